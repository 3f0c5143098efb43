"""Admission of the real process: who goes, who waits, who is told to come back, and what shows."""

import contextlib
import itertools
import json
import socket
import threading
import time

import pytest

from tests.blackbox.harness import (
    LAST_CHUNK,
    OK,
    OK_HEAD,
    Client,
    Sidecar,
    Upstream,
    chunk,
    get,
    new_keys,
    ok,
    post,
    until,
)

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":10}'
P0, P1, P2 = (b"X-QoS-Class: " + name for name in (b"P0", b"P1", b"P2"))
GRANTED = '[tenants.default]\nmax_class = "P0"\n'
OFF = {"QOS_LIMITS_URL": ""}


class Held:
    """A script that answers each request when it is told to, and remembers the order."""

    def __init__(self):
        self.order = []
        self._free = threading.Semaphore(0)

    def __call__(self, seen):
        body = seen.body()
        self.order.append((seen.get("X-QoS-Class"), body))
        self._free.acquire()
        seen.wire.send(OK)

    def let(self, count=1):
        self._free.release(count)

    def count(self, number):
        """Wait until so many requests have come upstream."""
        return until(lambda: len(self.order) >= number, f"{number} requests upstream")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("qos") / "keys")


@pytest.fixture
def upstream():
    with Upstream() as upstream:
        yield upstream
        assert upstream.problems == []


@pytest.fixture
def started(tmp_path, upstream):
    """Start sidecars that end with the test."""
    made = []
    numbers = itertools.count()

    def start(toml=GRANTED, url=None, **variables):
        folder = tmp_path / f"sidecar{next(numbers)}"
        sidecar = Sidecar(folder, url or upstream.url, toml=toml, **{**OFF, **variables})
        made.append(sidecar.start())
        return sidecar

    yield start
    for sidecar in made:
        sidecar.kill()
        bad = [line for line in sidecar.log.splitlines() if " ERROR " in line or "Trace" in line]
        assert bad == [], sidecar.log


class Clients:
    """Connections that are open together."""

    def __init__(self, sidecar):
        self.sidecar = sidecar
        self.all = []

    def send(self, *parts):
        client = Client(self.sidecar.app)
        self.all.append(client)
        client.send(*parts)
        return client

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in self.all:
            client.close()


def queued(sidecar, qos, number):
    until(
        lambda: sidecar.metric("tongguan_proxy_queue_depth", qos=qos) == number,
        f"{number} {qos} in the queue",
    )


def body(number, tokens=10):
    return json.dumps({"model": "m", "prompt": f"{number}", "max_tokens": tokens}).encode()


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


# --- rules


RULES = """
[[qos.rules]]
qos = "P2"
tenant = "nobody"
[[qos.rules]]
qos = "P2"
model = "batch-*"
[[qos.rules]]
qos = "P0"
sla = "gold"
model = "live"
[[qos.rules]]
qos = "P2"
prompt_tokens_min = 1000
"""


def asked(model, prompt="x", **more):
    return json.dumps({"model": model, "prompt": prompt, **more}).encode()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (asked("batch-7"), b"P2"),
        (asked("batch"), b"P1"),
        (asked("live"), b"P0"),
        (asked("m", "x" * 3996), b"P1"),  # 3 998 bytes with its quotes are 1 000 tokens
        (asked("m", "x" * 3994 + ""), b"P1"),
        (asked("m", "x" * 4000), b"P2"),
        (b"no json", b"P1"),
        (b"", b"P1"),
    ],
)
def test_rules_class_what_names_no_class(started, upstream, sent, expected):
    sidecar = started('[tenants.default]\nmax_class = "P0"\nsla = "gold"\n' + RULES)
    if sent.startswith(b'{"model": "m"'):
        size = len(json.dumps(json.loads(sent)["prompt"]))
        expected = b"P2" if -(-size // 4) >= 1000 else b"P1"
    answer = sidecar.ask(post(sent))
    assert answer.get("X-QoS-Class") == expected
    assert upstream.last().get("X-QoS-Class") == expected
    # What is named is not classed by rule.
    assert sidecar.ask(post(sent, P1)).get("X-QoS-Class") == b"P1"


def test_rules_are_counted_and_shown(started, upstream):
    del upstream
    sidecar = started(GRANTED + RULES)
    assert sidecar.ask(post(asked("batch-1"))).get("X-QoS-Class") == b"P2"
    assert sidecar.metric("tongguan_proxy_rule_matches_total", rule="2") == 1
    shown = json.loads(sidecar.admin_ask("GET", "/config").body)
    assert shown["qos"]["rules"][1]["model"] == "batch-*"
    assert shown["qos"]["p2"]["deadline_s"] == 30


def test_a_rule_sees_no_more_than_64_kib_of_the_body(started, upstream):
    sidecar = started(GRANTED + '[[qos.rules]]\nqos = "P2"\nmodel = "late"\n')
    early = b'{"model":"late","prompt":"%b"}' % (b"x" * 100_000)
    late = b'{"prompt":"%b","model":"late"}' % (b"x" * 100_000)
    assert sidecar.ask(post(early)).get("X-QoS-Class") == b"P2"
    assert sidecar.ask(post(late)).get("X-QoS-Class") == b"P1"
    with sidecar.client() as client:
        # The class is known with the first 64 KiB, though the body streams on.
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(early))
        client.send(early[:70_000])
        until(
            lambda: sidecar.metric("tongguan_proxy_requests_started_total", qos="P2") == 2,
            "the class before the whole body",
        )
        client.send(early[70_000:])
        assert client.answer().get("X-QoS-Class") == b"P2"
    assert upstream.last().body() == early


def test_expect_is_answered_before_a_rule_that_needs_the_body(started, upstream):
    del upstream
    sidecar = started(GRANTED + '[[qos.rules]]\nqos = "P2"\nmodel = "m"\n')
    with sidecar.client() as client:
        client.send(
            b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
            % len(CHAT)
        )
        assert client.head().status == 100
        answer = client.send(CHAT).answer()
        assert (answer.status, answer.get("X-QoS-Class")) == (200, b"P2")


def test_a_rule_raises_nobody_above_the_tenants_cap(started, upstream, keys):
    del upstream
    toml = '[tenants.default]\nmax_class = "P2"\n[[qos.rules]]\nqos = "P0"\nmodel = "m"\n'
    sidecar = started(toml, keys=keys)
    answer = sidecar.ask(post(CHAT))
    assert answer.get("X-QoS-Class") == b"P2"
    assert sidecar.record(answer.trace_id)["qos_asked"] == "P0"


# --- rates


def test_a_class_has_a_rate_and_retry_after_is_true_to_its_bucket(started, upstream):
    del upstream
    sidecar = started(QOS_P1_RATE=0.5, QOS_P1_BURST=2)
    with sidecar.client() as client:
        answers = [client.send(post(CHAT, P1)).answer() for _ in range(3)]
        assert [a.status for a in answers] == [200, 200, 429]
        assert answers[2].error() == "rate_limited"
        assert answers[2].get("Retry-After") == b"2"
        assert client.send(post(CHAT, P0)).answer().status == 200  # P0 passes by
        assert client.send(post(CHAT, P2)).answer().status == 200
        assert sidecar.metric("tongguan_proxy_rate_limited_total", qos="P1", scope="class") == 1
        until(lambda: client.send(post(CHAT, P1)).answer().status == 200, "a token again")


def test_a_tenant_has_a_rate_over_its_classes(started, upstream, keys):
    del upstream
    toml = '[tenants.default]\nmax_class = "P0"\nrate = 0.01\nburst = 2\n'
    sidecar = started(toml, keys=keys)
    statuses = [sidecar.ask(post(CHAT, qos)).status for qos in (P1, P2, P1, P0)]
    assert statuses == [200, 200, 429, 200]
    answer = sidecar.ask(post(CHAT, P2))
    assert (answer.status, answer.error()) == (429, "rate_limited")
    assert 90 <= int(answer.get("Retry-After")) <= 100
    assert sidecar.record(answer.trace_id)["outcome"] == "shed"
    assert sidecar.metric("tongguan_proxy_rate_limited_total", scope="tenant") == 2


# --- limits from the agent


class Agent(Upstream):
    """Answers GET /v1/limits with what `says` is."""

    def __init__(self):
        super().__init__()
        self.says = {}
        self.answering(self.limits)

    def limits(self, seen):
        if self.says is None:
            seen.wire.close()
            return
        text = self.says if isinstance(self.says, bytes) else json.dumps(self.says).encode()
        seen.reply(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(text), text)
        )


@pytest.fixture
def agent():
    with Agent() as agent:
        yield agent
        assert agent.problems == []


def test_the_agents_limit_takes_the_place_of_the_adaptive_one(started, upstream, agent):
    held = Held()
    upstream.answering(held)
    agent.says = {"P1": {"limit": 2, "age_ms": 0}, "P9": {"limit": 1}}
    sidecar = started(QOS_LIMITS_URL=agent.url + "/v1/limits", QOS_P1_DEADLINE_S=60)
    until(lambda: sidecar.metric("tongguan_proxy_agent_limit", qos="P1") == 2, "the limit")
    assert sidecar.metric("tongguan_proxy_inflight_limit", qos="P1") == 2
    with Clients(sidecar) as clients:
        for number in range(4):
            clients.send(post(body(number), P1))
        queued(sidecar, "P1", 2)
        clients.send(post(body(9), P2))
        held.count(3)
        assert [qos for qos, _ in held.order].count(b"P1") == 2
        agent.says = {"P1": {"limit": 3, "age_ms": 0}}
        held.count(4)
        agent.says = {"P1": {"limit": 1, "age_ms": 2000}}  # too old: as if it had not been said
        held.count(5)
        until(lambda: sidecar.metric("tongguan_proxy_agent_limit") == 0, "the limit to go")
        held.let(9)
    assert agent.last().line == b"GET /v1/limits HTTP/1.1"
    assert sidecar.metric("tongguan_proxy_agent_limits_total", outcome="stale") > 0


def test_limits_are_forgotten_when_the_agent_falls_silent(started, upstream, agent):
    del upstream
    agent.says = {"P2": {"limit": 1, "age_ms": 0}}
    sidecar = started(QOS_LIMITS_URL=agent.url + "/v1/limits")
    until(lambda: sidecar.metric("tongguan_proxy_agent_limit", qos="P2") == 1, "the limit")
    agent.says = None
    begun = time.monotonic()
    until(lambda: sidecar.metric("tongguan_proxy_agent_limit") == 0, "the limit to go")
    assert time.monotonic() - begun < 4
    until(
        lambda: sidecar.metric("tongguan_proxy_agent_limits_total", outcome="absent") > 1,
        "questions without answer",
    )
    assert " WARNING " not in sidecar.log.split("serving:")[1]


@pytest.mark.parametrize(
    "text",
    [
        b"no json",
        b"[]",
        b'{"P1": 3}',
        b'{"P1": {"limit": -1, "age_ms": 0}}',
        b'{"P1": {"limit": "3", "age_ms": 0}}',
        b'{"P1": {"limit": 3}}',
        b'{"P1": {"limit": true, "age_ms": 0}}',
    ],
)
def test_a_malformed_answer_is_ignored_and_counted(started, upstream, agent, text):
    del upstream
    agent.says = text
    sidecar = started(QOS_LIMITS_URL=agent.url + "/v1/limits")
    until(
        lambda: sidecar.metric("tongguan_proxy_agent_limits_total", outcome="malformed") > 0,
        "a malformed answer",
    )
    assert sidecar.metric("tongguan_proxy_agent_limit") == 0
    assert sidecar.ask(post(CHAT)).status == 200


def test_nobody_to_ask_is_no_trouble(started, upstream):
    del upstream
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1/limits"
        sidecar = started(QOS_LIMITS_URL=url)
        until(
            lambda: sidecar.metric("tongguan_proxy_agent_limits_total", outcome="absent") >= 2,
            "two questions",
        )
        assert sidecar.ask(get()).status == 200


# --- pools of their own


def test_pools_with_other_endpoints_do_not_wait_for_each_other(started, upstream):
    held = Held()
    upstream.answering(held)
    with Upstream() as other:
        other.answering(ok)
        sidecar = started(POOLS_BEST_EFFORT_ENDPOINTS=other.url, POOLS_SHARED_INFLIGHT=1)
        with Clients(sidecar) as clients:
            clients.send(post(body(0), P1))
            held.count(1)
            clients.send(post(body(1), P1))
            queued(sidecar, "P1", 1)
            assert clients.send(post(CHAT, P2)).answer().status == 200
            names = {"pools": "best_effort"}
            assert sidecar.metric("tongguan_proxy_adaptive_limit", **names) > 0
            assert sidecar.metric("tongguan_proxy_adaptive_limit", pools="dedicated+shared") > 0
            held.let(2)


def test_the_measured_limit_grows_where_nothing_waits(started, upstream):
    def script(seen):
        seen.body()
        time.sleep(0.03)  # the upstream's own time
        seen.wire.send(OK_HEAD, b"{}")

    upstream.answering(script)
    sidecar = started(QOS_ADAPTIVE_INITIAL=8)
    ending = threading.Event()

    def ask():
        with Client(sidecar.app) as client:
            while not ending.is_set():
                assert client.send(post(CHAT, P1)).answer().status == 200

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: sidecar.metric("tongguan_proxy_adaptive_limit") >= 16, "the limit to grow")
    finally:
        ending.set()
        for thread in threads:
            thread.join()
