"""The sealed door: everything that is no good envelope."""

import contextlib
import json
import random

import httpx
import pytest

from proxy.client import AnswerError, Sm4Transport
from tests.blackbox.channel import Channel, ask, counted, now_ms, refused
from tests.blackbox.harness import (
    Client,
    Sidecar,
    answer_with,
    get,
    new_keys,
    post,
)

CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'
REFUSED = {(400, "envelope_rejected"), (400, "envelope_stale")}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    with Sidecar(
        tmp_path_factory.mktemp("sealed"), backend.url, keys=keys, TIMEOUTS_STREAM_IDLE_S=0.5
    ) as sidecar:
        yield sidecar


@pytest.mark.parametrize("data", [post(CHAT), get(b"/v1/models"), get(b"/livez")])
def test_unsealed_request_is_refused(sidecar, upstream, data):
    assert refused(ask(sidecar, data)) == (400, "envelope_rejected")
    assert upstream.seen == []


def test_client_library_names_the_refusal_of_an_unsealed_answer(upstream, keys):
    upstream.answering(answer_with(b'{"choices":[]}'))
    with (
        httpx.Client(transport=Sm4Transport(keys / "client.json"), timeout=20) as http,
        pytest.raises(AnswerError),
    ):
        http.post(upstream.url + "/v1/chat/completions", json=json.loads(CHAT))


@pytest.mark.parametrize("stream", [False, True])
def test_captured_envelope_is_refused_when_sent_again(sidecar, upstream, channel, stream):
    sealed = channel.seal(CHAT, stream=stream)
    before = sidecar.metric("tongguan_proxy_envelope_failures_total", reason="replayed")
    assert sealed.open(ask(sidecar, sealed.request()))[0] == 200
    for path in ("/sealed", "/other"):
        assert refused(ask(sidecar, sealed.request(path=path))) in REFUSED
    assert len(upstream.seen) == 1
    after = sidecar.metric("tongguan_proxy_envelope_failures_total", reason="replayed")
    assert after == before + 2


def test_two_copies_at_once_are_served_once(sidecar, upstream, channel):
    sealed = channel.seal(CHAT)
    with Client(sidecar.sealed) as one, Client(sidecar.sealed) as two:
        for client in (one, two):
            client.send(sealed.request()[:-1])
        for client in (one, two):
            client.send(sealed.wire[-1:])
        first = one.answer()
        second = two.answer()
    assert sorted([first.status, second.status]) == [200, 400]
    assert len(upstream.seen) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_any_flipped_bit_is_refused(sidecar, upstream, channel, stream):
    size = len(channel.seal(CHAT, stream=stream).wire)
    bits = [8 * byte + byte % 8 for byte in range(40)]
    bits += random.Random(7).sample(range(320, 8 * size), 60)
    with contextlib.ExitStack() as clients:
        for bit in bits:
            sealed = channel.seal(CHAT, stream=stream)
            flipped = bytearray(sealed.wire)
            flipped[bit // 8] ^= 1 << bit % 8
            sealed.wire = bytes(flipped)
            client = clients.enter_context(Client(sidecar.sealed))
            answer = client.send(sealed.request()).answer()
            assert refused(answer) in REFUSED, f"bit {bit}"
    assert upstream.seen == []


def bend(offset, value):
    def change(wire):
        return wire[:offset] + value + wire[offset + len(value) :]

    return change


BENT = {
    "bad_magic": bend(0, b"SMX2"),
    "bad_suite": bend(4, b"\x02"),
    "bad_flags": bend(5, b"\x80"),
    "bad_reserved": bend(6, b"\x00\x01"),
    "unknown_kid": bend(8, bytes(8)),
    "bad_length": bend(36, b"\xff\xff\xff\xff"),
    "bad_tag": lambda wire: wire[:-1] + bytes([wire[-1] ^ 1]),
    "truncated": lambda wire: wire[:-1],
    "trailing_data": lambda wire: wire + b"x",
}


@pytest.mark.parametrize("reason", BENT)
def test_metrics_show_why_and_the_answer_does_not(sidecar, upstream, channel, reason):
    sealed = channel.seal(CHAT)
    sealed.wire = BENT[reason](sealed.wire)
    before = counted(sidecar, reason)
    answer = ask(sidecar, sealed.request())
    assert refused(answer) == (400, "envelope_rejected")
    assert reason.encode() not in answer.body
    assert counted(sidecar, reason) == before + 1
    assert upstream.seen == []


@pytest.mark.parametrize(
    ("reason", "shift_ms"), [("stale", -61_000), ("future", 8_000), ("stale", -(10**12))]
)
def test_envelope_out_of_time_is_refused_with_our_time(
    sidecar, upstream, channel, reason, shift_ms
):
    before = counted(sidecar, reason)
    sealed = channel.seal(CHAT, time_ms=now_ms() + shift_ms)
    assert refused(ask(sidecar, sealed.request())) in REFUSED
    assert counted(sidecar, reason) == before + 1
    assert upstream.seen == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((b"X-Model-Id: tiny", b"X-Model-Id: other"), "bad_tag"),
        ((b"X-Model-Id: tiny", b"X-Model-Id: tiny\r\nX-Model-Id: tiny"), "model_mismatch"),
        ((b"X-Model-Id: tiny", b"X-Model-Id: ti ny"), "model_mismatch"),
        ((b"Host:", b"Content-Encoding: gzip\r\nHost:"), "bad_carrier"),
        ((b"application/x-sm4-envelope\r\nContent-L", b"application/json\r\nContent-L"),
         "bad_carrier"),
        ((b"POST", b"PUT"), "bad_carrier"),
    ],
)  # fmt: skip
def test_outer_fields_that_do_not_fit_are_refused(sidecar, upstream, channel, change, reason):
    request = channel.seal(CHAT).request()
    assert change[0] in request
    before = counted(sidecar, reason)
    answer = ask(sidecar, request.replace(change[0], change[1], 1))
    assert refused(answer) == (400, "envelope_rejected")
    assert counted(sidecar, reason) == before + 1
    assert upstream.seen == []


@pytest.mark.parametrize("reason", ["tenant_mismatch", "model_mismatch"])
def test_mismatch_that_shows_only_after_opening_is_answered_sealed(
    sidecar, upstream, channel, reason
):
    before = counted(sidecar, reason)
    sealed = channel.seal(CHAT, model="other" if reason == "model_mismatch" else None)
    fields = ["X-Tenant-Id: other"] if reason == "tenant_mismatch" else []
    answer = ask(sidecar, sealed.request(*fields))
    status, _, body = sealed.open(answer)
    assert status == 400
    assert json.loads(body)["error"]["code"] == "envelope_rejected"
    assert reason.encode() not in body + answer.raw
    assert counted(sidecar, reason) == before + 1
    assert upstream.seen == []


@pytest.mark.parametrize("method", ["duplicated", "not JSON"])
def test_body_whose_model_is_in_doubt_is_refused(sidecar, upstream, channel, method):
    body = {"duplicated": b'{"model":"tiny","model":"tiny"}', "not JSON": b'{"model":"tiny"'}
    sealed = channel.seal(body[method], model="tiny")
    assert sealed.open(ask(sidecar, sealed.request()))[0] == 400
    assert upstream.seen == []


def frames(wire):
    """Take a stream envelope apart: header, frames."""
    parts, at = [wire[:40]], 40
    while at < len(wire):
        size = 4 + (int.from_bytes(wire[at : at + 4], "big") & 0x7FFFFFFF)
        parts.append(wire[at : at + size])
        at += size
    return parts


REARRANGED = {
    "last frame missing": lambda p: p[:-1],
    "only the header": lambda p: p[:1],
    "frame missing": lambda p: [p[0], p[1], *p[3:]],
    "first frame missing": lambda p: [p[0], *p[2:]],
    "frames swapped": lambda p: [p[0], p[1], p[3], p[2], *p[4:]],
    "frame twice": lambda p: [p[0], p[1], p[1], *p[2:]],
    "frame after the last": lambda p: [*p, p[-1]],
    "called last too early": lambda p: [p[0], p[1], bytes([p[2][0] | 0x80]) + p[2][1:]],
    "not called last": lambda p: [*p[:-1], bytes([p[-1][0] & 0x7F]) + p[-1][1:]],
    "huge frame": lambda p: [*p[:2], b"\x7f\xff\xff\xff" + p[2][4:]],
    "tiny frame": lambda p: [*p[:2], b"\x00\x00\x00\x10" + bytes(16)],
    "junk behind": lambda p: [*p, b"x"],
}


@pytest.mark.parametrize("how", REARRANGED)
def test_rearranged_frames_are_refused(sidecar, upstream, channel, how):
    body = b'{"model":"tiny","x":"' + b"y" * 150_000 + b'"}'
    sealed = channel.seal(body, stream=True)
    parts = frames(sealed.wire)
    assert len(parts) > 4
    sealed.wire = b"".join(REARRANGED[how](parts))
    assert refused(ask(sidecar, sealed.request())) == (400, "envelope_rejected")
    assert upstream.seen == []


def test_envelope_of_another_audience_is_refused(sidecar, upstream, tmp_path):
    other = Channel(new_keys(tmp_path / "other") / "client.json")
    assert refused(ask(sidecar, other.seal(CHAT).request())) == (400, "envelope_rejected")


def test_plain_limits_of_http_hold_before_the_envelope(sidecar, channel):
    sealed = channel.seal(CHAT)
    answer = ask(sidecar, sealed.head(length=33 << 20))
    assert (answer.status, answer.error()) == (413, "payload_too_large")
    answer = ask(sidecar, sealed.head().replace(b"Host: ", b"Host : "))
    assert (answer.status, answer.error()) == (400, "invalid_request")


def test_nothing_is_held_when_all_is_done(sidecar, upstream, channel):
    assert refused(ask(sidecar, channel.seal(CHAT).request()[:-1] + b"x")) in REFUSED
    assert sidecar.idle()
