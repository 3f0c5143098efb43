"""Stored envelopes: every request among the vectors, and what is released when."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.sm4 import sm2
from proxy.sm4.digest import HmacSm3
from proxy.sm4.envelope import EnvelopeError
from proxy.sm4.keyring import EnvelopeKey, Keyring
from proxy.sm4.stored import StoredOpener
from tests.unit.proxy.sm4_kit import (
    BODY,
    MODEL,
    NOW_MS,
    PRELUDE,
    derived_of,
    make_key,
    pieces,
    seal_request,
    vector_file,
    vector_keys,
)
from tests.unit.proxy.test_envelope_outcomes import CUTS, KEYS, VECTORS, outer, told_badly

# What a file has nobody to judge: clock, replay cache, outer fields.
UNJUDGED = {"stale", "future", "replayed", "cache_full", "tenant_mismatch", "model_mismatch"}
# Far off, the kid's own times say so.
BY_THE_KID = dict.fromkeys(UNJUDGED, ()) | dict.fromkeys(("stale", "future"), ("kid_expired",))


def opened(
    keys: list[EnvelopeKey], wire: bytes, model: str = "", cut: int = 0, **options: Any
) -> tuple[StoredOpener, bytes]:
    opener = StoredOpener(Keyring(keys), model=model, **options)
    out = b"".join(b"".join(opener.feed(piece)) for piece in pieces(wire, cut))
    return opener, out + opener.finish()


def reason_of(keys: list[EnvelopeKey], wire: bytes, model: str, cut: int) -> str:
    try:
        opened(keys, wire, model, cut)
    except EnvelopeError as problem:
        return problem.reason
    return "ok"


def requests() -> list[Any]:
    published = [(v, list(vector_keys().values())) for v in vector_file()["vectors"]]
    ours = [(v, KEYS) for v in VECTORS]
    return [
        pytest.param(vector, keys, id=str(vector["id"]))
        for vector, keys in published + ours
        if vector["direction"] == "request"
        and "receiver_audience" not in vector.get("policy", {})
        and vector["outcome"] != "bad_carrier"  # outer fields, which a file has not
        and not told_badly(vector)
    ]


@pytest.mark.parametrize(("vector", "keys"), requests())
def test_a_stored_vector_opens_to_its_outcome_in_any_cuts(
    vector: dict[str, Any], keys: list[EnvelopeKey]
) -> None:
    if not sm2.available():
        pytest.skip("capability: OpenSSL with SM2")
    wire, model = bytes.fromhex(vector["wire_hex"]), outer(vector, "X-Model-Id")[0] or ""
    for cut in CUTS:
        if vector["outcome"] == "ok":
            opener, body = opened(keys, wire, model, cut)
            assert opener.prelude is not None
            assert opener.prelude.encode()[2:].hex() == vector["prelude_hex"]
            assert body.hex() == vector["body_hex"]
        elif vector["outcome"] in UNJUDGED:
            assert reason_of(keys, wire, model, cut) in {"ok", *BY_THE_KID[vector["outcome"]]}
        else:
            assert reason_of(keys, wire, model, cut) in {
                vector["outcome"],
                *vector.get("also", ()),
            }


def test_the_first_and_last_time_that_is_taken_are() -> None:
    key = make_key()
    _, wire = seal_request(key)
    for first, last in ((NOW_MS, NOW_MS), (NOW_MS - 5, NOW_MS + 5)):
        assert opened([key], wire, MODEL, times_ms=(first, last))[1] == BODY
    for times, reason in (((NOW_MS + 1, NOW_MS + 9), "stale"), ((0, NOW_MS - 1), "future")):
        with pytest.raises(EnvelopeError) as caught:
            opened([key], wire, MODEL, times_ms=times)
        assert caught.value.reason == reason


def test_each_frame_is_released_when_it_is_there_and_a_single_at_its_end() -> None:
    key = make_key()
    _, single = seal_request(key)
    opener = StoredOpener(Keyring([key]), model=MODEL)
    assert opener.feed(single) == []
    assert opener.finish() == BODY
    _, wire = seal_request(key, cuts=[10, 20], mac=True)
    opener = StoredOpener(Keyring([key]), model=MODEL)
    seen = b""
    for i in range(len(wire)):
        seen += b"".join(opener.feed(wire[i : i + 1]))
        assert BODY.startswith(seen)
        assert opener.complete is (i == len(wire) - 1)
    assert seen + opener.finish() == BODY
    assert opener.prelude == PRELUDE


def test_what_comes_after_a_failure_is_refused_too() -> None:
    key = make_key()
    _, wire = seal_request(key)
    opener = StoredOpener(Keyring([key]), model=MODEL)
    with pytest.raises(EnvelopeError) as caught:
        opener.feed(wire + b"x")
    assert caught.value.reason == "trailing_data"
    for after in (lambda: opener.feed(b""), opener.finish):
        with pytest.raises(EnvelopeError):
            after()


def test_a_wrong_mac_keeps_the_last_frame_back() -> None:
    key = make_key()
    derived = derived_of(key)
    _, wire = seal_request(key, cuts=[10, 20], mac=True)
    opener = StoredOpener(Keyring([key]), model=MODEL)
    ring = opener._keys
    ring._derived[key.kid] = derived
    derived.mac = HmacSm3(bytes(32))
    seen = b"".join(opener.feed(wire[:-1]))
    with pytest.raises(EnvelopeError) as caught:
        opener.feed(wire[-1:])
    assert caught.value.reason == "bad_mac"
    assert seen == BODY[:30]
