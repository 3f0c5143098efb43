"""How much goes at once: the node agent's word, the measured limit, pools of their own."""

import json
import socket
import threading
import time

import pytest

from tests.blackbox.harness import (
    OK_HEAD,
    Client,
    Upstream,
    get,
    ok,
    post,
    until,
)
from tests.blackbox.queues import CHAT, P1, P2, Clients, Held, body, queued

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


def test_a_limit_below_one_lets_one_through(started, upstream, agent):
    agent.says = {"P1": {"limit": 0, "age_ms": 0}}
    held = Held()
    upstream.answering(held)
    sidecar = started(QOS_LIMITS_URL=agent.url + "/v1/limits")
    name = "tongguan_proxy_agent_limits_total"
    until(lambda: sidecar.metric(name, outcome="taken") > 0, "the limit")
    with Clients(sidecar) as clients:
        first, second = (clients.send(post(body(number), P1)) for number in range(2))
        held.count(1)
        queued(sidecar, "P1", 1)
        assert len(held.order) == 1
        held.let(2)
        assert {first.answer().status, second.answer().status} == {200}


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
