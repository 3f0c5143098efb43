"""Which pools share a gate, and what a reload keeps of it."""

from __future__ import annotations

import asyncio

import pytest

from proxy.clock import ManualClock
from proxy.config import load
from proxy.context import Context
from proxy.qos.limits import BELIEVED_NS, AgentLimits
from proxy.reload import Loaded


class Waiter:
    """Somebody who waits."""


@pytest.fixture
def context():
    loop = asyncio.new_event_loop()
    yield lambda text="": Context(load(text, {}), ManualClock(), loop, "node")
    loop.close()


def pools(**endpoints):
    return "".join(
        f"[pools.{name}]\nendpoints = {[f'http://{host}:1' for host in hosts]}\n"
        for name, hosts in endpoints.items()
    )


def names(made):
    return sorted(gate.name for gate in made.gates.gates)


TOGETHER = ["dedicated+shared+best_effort"]
APART = ["best_effort", "dedicated", "shared"]


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        ({}, TOGETHER),
        ({"dedicated": "a"}, ["dedicated", "shared+best_effort"]),
        ({"dedicated": "a", "shared": "b", "best_effort": "c"}, APART),
        ({"dedicated": "a", "shared": "bc", "best_effort": "ac"}, TOGETHER),
        ({"dedicated": "a", "shared": "b", "best_effort": "ab"}, TOGETHER),
        (
            {"dedicated": "ab", "shared": "c", "best_effort": "bd"},
            ["dedicated+best_effort", "shared"],
        ),
    ],
)
def test_pools_that_share_an_endpoint_share_a_gate(context, endpoints, expected):
    made = context(pools(**endpoints))
    assert names(made) == expected
    for qos, tier in made.gates.tiers.items():
        assert made.turnstiles[qos].gate is tier.gate


def test_a_gate_of_p0_alone_measures_nothing(context):
    made = context(pools(dedicated="a"))
    assert made.gates.tiers["P0"].gate.adaptive is None
    assert made.gates.tiers["P1"].gate.adaptive is not None


def test_without_the_adaptive_limit_pools_alone_bound(context):
    made = context("[qos.adaptive]\nenabled = false\n")
    assert made.gates.tiers["P1"].bound == made.gates.tiers["P2"].bound == 512


def renewed(made, text):
    return made.renewed(Loaded(load(text, {}), None, {}))


def test_a_reload_keeps_who_waits_and_what_was_learnt(context):
    made = context("[qos.p1]\nrate = 5\n[tenants.a]\nrate = 3\n")
    p1 = made.gates.tiers["P1"]
    gate, bucket = p1.gate, p1.bucket
    tenants = made.gates.buckets["a"]
    ticket = gate.enter(p1, Waiter(), 1, 0, 0, 1)
    text = (
        "[qos.p1]\nrate = 5\nqueue = 3\nweight = 9\n[tenants.a]\nrate = 3\n[tenants.b]\nrate = 1\n"
    )
    after = renewed(made, text)
    assert after.gates is made.gates
    assert p1.gate is gate
    assert (p1.bucket, after.gates.buckets["a"]) == (bucket, tenants)
    assert "b" in after.gates.buckets
    assert (p1.terms.queue_max, p1.terms.weight, p1.waiting) == (3, 9, 1)
    assert gate.next(1) is ticket


def test_a_reload_that_parts_pools_makes_new_gates_and_loses_no_place(context):
    made = context()
    p1, p2 = made.gates.tiers["P1"], made.gates.tiers["P2"]
    old, turnstile = p1.gate, made.turnstiles["P1"]
    for tier in (p1, p2):
        old.enter(tier, Waiter(), 1, 0, 0, 1)
        old.enter(tier, Waiter(), 1, 0, 0, 1)
    old.next(1)
    old.next(1)
    assert old.inflight == 2
    after = renewed(made, pools(best_effort="b"))
    assert p1.gate is not p2.gate
    assert p1.gate.inflight + p2.gate.inflight == 2
    assert p1.gate.waiting + p2.gate.waiting == 2
    assert turnstile.gate.next(2) is None  # a turn that was due finds nobody
    assert after.turnstiles is made.turnstiles
    assert after.turnstiles["P2"].gate is p2.gate


def test_other_rates_give_other_buckets(context):
    made = context("[qos.p2]\nrate = 5\n")
    bucket = made.gates.tiers["P2"].bucket
    renewed(made, "[qos.p2]\nrate = 6\n")
    assert made.gates.tiers["P2"].bucket is not bucket
    renewed(made, "")
    assert made.gates.tiers["P2"].bucket is None
    assert not made.gates.tiers["P2"].checks


def test_workers_share_the_agents_limit_and_let_it_go_in_time(context):
    made = context()
    agent, tiers = AgentLimits(), made.gates.tiers
    text = b'{"P1": {"limit": 9, "age_ms": 500}, "P0": {"limit": 1, "age_ms": 0}}'
    assert agent.take(text, tiers.values(), 0, 2) == [tiers["P1"].gate]
    assert (tiers["P1"].external, tiers["P1"].bound, tiers["P0"].external) == (4, 4, -1)
    assert agent.next_ns() == BELIEVED_NS - 500_000_000
    assert agent.expire(tiers.values(), agent.next_ns() - 1) == []
    assert agent.expire(tiers.values(), agent.next_ns()) == [tiers["P1"].gate]
    assert tiers["P1"].external == -1
    assert agent.next_ns() == 0
