"""Pools: which endpoint, which pool, over which connection; TLS; what is known of endpoints."""

import contextlib
import threading
import time

import pytest

from tests.blackbox.harness import (
    OK,
    SSE_HEAD,
    Sidecar,
    chunk,
    post,
    until,
)
from tests.blackbox.pooled import (
    CHAT,
    GRANTED,
    P0,
    UNAVAILABLE,
    Pooled,
    asked,
    both,
    holding,
    notes,
    state,
    two_pools,
)

# --- the least outstanding cost


def test_equals_take_turns(tmp_path, two):
    with Sidecar(tmp_path / "s", both(two)) as sidecar:
        assert {sidecar.ask(post(CHAT)).status for _ in range(10)} == {200}
    assert asked(two) == [5, 5]


def test_the_endpoint_that_holds_less_is_asked(tmp_path, two):
    release = threading.Event()
    first, second = two
    first.answering(holding(release))
    second.answering(holding(release))
    with Sidecar(tmp_path / "s", both(two)) as sidecar:
        held = [sidecar.client().send(post(CHAT))]
        until(lambda: sum(asked(two)) == 1, "the first request")
        busy, free = (first, second) if first.seen else (second, first)
        free.answering(OK)
        assert [sidecar.ask(post(CHAT)).status for _ in range(4)] == [200] * 4
        assert (len(busy.seen), len(free.seen)) == (1, 4)
        outstanding = "tongguan_proxy_endpoint_outstanding"
        assert sidecar.metric(outstanding, pool="shared", endpoint=busy.url) >= 1
        release.set()
        assert [client.answer().status for client in held] == [200]
        assert sidecar.metric(outstanding) == 0
        for client in held:
            client.close()


# --- endpoints that fail


def eject(**more):
    return {"POOLS_SHARED_EJECT_ERRORS": 3, "POOLS_SHARED_EJECT_S": 0.5} | more


def until_ejected(sidecar, upstream):
    until(
        lambda: [sidecar.ask(post(CHAT))] and state(sidecar, upstream) == "ejected",
        "the ejection",
    )


@pytest.mark.parametrize(
    "failure",
    [
        b"HTTP/1.1 504 No\r\nContent-Length: 0\r\n\r\n",
        b"nonsense\r\n\r\n",
        lambda seen: (seen.body(), seen.wire.reset()),
        lambda seen: (seen.reply(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
                      seen.wire.close()),
    ],
    ids=["504", "nonsense", "reset", "cut"],
)  # fmt: skip
def test_one_that_fails_in_a_row_is_left_alone(tmp_path, two, failure):
    bad, good = two
    bad.answering(failure)
    with Sidecar(tmp_path / "s", both(two), **eject(POOLS_SHARED_EJECT_S=60)) as sidecar:
        for _ in range(6):
            with sidecar.client() as client:
                client.send(post(CHAT))
                with contextlib.suppress(EOFError):  # an answer that was cut
                    client.answer()
        assert state(sidecar, bad) == "ejected"
        assert asked(two) == [3, 3]
        assert f"endpoint_ejected: {bad.url} of shared" in notes(sidecar)
        assert [sidecar.ask(post(CHAT)).status for _ in range(5)] == [200] * 5
        assert asked(two) == [3, 8]
        assert sidecar.metric("tongguan_proxy_pool_ejections_total", reason="errors") == 1
        assert state(sidecar, good) == "healthy"
        assert sidecar.admin_ask("GET", "/readyz").status == 200


def test_an_upstreams_own_refusals_are_answers(tmp_path, two):
    one, _ = two
    with Sidecar(tmp_path / "s", both(two), **eject()) as sidecar:
        for status in (b"400", b"404", b"429", b"500", b"501", b"505"):
            one.answering(b"HTTP/1.1 " + status + b" No\r\nContent-Length: 0\r\n\r\n")
            answers = [sidecar.ask(post(CHAT)).status for _ in range(8)]
            assert answers.count(int(status)) == 4
            assert state(sidecar, one) == "healthy"


def on_idle_connections(count, sidecar, upstream):
    """Ask so often at once that so many connections are idle afterwards."""
    release = threading.Event()
    upstream.answering(holding(release))
    clients = [sidecar.client().send(post(CHAT)) for _ in range(count)]
    until(lambda: len(upstream.seen) == count, "the requests")
    release.set()
    for client in clients:
        assert client.answer().status == 200
        client.close()


def test_idle_connections_that_end_are_no_errors(tmp_path, two):
    one, _ = two
    with Sidecar(tmp_path / "s", one.url, **eject()) as sidecar:
        on_idle_connections(5, sidecar, one)
        one.answering(lambda seen: (seen.body(), seen.wire.close()))
        assert [sidecar.ask(post(CHAT)).status for _ in range(5)] == [502] * 5
        assert state(sidecar, one) == "healthy"
        assert [sidecar.ask(post(CHAT)).status for _ in range(3)] == [502] * 3  # made for them
        assert state(sidecar, one) == "suspect"


def test_a_second_attempt_takes_no_idle_connection(tmp_path, two):
    one, _ = two
    toml = "[pools.shared]\nrepeatable = true\n"
    with Sidecar(tmp_path / "s", one.url, toml=toml) as sidecar:
        on_idle_connections(3, sidecar, one)
        idle = list(one.wires)
        one.answering(
            lambda seen: (seen.body(), seen.wire.close()) if seen.wire in idle else seen.reply(OK)
        )
        assert sidecar.ask(post(CHAT)).status == 200
        assert [seen.wire in idle for seen in one.seen] == [True, False]


def test_one_that_comes_back_is_tried_by_one_request_and_used_again(tmp_path, two):
    bad, _ = two
    bad.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", both(two), **eject()) as sidecar:
        until_ejected(sidecar, bad)
        release = threading.Event()
        bad.answering(holding(release))
        with sidecar.client() as client:
            time.sleep(0.55)
            client.send(post(CHAT))
            until(lambda: bad.seen, "a request that tries it")
            assert state(sidecar, bad) == "half_open"
            assert {sidecar.ask(post(CHAT)).status for _ in range(6)} == {200}
            assert len(bad.seen) == 1
            release.set()
            assert client.answer().status == 200
        assert state(sidecar, bad) == "healthy"
        assert sidecar.metric("tongguan_proxy_pool_probes_total", result="passed") == 1
        bad.answering(OK)
        for _ in range(6):
            sidecar.ask(post(CHAT))
        assert len(bad.seen) == 3


def test_a_stream_closes_it_by_its_head(tmp_path, two):
    bad, _ = two
    bad.answering(UNAVAILABLE)
    going = threading.Event()

    def stream(seen):
        seen.reply(SSE_HEAD, chunk(b"data: 1\n\n"))
        going.wait(20)
        seen.wire.send(b"0\r\n\r\n")

    with Sidecar(tmp_path / "s", both(two), **eject()) as sidecar:
        until_ejected(sidecar, bad)
        bad.answering(stream)
        with sidecar.client() as client:
            while client.send(post(CHAT)).head().get("Content-Length"):
                assert client.take(2) == b"{}"
            assert state(sidecar, bad) == "healthy"
            going.set()


def test_one_that_fails_again_is_left_alone_for_longer(tmp_path, two):
    bad, _ = two
    bad.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", both(two), **eject(POOLS_SHARED_EJECT_S=0.3)) as sidecar:
        until_ejected(sidecar, bad)
        failed = lambda: sidecar.metric("tongguan_proxy_pool_probes_total", result="failed")  # noqa: E731
        times = [time.monotonic()]
        for count in (1, 2):
            until(lambda n=count: [sidecar.ask(post(CHAT))] and failed() >= n, "a failed try")
            times.append(time.monotonic())
        assert times[1] - times[0] > 0.25
        assert times[2] - times[1] > 0.55
        assert sidecar.metric("tongguan_proxy_pool_ejections_total", reason="errors") == 1


def test_a_client_that_leaves_says_nothing_of_the_endpoint_it_tried(tmp_path, two):
    bad, _ = two
    bad.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", both(two), **eject(POOLS_SHARED_EJECT_S=0.2)) as sidecar:
        until_ejected(sidecar, bad)
        bad.answering(lambda seen: (seen.body(), seen.wire.ended()))
        time.sleep(0.2)
        with sidecar.client() as client:
            client.send(post(CHAT))
            until(lambda: bad.seen, "a request that tries it")
        until(lambda: sidecar.metric("tongguan_proxy_pool_inflight") == 0, "its end")
        assert state(sidecar, bad) == "half_open"
        bad.answering(OK)
        assert sidecar.ask(post(CHAT)).status == 200
        assert state(sidecar, bad) == "healthy"


def test_the_last_healthy_one_is_suspect_and_is_still_asked(tmp_path, two):
    for upstream in two:
        upstream.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", both(two), **eject(POOLS_SHARED_EJECT_S=60)) as sidecar:
        assert {sidecar.ask(post(CHAT)).status for _ in range(12)} == {503}
        states = {upstream: state(sidecar, upstream) for upstream in two}
        assert sorted(states.values()) == ["ejected", "suspect"]
        (last,) = (upstream for upstream, name in states.items() if name == "suspect")
        last.answering(OK)
        assert sidecar.ask(post(CHAT)).status == 200
        assert state(sidecar, last) == "healthy"


def test_the_only_one_is_suspect_in_the_notes_and_nowhere_else(tmp_path, two):
    only, _ = two
    only.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", only.url, **eject()) as sidecar:
        for count in range(1, 8):
            assert sidecar.ask(post(CHAT)).status == 503
            assert len(only.seen) == count
        assert f"endpoint_suspect: {only.url} of shared" in notes(sidecar)
        assert sidecar.admin_ask("GET", "/readyz").status == 200
        only.answering(OK)
        assert sidecar.ask(post(CHAT)).status == 200
        assert "endpoint_suspect" not in str(notes(sidecar))


def test_one_that_is_far_slower_than_the_other_is_left_alone(tmp_path, two):
    slow, _ = two

    def script(seen):
        seen.body()
        time.sleep(0.08)
        seen.wire.send(OK)

    slow.answering(script)
    with Sidecar(tmp_path / "s", both(two), POOLS_SHARED_EJECT_S=60) as sidecar:
        until(
            lambda: [sidecar.ask(post(CHAT))] and state(sidecar, slow) == "ejected",
            "the ejection",
        )
        assert sidecar.metric("tongguan_proxy_pool_ejections_total", reason="slow") == 1
        assert len(slow.seen) >= 20
        latency = sidecar.metric(
            "tongguan_proxy_endpoint_first_byte_seconds", pool="shared", endpoint=slow.url
        )
        assert 0.07 < latency < 1


# --- connections


def test_what_the_upstream_announces_bounds_the_idle_time(tmp_path, two):
    one, _ = two
    one.answering(OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: timeout=1, max=99\r\n\r\n", 1))
    with Sidecar(tmp_path / "s", one.url) as sidecar:
        start = time.monotonic()
        answer = sidecar.ask(post(CHAT))
        assert answer.get("Keep-Alive") is None
        until(lambda: one.last().wire.sock.fileno() < 0, "the connection's end")
        assert 0.4 < time.monotonic() - start < 0.98  # by the sidecar: the upstream never closes


def test_what_announces_no_shorter_time_changes_nothing(tmp_path, two):
    one, _ = two
    values = [b"timeout=60", b"max=5", b"timeout=x", b"timeout=-1", b"xtimeout=1", b""]
    with Sidecar(tmp_path / "s", one.url) as sidecar:
        for value in values:
            one.answering(OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: " + value + b"\r\n\r\n", 1))
            sidecar.ask(post(CHAT))
            one.seen[0].wire.close()  # the next one is announced on a connection of its own
            until(lambda: sidecar.metric("tongguan_proxy_pool_idle_connections") == 0, "its end")
        one.answering(OK)
        sidecar.ask(post(CHAT))
        time.sleep(0.7)
        assert sidecar.metric("tongguan_proxy_pool_idle_connections", pool="shared") == 1


def test_connections_for_p0_are_open_before_it_comes(tmp_path, two):
    toml = two_pools(two, tmp_path, overflow=False)
    with Pooled(tmp_path / "s", toml, QOS_P0_PREOPEN=3) as sidecar:
        until(lambda: len(two[0].wires) == 3, "the connections")
        assert sidecar.ask(post(CHAT, P0)).status == 200
        assert [wire for wire in two[0].wires if wire.sock.fileno() < 0] == []
        assert two[0].last().wire in two[0].wires[:3]
        two[0].wires[0].close()
        until(lambda: len(two[0].wires) == 4, "another one for the one that ended")
        assert len(two[1].wires) == 0


def test_nothing_is_opened_ahead_where_nobody_is_granted_p0(tmp_path, two):
    toml = two_pools(two, tmp_path, overflow=False).replace(GRANTED, "")
    with Pooled(tmp_path / "s", toml, POOLS_SHARED_KEEPALIVE_S=1) as sidecar:
        sidecar.ask(post(CHAT))
        until(lambda: sidecar.metric("tongguan_proxy_pool_idle_connections") == 0, "seconds")
        assert two[0].wires == []
