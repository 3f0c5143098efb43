"""Requests that are sent again, and those that must not be: what the upstream saw decides."""

import collections
import json
import math
import random
import select
import signal
import socket
import threading
import time

import pytest

from tests.blackbox.harness import (
    OK,
    RESET,
    SSE_HEAD,
    WAIT_S,
    Sidecar,
    Upstream,
    Wire,
    chunk,
    post,
    stop,
    until,
)
from tests.blackbox.node import free_base

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
P2 = b"X-QoS-Class: P2"  # the pool that is repeatable
TICK_S = 0.1


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend):
    toml = "[pools.best_effort]\nrepeatable = true\nretry_percent = 100\n"
    with Sidecar(tmp_path_factory.mktemp("retries") / "s", backend.url, toml=toml) as sidecar:
        yield sidecar


@pytest.fixture
def upstream(backend):
    yield backend.answering(OK)
    assert backend.problems == []


def then(*steps):
    """Return a script: the first request is answered, each later one has its step."""
    rest = list(steps)

    def script(seen):
        if not script.warm:
            script.warm = True
            seen.reply(OK)
        elif rest:
            rest.pop(0)(seen)
        else:
            seen.reply(OK)

    script.warm = False
    return script


def close(seen):
    """Take the whole request and end the connection: it may have been processed."""
    seen.body()
    seen.wire.close()


def reset(seen):
    seen.body()
    seen.wire.reset()


def retried(sidecar, reason):
    return sidecar.metric("tongguan_proxy_pool_retries_total", reason=reason)


def denied(sidecar, reason):
    return sidecar.metric("tongguan_proxy_pool_retries_denied_total", reason=reason)


def twice(sidecar, *fields, second=None):
    """Ask twice on one connection; return the second answer: its connection upstream is reused."""
    with sidecar.client() as client:
        assert client.send(post(CHAT, *fields)).answer().status == 200
        return client.send(second or post(CHAT, *fields)).answer()


# --- what may be sent again, and what not


@pytest.mark.parametrize("end", [close, reset])
def test_a_repeatable_request_lost_on_a_reused_connection_is_sent_once_more(sidecar, upstream, end):
    upstream.answering(then(end))
    before = retried(sidecar, "repeatable")
    assert twice(sidecar, P2).status == 200
    assert [seen.payload for seen in upstream.seen] == [CHAT] * 3
    first, lost, again = (seen.wire for seen in upstream.seen)
    assert lost is first
    assert again is not lost
    assert retried(sidecar, "repeatable") == before + 1


@pytest.mark.parametrize("end", [close, reset])
def test_a_written_request_is_not_repeated_where_that_may_do_harm(sidecar, upstream, end):
    upstream.answering(then(end))
    before = denied(sidecar, "unprovable")
    answer = twice(sidecar)
    assert (answer.status, answer.error()) == (502, "upstream_reset")
    assert len(upstream.seen) == 2
    assert denied(sidecar, "unprovable") == before + 1


def test_a_second_attempt_that_is_lost_too_is_the_last(sidecar, upstream):
    upstream.answering(then(close, close))
    answer = twice(sidecar, P2)
    assert (answer.status, answer.error()) == (502, "upstream_reset")
    assert len(upstream.seen) == 3


def test_a_request_lost_on_a_new_connection_is_never_repeated(tmp_path, upstream):
    upstream.answering(close)
    toml = "[pools.shared]\nrepeatable = true\n"
    with Sidecar(tmp_path / "s", upstream.url, toml=toml) as sidecar:
        assert sidecar.ask(post(CHAT)).status == 502
    assert len(upstream.seen) == 1


@pytest.mark.parametrize(
    "begun",
    [b"H", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 103 Early Hints\r\n\r\n",
     b"HTTP/1.1 100 Continue\r\n\r\n"],
)  # fmt: skip
@pytest.mark.parametrize("end", [close, reset])
def test_nothing_is_repeated_after_a_byte_of_an_answer(sidecar, upstream, begun, end):
    def script(seen):
        seen.reply(begun)
        if end is reset:  # RST would take the byte back
            time.sleep(0.02)
        end(seen)

    upstream.answering(then(script))
    answer = twice(sidecar, P2)
    assert (answer.status, answer.error()) == (502, "upstream_reset")
    assert len(upstream.seen) == 2


def test_a_stream_that_breaks_off_is_never_repeated(sidecar, upstream):
    def script(seen):
        seen.reply(SSE_HEAD, chunk(b"data: 1\n\n"))
        seen.wire.close()

    upstream.answering(then(script))
    answer = twice(sidecar, P2)
    assert answer.status == 200
    assert b"upstream_reset" in answer.body
    assert len(upstream.seen) == 2


@pytest.mark.parametrize("status", [b"500 No", b"502 No", b"503 No", b"504 No"])
def test_an_answer_is_an_answer_whatever_its_status(sidecar, upstream, status):
    upstream.answering(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
    assert sidecar.ask(post(CHAT, P2)).status == int(status[:3])
    assert len(upstream.seen) == 1


def large(size, *fields):
    return post(b"x" * size, *fields)


def test_an_early_answer_to_a_body_that_is_still_sent_is_the_answer(sidecar, upstream):
    def script(seen):
        seen.wire.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        seen.wire.sock.shutdown(socket.SHUT_WR)

    upstream.answering(then(script))
    with sidecar.client() as client:
        assert client.send(post(CHAT, P2)).answer().status == 200
        body = b"x" * (2 << 20)
        head = large(3 << 20, P2)[: -(3 << 20)]
        client.send(head, body)  # a third is never sent
        assert client.answer().status == 413
    assert len(upstream.seen) == 2


def test_a_body_that_streams_through_is_not_repeated(sidecar, upstream):
    upstream.answering(then(close))
    before = denied(sidecar, "streamed")
    answer = twice(sidecar, P2, second=large(2 << 20, P2))
    assert (answer.status, answer.error()) == (502, "upstream_reset")
    assert len(upstream.seen) == 2
    assert denied(sidecar, "streamed") == before + 1


class Narrow(Upstream):
    """An upstream whose kernel takes little, so that a large request cannot be fully written."""

    def __init__(self):
        super().__init__()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def unread(self, seen):
        """End the connection with most of the request unread; the next one is wider."""
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SIZE)
        seen.wire.reset()


SIZE = 16 << 20


def test_what_was_provably_not_fully_written_is_sent_again_anywhere(tmp_path):
    with (
        Narrow() as upstream,
        Sidecar(tmp_path / "s", upstream.url, LIMITS_COLLECT_BYTES=SIZE) as sidecar,
    ):
        upstream.answering(then(upstream.unread))
        assert twice(sidecar, second=large(SIZE)).status == 200
        assert upstream.problems == []
        assert [len(seen.payload or b"") for seen in upstream.seen] == [len(CHAT), 0, SIZE]
        assert retried(sidecar, "unwritten") == 1


def test_a_request_that_was_not_fully_written_to_a_new_connection_is_not_repeated(tmp_path):
    with (
        Narrow() as upstream,
        Sidecar(tmp_path / "s", upstream.url, LIMITS_COLLECT_BYTES=SIZE) as sidecar,
    ):
        upstream.answering(upstream.unread)
        assert sidecar.ask(large(SIZE)).status == 502
        assert len(upstream.seen) == 1


# --- the budget


def test_nothing_is_repeated_without_a_budget(tmp_path, upstream):
    toml = "[pools.shared]\nrepeatable = true\nretry_percent = 0\n"
    with Sidecar(tmp_path / "s", upstream.url, toml=toml) as sidecar:
        upstream.answering(then(close))
        assert twice(sidecar).status == 502
        assert denied(sidecar, "budget") == 1
    assert len(upstream.seen) == 2


def test_the_budget_ends(tmp_path, upstream):
    toml = "[pools.shared]\nrepeatable = true\n"
    statuses = []
    with Sidecar(tmp_path / "s", upstream.url, toml=toml) as sidecar:
        for _ in range(13):
            upstream.answering(then(close))
            statuses.append(twice(sidecar).status)
        assert denied(sidecar, "budget") == 3
    assert statuses == [200] * 10 + [502] * 3


# --- refused connections


def closed_port():
    """Return the URL of a port at which nobody listens."""
    return f"http://127.0.0.1:{free_base()}"


def test_a_refused_connection_is_tried_on_the_other_endpoint(tmp_path, upstream):
    urls = f"{closed_port()},{upstream.url}"
    with Sidecar(tmp_path / "s", urls) as sidecar:
        assert [sidecar.ask(post(CHAT)).status for _ in range(4)] == [200] * 4
        assert retried(sidecar, "refused") >= 1
        assert sidecar.metric("tongguan_proxy_retries_total") == 0  # nothing was sent twice
    assert [seen.payload for seen in upstream.seen] == [CHAT] * 4


def test_a_body_that_streams_through_goes_to_the_other_endpoint_whole(tmp_path, upstream):
    urls = f"{closed_port()},{upstream.url}"
    body = random.Random(1).randbytes(3 << 20)
    with Sidecar(tmp_path / "s", urls) as sidecar:
        for _ in range(2):  # equals take turns: one of two meets the closed port
            assert sidecar.ask(post(body)).status == 200
    assert [seen.payload == body for seen in upstream.seen] == [True, True]


def test_refused_everywhere_is_no_upstream(tmp_path):
    with Sidecar(tmp_path / "s", f"{closed_port()},{closed_port()}") as sidecar:
        answer = sidecar.ask(post(CHAT))
        assert (answer.status, answer.error()) == (503, "no_upstream")
        assert sidecar.metric("tongguan_proxy_pool_connect_failures_total", pool="shared") == 2


# --- the moment at which an idle connection is closed


class Racing:
    """An upstream that closes its idle connections at `moment`.

    Counts how often it has had each request whole, by the number in its body.
    """

    def __init__(self, *, by_reset):
        self.moment = math.inf
        self.by_reset = by_reset
        self.processed = collections.Counter()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(Wire(sock),), daemon=True).start()

    def _serve(self, wire):
        try:
            born = time.monotonic()
            while self._asked(wire, born):
                head = wire.take_until(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                number = json.loads(wire.take(size))["number"]
                with self._lock:
                    self.processed[number] += 1
                wire.send(OK)
        except (OSError, EOFError):
            pass  # the sidecar left
        if self.by_reset:
            wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        wire.sock.close()

    def _asked(self, wire, born):
        """Wait for a request; False: the moment has come first."""
        while not born < self.moment <= time.monotonic():
            left = self.moment - time.monotonic()
            if select.select([wire.sock], [], [], min(left, 0.02) if left > 0 else 0.02)[0]:
                return wire.fill()
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()


CLIENTS, ROUNDS = 25, 10  # 250 requests at that moment


def race(sidecar, upstream):
    """Ask, and ask again when the upstream closes; return the status of the second answers."""
    statuses = {}
    barrier = threading.Barrier(CLIENTS)

    def run(index):
        dice = random.Random(index)
        with sidecar.client() as client:
            for turn in range(ROUNDS):
                number = index * ROUNDS + turn
                upstream.moment = math.inf
                barrier.wait(WAIT_S)
                assert client.send(numbered(-1 - number)).answer().status == 200
                barrier.wait(WAIT_S)
                if index == 0:  # longer than a tick: what was used within one is believed
                    upstream.moment = time.monotonic() + 2 * TICK_S
                barrier.wait(WAIT_S)
                time.sleep(upstream.moment + dice.uniform(-0.002, 0.002) - time.monotonic())
                statuses[number] = client.send(numbered(number)).answer().status
                barrier.wait(WAIT_S)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == CLIENTS * ROUNDS
    return statuses


def numbered(number):
    return post(b'{"number":%d}' % number)


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("by_reset", [False, True], ids=["FIN", "RST"])
def test_requests_at_the_moment_of_idle_close(tmp_path, by_reset, repeatable):
    with (
        Racing(by_reset=by_reset) as upstream,
        Sidecar(
            tmp_path / "s",
            upstream.url,
            POOLS_SHARED_REPEATABLE=str(repeatable).lower(),
            POOLS_SHARED_RETRY_PERCENT=100,
        ) as sidecar,
    ):
        statuses = race(sidecar, upstream)
        lost = [number for number, status in statuses.items() if status != 200]
        assert {statuses[number] for number in lost} <= {502}
        # What was lost was not processed, what was answered was, and nothing was twice.
        assert [upstream.processed[n] for n in statuses] == [int(n not in lost) for n in statuses]
        again = sidecar.metric("tongguan_proxy_retries_total")
        found = sidecar.metric("tongguan_proxy_pool_found_closed_total")
        assert again + found + len(lost) > 0, "no request came at that moment"
        assert len(lost) == denied(sidecar, "unprovable")
        if repeatable:
            assert lost == []


@pytest.mark.parametrize("end", [close, reset])
def test_an_idle_connection_that_ended_is_found_before_it_is_used(tmp_path, upstream, end):
    """The request comes first and the end after it: only a look at the socket tells."""
    told = []

    def script(seen):
        seen.reply(OK)
        if len(upstream.seen) == 1:
            until(lambda: told, "the next request to have come")
            end(seen)
            told.append("done")

    upstream.answering(script)
    with Sidecar(tmp_path / "s", upstream.url) as sidecar, sidecar.client() as client:
        assert client.send(post(CHAT)).answer().status == 200
        time.sleep(2 * TICK_S)  # what was used within a tick is believed
        stop(sidecar.process.pid)
        client.send(post(CHAT))
        time.sleep(0.02)
        told.append(True)
        until(lambda: len(told) == 2, "the end")
        sidecar.signal(signal.SIGCONT)
        assert client.answer().status == 200
        assert len(upstream.seen) == 2
        assert sidecar.metric("tongguan_proxy_pool_found_closed_total") == 1
        assert sidecar.metric("tongguan_proxy_retries_total") == 0
