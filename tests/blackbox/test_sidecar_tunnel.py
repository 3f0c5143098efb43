"""Upgraded connections: what is forwarded, what the tunnel carries, how it ends."""

import contextlib
import random
import signal
import socket
import threading

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.harness import (
    OK,
    Sidecar,
    get,
    ok,
    post,
    until,
)

ASK = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: a2V5", b"X-Q: 1")
SWITCH = (
    b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n"
    b"Sec-WebSocket-Accept: abc=\r\n\r\n"
)
SHORT = {"TIMEOUTS_TUNNEL_IDLE_S": 1, "TIMEOUTS_CLIENT_STALL_S": 1, "TIMEOUTS_REQUEST_TOTAL_S": 0.2}
MIB = 1 << 20


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    folder = tmp_path_factory.mktemp("tunnel")
    with Sidecar(folder / "s", backend.url, keys=keys) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def hasty(tmp_path_factory, backend, keys):
    """A sidecar that waits a second, and allows a request in all less than that."""
    folder = tmp_path_factory.mktemp("hasty")
    with Sidecar(folder / "s", backend.url, keys=keys, **SHORT) as sidecar:
        yield sidecar


class Far:
    """The upstream's end: switches, then hands its wire to the test."""

    def __init__(self, switch=SWITCH):
        self.switch = switch
        self.wire = None
        self.over = threading.Event()

    def __call__(self, seen):
        seen.reply(self.switch)
        self.wire = seen.wire
        self.over.wait(60)


@pytest.fixture
def upstream(backend):
    yield backend.answering(Far())
    far = backend.script
    if isinstance(far, Far):
        far.over.set()
        if far.wire is not None:
            far.wire.close()
    assert backend.problems == []


def far_end(upstream):
    """Return the upstream's wire of the tunnel."""
    wire = until(lambda: upstream.script.wire, "the tunnel")
    wire.sock.settimeout(20)
    return wire


@contextlib.contextmanager
def tunnel(sidecar, upstream, **options):
    """Yield (client, upstream's wire, the 101's head) of an open tunnel."""
    with sidecar.client(**options) as client:
        head = client.send(get(b"/v1/realtime?model=m", *ASK)).head()
        assert head.status == 101
        yield client, far_end(upstream), head


def ended(sidecar, head, outcome):
    """Check the record and that nothing is left; return what went each way."""
    record = sidecar.record(head.trace_id)
    assert (record["outcome"], record["status"]) == (outcome, 101)
    until(lambda: sidecar.metric("tongguan_proxy_tunnels_open") == 0, "no tunnel")
    until(lambda: sidecar.metric("tongguan_proxy_pool_inflight") == 0, "no request in flight")
    return record["tunnel"]["sent"], record["tunnel"]["received"]


def reset_seen(wire):
    try:
        while wire.sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    return False


# --- the switch


def test_switch_is_asked_for_and_told_with_both_fields(sidecar, upstream):
    with tunnel(sidecar, upstream) as (client, far, head):
        seen = upstream.last()
        assert seen.line == b"GET /v1/realtime?model=m HTTP/1.1"
        assert (seen.get("Connection"), seen.get("Upgrade")) == (b"upgrade", b"websocket")
        assert (seen.get("Sec-WebSocket-Key"), seen.get("X-Q")) == (b"a2V5", b"1")
        assert seen.get("X-QoS-Class") == b"P1"
        assert head.line == b"HTTP/1.1 101 Switching"
        assert (head.get("Connection"), head.get("Upgrade")) == (b"upgrade", b"WebSocket")
        assert head.get("Sec-WebSocket-Accept") == b"abc="
        assert head.get("X-QoS-Pool") == b"shared"
        assert head.get("Content-Length") is None
        assert sidecar.metric("tongguan_proxy_pool_inflight", pool="shared") == 1
        assert sidecar.metric("tongguan_proxy_tunnels_open") == 1
        client.send(b"\x81\x05hello")
        assert far.take(7) == b"\x81\x05hello"
        far.send(b"\r\n\r\nHTTP/1.1 ")
        assert client.take(13) == b"\r\n\r\nHTTP/1.1 "
        client.close()
        assert far.rest() == (b"", True)
        far.close()
    assert ended(sidecar, head, "ok") == (7, 13)


def test_more_early_bytes_than_are_held_wait_and_arrive(sidecar, upstream):
    far = Far()
    go = threading.Event()

    def script(seen):
        go.wait(20)
        far(seen)

    upstream.answering(script)
    early = random.Random(1).randbytes(MIB)
    with sidecar.client() as client:
        sender = threading.Thread(target=client.send, args=(get(b"/", *ASK), early))
        sender.start()
        upstream.last()
        go.set()
        assert client.head().status == 101
        wire = until(lambda: far.wire, "the tunnel")
        assert wire.take(len(early)) == early
        sender.join()
        client.close()
        wire.close()
        far.over.set()


def test_bytes_of_both_ways_at_once_arrive_in_any_pieces(sidecar, upstream):
    rng = random.Random(2)
    up, down = rng.randbytes(3 * MIB), rng.randbytes(5 * MIB)

    def pour(wire, data, seed):
        sizes, at = random.Random(seed), 0
        while at < len(data):
            step = sizes.choice([1, 7, 1000, 65536, 300_000])
            wire.send(data[at : at + step])
            at += step
        wire.sock.shutdown(socket.SHUT_WR)

    with tunnel(sidecar, upstream) as (client, far, head):
        ends = [(client, up, 3), (far, down, 4)]
        pourers = [threading.Thread(target=pour, args=end) for end in ends]
        got = []
        readers = [threading.Thread(target=lambda: got.append(far.rest()))]
        for thread in (*pourers, *readers):
            thread.start()
        assert client.rest() == (down, True)
        for thread in (*pourers, *readers):
            thread.join()
        assert got == [(up, True)]
    assert ended(sidecar, head, "ok") == (len(up), len(down))


def test_bytes_that_come_before_the_switch_go_into_the_tunnel(sidecar, upstream):
    upstream.answering(Far(SWITCH + b"first"))
    with sidecar.client() as client:
        client.send(get(b"/", *ASK) + b"early", b"and late")
        far = far_end(upstream)
        assert far.take(13) == b"earlyand late"
        assert client.head().status == 101
        assert client.take(5) == b"first"


def test_request_with_a_body_may_switch(sidecar, upstream):
    with sidecar.client() as client:
        client.send(post(b'{"a":1}', *ASK), b"more")
        assert client.head().status == 101
        assert upstream.last().payload == b'{"a":1}'
        assert far_end(upstream).take(4) == b"more"


def test_other_answer_is_a_normal_one_and_what_came_early_is_the_next_request(sidecar, upstream):
    upstream.answering(b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno")
    with sidecar.client() as client:
        client.send(get(b"/", *ASK) + get(b"/next"))
        for _ in range(2):
            answer = client.answer()
            assert (answer.status, answer.body) == (403, b"no")
    assert [seen.get("Upgrade") for seen in upstream.seen] == [b"websocket", None]
    assert sidecar.record(answer.trace_id)["status"] == 403


@pytest.mark.parametrize(
    "switch",
    [
        b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: other\r\n\r\n",
        b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: websocket, other\r\n\r\n",
        b"HTTP/1.1 101 Go\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 101 Go\r\n\r\n",
    ],
)
def test_switch_to_what_nobody_asked_for_gets_502(sidecar, upstream, switch):
    upstream.answering(switch)
    answer = sidecar.ask(get(b"/", *ASK))
    assert (answer.status, answer.error()) == (502, "upstream_protocol")


@pytest.mark.parametrize(
    "data",
    [
        get(b"/", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA"),
        get(b"/", b"Connection: Upgrade", b"Upgrade: websocket, h2c"),
        get(b"/", b"Upgrade: websocket"),
        get(b"/", b"Connection: upgrade"),
        b"GET / HTTP/1.0\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        post(b"x" * (2 * MIB), *ASK),
    ],
    ids=["h2c", "list with h2c", "not in Connection", "no Upgrade", "HTTP/1.0", "large body"],
)
def test_switch_that_is_not_forwarded_was_never_asked(sidecar, upstream, data):
    upstream.answering(ok)
    assert sidecar.ask(data).body == b"{}"
    seen = upstream.last()
    assert (seen.get("Upgrade"), seen.get("Connection")) == (None, None)
    assert seen.get("HTTP2-Settings") is None


def test_sealed_request_does_not_switch(sidecar, upstream, keys):
    upstream.answering(ok)
    sealed = Channel(keys / "client.json").seal(b'{"model":"m"}')
    with socket.create_connection(("127.0.0.1", sidecar.sealed)) as sock:
        sock.sendall(sealed.request("Connection: upgrade", "Upgrade: websocket"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
    assert upstream.last().get("Upgrade") is None


# --- what it carries


def test_half_close_of_the_client_passes(sidecar, upstream):
    with tunnel(sidecar, upstream) as (client, far, head):
        client.send(b"all I have")
        client.sock.shutdown(socket.SHUT_WR)
        assert far.rest() == (b"all I have", True)
        far.send(b"the answer")
        far.close()
        assert client.rest() == (b"the answer", True)
    assert ended(sidecar, head, "ok") == (10, 10)


def test_half_close_of_the_upstream_passes(sidecar, upstream):
    with tunnel(sidecar, upstream) as (client, far, head):
        far.send(b"that was it")
        far.sock.shutdown(socket.SHUT_WR)
        assert client.rest() == (b"that was it", True)
        client.send(b"thanks")
        client.sock.shutdown(socket.SHUT_WR)
        assert far.rest() == (b"thanks", True)
    assert ended(sidecar, head, "ok") == (6, 11)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_side_that_does_not_read_holds_the_other_back(sidecar, upstream, way):
    size, step = 48 * MIB, b"0123456789abcdef" * 4096
    with tunnel(sidecar, upstream) as (client, far, head):
        source, drain = (client, far) if way == "up" else (far, client)
        before = sidecar.resident_bytes()
        sent = 0
        source.sock.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while sent < size:
                sent += source.sock.send(step)
        assert sent < size, "nothing held it back"
        assert sidecar.resident_bytes() - before < 8 * MIB
        source.sock.settimeout(20)
        # The other direction is not held back.
        drain.send(b"still here")
        assert source.take(10) == b"still here"
        finish = threading.Thread(target=source.sock.shutdown, args=(socket.SHUT_WR,))
        finish.start()
        got, clean = drain.rest()
        finish.join()
        assert (len(got), clean) == (sent, True)
        assert got == (step * (sent // len(step) + 1))[:sent]
        drain.close()
    assert sum(ended(sidecar, head, "ok")) == sent + 10


# --- how it ends


def test_reset_of_the_upstream_is_no_regular_end(sidecar, upstream):
    with tunnel(sidecar, upstream) as (client, far, head):
        far.reset()
        assert reset_seen(client)
    ended(sidecar, head, "truncated")


def test_reset_of_the_client_resets_the_upstream(sidecar, upstream):
    with tunnel(sidecar, upstream) as (client, far, head):
        client.reset()
        assert reset_seen(far)
    ended(sidecar, head, "client_gone")


def test_silence_ends_it_and_no_total_time_does(hasty, upstream):
    hits = hasty.metric("tongguan_proxy_limit_hits_total", limit="timeouts.tunnel_idle_s")
    with tunnel(hasty, upstream) as (client, far, head):
        for _ in range(8):
            client.send(b".")
            far.take(1)
            threading.Event().wait(0.3)  # two seconds in all: longer than silence or a request may
        assert reset_seen(client)
        assert reset_seen(far)
    ended(hasty, head, "timeout")
    limit = {"limit": "timeouts.tunnel_idle_s"}
    assert hasty.metric("tongguan_proxy_limit_hits_total", **limit) == hits + 1
    limit = {"limit": "timeouts.request_total_s"}
    assert hasty.metric("tongguan_proxy_limit_hits_total", **limit) == 0


def test_client_that_does_not_read_is_cut(hasty, upstream):
    with (
        tunnel(hasty, upstream, receive_buffer=4096) as (_, far, head),
        pytest.raises(ConnectionError),
    ):
        far.send(b"x" * (64 * MIB))
    ended(hasty, head, "client_stalled")


def test_drain_ends_it_when_the_grace_is_over(tmp_path, backend, upstream, keys):
    with Sidecar(tmp_path / "s", backend.url, keys=keys, TIMEOUTS_DRAIN_S=0.5) as sidecar:
        with tunnel(sidecar, upstream) as (client, far, head):
            sidecar.signal(signal.SIGTERM)
            client.send(b"still served")
            assert far.take(12) == b"still served"
            assert reset_seen(client)
            assert reset_seen(far)
            assert sidecar.ended() == 0
        record = sidecar.record(head.trace_id)
        assert (record["outcome"], record["tunnel"]) == ("truncated", {"sent": 12, "received": 0})


def test_tunnel_that_ends_in_the_grace_ends_well(tmp_path, backend, upstream, keys):
    with Sidecar(tmp_path / "s", backend.url, keys=keys) as sidecar:
        with tunnel(sidecar, upstream) as (client, far, head):
            sidecar.signal(signal.SIGTERM)
            until(lambda: "draining" in sidecar.log_since, "the drain")
            client.close()
            far.close()
            assert sidecar.ended(5) == 0
        assert sidecar.record(head.trace_id)["outcome"] == "ok"


def test_next_request_takes_another_connection(sidecar, upstream):
    with tunnel(sidecar, upstream) as (client, far, _):
        client.close()
        far.close()
    upstream.answering(ok)
    assert sidecar.ask(get()).body == OK[-2:]
    sidecar.idle()
