"""Admission of the real process: who goes, who waits, who is told to come back, and what shows."""

import contextlib
import socket
import threading
import time

import pytest

from tests.blackbox.harness import (
    LAST_CHUNK,
    OK,
    Client,
    chunk,
    get,
    post,
    until,
)
from tests.blackbox.queues import CHAT, GRANTED, P0, P1, P2, Clients, Held, body, queued

# --- waiting


def test_a_full_pool_lets_p1_and_p2_wait_and_serves_them_in_turn(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1, POOLS_BEST_EFFORT_INFLIGHT=1)
    with Clients(sidecar) as clients:
        first = clients.send(post(body(0), P1))
        held.count(1)
        waiting = []
        for number in (1, 2, 3):
            waiting.append(clients.send(post(body(number), P1)))
            queued(sidecar, "P1", number)
        held.let()
        assert first.answer().status == 200
        for number, client in enumerate(waiting, 1):
            held.count(number + 1)
            held.let()
            answer = client.answer()
            assert (answer.status, answer.get("X-QoS-Class")) == (200, b"P1")
            timing = answer.get("Server-Timing")
            assert float(timing.split(b"queue;dur=")[1].split(b",")[0]) > 1
        assert [b for _, b in held.order] == [body(n) for n in range(4)]
        queued(sidecar, "P1", 0)
        assert sidecar.metric("tongguan_proxy_queue_wait_seconds_count", qos="P1") == 3
        assert sidecar.metric("tongguan_proxy_shed_total") == 0
    assert sidecar.idle()


def test_p0_passes_a_full_queue_and_has_a_bound_of_its_own(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(
        POOLS_SHARED_INFLIGHT=1, QOS_P1_QUEUE=1, QOS_P0_INFLIGHT=2, QOS_ADAPTIVE_INITIAL=4
    )
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P1))
        held.count(1)
        clients.send(post(body(1), P1))
        queued(sidecar, "P1", 1)
        full = clients.send(post(body(2), P1)).answer()
        assert (full.status, full.error()) == (503, "queue_full")
        for number in (3, 4):
            clients.send(post(body(number), P0))
        held.count(3)
        assert [qos for qos, _ in held.order] == [b"P1", b"P0", b"P0"]
        beyond = clients.send(post(body(5), P0)).answer()
        assert (beyond.status, beyond.error()) == (503, "queue_full")
        assert beyond.get("X-QoS-Class") == b"P0"
        assert beyond.get("x-should-retry") is None  # a place may be free at once
        assert sidecar.metric("tongguan_proxy_broken_promises_total") == 1
        assert sidecar.metric("tongguan_proxy_shed_beyond_budget_total", qos="P0") == 1
        assert sidecar.metric("tongguan_proxy_shed_total", qos="P1", reason="queue_full") == 1
        held.let(9)


def test_p1_goes_before_p2_that_came_earlier_and_p2_is_not_starved(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(
        POOLS_SHARED_INFLIGHT=100,
        QOS_ADAPTIVE_INITIAL=1,
        QOS_ADAPTIVE_LEAST=1,
        QOS_P1_WEIGHT=4,
        QOS_P1_DEADLINE_S=60,
    )
    with Clients(sidecar) as clients:
        clients.send(post(body("first"), P1))
        held.count(1)
        for number in range(1, 5):
            clients.send(post(body(number), P2))
            queued(sidecar, "P2", number)
        for number in range(1, 17):
            clients.send(post(body(number), P1))
            queued(sidecar, "P1", number)
        for number in range(1, 22):
            held.count(number)
            held.let()
        order = [qos for qos, _ in held.order[1:]]
    assert order[:4] == [b"P1"] * 4
    served = [order[:n].count(b"P2") for n in (5, 10, 15, 20)]
    assert served == [1, 2, 3, 4]


def test_what_costs_more_waits_longer_for_its_share(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(
        QOS_ADAPTIVE_INITIAL=1, QOS_ADAPTIVE_LEAST=1, QOS_P1_WEIGHT=1, QOS_P1_DEADLINE_S=60
    )
    with Clients(sidecar) as clients:
        clients.send(post(body("first"), P1))
        held.count(1)
        for number in range(1, 9):
            clients.send(post(body(number, tokens=100), P2))
            queued(sidecar, "P2", number)
        for number in range(1, 5):
            clients.send(post(body(number, tokens=305), P1))
            queued(sidecar, "P1", number)
        for number in range(1, 9):
            held.count(number)
            held.let()
        held.count(9)
        order = [qos for qos, _ in held.order[1:9]]
        held.let(20)
    # The same weight and three times the cost: one for about three.
    assert order.count(b"P1") == 2
    assert order.count(b"P2") == 6


def test_a_wait_ends_at_its_deadline_with_queue_deadline(started, upstream, keys):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1, QOS_P1_DEADLINE_S=0.4, keys=keys)
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P1))
        held.count(1)
        begun = time.monotonic()
        late = clients.send(post(body(1), P1))
        answer = late.answer()
        assert 0.35 < time.monotonic() - begun < 5
        assert (answer.status, answer.error()) == (503, "queue_deadline")
        assert answer.get("Connection") is None
        record = sidecar.record(answer.trace_id)
        assert (record["outcome"], record["status"]) == ("shed", 503)
        assert record["times_us"]["queue"] >= 350_000
        held.let(2)
        assert late.send(post(body(2), P1)).answer().status == 200
        assert sidecar.metric("tongguan_proxy_shed_total", reason="queue_deadline") == 1
        assert sidecar.metric("tongguan_proxy_shed_beyond_budget_total", qos="P1") == 1


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_that_ends_in_the_read_that_begins_its_wait_keeps_the_deadline(
    started, upstream, framing
):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1, QOS_P1_DEADLINE_S=0.4, LIMITS_COLLECT_BYTES=1000)
    whole = b"x" * 5000
    if framing == "chunked":
        head = get(b"/", P1, b"Transfer-Encoding: chunked").replace(b"GET", b"POST")
        first, rest = head, chunk(whole) + LAST_CHUNK
    else:
        request = post(whole, P1)
        first, rest = request[:-4990], request[-4990:]
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P1))
        held.count(1)
        late = clients.send(first)
        until(lambda: sidecar.metric("tongguan_proxy_connections", door="app") == 2, "a head")
        begun = time.monotonic()
        answer = late.send(rest).answer()  # more than is collected: it streams, and waits
        assert (answer.status, answer.error()) == (503, "queue_deadline")
        assert time.monotonic() - begun < 5
        held.let(2)
        assert late.send(post(body(2), P1)).answer().status == 200


def test_the_time_in_the_queue_is_in_the_record(started, upstream, keys):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1, keys=keys)
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P1))
        held.count(1)
        waits = clients.send(post(body(1), P1))
        queued(sidecar, "P1", 1)
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 0.3, "a while")
        held.let(2)
        answer = waits.answer()
        record = sidecar.record(answer.trace_id)
        assert record["outcome"] == "ok"
        times = record["times_us"]
        assert 300_000 <= times["queue"] <= times["first_byte"] <= times["total"]


def test_a_client_that_leaves_leaves_the_queue_at_once(started, upstream, keys):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_BEST_EFFORT_INFLIGHT=1, QOS_P2_QUEUE=2, keys=keys)
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P2))
        held.count(1)
        gone = clients.send(post(body(1), P2))
        stays = clients.send(post(body(2), P2))
        queued(sidecar, "P2", 2)
        gone.close()
        queued(sidecar, "P2", 1)
        assert sidecar.metric("tongguan_proxy_queue_left_total", qos="P2") == 1
        record = sidecar.record("client_gone", "outcome")
        assert "queue" not in record["times_us"]
        held.let(2)
        assert stays.answer().status == 200
        assert [b for _, b in held.order] == [body(0), body(2)]


def test_retry_after_is_true_to_the_drain_rate(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(
        POOLS_BEST_EFFORT_INFLIGHT=1, QOS_P2_QUEUE=8, QOS_P2_DEADLINE_S=60, QOS_P2_EARLY_SHED=0
    )
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P2))
        held.count(1)
        for number in range(1, 9):
            clients.send(post(body(number), P2))
        queued(sidecar, "P2", 8)
        # Four leave in about two seconds, and four others come: eight wait, two a second go.
        for number in range(4):
            at = time.monotonic()
            until(lambda at=at: time.monotonic() - at >= 0.5, "half a second")
            held.let()
            held.count(number + 2)
            clients.send(post(body(number), P2))
            queued(sidecar, "P2", 8)
        answer = clients.send(post(body(99), P2)).answer()
        assert answer.error() == "queue_full"
        assert 3 <= int(answer.get("Retry-After")) <= 6
        assert answer.get("x-should-retry") is None  # eight are served well within 60 s
        held.let(20)


def test_x_should_retry_says_when_waiting_is_no_use(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1, QOS_P1_QUEUE=3, QOS_P1_DEADLINE_S=0.5)
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P1))
        held.count(1)
        waits = [clients.send(post(body(number), P1)) for number in (1, 2, 3)]
        queued(sidecar, "P1", 3)
        answer = clients.send(post(body(4), P1)).answer()
        # Nothing has left the queue yet: its deadline is the only measure.
        assert (answer.error(), answer.get("Retry-After")) == ("queue_full", b"1")
        assert answer.get("x-should-retry") == b"false"
        assert {client.answer().error() for client in waits} == {"queue_deadline"}
        held.let(9)


def test_early_refusal_keeps_to_its_budget(started, upstream):
    """P2 drains at some rate far too slow for its deadline: 5 % may be refused at once."""
    slow = threading.Event()

    def script(seen):
        seen.body()
        if slow.is_set():
            time.sleep(0.2)  # the upstream's own time
        seen.wire.send(OK)

    upstream.answering(script)
    sidecar = started(
        POOLS_BEST_EFFORT_INFLIGHT=1, QOS_P2_QUEUE=64, QOS_P2_DEADLINE_S=2, QOS_P2_EARLY_SHED=0.05
    )
    with Clients(sidecar) as clients:
        client = Client(sidecar.app)
        clients.all.append(client)
        for _ in range(300):
            assert client.send(post(CHAT, P2)).answer().status == 200
        slow.set()
        waiting = [clients.send(post(CHAT, P2)) for _ in range(8)]
        until(
            lambda: sidecar.metric("tongguan_proxy_queue_drain_rate", qos="P2") > 0,
            "a measured rate",
        )
        more = [clients.send(post(CHAT, P2)) for _ in range(50)]
        answers = [one.answer() for one in (*waiting, *more)]
        assert {a.status for a in answers} <= {200, 503}
        early = sidecar.metric("tongguan_proxy_shed_total", qos="P2", reason="early")
        # About 350 came in the window: 5 % of them, and not one more.
        assert 10 <= early <= 18
        refused = [a for a in answers if a.status == 503]
        assert {a.error() for a in refused} == {"queue_deadline"}
        assert sidecar.metric("tongguan_proxy_shed_beyond_budget_total", qos="P2") > 0


def test_a_body_that_streams_waits_too(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1, LIMITS_COLLECT_BYTES=1000)
    large = b'{"prompt":"' + b"x" * 200_000 + b'"}'
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P1))
        held.count(1)
        lengthed = clients.send(post(large, P1))
        chunked = clients.send(
            b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n" + P1 + b"\r\n\r\n",
            chunk(large[:3000]),
        )
        queued(sidecar, "P1", 2)
        held.let()
        held.count(2)
        held.let(2)
        assert lengthed.answer().status == 200
        chunked.send(chunk(large[3000:]), b"0\r\n\r\n")
        assert chunked.answer().status == 200
        assert [b for _, b in held.order] == [body(0), large, large]


def test_a_large_body_is_not_taken_in_for_a_full_queue(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1, QOS_P1_QUEUE=1)
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P1))
        held.count(1)
        clients.send(post(body(1), P1))
        queued(sidecar, "P1", 1)
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n" + P1 + b"\r\n"
        for fields in (b"\r\n", b"Expect: 100-continue\r\n\r\n"):
            answer = clients.send(head + fields).head()  # a 100 would be read first
            assert answer.status == 503
            assert answer.get("X-Tongguan-Error") == b"queue_full"
        held.let(2)


def test_the_deadline_holds_until_a_connection_is_there(started, upstream, keys):
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # nobody accepts: the next one hangs
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        sidecar = started(
            POOLS_SHARED_ENDPOINTS=url, QOS_P1_DEADLINE_S=0.5, TIMEOUTS_CONNECT_S=15, keys=keys
        )
        begun = time.monotonic()
        answer = sidecar.ask(post(CHAT, P1))
        assert (answer.status, answer.error()) == (503, "queue_deadline")
        assert 0.4 < time.monotonic() - begun < 5
        assert sidecar.record(answer.trace_id)["times_us"]["queue"] >= 450_000
        until(lambda: sidecar.metric("tongguan_proxy_pool_inflight") == 0, "the place back")
    del upstream


# --- drain and reload


def test_sigterm_serves_those_who_wait(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1)
    with Clients(sidecar) as clients:
        first, second = clients.send(post(body(0), P1)), None
        held.count(1)
        second = clients.send(post(body(1), P1))
        queued(sidecar, "P1", 1)
        sidecar.signal(15)
        held.let(2)
        assert first.answer().status == 200
        assert second.answer().status == 200
        assert sidecar.ended() == 0


def test_the_end_of_the_grace_answers_those_who_wait(started, upstream, keys):
    held = Held()
    upstream.answering(held)
    sidecar = started(POOLS_SHARED_INFLIGHT=1, TIMEOUTS_DRAIN_S=0.3, keys=keys)
    with Clients(sidecar) as clients:
        clients.send(post(body(0), P1))
        held.count(1)
        waits = clients.send(post(body(1), P1))
        queued(sidecar, "P1", 1)
        sidecar.signal(15)
        answer = waits.answer()
        assert (answer.status, answer.error()) == (503, "draining")
        assert answer.get("x-should-retry") == b"false"
        assert sidecar.ended() == 0
        assert {r["outcome"] for r in sidecar.records() if r["kind"] == "request"} == {"shed"}
        held.let(2)


def test_a_reload_keeps_who_waits_and_gives_more_places(started, upstream):
    held = Held()
    upstream.answering(held)
    sidecar = started(GRANTED + "[pools.shared]\ninflight = 1\n", QOS_P1_DEADLINE_S=60)
    with Clients(sidecar) as clients:
        first = clients.send(post(body(0), P1))
        held.count(1)
        waits = [clients.send(post(body(number), P1)) for number in (1, 2)]
        queued(sidecar, "P1", 2)
        sidecar.config.write_text(GRANTED + "[pools.shared]\ninflight = 3\n")
        held.count(3)
        held.let(3)
        assert [c.answer().status for c in (first, *waits)] == [200, 200, 200]
    assert sidecar.idle()
