"""Streams and their ends: cut upstreams, clients that leave or do not read."""

import hmac
import json
import socket
import threading
import time

import pytest

from tests.blackbox.harness import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    Sidecar,
    chunk,
    get,
    ok,
    post,
    until,
)

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"one"}}]}\n\n'
HALF_EVENT = EVENT[:30]
STREAMED = 1 << 20  # a larger body streams through
STALL_S = IDLE_S = 0.5
# Noticing is immediate; the rest is two busy cores.
AT_ONCE_S = 0.25
MIB = 1 << 20


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    with Sidecar(
        tmp_path_factory.mktemp("streams"),
        backend.url,
        keys=keys,
        TIMEOUTS_FIRST_BYTE_S=5,
        TIMEOUTS_STREAM_IDLE_S=IDLE_S,
        TIMEOUTS_CLIENT_STALL_S=STALL_S,
        TIMEOUTS_BODY_IDLE_S=0.5,
        TIMEOUTS_DISCARD_S=0.5,
        LIMITS_BODY_BYTES=4 * MIB,
        LIMITS_DISCARD_BYTES=2 * MIB,
    ) as sidecar:
        yield sidecar


class Script:
    """An upstream's answer in parts: `begin`, wait until the test says `go`, then `then`."""

    def __init__(self, begin, then):
        self.begin, self.then = begin, then
        self.going = False
        self.done = False

    def __call__(self, seen):
        seen.reply(*self.begin)
        until(lambda: self.going, "the go")
        self.then(seen.wire)
        self.done = True


def hang(wire):
    wire.ended()


def begun(client, script, data):
    """Read the head and `data` of a begun chunked answer, then let the upstream go on."""
    head = client.head()
    taken = client.take(len(chunk(data))) if data else b""
    assert taken == (chunk(data) if data else b"")
    script.going = True
    return head


ENDS = {"close": lambda wire: wire.close(), "reset": lambda wire: wire.reset(), "idle": hang}
CODES = {"close": "upstream_reset", "reset": "upstream_reset", "idle": "upstream_timeout"}


@pytest.mark.parametrize(
    ("how", "data"),
    [("close", EVENT), ("reset", EVENT), ("idle", EVENT), ("close", b""), ("reset", b"")],
    ids=["close", "reset", "idle", "close before any event", "reset before any event"],
)
def test_stream_that_breaks_between_events_ends_with_an_error_event(sidecar, upstream, how, data):
    script = Script([SSE_HEAD, chunk(data) if data else b""], ENDS[how])
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        if data:
            head = begun(client, script, data)
        else:
            script.going = True
            head = client.head()
        if head.status == 502:  # the head had not been written yet: a plain refusal is better
            assert not data
            return
        payload, _ = client.chunked()
        assert payload.startswith(b"data: ")
        assert payload.endswith(b"\n\n")
        assert json.loads(payload[6:])["error"]["code"] == CODES[how]
        assert b"[DONE]" not in payload
        upstream.answering(ok)
        assert client.send(get()).answer().status == 200
    record = sidecar.record(head.trace_id)
    assert record["outcome"] == ("timeout" if how == "idle" else "truncated")
    assert record["phase"] == "streaming"


@pytest.mark.parametrize("how", ENDS)
def test_stream_that_breaks_inside_an_event_is_cut_without_one_byte_more(sidecar, upstream, how):
    script = Script([SSE_HEAD, chunk(EVENT + HALF_EVENT)], ENDS[how])
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        head = begun(client, script, EVENT + HALF_EVENT)
        assert client.rest()[0] == b""
    assert sidecar.record(head.trace_id)["outcome"] in {"truncated", "timeout"}


def test_error_event_follows_an_event_that_ends_with_crlf(sidecar, upstream):
    event = b"data: x\r\n\r\n"
    script = Script([SSE_HEAD, chunk(event)], ENDS["close"])
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        begun(client, script, event)
        assert b'"upstream_reset"' in client.chunked()[0]


def test_http10_client_of_a_cut_stream_sees_no_clean_end_inside_an_event(sidecar, upstream):
    script = Script([SSE_HEAD, chunk(EVENT + HALF_EVENT)], ENDS["reset"])
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        client.head()
        assert client.take(len(EVENT + HALF_EVENT)) == EVENT + HALF_EVENT
        script.going = True
        assert client.rest() == (b"", False)


@pytest.mark.parametrize("how", ["close", "reset", "idle"])
def test_cut_in_a_body_of_known_length_is_never_filled_up(sidecar, upstream, how):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    script = Script([head, b"x" * 60], ENDS[how])
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        head = client.head()
        client.take(60)
        script.going = True
        assert client.rest()[0] == b""
    assert sidecar.record(head.trace_id)["outcome"] in {"truncated", "timeout"}


def test_reset_in_a_body_that_ends_by_close_is_no_end(sidecar, upstream):
    script = Script([b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 60], ENDS["reset"])
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        begun(client, script, b"x" * 60)
        assert LAST_CHUNK not in client.rest()[0]


def test_stream_without_framing_that_ends_inside_an_event_is_no_whole_answer(sidecar, upstream):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    script = Script([head, EVENT + HALF_EVENT], ENDS["close"])
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        begun(client, script, EVENT + HALF_EVENT)
        assert client.rest()[0] == b""


def test_compressed_stream_that_breaks_is_cut(sidecar, upstream):
    head = SSE_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n"
    script = Script([head, chunk(b"\x1f\x8b\n\n")], ENDS["close"])
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        begun(client, script, b"\x1f\x8b\n\n")
        assert client.rest()[0] == b""


@pytest.mark.parametrize("how", ["close", "reset"])
def test_upstream_that_dies_inside_a_streamed_request_gives_the_client_a_502(
    sidecar, upstream, how
):
    def script(seen):
        seen.wire.take(1000)
        getattr(seen.wire, how)()

    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(b"x" * (3 * MIB)))
        answer = client.answer()
    assert (answer.status, answer.error()) == (502, "upstream_reset")


def leave_by_close(client):
    client.close()


def leave_by_reset(client):
    client.reset()


def leave_by_half_close(client):
    client.sock.shutdown(socket.SHUT_WR)


LEAVES = [leave_by_close, leave_by_reset, leave_by_half_close]


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("streaming", [False, True])
def test_upstream_is_cancelled_at_once_when_the_client_leaves(sidecar, upstream, leave, streaming):
    gone = []

    def script(seen):
        seen.reply(SSE_HEAD + chunk(EVENT) if streaming else b"")
        gone.append(seen.wire.ended())

    upstream.answering(script)
    trace = b"00-%032x-%016x-01" % (time.time_ns(), 7)
    with sidecar.client() as client:
        client.send(post(CHAT, b"traceparent: " + trace))
        upstream.last().body()
        if streaming:
            client.head()
            client.take(len(chunk(EVENT)))
        left = time.monotonic()
        leave(client)
        until(lambda: gone, "the upstream's connection to close")
        assert gone[0] - left < AT_ONCE_S
    record = sidecar.record(trace.decode(), "traceparent")
    assert record["outcome"] == "client_gone"
    assert record["phase"] == ("streaming" if streaming else "before_first_byte")


def test_median_time_to_cancel_is_below_50_ms(sidecar, upstream):
    gone = []

    def script(seen):
        seen.body()
        gone.append(seen.wire.ended())

    upstream.answering(script)
    times = []
    for i in range(9):
        with sidecar.client() as client:
            client.send(post(CHAT))
            until(lambda n=i: len(upstream.seen) > n, "the request upstream")
            left = time.monotonic()
            client.close()
            until(lambda n=i: len(gone) > n, "the upstream's connection to close")
            times.append(gone[i] - left)
    assert sorted(times)[len(times) // 2] < 0.05


@pytest.mark.parametrize("size", [STREAMED + 1, 3 * MIB])
@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_upstream_is_cancelled_when_the_client_leaves_after_a_large_body(
    sidecar, upstream, size, coding
):
    gone = []

    def script(seen):
        seen.body()
        gone.append(None)
        gone.append(seen.wire.ended())

    upstream.answering(script)
    data = post(b"x" * size)
    if coding == "chunked":
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        data = head + chunk(b"x" * size) + LAST_CHUNK
    with sidecar.client() as client:
        client.send(data)
        until(lambda: gone, "the body upstream")
        left = time.monotonic()
        client.close()
        until(lambda: len(gone) > 1, "the upstream's connection to close", wait_s=3)
        assert gone[1] - left < AT_ONCE_S


def test_client_that_leaves_inside_its_body_reaches_nobody(sidecar, upstream):
    trace = b"00-%032x-%016x-01" % (time.time_ns(), 7)
    with sidecar.client() as client:
        client.send(post(CHAT, b"traceparent: " + trace)[:-5])
    record = sidecar.record(trace.decode(), "traceparent")
    assert record["outcome"] == "client_gone"
    assert upstream.seen == []


def test_client_that_leaves_inside_a_streamed_body_cuts_the_upstream(sidecar, upstream):
    gone = []

    def script(seen):
        gone.append(seen.wire.ended())

    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(b"x" * (2 * MIB))[: STREAMED + 5000])
        upstream.last()
        client.close()
        until(lambda: gone, "the upstream's connection to close")


def test_slow_reader_holds_the_upstream_back(sidecar, upstream):
    total = 100 * MIB
    sent = [0]
    block = chunk(b"data: " + b"x" * 65000 + b"\n\n")

    def script(seen):
        seen.reply(SSE_HEAD)
        while sent[0] < total:
            seen.wire.send(block)
            sent[0] += len(block)
        seen.wire.send(LAST_CHUNK)

    upstream.answering(script)
    sidecar.ask(post(CHAT), "HEAD")  # what the first stream loads is loaded
    until(lambda: sidecar.metric("tongguan_proxy_connections", door="app") == 0, "an idle door")
    upstream.answering(script)
    sent[0] = 0
    before = sidecar.resident_bytes()
    with sidecar.client(receive_buffer=65536) as client:
        client.send(post(CHAT))
        client.head()
        last = -1
        while last != sent[0]:  # until the upstream stands still
            last = sent[0]
            time.sleep(0.1)
        assert sent[0] < 40 * MIB
        growth = sidecar.resident_bytes() - before
        assert growth < 8 * MIB
        payload_bytes = len(client.buffer)
        while client.buffer[-len(LAST_CHUNK) :] != LAST_CHUNK:
            client.buffer = client.buffer[-len(LAST_CHUNK) :]
            kept = len(client.buffer)
            assert client.fill()
            payload_bytes += len(client.buffer) - kept
        assert payload_bytes > total
    assert sidecar.resident_bytes() - before < 16 * MIB


def test_client_that_does_not_read_is_cut_and_the_upstream_cancelled(sidecar, upstream):
    gone = []

    def script(seen):
        seen.reply(SSE_HEAD)
        try:
            while True:
                seen.wire.send(chunk(b"data: " + b"x" * 65000 + b"\n\n"))
        finally:
            gone.append(True)

    upstream.answering(script)
    hits = sidecar.metric("tongguan_proxy_limit_hits_total", limit="timeouts.client_stall_s")
    with sidecar.client(receive_buffer=4096) as client:
        client.send(post(CHAT))
        head = client.head()
        until(lambda: gone, "the upstream's connection to close")
        assert sidecar.record(head.trace_id)["outcome"] == "client_stalled"
        raw, clean = client.rest()
        assert not clean
        assert LAST_CHUNK not in raw[-len(LAST_CHUNK) :]
    after = sidecar.metric("tongguan_proxy_limit_hits_total", limit="timeouts.client_stall_s")
    assert after == hits + 1


def test_stream_idle_does_not_run_while_the_client_is_slow(sidecar, upstream):
    body = b"y" * (24 * MIB)
    upstream.answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    with sidecar.client(receive_buffer=65536) as client:
        client.send(get())
        head = client.head()
        end = time.monotonic() + 2 * IDLE_S
        taken = len(client.buffer)
        while time.monotonic() < end:  # slower than the idle time, never stalled
            taken += len(client.sock.recv(200_000))
            time.sleep(STALL_S / 10)
        while taken < len(body):
            data = client.sock.recv(1 << 20)
            assert data, "cut"
            taken += len(data)
    assert sidecar.record(head.trace_id)["outcome"] == "ok"


def test_client_that_reads_slowly_between_two_requests_is_not_cut(sidecar, upstream):
    """No request is under way then, but an answer waits in our buffer and the kernel's."""
    body, count = b"z" * 200_000, 40
    upstream.answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    name = "tongguan_proxy_limit_hits_total"
    hits = sidecar.metric(name, limit="timeouts.client_stall_s")
    with sidecar.client(receive_buffer=4096) as client:
        client.send(get() * count)
        end = time.monotonic() + 6 * STALL_S
        while time.monotonic() < end:
            client.buffer += client.sock.recv(4096)
            time.sleep(STALL_S / 20)
        for _ in range(count):
            assert client.answer().body == body
        assert client.send(get()).answer().body == body
    assert sidecar.metric(name, limit="timeouts.client_stall_s") == hits


def test_pipelining_without_reading_is_held_back(sidecar, upstream):
    body = b"z" * 60_000
    upstream.answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    count = 1000
    before = sidecar.resident_bytes()
    with sidecar.client(receive_buffer=4096) as client:
        client.send(get() * count)
        last = -1
        while last != len(upstream.seen):
            last = len(upstream.seen)
            time.sleep(0.1)
        growth = sidecar.resident_bytes() - before
        assert len(upstream.seen) < count
        assert growth < 12 * MIB


def test_pipelining_without_end_is_read_as_it_is_answered(tmp_path, upstream):
    """Small requests by the hundred thousand: what waits for its turn waits in the kernel."""
    many = get() * 2000
    with (
        Sidecar(tmp_path / "s", upstream.url) as sidecar,
        sidecar.client(receive_buffer=4096) as client,
    ):
        sidecar.ask(post(CHAT))
        before = sidecar.resident_bytes()
        client.sock.setblocking(False)
        end, sent = time.monotonic() + 3, 0
        while time.monotonic() < end:
            try:
                sent += client.sock.send(many)
            except BlockingIOError:
                time.sleep(0.01)
        assert sent < 16 * MIB
        assert sidecar.resident_bytes() - before < 8 * MIB
        assert len(upstream.seen) > 500  # none costs what the others behind it take


def test_what_stands_behind_much_that_was_read_is_read_in_its_turn(sidecar, upstream):
    count, large = 20, b"y" * 600_000
    go = threading.Event()

    def script(seen):
        if b"/first" in seen.line:
            assert go.wait(20)
        seen.reply(OK)

    upstream.answering(script)
    with sidecar.client() as client:
        client.send(get(b"/first"))
        upstream.last()
        parts = (get() * count, post(large), get() * count, get(b"/end"))
        sender = threading.Thread(target=client.send, args=parts)
        sender.start()
        time.sleep(0.2)  # more than a head's limit has come, so reading stops
        go.set()
        for _ in range(2 * count + 3):
            assert client.answer().status == 200
        sender.join()
    assert upstream.seen[count + 1].payload == large
    assert upstream.seen[-1].line == b"GET /end HTTP/1.1"


def test_client_that_never_reads_its_last_bytes_does_not_keep_its_connection(sidecar, upstream):
    body = b"w" * 200_000
    upstream.answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    with sidecar.client(receive_buffer=4096) as client:
        # Enough to fill what the kernel takes, the last answer closes.
        client.send(get() * 60 + get(b"/last", b"Connection: close"))
        until(
            lambda: sidecar.metric("tongguan_proxy_connections", door="app") == 0,
            "the connection to be let go",
            wait_s=6 * STALL_S,
        )
        assert not client.rest()[1]  # FIN would be the end of what was cut


def test_upstream_that_does_not_read_holds_the_client_back(sidecar, upstream):
    release = []

    def script(seen):
        until(lambda: release, "the release")
        seen.reply(OK)

    upstream.answering(script)
    size = 4 * MIB
    with sidecar.client() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        data = memoryview(post(b"x" * size))
        client.sock.settimeout(0.3)
        sent = 0
        try:
            while sent < len(data):
                sent += client.sock.send(data[sent : sent + 65536])
        except TimeoutError:
            pass
        client.sock.settimeout(20)
        release.append(True)
        client.send(data[sent:])
        assert client.answer().status == 200
    assert upstream.last().payload == b"x" * size


def test_output_hash_covers_what_was_handed_to_a_client_that_left(sidecar, upstream, keys):
    script = Script([SSE_HEAD, chunk(EVENT)], hang)
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        head = begun(client, script, EVENT)
    key = json.loads((keys / "auditor.json").read_text())["prompt_keys"]["default"]
    record = sidecar.record(head.trace_id)
    assert record["output_hash"] == hmac.digest(bytes.fromhex(key), b"one", "sha256").hex()
    assert record["output_len"] == 3


def test_nothing_is_held_when_all_is_done(sidecar, upstream):
    assert sidecar.ask(post(CHAT)).status == 200
    assert sidecar.idle()
