"""Answers that come before the request is whole: the upstream's, and refusals of our own."""

import contextlib
import socket
import threading
import time

import pytest

from tests.blackbox.harness import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    Sidecar,
    Upstream,
    chunk,
    ok,
    post,
    until,
)

CHAT = b'{"model":"m"}'
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"one"}}]}\n\n'
STREAMED = 64 << 10  # a larger body streams through
DISCARD_BYTES = 256 << 10
MIB = 1 << 20


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend):
    with Sidecar(
        tmp_path_factory.mktemp("early") / "s",
        backend.url,
        LIMITS_BODY_BYTES=MIB,
        LIMITS_COLLECT_BYTES=STREAMED,
        LIMITS_DISCARD_BYTES=DISCARD_BYTES,
        TIMEOUTS_BODY_IDLE_S=0.5,
        TIMEOUTS_DISCARD_S=0.4,
        TIMEOUTS_STREAM_IDLE_S=0.5,
        QOS_ON_UNKNOWN="reject",
    ) as sidecar:
        yield sidecar


EARLY = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy"


def early(seen):
    """Answer before the body was read; keep the connection open."""
    seen.wire.take(1000)
    seen.wire.send(EARLY)
    seen.wire.ended()
    seen.wire.close()  # what is left of the body is no request


def hits(sidecar, limit):
    return sidecar.metric("tongguan_proxy_limit_hits_total", limit=limit)


# --- to the client


@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_early_answer_is_handed_on_and_the_connection_closes_politely(sidecar, upstream, coding):
    upstream.answering(early)
    first = b"x" * (STREAMED + 20_000)
    if coding == "length":
        start = post(b"x" * DISCARD_BYTES)[: STREAMED + 20_000]
    else:
        start = CHUNKED + chunk(first)
    with sidecar.client() as client:
        client.send(start)
        answer = client.answer()
        assert (answer.status, answer.body) == (429, b"busy")
        assert answer.get("Connection") == b"close"
        client.send(b"y" * 1000)  # still sending: read and dropped, no reset
        assert client.rest() == (b"", True)


def test_early_answer_is_followed_by_a_discard_of_bounded_time(sidecar, upstream):
    upstream.answering(early)
    before = hits(sidecar, "timeouts.discard_s")
    with sidecar.client() as client:
        client.send(CHUNKED, chunk(b"x" * (STREAMED + 2000)))
        assert client.answer().status == 429
        start = time.monotonic()
        client.rest()
        assert 0.3 < time.monotonic() - start < 3
    assert hits(sidecar, "timeouts.discard_s") == before + 1


def test_early_answer_is_followed_by_a_discard_of_bounded_size(sidecar, upstream):
    upstream.answering(early)
    before = hits(sidecar, "limits.discard_bytes")
    with sidecar.client() as client:
        client.send(CHUNKED, chunk(b"x" * (STREAMED + 2000)))
        assert client.answer().status == 429
        with pytest.raises(ConnectionError):
            client.send(b"y" * (16 << 20))
    assert hits(sidecar, "limits.discard_bytes") == before + 1


def test_early_answer_to_more_than_is_discarded_closes_at_once(sidecar, upstream):
    upstream.answering(early)
    with sidecar.client() as client:
        client.send(post(b"x" * (DISCARD_BYTES * 4))[: STREAMED + 2000])
        assert client.answer().status == 429
        start = time.monotonic()
        client.rest()
        assert time.monotonic() - start < 0.3


def test_connection_of_an_early_answer_is_not_used_for_another_request(sidecar, upstream):
    upstream.answering(early)
    with sidecar.client() as client:
        client.send(post(b"x" * MIB)[: STREAMED + 20_000])
        assert client.answer().status == 429
        half_used = upstream.last().wire
        upstream.answering(ok)
        assert sidecar.ask(post(CHAT)).status == 200
        assert upstream.last().wire is not half_used


def sized(seen):
    """Answer early with as many bytes as the path says."""
    size = int(seen.line.split(b" ")[1][1:])
    seen.wire.take(1000)
    seen.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"z" * size)
    seen.wire.ended()
    seen.wire.close()


@contextlib.contextmanager
def early_and_unread(sidecar, upstream, size):
    """A client that asked for so many bytes and reads none; yields it, and whether all was taken.

    What is not, waits at the upstream.
    """
    seen = len(upstream.seen)
    with sidecar.client(receive_buffer=4096) as client:
        head = CHUNKED.replace(b"POST /", b"POST /%d" % size)
        client.send(head, chunk(b"x" * (STREAMED + 2000)))
        until(lambda: len(upstream.seen) > seen, "the request")
        time.sleep(0.2)
        yield client, sidecar.metric("tongguan_proxy_pool_inflight") == 0


def test_early_answer_to_a_slow_reader_is_not_cut_when_the_discard_ends(sidecar, upstream):
    upstream.answering(sized)
    least, most = 0, 8 * MIB
    while most - least > 16 << 10:  # how much the kernel and we take for one who does not read
        size = (least + most) // 2
        with early_and_unread(sidecar, upstream, size) as (_, taken):
            least, most = (size, most) if taken else (least, size)
        assert sidecar.idle()
    # The largest that is taken: its end waits in our buffer. The kernel's room differs a little.
    for size in range(least, 0, -(16 << 10)):
        before = hits(sidecar, "timeouts.discard_s")
        with early_and_unread(sidecar, upstream, size) as (client, taken):
            if taken:
                until(lambda b=before: hits(sidecar, "timeouts.discard_s") > b, "the end of it")
                assert client.answer().body == b"z" * size
                assert client.rest() == (b"", True)
                return
    raise AssertionError("nothing was taken")


def test_expectation_of_a_request_before_changes_nothing(sidecar, upstream):
    """Only who waits for 100 sends no body; the client of the next request does."""
    with sidecar.client() as client:
        refused = post(CHAT, b"X-QoS-Class: P9", b"Expect: 100-continue")  # with its body
        assert client.send(refused).answer().error() == "invalid_request"
        answer = client.send(CHUNKED, chunk(b"x" * (MIB + 1000))).answer()
        assert answer.error() == "payload_too_large"
        for _ in range(3):
            time.sleep(0.05)  # so that a reset would be seen
            client.send(chunk(b"y" * 1000))
        assert client.rest() == (b"", True)


# --- inside a stream, and upstream


def sse_early(seen):
    """Begin a stream before the body was read."""
    seen.wire.take(1000)
    seen.wire.send(SSE_HEAD + chunk(EVENT))
    seen.wire.ended()
    seen.wire.close()


@pytest.mark.parametrize(
    "rest",
    [None, b"zz\r\n", b"%x\r\n" % (2 * MIB) + b"x" * MIB],
    ids=["stalls", "bad chunk", "too large"],
)
def test_body_that_goes_wrong_after_the_answer_began_gets_no_second_head(sidecar, upstream, rest):
    upstream.answering(sse_early)
    with sidecar.client() as client:
        client.send(
            CHUNKED,
            chunk(b"x" * (STREAMED + 20_000)),
        )
        head = client.head()
        assert client.take(len(chunk(EVENT))) == chunk(EVENT)
        if rest is not None:
            client.send(rest)
        raw, _ = client.rest()
    assert b"HTTP/1.1" not in raw
    assert head.status == 200
    assert raw == b"" or raw.endswith(LAST_CHUNK)


def test_connection_that_has_not_taken_its_request_is_not_used_for_another(tmp_path):
    """A body that was collected, answered in one read while the kernel still holds most of it."""
    over = threading.Event()

    def script(seen):
        if int(seen.get("Content-Length")) > MIB:
            seen.wire.send(OK)
            over.wait(60)  # it reads no further
            seen.wire.close()
        else:
            seen.reply(OK)

    with Upstream() as upstream:
        upstream.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        upstream.answering(script)
        with (
            Sidecar(tmp_path / "s", upstream.url, LIMITS_COLLECT_BYTES=16 * MIB) as sidecar,
            sidecar.client() as client,
        ):
            answer = client.send(post(b"x" * (12 * MIB))).answer()
            assert (answer.status, answer.get("Connection")) == (200, None)
            assert client.send(post(CHAT)).answer().status == 200
            assert upstream.seen[0].wire is not upstream.seen[1].wire
            over.set()
        assert upstream.problems == []
