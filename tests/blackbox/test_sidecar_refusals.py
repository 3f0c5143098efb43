"""What bad heads, bodies and peers get: refusals, limits, timeouts; nothing else suffers."""

import random
import socket
import time

import pytest

from tests.blackbox.harness import (
    LAST_CHUNK,
    OK,
    Sidecar,
    chunk,
    get,
    new_keys,
    ok,
    post,
    until,
)

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
HEAD_BYTES, BODY_BYTES = 8192, 2 << 20
# A body that is large enough to be streamed through, not collected.
STREAMED = 1 << 20


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend):
    folder = tmp_path_factory.mktemp("refusals")
    keys = new_keys(folder / "keys")
    toml = '[tenants.default]\nmax_class = "P0"\n'
    with Sidecar(
        folder / "sidecar",
        backend.url,
        keys=keys,
        toml=toml,
        LIMITS_HEAD_BYTES=HEAD_BYTES,
        LIMITS_FIELD_BYTES=4096,
        LIMITS_FIELDS=20,
        LIMITS_BODY_BYTES=BODY_BYTES,
        TIMEOUTS_HEAD_S=0.4,
        TIMEOUTS_BODY_IDLE_S=0.4,
        TIMEOUTS_FIRST_BYTE_S=0.6,
        TIMEOUTS_DISCARD_S=0.5,
        TIMEOUTS_KEEPALIVE_S=30,
        QOS_P0_INFLIGHT=1,
        POOLS_BEST_EFFORT_INFLIGHT=1,
        QOS_P2_QUEUE=0,
    ) as sidecar:
        yield sidecar


def framed(*fields, body=b"", version=b"HTTP/1.1"):
    lines = b"".join(field + b"\r\n" for field in (b"Host: a", *fields))
    return b"POST / %b\r\n%b\r\n%b" % (version, lines, body)


CHUNKED = b"Transfer-Encoding: chunked"
CLIENT_NONSENSE = {
    "length with coding": framed(b"Content-Length: 5", CHUNKED, body=LAST_CHUNK),
    "two equal lengths": framed(b"Content-Length: 2", b"Content-Length: 2", body=b"{}"),
    "two lengths": framed(b"Content-Length: 2", b"Content-Length: 3", body=b"{}"),
    "list of lengths": framed(b"Content-Length: 2, 2", body=b"{}"),
    "signed length": framed(b"Content-Length: +5", body=b"hello"),
    "negative length": framed(b"Content-Length: -5"),
    "hex length": framed(b"Content-Length: 0x5", body=b"hello"),
    "empty length": framed(b"Content-Length:"),
    "length with inner space": framed(b"Content-Length: 1 0", body=b"0123456789"),
    "overflowing length": framed(b"Content-Length: 99999999999999999999999"),
    "unknown coding": framed(b"Transfer-Encoding: gzip, chunked", body=LAST_CHUNK),
    "identity coding": framed(b"Transfer-Encoding: identity"),
    "coding twice": framed(CHUNKED, CHUNKED, body=LAST_CHUNK),
    "chunked twice": framed(b"Transfer-Encoding: chunked, chunked", body=LAST_CHUNK),
    "quoted coding": framed(b'Transfer-Encoding: "chunked"', body=LAST_CHUNK),
    "coding with a tab inside": framed(b"Transfer-Encoding: chunked\x0b", body=LAST_CHUNK),
    "coding in 1.0": framed(CHUNKED, version=b"HTTP/1.0", body=LAST_CHUNK),
    "folded line": framed(b"X-A: 1", b" folded"),
    "folded first line": b"GET / HTTP/1.1\r\n Host: a\r\nHost: a\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: a\n\n",
    "one bare LF": b"GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n",
    "bare CR": framed(b"X: a\rb"),
    "CR before the line end": b"GET / HTTP/1.1\r\nHost: a\r\r\n\r\n",
    "NUL in a value": framed(b"X: a\x00b"),
    "escape in a value": framed(b"X: \x1b[0m"),
    "DEL in a value": framed(b"X: a\x7f"),
    "space before colon": framed(b"Content-Length : 2", body=b"{}"),
    "space in a name": framed(b"X A: 1"),
    "no colon": framed(b"X-A"),
    "empty name": framed(b": 1"),
    "name beyond ASCII": framed(b"X-\xe9: 1"),
    "no host": b"GET / HTTP/1.1\r\nX: 1\r\n\r\n",
    "two hosts": framed(b"host: a"),
    "host list": b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "host with path": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "bad version": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "lower-case version": b"GET / http/1.1\r\nHost: a\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    "space after version": b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
    "target beyond ASCII": b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "target without slash": b"GET a HTTP/1.1\r\nHost: a\r\n\r\n",
    "other host in target": b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "method with a colon": b"GE:T / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "chunk size": framed(CHUNKED, body=b"xyz\r\n"),
    "chunk size with sign": framed(CHUNKED, body=b"+5\r\nhello\r\n0\r\n\r\n"),
    "chunk size with prefix": framed(CHUNKED, body=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "chunk size empty": framed(CHUNKED, body=b"\r\nhello\r\n0\r\n\r\n"),
    "chunk size overflow": framed(CHUNKED, body=b"fffffffffffffffff\r\nhello"),
    "chunk size with space before": framed(CHUNKED, body=b" 5\r\nhello\r\n0\r\n\r\n"),
    "chunk size with bare LF": framed(CHUNKED, body=b"5\nhello\r\n0\r\n\r\n"),
    "junk after chunk data": framed(CHUNKED, body=b"5\r\nhelloXX0\r\n\r\n"),
    "LF after chunk data": framed(CHUNKED, body=b"5\r\nhello\n0\r\n\r\n"),
    "control byte in an extension": framed(CHUNKED, body=b"5;a=\x01\r\nhello\r\n0\r\n\r\n"),
    "bare LF after the last chunk": framed(CHUNKED, body=b"5\r\nhello\r\n0\r\n\n"),
    "trailer without colon": framed(CHUNKED, body=b"5\r\nhello\r\n0\r\nX\r\n\r\n"),
    "folded trailer": framed(CHUNKED, body=b"5\r\nhello\r\n0\r\nX: 1\r\n y\r\n\r\n"),
}


@pytest.mark.parametrize("data", CLIENT_NONSENSE.values(), ids=CLIENT_NONSENSE)
def test_clients_nonsense_gets_400_and_reaches_nobody(sidecar, upstream, data):
    with sidecar.client() as client:
        client.send(data, get(b"/smuggled"))
        answer = client.answer()
        assert (answer.status, answer.error()) == (400, "invalid_request")
        assert answer.get("Connection") == b"close"
        client.sock.shutdown(socket.SHUT_WR)
        assert client.rest()[0] == b""
    assert sidecar.ask(get(b"/after")).status == 200
    assert [seen.line for seen in upstream.seen] == [b"GET /after HTTP/1.1"]


@pytest.mark.parametrize("method", [b"CONNECT", b"TRACE"])
def test_connect_and_trace_are_refused(sidecar, upstream, method):
    answer = sidecar.ask(method + b" / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (answer.status, answer.error()) == (405, "method_not_allowed")
    assert upstream.seen == []


OK_LINE = b"HTTP/1.1 200 OK\r\n"
UPSTREAM_NONSENSE = {
    "length with coding": OK_LINE + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n\r\n0\r\n\r\n",
    "two equal lengths": OK_LINE + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "signed length": OK_LINE + b"Content-Length: +2\r\n\r\n{}",
    "unknown coding": OK_LINE + b"Transfer-Encoding: gzip\r\n\r\n",
    "coding twice": OK_LINE + 2 * (CHUNKED + b"\r\n") + b"\r\n0\r\n\r\n",
    "coding in 1.0": b"HTTP/1.0 200 OK\r\n" + CHUNKED + b"\r\n\r\n0\r\n\r\n",
    "folded line": OK_LINE + b"X: 1\r\n y\r\nContent-Length: 0\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "bare CR": OK_LINE + b"X: a\rb\r\nContent-Length: 0\r\n\r\n",
    "control byte": OK_LINE + b"X: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "space before colon": OK_LINE + b"Content-Length : 0\r\n\r\n",
    "bad name": OK_LINE + b"X(: 0\r\nContent-Length: 0\r\n\r\n",
    "bad version": b"HTTP/2 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no HTTP": b"SSH-2.0-server\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    "status 099": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "switch nobody asked for": b"HTTP/1.1 101 Go\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "empty line first": b"\r\n" + OK,
    "head too large": OK_LINE + b"X: " + b"y" * 3000 + b"\r\nY: " + b"y" * 3000 + b"\r\nZ: "
    + b"z" * 3000 + b"\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("data", UPSTREAM_NONSENSE.values(), ids=UPSTREAM_NONSENSE)
def test_upstreams_nonsense_gets_502_upstream_protocol(sidecar, upstream, data):
    upstream.answering(data)
    with sidecar.client() as client:
        client.send(post(CHAT))
        answer = client.answer()
        assert (answer.status, answer.error()) == (502, "upstream_protocol")
        assert sidecar.record(answer.trace_id)["outcome"] == "upstream_error"
        upstream.answering(ok)
        assert client.send(post(CHAT)).answer().status == 200


@pytest.mark.parametrize(
    ("body", "handed"),
    [
        (b"3\r\nabc\r\nzz\r\n", b"abc"),
        (b"3\r\nabcXX", b""),
        (b"3\r\nabc\r\n" + b"f" * 17 + b"\r\n", b"abc"),
        (b"3\r\nabc\r\n0\r\nbad trailer\r\n\r\n", b"abc"),
        (b"5\nabcde\r\n0\r\n\r\n", b""),
    ],
)
def test_upstreams_broken_chunks_never_look_whole(sidecar, upstream, body, handed):
    def script(seen):
        seen.reply(OK_LINE + CHUNKED + b"\r\n\r\n")
        until(lambda: told, "the client to have the head")
        seen.wire.send(body)

    told = []
    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        # Nothing of the body has come: the head may wait for it.
        if client.sock.recv(1, socket.MSG_PEEK):
            told.append(True)
        head = client.head()
        raw, _ = client.rest()
    assert head.status == 200
    assert raw in {b"", chunk(handed) if handed else b"", chunk(b"abc")}
    assert LAST_CHUNK not in raw


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_upstream_that_dies_before_its_head_is_whole_gets_502(sidecar, upstream, start, how):
    def script(seen):
        seen.reply(start)
        getattr(seen.wire, how)()

    upstream.answering(script)
    with sidecar.client() as client:
        answer = client.send(post(CHAT)).answer()
        assert (answer.status, answer.error()) == (502, "upstream_reset")
        upstream.answering(ok)
        assert client.send(post(CHAT)).answer().status == 200
    record = sidecar.record(answer.trace_id)
    assert (record["status"], record["outcome"], record["phase"]) == (
        502,
        "upstream_error",
        "before_first_byte",
    )


def test_late_bytes_after_an_answer_drop_that_connection(sidecar, upstream):
    upstream.answering(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
    with sidecar.client() as client:
        assert client.send(get(b"/1")).answer().body == b"{}"
        upstream.answering(ok)
        assert client.send(get(b"/2")).answer().body == b"{}"
    assert sidecar.metric("tongguan_proxy_pool_late_closes_total", pool="shared") >= 1


def test_late_bytes_on_an_idle_connection_drop_it(sidecar, upstream):
    def script(seen):
        seen.reply(OK)
        until(lambda: told, "the client to have its answer")
        seen.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
        seen.wire.ended()

    told = []
    upstream.answering(script)
    before = sidecar.metric("tongguan_proxy_pool_late_closes_total")
    with sidecar.client() as client:
        assert client.send(get()).answer().body == b"{}"
        told.append(True)
        until(lambda: sidecar.metric("tongguan_proxy_pool_late_closes_total") > before, "the drop")
        upstream.answering(ok)
        assert client.send(get()).answer().body == b"{}"


def test_body_declared_too_large_gets_413_that_names_limit_and_key(sidecar, upstream):
    answer = sidecar.ask(framed(b"Content-Length: %d" % (BODY_BYTES + 1)))
    assert (answer.status, answer.error()) == (413, "payload_too_large")
    assert b"limits.body_bytes" in answer.body
    assert str(BODY_BYTES).encode() in answer.body
    assert upstream.seen == []


def test_body_of_exactly_the_limit_is_taken(sidecar, upstream):
    assert sidecar.ask(post(b"x" * BODY_BYTES)).status == 200
    assert len(upstream.last().payload) == BODY_BYTES


def test_chunked_body_too_large_gets_413(sidecar, upstream):
    with sidecar.client() as client:
        client.send(framed(CHUNKED))
        try:
            for _ in range(BODY_BYTES // 65536 + 1):
                client.send(chunk(b"x" * 65536))
        except ConnectionError as problem:
            pytest.fail(f"the answer may be lost: {problem!r}")
        answer = client.answer()
    assert (answer.status, answer.error()) == (413, "payload_too_large")
    upstream.last()  # what had come was streamed through; no other test may see it


def test_client_that_expects_continue_is_refused_without_sending_its_body(sidecar, upstream):
    with sidecar.client() as client:
        client.send(framed(b"Content-Length: %d" % (BODY_BYTES + 1), b"Expect: 100-continue"))
        answer = client.head()
        assert answer.status == 413
        client.take(int(answer.get("Content-Length")))
        assert client.rest() == (b"", True)


@pytest.mark.parametrize(
    "fields",
    [
        [b"X: " + b"y" * 4096],
        [b"X-%d: " % i + b"y" * 3000 for i in range(3)],
        [b"X-%d: 1" % i for i in range(20)],
    ],
    ids=["field", "head", "count"],
)
def test_head_too_large_gets_431(sidecar, upstream, fields):
    answer = sidecar.ask(get(b"/", *fields))
    assert (answer.status, answer.error()) == (431, "headers_too_large")
    assert upstream.seen == []


def test_request_line_counts_as_a_field(sidecar, upstream):
    assert sidecar.ask(get(b"/" + b"a" * 4200)).status == 431
    assert sidecar.ask(get(b"/" + b"a" * 3900)).status == 200


def test_endless_head_is_cut_off(sidecar):
    with sidecar.client() as client:
        client.send(b"GET /" + b"a" * HEAD_BYTES)
        assert client.answer().status == 431


def test_head_that_does_not_become_whole_gets_408(sidecar, upstream):
    start = time.monotonic()
    with sidecar.client() as client:
        client.send(b"GET / HT")
        answer = client.answer()
    assert (answer.status, answer.error()) == (408, "request_timeout")
    assert 0.35 < time.monotonic() - start < 2
    assert upstream.seen == []


def test_head_that_is_dripped_gets_408(sidecar):
    with sidecar.client() as client:
        end = time.monotonic() + 3
        client.sock.setblocking(False)
        while time.monotonic() < end:
            try:
                client.sock.send(b"a")
                if data := client.sock.recv(100):
                    break
            except BlockingIOError:
                time.sleep(0.02)
        assert data.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "start",
    [
        framed(b"Content-Length: 100", body=b"part"),
        framed(CHUNKED, body=b"64\r\npart"),
        framed(b"Content-Length: %d" % (STREAMED + 100), body=b"x" * (STREAMED + 10)),
    ],
    ids=["length", "chunked", "streamed through"],
)
def test_body_without_progress_gets_408(sidecar, upstream, start):
    with sidecar.client() as client:
        answer = client.send(start).answer()
    assert (answer.status, answer.error()) == (408, "request_timeout")
    assert sidecar.record(answer.trace_id)["outcome"] == "timeout"
    if len(start) > STREAMED:
        upstream.last()


def test_silent_upstream_gets_504_and_is_cancelled(sidecar, upstream):
    gone = []

    def script(seen):
        seen.body()
        gone.append(seen.wire.ended())

    upstream.answering(script)
    start = time.monotonic()
    with sidecar.client() as client:
        answer = client.send(post(CHAT)).answer()
        took = time.monotonic() - start
        assert (answer.status, answer.error()) == (504, "upstream_timeout")
        assert 0.55 < took < 2
        until(lambda: gone, "the upstream's connection to close")
        upstream.answering(ok)
        assert client.send(post(CHAT)).answer().status == 200
    assert sidecar.record(answer.trace_id)["outcome"] == "timeout"


@pytest.mark.parametrize("interim", [True, False])
def test_a_head_alone_does_not_stop_the_first_byte_timeout(sidecar, upstream, interim):
    def script(seen):
        seen.reply(b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"")
        seen.wire.send(b"" if interim else b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        seen.wire.ended()

    upstream.answering(script)
    start = time.monotonic()
    with sidecar.client() as client:
        answer = client.send(post(CHAT)).head()
        if interim:
            assert answer.status == 504
        else:
            assert client.rest()[0] == b""
    assert 0.55 < time.monotonic() - start < 2


def test_event_stream_that_is_silent_from_its_head_on_ends_with_an_error_event(sidecar, upstream):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + CHUNKED + b"\r\n\r\n"

    def script(seen):
        seen.reply(head)
        seen.wire.ended()

    upstream.answering(script)
    answer = sidecar.ask(post(CHAT))
    assert answer.status == 200
    assert b'"upstream_timeout"' in answer.body
    assert sidecar.record(answer.trace_id)["outcome"] == "timeout"


def test_refusal_of_our_own_to_head_has_no_body(sidecar, upstream):
    def script(seen):
        seen.reply()
        seen.wire.close()

    upstream.answering(script)
    with sidecar.client() as client:
        client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.answer("HEAD").status == 502
        upstream.answering(ok)
        answer = client.send(get()).answer()
        assert (answer.status, answer.body) == (200, b"{}")


@pytest.mark.parametrize("qos", [b"P0", b"P2"])
def test_full_pool_gets_503_queue_full(sidecar, upstream, qos):
    release = []

    def script(seen):
        seen.body()
        if seen.get("X-QoS-Class") == qos:
            until(lambda: release, "the release")
        seen.wire.send(OK)

    upstream.answering(script)
    with sidecar.client() as first, sidecar.client() as second:
        first.send(post(CHAT, b"X-QoS-Class: " + qos))
        upstream.last()
        answer = second.send(post(CHAT, b"X-QoS-Class: " + qos)).answer()
        assert (answer.status, answer.error()) == (503, "queue_full")
        assert answer.get("X-QoS-Class") == qos
        assert answer.get("X-QoS-Pool") == {b"P0": b"dedicated", b"P2": b"best_effort"}[qos]
        assert sidecar.record(answer.trace_id)["outcome"] == "shed"
        assert sidecar.ask(post(CHAT)).status == 200  # the other pools have room
        release.append(True)
        assert first.answer().status == 200
        assert second.send(post(CHAT, b"X-QoS-Class: " + qos)).answer().status == 200


def test_nothing_listening_gets_503_no_upstream(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Sidecar(tmp_path / "s", url) as sidecar, sidecar.client() as client:
            for _ in range(2):
                answer = client.send(post(CHAT)).answer()
                assert (answer.status, answer.error()) == (503, "no_upstream")
                assert answer.get("Connection") is None


def test_refused_connect_is_tried_on_another_endpoint(tmp_path, upstream):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        urls = f"http://127.0.0.1:{unused.getsockname()[1]},{upstream.url}"
        with Sidecar(tmp_path / "s", urls) as sidecar:
            assert [sidecar.ask(post(CHAT)).status for _ in range(4)] == [200] * 4


def test_unknown_class_is_refused_where_policy_says_so(tmp_path, upstream):
    with Sidecar(tmp_path / "s", upstream.url, QOS_ON_UNKNOWN="reject") as sidecar:
        answer = sidecar.ask(post(CHAT, b"X-QoS-Class: P7"))
        assert (answer.status, answer.error()) == (400, "invalid_request")
        assert upstream.seen == []
        assert sidecar.ask(post(CHAT, b"X-QoS-Class: P2")).get("X-QoS-Class") == b"P2"


def mutated(rng):
    """Return bytes that look like requests, bent in a few places."""
    seeds = [post(CHAT), get(b"/a", b"X: 1"), framed(CHUNKED, body=chunk(CHAT) + LAST_CHUNK)]
    data = bytearray(b"".join(rng.choices(seeds, k=2)))
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 30)]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            case _:
                data[at:at] = rng.choice([b"\r\n", b"\n", b"\r", b"\0", b": ", b"0\r\n\r\n"])
    return bytes(data)


def test_bent_requests_disturb_nobody_else(sidecar, upstream):
    rng = random.Random(14)
    with sidecar.client() as bystander:
        for i in range(300):
            with sidecar.client() as client:
                client.send(mutated(rng))
                if i % 3:
                    client.sock.shutdown(socket.SHUT_WR)
                    client.ended()
            if i % 25 == 0:
                upstream.script = ok
                assert bystander.send(post(CHAT)).answer().body == b"{}"
    for seen in upstream.seen:
        assert b"\n" not in seen.raw.replace(b"\r\n", b"")
        assert b"\r" not in seen.raw.replace(b"\r\n", b"")
        assert b"\0" not in seen.raw
    assert sidecar.idle()


def test_bent_answers_disturb_nobody_else(sidecar, upstream):
    rng = random.Random(15)
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + CHUNKED + b"\r\n\r\n"
    seeds = [OK, stream + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + LAST_CHUNK]
    for i in range(200):
        data = bytearray(seeds[i % 2])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[at] = rng.randrange(256)
            else:
                del data[at : at + rng.randrange(1, 20)]

        def script(seen, data=bytes(data)):
            seen.reply(data)
            seen.wire.close()

        upstream.answering(script)
        with sidecar.client() as client:
            raw, _ = client.send(post(CHAT, b"Connection: close")).rest()
            assert raw.startswith(b"HTTP/1.1 ")
            assert raw.count(b"HTTP/1.1 ") == 1
    upstream.answering(ok)
    assert sidecar.ask(post(CHAT)).body == b"{}"
    assert sidecar.idle()
