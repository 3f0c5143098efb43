"""Signed envelopes through the real process, and one envelope on many connections at once."""

import json

import httpx
import pytest

from proxy.client import Sm4Transport
from proxy.sm4 import sm2
from tests.blackbox.channel import Channel, ask, counted, refused
from tests.blackbox.harness import Client, Sidecar, new_keys, until

CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'
LARGE = b'{"model":"tiny","padding":"' + b"x" * 300_000 + b'"}'
MANY = 64


@pytest.fixture(scope="module", params=["ed25519", "sm2"])
def keys(request, tmp_path_factory):
    if request.param == "sm2" and not sm2.available():
        pytest.skip("capability: OpenSSL with SM2")
    folder = tmp_path_factory.mktemp(request.param)
    return new_keys(
        folder, "--sign", request.param, "--require-signature", "--require-mac", "--digest", "sm3"
    )


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    with Sidecar(
        tmp_path_factory.mktemp("signed"),
        backend.url,
        keys=keys,
        ENVELOPE_SIGNATURE_QUEUE=MANY,
    ) as sidecar:
        yield sidecar


@pytest.mark.parametrize("body", [CHAT, LARGE])
@pytest.mark.parametrize("stream", [False, True])
def test_a_signed_request_is_served_and_its_record_says_so(
    sidecar, upstream, channel, body, stream
):
    before = sidecar.metric("tongguan_proxy_signatures_verified_total")
    sealed = channel.seal(body, stream=stream)
    answer = ask(sidecar, sealed.request())
    assert sealed.open(answer) == (200, "application/json", b"{}")
    assert upstream.last().body() == body
    record = sidecar.record(answer.get("X-Trace-Id").decode())
    envelope = record["envelope"]
    assert (envelope["signature"], envelope["mac"]) == (True, True)
    assert sidecar.metric("tongguan_proxy_signatures_verified_total") == before + 1
    assert sidecar.metric("tongguan_proxy_signatures_pending") == 0


def test_the_client_library_signs_by_its_key_file(sidecar, upstream, keys):
    with httpx.Client(transport=Sm4Transport(keys / "client.json"), timeout=20) as http:
        url = f"http://127.0.0.1:{sidecar.sealed}/v1/chat/completions"
        assert http.post(url, json=json.loads(CHAT)).json() == {}
    assert len(upstream.seen) == 1


def test_signed_requests_of_one_connection_are_answered_in_order(sidecar, upstream, channel):
    upstream.answering(
        lambda seen: seen.reply(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(seen.body()), seen.body())
        )
    )
    bodies = [b'{"model":"tiny","n":%d}' % i for i in range(8)]
    sealed = [channel.seal(body) for body in bodies]
    with Client(sidecar.sealed) as client:
        client.send(b"".join(s.request() for s in sealed))
        assert [s.open(client.answer())[2] for s in sealed] == bodies


@pytest.mark.parametrize("stream", [False, True])
def test_another_s_signature_is_refused_in_clear_and_nothing_goes_on(
    sidecar, upstream, channel, keys, tmp_path, stream
):
    scheme = channel.key.scheme
    other = Channel(new_keys(tmp_path / "other", "--sign", scheme) / "client.json")
    sealed = forged(channel, other, stream=stream)
    before = counted(sidecar, "bad_signature")
    assert refused(ask(sidecar, sealed.request())) == (400, "envelope_rejected")
    assert counted(sidecar, "bad_signature") == before + 1
    assert upstream.seen == []


def forged(channel, other, *, stream):
    """Seal with the right key, signed with another's."""
    derived = channel.ring.get(channel.key.kid)
    right = derived.signer()
    derived._signer = other.ring.get(other.key.kid).signer()
    try:
        return channel.seal(CHAT, stream=stream)
    finally:
        derived._signer = right


def test_an_unsigned_request_is_refused_where_a_signature_is_demanded(sidecar, upstream, channel):
    sealed = unsigned(channel)
    before = counted(sidecar, "missing_signature")
    assert refused(ask(sidecar, sealed.request())) == (400, "envelope_rejected")
    assert counted(sidecar, "missing_signature") == before + 1
    assert upstream.seen == []


def unsigned(channel):
    from msgspec.structs import replace

    from proxy.sm4.keyring import Keyring

    lax = Channel.__new__(Channel)
    lax.key = replace(channel.key, require_signature=False)
    lax.ring = Keyring([lax.key])
    return lax.seal(CHAT, sign=False)


@pytest.mark.parametrize("stream", [False, True])
def test_of_64_copies_at_once_exactly_one_is_taken(sidecar, upstream, channel, stream):
    sealed = channel.seal(CHAT, stream=stream)
    assert copies(sealed, [sidecar.sealed] * MANY) == [200] + [400] * (MANY - 1)
    assert len(upstream.seen) == 1
    assert sidecar.idle()


def copies(sealed, ports):
    """Send one envelope to each port, all but its last byte first; return the sorted statuses."""
    clients = [Client(port) for port in ports]
    try:
        for client in clients:
            client.send(sealed.request()[:-1])
        for client in clients:
            client.send(sealed.wire[-1:])
        return sorted(client.answer().status for client in clients)
    finally:
        for client in clients:
            client.close()


def at_once(sidecar, sealed):
    """Send these on connections of their own, all but their last bytes first."""
    clients = [Client(sidecar.sealed) for _ in sealed]
    for client, one in zip(clients, sealed, strict=True):
        client.send(one.request()[:-1])
    for client, one in zip(clients, sealed, strict=True):
        client.send(one.wire[-1:])
    answers = [client.answer() for client in clients]
    for client in clients:
        client.close()
    return answers


def test_a_full_queue_of_signatures_is_busy_and_all_others_are_served(
    tmp_path, backend, upstream, keys, channel
):
    with Sidecar(tmp_path / "narrow", backend.url, keys=keys, ENVELOPE_SIGNATURE_QUEUE=1) as narrow:
        answers = []
        for _ in range(10):  # a machine may be so slow that each is verified before the next
            answers += at_once(narrow, [channel.seal(CHAT) for _ in range(MANY)])
            if any(a.status == 503 for a in answers):
                break
        served = [a for a in answers if a.status == 200]
        busy = [a for a in answers if a.status == 503]
        assert len(served) + len(busy) == len(answers)
        assert busy
        assert served
        assert all(refused(a) == (503, "envelope_busy") for a in busy)
        assert all(a.get("Retry-After") for a in busy)
        hits = narrow.metric("tongguan_proxy_limit_hits_total", limit="envelope.signature_queue")
        assert hits == counted(narrow, "busy") == len(busy)
        assert len(upstream.seen) == len(served)
        assert narrow.idle()


def test_a_caller_that_leaves_while_its_signature_waits_leaves_nothing_behind(
    sidecar, upstream, channel
):
    verified = sidecar.metric("tongguan_proxy_signatures_verified_total")
    clients = [Client(sidecar.sealed) for _ in range(16)]
    for client in clients:
        client.send(channel.seal(CHAT).request())
        client.reset()
    until(lambda: sidecar.metric("tongguan_proxy_signatures_pending") == 0, "all were verified")
    assert sidecar.idle()
    assert sidecar.metric("tongguan_proxy_signatures_verified_total") <= verified + 16
    sealed = channel.seal(CHAT)
    assert sealed.open(ask(sidecar, sealed.request()))[0] == 200
