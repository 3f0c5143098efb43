"""Streams lent to the native pump (limits.lent_streams): the same bytes, the same record."""

import json
import time

import pytest

from kernels import wire
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Sidecar,
    chunk,
    post,
    until,
)

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
IDLE_S = 0.6
MIB = 1 << 20
LENT = pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire is not built: no C compiler")


def event(number):
    delta = {"choices": [{"index": 0, "delta": {"content": f" w\u00f6rd{number}"}}]}
    return b"data: " + json.dumps(delta, ensure_ascii=False).encode() + b"\n\n"


EVENTS = [event(number) for number in range(40)]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":40}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory, backend, keys):
    def made(lent):
        folder = tmp_path_factory.mktemp("lent")
        return Sidecar(
            folder,
            backend.url,
            keys=keys,
            LIMITS_LENT_STREAMS=lent,
            TIMEOUTS_STREAM_IDLE_S=IDLE_S,
            TIMEOUTS_CLIENT_STALL_S=5,
        )

    with made(4096) as lending, made(0) as own:
        yield lending, own


def asked(sidecar):
    """Ask for a stream; return the payload, and what the record says of it."""
    with sidecar.client() as client:
        client.send(post(CHAT))
        head = client.head()
        payload, _ = client.chunked()
    record = sidecar.record(head.trace_id)
    names = ("outcome", "output_hash", "output_len", "usage", "phase", "status")
    return payload, {name: record.get(name) for name in names}


def one_by_one(seen):
    seen.reply(SSE_HEAD)
    for piece in EVENTS:
        seen.wire.send(chunk(piece))
        time.sleep(0.002)
    seen.wire.send(chunk(USAGE) + chunk(DONE) + LAST_CHUNK)


def cut_anywhere(seen):
    seen.reply(SSE_HEAD)
    body = b"".join(map(chunk, [*EVENTS, USAGE, DONE])) + LAST_CHUNK
    for start in range(0, len(body), 97):
        seen.wire.send(body[start : start + 97])
        time.sleep(0.001)


def with_extensions(seen):
    seen.reply(SSE_HEAD)
    for number, piece in enumerate([*EVENTS, USAGE, DONE]):
        line = b"%x;n=%d\r\n" if number % 3 == 0 else b"%x\r\n"
        size = line % ((len(piece), number) if number % 3 == 0 else len(piece))
        seen.wire.send(size + piece + b"\r\n")
        time.sleep(0.001)
    seen.wire.send(LAST_CHUNK)


def in_bursts(seen):
    seen.reply(SSE_HEAD)
    for start in range(0, 40, 8):
        seen.wire.send(b"".join(map(chunk, EVENTS[start : start + 8])))
        time.sleep(0.005)
    seen.wire.send(b"".join(map(chunk, [USAGE, DONE])))
    time.sleep(0.005)
    seen.wire.send(LAST_CHUNK)


@LENT
@pytest.mark.parametrize("script", [one_by_one, cut_anywhere, with_extensions, in_bursts])
def test_a_lent_stream_has_the_same_bytes_and_the_same_record(sidecars, upstream, script):
    lending, own = sidecars
    upstream.answering(script)
    name = "tongguan_proxy_lent_streams_total"
    before = lending.metric(name)
    payload, record = asked(lending)
    assert payload == b"".join([*EVENTS, USAGE, DONE])
    assert record["outcome"] == "ok"
    assert record["usage"] == {"prompt": 1, "completion": 40}
    assert lending.metric(name) > before
    assert asked(own) == (payload, record)
    assert own.metric(name) == 0
    until(lambda: lending.metric("tongguan_proxy_lent_streams_open") == 0, "the end of the loan")


@LENT
def test_a_body_without_length_is_lent_too(sidecars, upstream):
    def script(seen):
        seen.reply(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for piece in [*EVENTS, USAGE, DONE]:
            seen.wire.send(piece)
            time.sleep(0.001)
        seen.wire.close()

    upstream.answering(script)
    lending, own = sidecars
    assert asked(lending) == asked(own)
    assert asked(lending)[1]["outcome"] == "ok"


@LENT
@pytest.mark.parametrize("framed", [True, False], ids=["chunked", "until the end"])
def test_a_reset_between_two_events_is_no_end(sidecars, upstream, framed):
    # Whoever reads a socket's error has it: the next read sees a regular end.
    def script(seen):
        head = SSE_HEAD if framed else SSE_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
        seen.reply(head)
        for piece in EVENTS[:10]:
            seen.wire.send(chunk(piece) if framed else piece)
            time.sleep(0.005)
        seen.wire.reset()

    upstream.answering(script)
    lending, own = sidecars
    name = "tongguan_proxy_lent_streams_total"
    before = lending.metric(name)
    payload, record = asked(lending)
    assert lending.metric(name) > before
    assert payload.startswith(b"".join(EVENTS[:10]) + b"data: ")
    assert b'"upstream_reset"' in payload
    assert record["outcome"] == "truncated"
    assert asked(own) == (payload, record)


@LENT
def test_idle_time_runs_from_the_last_event_that_passed(sidecars, upstream):
    last_s = 0.0

    def script(seen):
        nonlocal last_s
        seen.reply(SSE_HEAD)
        for piece in EVENTS[:6]:
            seen.wire.send(chunk(piece))
            last_s = time.monotonic()
            time.sleep(IDLE_S / 2)
        seen.wire.ended()

    upstream.answering(script)
    lending, _ = sidecars
    payload, record = asked(lending)
    took_s = time.monotonic() - last_s
    assert payload.startswith(b"".join(EVENTS[:6]) + b"data: ")
    assert b'"upstream_timeout"' in payload
    assert record["outcome"] == "timeout"
    assert IDLE_S - 0.05 <= took_s < IDLE_S + 0.9


@LENT
def test_a_client_that_stops_reading_gets_every_byte_later(sidecars, upstream):
    # One whole chunk a read, so that it is the pump that finds the client's side full.
    big = [b"data: " + bytes([97 + n % 26]) * 30_000 + b"\n\n" for n in range(300)]
    sent = []

    def script(seen):
        seen.reply(SSE_HEAD)
        for piece in [*EVENTS[:5], *big, DONE]:
            seen.wire.send(chunk(piece))
            sent.append(piece)
            time.sleep(0.001)
        seen.wire.send(LAST_CHUNK)

    upstream.answering(script)
    lending, _ = sidecars
    with lending.client(receive_buffer=8192) as client:
        client.send(post(CHAT))
        client.head()
        last = -1
        while last != len(sent):  # until the upstream stands still
            last = len(sent)
            time.sleep(0.1)
        assert last < len(big)
        payload, _ = client.chunked()
    assert payload == b"".join([*EVENTS[:5], *big, DONE])


@LENT
def test_sigterm_ends_lent_streams_with_an_error_event(tmp_path, upstream, backend):
    def script(seen):
        seen.reply(SSE_HEAD)
        for piece in EVENTS[:5]:
            seen.wire.send(chunk(piece))
            time.sleep(0.005)
        seen.wire.ended()

    upstream.answering(script)
    with (
        Sidecar(tmp_path, backend.url, TIMEOUTS_DRAIN_S=0.2) as sidecar,
        sidecar.client() as client,
    ):
        client.send(post(CHAT))
        client.head()
        until(lambda: sidecar.metric("tongguan_proxy_lent_streams_open") == 1, "the loan")
        sidecar.signal(15)
        payload, _ = client.chunked()
        assert payload.startswith(b"".join(EVENTS[:5]) + b"data: ")
        assert b'"draining"' in payload
        assert sidecar.ended() == 0


@LENT
def test_no_more_than_lent_streams_are_lent(tmp_path, upstream, backend):
    going = []

    def script(seen):
        seen.reply(SSE_HEAD)
        seen.wire.send(chunk(EVENTS[0]))
        until(lambda: going, "the end")
        seen.wire.send(chunk(DONE) + LAST_CHUNK)

    upstream.answering(script)
    with (
        Sidecar(tmp_path, backend.url, LIMITS_LENT_STREAMS=1) as sidecar,
        sidecar.client() as first,
        sidecar.client() as second,
    ):
        for client in (first, second):
            client.send(post(CHAT))
            client.head()
            client.take(len(chunk(EVENTS[0])))
        hits = "tongguan_proxy_limit_hits_total"
        until(lambda: sidecar.metric(hits, limit="limits.lent_streams") == 1, "the limit")
        assert sidecar.metric("tongguan_proxy_lent_streams_open") == 1
        going.append(True)
        for client in (first, second):
            assert client.chunked()[0] == DONE
