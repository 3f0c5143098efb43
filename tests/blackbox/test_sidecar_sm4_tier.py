"""`envelope.sm4_tier`: what does SM4's work in a running sidecar, and what the sidecar refuses."""

import json

import pytest

from proxy.sm4.cipher import CRYPTOGRAPHY, usable_tiers
from tests.blackbox.channel import BOTH, Channel
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Sidecar,
    chunk,
    ok,
)

CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a question"}]}'
EVENTS = [b"data: %b\n\n" % json.dumps({"n": n}).encode() for n in range(5)]


def stream(seen):
    seen.reply(SSE_HEAD, *map(chunk, EVENTS), LAST_CHUNK)


@pytest.mark.parametrize("tier", ["auto", *usable_tiers()])
def test_every_tier_serves_the_sealed_door(tmp_path, backend, keys, tier):
    channel = Channel(keys / "client.json")
    with Sidecar(tmp_path, backend.url, keys=keys, ENVELOPE_SM4_TIER=tier) as sidecar:
        real = usable_tiers()[0] if tier == "auto" else tier
        assert f"sm4={real} " in sidecar.log
        assert sidecar.metric("tongguan_proxy_sm4_info", tier=real) == 1
        for script, body in ((ok, None), (stream, b"".join(EVENTS))):
            backend.answering(script)
            sealed = channel.seal(CHAT, mac=True)
            with Client(sidecar.sealed) as client:
                answer = client.send(sealed.request(accept=BOTH)).answer()
            status, _, opened = sealed.open(answer)
            assert status == 200
            assert body is None or opened == body


@pytest.mark.parametrize("tier", ["fastest", "", "none"])
def test_an_unusable_tier_ends_the_start_and_names_the_usable_ones(tmp_path, backend, keys, tier):
    sidecar = Sidecar(tmp_path, backend.url, keys=keys, ENVELOPE_SM4_TIER=tier)
    try:
        assert sidecar.spawn().ended() == 2
    finally:
        sidecar.kill()
    assert "envelope.sm4_tier" in sidecar.log
    for usable in ("auto", *usable_tiers()):
        assert usable in sidecar.log
    assert "Traceback" not in sidecar.log


def test_cryptography_is_always_usable():
    assert CRYPTOGRAPHY in usable_tiers()
