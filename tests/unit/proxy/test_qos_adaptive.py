"""The adaptive limit against simulated upstreams: it finds their slots, and is not fooled."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque

import pytest

from proxy.qos.adaptive import AdaptiveLimit

MS = 1_000_000
S = 1_000 * MS


def made(**other):
    terms = {"initial": 32, "least": 4, "most": 512, "tolerance": 1.2, "headroom": 0.1}
    return AdaptiveLimit(**{**terms, **other})


def simulate(slots, service, *, seconds, load=512, seed=1, limit=None):
    """Keep as many in flight as the limit allows; return it, with (time, limit) of its changes."""
    rnd = random.Random(seed)
    limit = limit or made()
    now = inflight = busy = 0
    waiting: deque[int] = deque()
    events: list[tuple[int, int, int]] = []
    number = itertools.count()
    changes = []
    while now < seconds * S:
        while inflight < min(limit.limit, load):
            inflight += 1
            if busy < slots:
                busy += 1
                heapq.heappush(events, (now + service(rnd, now), next(number), now))
            else:
                waiting.append(now)
        now, _, sent = heapq.heappop(events)
        if limit.sample(sent, now, inflight):
            changes.append((now / S, limit.limit))
        inflight -= 1
        if waiting:
            heapq.heappush(events, (now + service(rnd, now), next(number), waiting.popleft()))
        else:
            busy -= 1
    return limit, changes


def steady(mean_ms, spread=0.2):
    return lambda rnd, _now: int(mean_ms * MS * rnd.uniform(1 - spread, 1 + spread))


@pytest.mark.parametrize(
    ("slots", "service", "seconds"),
    [
        (32, steady(20, 0.0), 12),
        (32, steady(20), 12),
        (8, steady(50), 20),
        (4, steady(500), 60),
        (128, steady(50, 0.6), 12),
        (32, lambda rnd, _now: int(20 * MS * rnd.expovariate(1)), 12),
    ],
)
def test_it_finds_about_as_many_as_there_are_slots(slots, service, seconds):
    limit, _ = simulate(slots, service, seconds=seconds)
    assert 0.6 * slots <= limit.limit <= 1.6 * slots


def test_where_nothing_waits_it_grows_to_the_load():
    limit, _ = simulate(10_000, steady(50, 0.6), seconds=5, load=200)
    assert limit.limit >= 200


def test_it_does_not_grow_beyond_what_is_used():
    limit, _ = simulate(10_000, steady(50), seconds=5, load=10)
    assert limit.limit == 32


def test_short_hiccups_do_not_bring_it_down():
    def service(rnd, now):
        slow = 3 if now % (2 * S) < 40 * MS else 1
        return int(20 * MS * slow * rnd.uniform(0.95, 1.05))

    _, changes = simulate(10_000, service, seconds=20, load=24)
    assert min([32, *(limit for _, limit in changes)]) >= 20


def test_work_that_becomes_slower_by_itself_is_no_queue():
    def service(rnd, now):
        return int((20 if now < 5 * S else 200) * MS * rnd.uniform(0.8, 1.2))

    limit, _ = simulate(10_000, service, seconds=40, load=60)
    assert limit.limit >= 50
    assert 150 * MS < limit.baseline_ns < 250 * MS


def test_an_upstream_that_loses_slots_is_followed():
    limit, _ = simulate(32, steady(20), seconds=5)
    before = limit.limit
    limit, _ = simulate(8, steady(20), seconds=8, limit=limit, seed=2)
    assert limit.limit < before
    assert limit.limit <= 14


@pytest.mark.parametrize("most", [1, 3, 16])
def test_bounds_hold(most):
    limit, changes = simulate(2, steady(20), seconds=5, limit=made(most=most, least=4))
    assert {value for _, value in changes} <= set(range(1, most + 1))
    assert limit.limit <= most


def test_waiting_of_a_few_milliseconds_is_none():
    limit, _ = simulate(1, steady(0.05), seconds=2, load=40)
    assert limit.limit >= 32
    assert limit.cuts == 0
