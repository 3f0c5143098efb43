"""The edges of HTTP/1.1: expectations, half-closes, interim and bodiless answers."""

import json
import socket
import time

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.harness import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    Client,
    Sidecar,
    chunk,
    get,
    ok,
    post,
    until,
)

CHAT = b'{"model":"m"}'
CONTINUE = b"HTTP/1.1 100 Continue"
EXPECT = b"Expect: 100-continue"
STREAMED = 64 << 10
DISCARD_BYTES = 256 << 10


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    with Sidecar(
        tmp_path_factory.mktemp("http") / "s",
        backend.url,
        keys=keys,
        LIMITS_COLLECT_BYTES=STREAMED,
        LIMITS_DISCARD_BYTES=DISCARD_BYTES,
        TIMEOUTS_DISCARD_S=0.4,
        TIMEOUTS_FIRST_BYTE_S=1,
        TIMEOUTS_CONNECT_S=0.3,
    ) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def patient(tmp_path_factory, backend):
    """A sidecar that waits for its upstream longer than any test does."""
    with Sidecar(tmp_path_factory.mktemp("patient") / "s", backend.url) as sidecar:
        yield sidecar


def parted(data):
    """Return (head, body) of a message."""
    head, end, body = data.partition(b"\r\n\r\n")
    return head + end, body


# --- what is forwarded


@pytest.mark.parametrize("method", [b"PROPFIND", b"QUERY", b"M-SEARCH", b"PURGE", b"get", b"!"])
def test_any_method_is_forwarded_with_its_body(sidecar, upstream, method):
    data = post(CHAT).replace(b"POST", method, 1)
    assert sidecar.ask(data).status == 200
    assert upstream.last().line == method + b" /v1/chat/completions HTTP/1.1"
    assert upstream.last().payload == CHAT


def test_forwarding_fields_of_the_app_pass_and_none_is_added(sidecar, upstream):
    fields = [b"Via: 1.1 theirs", b"Forwarded: for=a", b"X-Forwarded-For: 1.2.3.4",
              b"x-forwarded-proto: https", b"X-Forwarded-Host: h"]  # fmt: skip
    upstream.answering(b"HTTP/1.1 200 OK\r\nVia: 1.1 up\r\nContent-Length: 0\r\n\r\n")
    answer = sidecar.ask(post(CHAT, *fields))
    seen = upstream.last()
    assert [line for line in seen.lines if b"orward" in line or line[:3] == b"Via"] == fields
    assert answer.all("Via") == [b"1.1 up"]


def test_answers_fields_keep_case_order_and_duplicates(sidecar, upstream):
    lines = [b"set-Cookie: a=1", b"X-B: 1", b"Set-Cookie: b=2", b"x-b:  2\t", b"Set-Cookie: a=1"]
    upstream.answering(
        b"HTTP/1.1 200 OK\r\n" + b"\r\n".join(lines) + b"\r\nContent-Length: 0\r\n\r\n"
    )
    assert [line for line in sidecar.ask(get()).lines if line in lines] == lines


def test_upstreams_close_is_not_the_clients(sidecar, upstream):
    def script(seen):
        seen.reply(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        seen.wire.close()

    upstream.answering(script)
    with sidecar.client() as client:
        for _ in range(2):
            assert client.send(get()).answer().get("Connection") is None


def test_upstream_of_http10_is_read_by_its_length_or_its_end(sidecar, upstream):
    def script(seen):
        length = b"Content-Length: 3\r\n" if b"/a" in seen.line else b""
        seen.reply(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + length + b"\r\nabc")
        if not length:
            seen.wire.close()

    upstream.answering(script)
    with sidecar.client() as client:
        for target in (b"/a", b"/a", b"/b", b"/a"):
            answer = client.send(get(target)).answer()
            assert (answer.line, answer.body) == (b"HTTP/1.1 200 OK", b"abc")


# --- Expect


@pytest.mark.parametrize("coding", ["length", "chunked"])
@pytest.mark.parametrize("size", [10, STREAMED * 3])
def test_continue_comes_before_the_body_and_once(sidecar, upstream, coding, size):
    body = b"x" * size
    if coding == "length":
        head, wire = parted(post(body, EXPECT))
    else:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n" + EXPECT
        head, wire = head + b"\r\n\r\n", chunk(body) + LAST_CHUNK
    with sidecar.client() as client:
        client.send(head)
        assert client.head().line == CONTINUE
        assert upstream.seen == []
        client.send(wire)
        assert client.head().status == 200
    assert upstream.last().payload == body
    assert upstream.last().get("Expect") is None


@pytest.mark.parametrize(
    "fields",
    [(EXPECT, b"expect: 100-Continue"), (b"Expect: another, 100-continue",)],
    ids=["twice", "in a list"],
)
def test_expectation_counts_wherever_it_stands(sidecar, upstream, fields):
    # RFC 9110 sections 5.3 and 10.1.1: Expect is a list; else its client waits for nothing.
    head, body = parted(post(CHAT, *fields))
    with sidecar.client() as client:
        client.send(head)
        assert client.head().line == CONTINUE
        assert upstream.seen == []
        assert client.send(body).answer().status == 200
    assert upstream.last().get("Expect") is None


def test_body_that_comes_with_its_head_is_not_waited_for(sidecar, upstream):
    with sidecar.client() as client:
        client.send(post(CHAT, EXPECT))
        assert client.head().status == 200
    assert upstream.last().payload == CHAT


@pytest.mark.parametrize(
    "data",
    [
        get(b"/", EXPECT),
        post(b"", EXPECT),
        post(CHAT, EXPECT, version=b"1.0"),
        post(CHAT, b"Expect: something-else"),
        post(CHAT, b"Expect: a, 100-continue=1"),
    ],
    ids=["no body", "empty body", "HTTP/1.0", "another one", "others"],
)
def test_expectation_that_is_none_is_dropped_and_not_waited_for(sidecar, upstream, data):
    head, body = parted(data)
    with sidecar.client() as client:
        client.send(head)
        if body:
            client.sock.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.fill()
            client.sock.settimeout(10)
            client.send(body)
        assert client.head().status == 200
    assert upstream.last().get("Expect") is None


def test_expectation_behind_another_request_waits_its_turn(sidecar, upstream):
    head, body = parted(post(CHAT, EXPECT, target=b"/2"))
    with sidecar.client() as client:
        client.send(get(b"/1") + head)
        assert client.head().status == 200
        client.take(2)
        assert client.head().line == CONTINUE
        assert client.send(body).answer().status == 200
    assert [seen.line[:7] for seen in upstream.seen] == [b"GET /1 ", b"POST /2"]


def test_sealed_body_is_asked_for_and_a_refused_one_is_not(sidecar, upstream, keys):
    sealed = Channel(keys / "client.json").seal(CHAT)
    with Client(sidecar.sealed) as client:
        client.send(sealed.head(EXPECT.decode()))
        assert client.head().line == CONTINUE
        assert sealed.open(client.send(sealed.wire).answer())[0] == 200
    with Client(sidecar.sealed) as client:
        client.send(post(CHAT, EXPECT)[: -len(CHAT)])
        answer = client.answer()
        assert (answer.status, answer.error()) == (400, "envelope_rejected")
        assert client.rest() == (b"", True)
    assert len(upstream.seen) == 1


# --- a half-closed client


def test_client_that_half_closes_behind_its_request_is_gone(sidecar, upstream):
    gone = []

    def script(seen):
        seen.body()
        gone.append(seen.wire.ended())

    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        upstream.last()
        client.sock.shutdown(socket.SHUT_WR)
        until(lambda: gone, "the upstream's connection to end")
        assert client.rest()[0] == b""
    assert sidecar.idle()


@pytest.mark.parametrize("sent", [30, 200, STREAMED + 1000], ids=["head", "body", "streamed"])
def test_client_that_half_closes_inside_its_request_gets_nothing(sidecar, upstream, sent):
    data = post(b"x" * (2 * STREAMED))
    with sidecar.client() as client:
        client.send(data[:sent])
        if sent > STREAMED:
            upstream.last()
        client.sock.shutdown(socket.SHUT_WR)
        assert client.rest()[0] == b""
    assert sidecar.idle()


LEAVES = {
    "close": lambda client: client.close(),
    "reset": lambda client: client.reset(),
    "half-close": lambda client: client.sock.shutdown(socket.SHUT_WR),
}


@pytest.mark.parametrize(
    ("behind", "leave"),
    [*(("requests", leave) for leave in LEAVES), ("a body that is not taken", "reset")],
)
def test_client_that_leaves_while_it_is_not_read_cancels_the_upstream(
    patient, upstream, leave, behind
):
    gone = []

    def script(seen):
        if behind == "requests":
            seen.body()
            gone.append(seen.wire.ended())
            return
        until(lambda: left, "the client to leave")
        try:
            while seen.wire.sock.recv(1 << 20):
                pass
        except ConnectionError:
            pass
        gone.append(time.monotonic())

    left = []
    upstream.answering(script)
    with patient.client() as client:
        if behind == "requests":
            client.send(get() * 8000)
        else:
            client.sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.sock.sendall(post(b"x" * (30 << 20)))
        until(lambda: upstream.seen, "the request")
        start = time.monotonic()
        LEAVES[leave](client)
        left.append(True)
        until(lambda: gone, "the upstream's connection to end")
        assert gone[0] - start < 3
    assert patient.idle()


# --- interim answers, and answers without a body


def test_interim_answers_in_any_pieces_are_swallowed(sidecar, upstream):
    data = b"HTTP/1.1 102 Wait\r\nX: 1\r\n\r\n" * 3 + b"HTTP/1.1 103 Hints\r\n\r\n" + OK

    def script(seen):
        seen.body()
        for i in range(len(data)):
            seen.wire.send(data[i : i + 1])

    upstream.answering(script)
    with sidecar.client() as client:
        for _ in range(2):
            answer = client.send(post(CHAT)).head()
            assert (answer.status, answer.get("X")) == (200, None)
            assert client.take(2) == b"{}"


def test_interim_answers_without_end_do_not_stop_the_first_byte_timeout(sidecar, upstream):
    def script(seen):
        seen.body()
        while True:
            seen.wire.send(b"HTTP/1.1 102 Wait\r\n\r\n")
            time.sleep(0.02)

    upstream.answering(script)
    start = time.monotonic()
    assert sidecar.ask(post(CHAT)).error() == "upstream_timeout"
    assert time.monotonic() - start < 4


@pytest.mark.parametrize(
    ("method", "head", "length"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", None),
        (b"HEAD", b"HTTP/1.1 200 OK\r\n\r\n", None),
        (b"HEAD", b"HTTP/1.1 404 No\r\nContent-Length: 7\r\n\r\n", b"7"),
        (b"GET", b'HTTP/1.1 304 Same\r\nETag: "1"\r\nContent-Length: 99\r\n\r\n', b"99"),
        (b"GET", b"HTTP/1.1 204 None\r\nContent-Length: 0\r\n\r\n", None),
        (b"POST", b"HTTP/1.1 204 None\r\nTransfer-Encoding: chunked\r\n\r\n", None),
    ],
)
def test_answer_without_body_ends_with_its_head(sidecar, upstream, method, head, length):
    data = b"%b / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n" % method
    upstream.answering(head)
    with sidecar.client() as client:
        for _ in range(3):
            answer = client.send(data).head()
            assert answer.line == head.partition(b"\r\n")[0]
            assert (answer.get("Content-Length"), answer.get("Connection")) == (length, None)
        upstream.answering(ok)
        assert client.send(get()).answer().body == b"{}"
    assert len({id(seen.wire) for seen in upstream.seen}) == 1


# --- HTTP/1.0


@pytest.mark.parametrize(
    "answer",
    [OK, SSE_HEAD + chunk(b"data: 1\n\n") + LAST_CHUNK, OK_CLOSED := b"HTTP/1.1 200 OK\r\n"],
)
def test_http10_client_gets_no_chunks_and_then_the_end(sidecar, upstream, answer):
    def script(seen):
        seen.reply(answer if answer is not OK_CLOSED else answer + b"\r\nto the end")
        if answer is OK_CLOSED:
            seen.wire.close()

    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT, b"Connection: keep-alive", version=b"1.0") + get(b"/never"))
        got = client.answer()
        assert got.get("Transfer-Encoding") is None
        assert got.get("Connection") == b"close"
        assert got.body in {b"{}", b"data: 1\n\n", b"to the end"}
        assert client.rest()[0] == b""
    assert upstream.last().line.endswith(b" HTTP/1.1")
    assert len(upstream.seen) == 1


def hits(sidecar, limit):
    return sidecar.metric("tongguan_proxy_limit_hits_total", limit=limit)


# --- limits


def test_upstream_that_does_not_take_a_connection_is_given_up(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = []
        for _ in range(3):  # its queue is full; further SYNs are dropped
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(address)
            waiting.append(sock)
        url = f"http://127.0.0.1:{address[1]}"
        with Sidecar(tmp_path / "s", url, TIMEOUTS_CONNECT_S=0.3) as sidecar:
            start = time.monotonic()
            answer = sidecar.ask(post(CHAT))
            assert (answer.status, answer.error()) == (503, "no_upstream")
            assert 0.25 < time.monotonic() - start < 3
            assert hits(sidecar, "timeouts.connect_s") >= 1
        for sock in waiting:
            sock.close()


# No bound of a request or a connection: where a body is collected, and when livez fails.
NO_LIMITS = {"limits.collect_bytes", "timeouts.loop_stuck_s"}


def test_every_limit_shows_in_config_and_has_a_metric(sidecar):
    settings = json.loads(sidecar.admin_ask("GET", "/config").body)
    names = {f"{part}.{name}" for part in ("limits", "timeouts") for name in settings[part]}
    names -= NO_LIMITS | {"limits.field_bytes", "limits.fields"}  # counted as limits.head_bytes
    text = sidecar.admin_ask("GET", "/metrics").body.decode()
    lines = [line for line in text.splitlines() if "limit_hits_total{" in line]
    counted = {line.split('"')[1] for line in lines}
    assert names <= counted
    assert {"doors.connections", "envelope.unverified_bytes", "audit.observed_bytes"} <= counted
