"""Admission's machine: conservation, order, fairness, deadlines, budgets; with explicit time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.qos.adaptive import AdaptiveLimit
from proxy.qos.admission import NO_LIMIT, Gate, Refusal, Terms, Ticket, Tier
from proxy.qos.measure import REQUESTS_MIN, DrainRate, ShedBudget
from proxy.qos.pools import Endpoint, PoolState
from proxy.qos.ratelimit import TokenBucket

S = 1_000_000_000
MS = 1_000_000


class Someone:
    """A waiter; the machine only hands it back."""


def gate(
    places=1, *, queue=100, wait_s=60.0, weights=(16, 1), share=0.0, adaptive=None, p0=8, bounds=()
):
    tiers = []
    pools = ("dedicated", "shared", "best_effort")
    for number, (qos, name) in enumerate(zip(("P0", "P1", "P2"), pools, strict=True)):
        most = bounds[number] if bounds else places
        pool = PoolState(name, [Endpoint("u", ("u", 1))], p0 if qos == "P0" else most)
        weight = 1 if qos == "P0" else weights[number - 1]
        terms = Terms(
            queue_max=0 if qos == "P0" else queue,
            wait_ns=int(wait_s * S),
            weight=weight,
            early_shed=share,
        )
        tier = Tier(qos, pool, terms)
        tier.renew(terms, pool.inflight_max, None)
        tiers.append(tier)
    return Gate("g", tiers, adaptive), *tiers


def one_limit(places):
    """Return an adaptive limit that stays where it is."""
    return AdaptiveLimit(initial=places, least=places, most=places, tolerance=9, headroom=0)


def free(made, tier):
    tier.pool.inflight -= 1
    made.inflight -= 1


def wait(made, tier, cost=1, now=0, since=None, started=0):
    return made.enter(tier, Someone(), cost, now if since is None else since, now, started)


# --- the queue


def test_a_ticket_waits_for_a_place_and_takes_it():
    made, _, p1, _ = gate(places=1)
    first, second = wait(made, p1), wait(made, p1)
    assert made.next(5) is first
    assert (made.inflight, p1.pool.inflight, p1.waiting) == (1, 1, 1)
    assert made.next(5) is None
    assert not made.may_go()
    free(made, p1)
    assert made.may_go()
    assert made.next(6) is second
    assert made.waiting == 0


def test_nobody_goes_at_once_past_those_who_wait():
    made, _, p1, p2 = gate(places=4)
    assert p1.direct == p2.direct == NO_LIMIT - NO_LIMIT // 8
    wait(made, p2)
    assert p1.direct == p2.direct == 0
    made.next(0)
    assert p1.direct > 0


def test_a_full_queue_refuses_and_a_place_in_it_is_free_again():
    made, _, p1, _ = gate(queue=2)
    tickets = [wait(made, p1) for _ in range(2)]
    refused = wait(made, p1)
    assert isinstance(refused, Refusal)
    assert refused.reason == "queue_full"
    assert p1.full
    assert p1.checks
    made.leave(tickets[0], 1)
    assert not p1.full
    assert isinstance(wait(made, p1, now=1), Ticket)


def test_a_queue_of_none_refuses_at_once():
    made, _, p1, _ = gate(queue=0)
    assert wait(made, p1).reason == "queue_full"
    assert not p1.full  # where there is no queue, a free place decides


def test_p0_never_waits():
    made, p0, _, _ = gate()
    refused = wait(made, p0)
    assert (refused.reason, refused.retry_after_s, refused.retry_helps) == ("queue_full", 1, True)
    assert (p0.shed, p0.shed_beyond) == (1, 1)
    assert p0.direct == NO_LIMIT


def test_who_leaves_leaves_at_once_wherever_he_stands():
    made, _, p1, _ = gate()
    tickets = [wait(made, p1) for _ in range(5)]
    for number in (2, 0):
        made.leave(tickets[number], 1)
    assert (made.waiting, p1.waiting, p1.left) == (3, 3, 2)
    order = []
    while (ticket := made.next(2)) is not None:
        order.append(tickets.index(ticket))
        free(made, p1)
    assert order == [1, 3, 4]


def test_a_ticket_leaves_once():
    made, _, p1, _ = gate()
    ticket = wait(made, p1)
    made.leave(ticket, 0)
    with pytest.raises(AssertionError):
        made.leave(ticket, 0)


def test_those_who_leave_behind_a_stuck_head_do_not_pile_up():
    made, _, p1, _ = gate(places=1, queue=10)
    p1.pool.inflight = made.inflight = 1
    wait(made, p1)
    for _ in range(10_000):
        made.leave(wait(made, p1), 0)
    assert len(p1.queue) < 100


def test_one_past_its_deadline_takes_no_place():
    made, _, p1, _ = gate(wait_s=2)
    ticket = wait(made, p1, now=0)
    assert made.next(2 * S) is ticket
    assert (made.inflight, p1.pool.inflight, p1.waiting) == (0, 0, 0)
    made.refuse(p1, "queue_deadline", 2 * S, 1)
    assert p1.sheds["queue_deadline"] == 1


def test_a_deadline_counts_from_the_head():
    made, _, p1, _ = gate(wait_s=2)
    assert wait(made, p1, now=5 * S, since=3 * S).reason == "queue_deadline"
    assert wait(made, p1, now=5 * S, since=3 * S + 1).deadline_ns == 5 * S + 1


# --- limits


def test_the_limit_of_the_gate_counts_all_classes_and_p2_leaves_one_place():
    made, p0, p1, p2 = gate(places=100, adaptive=one_limit(8))
    made.inflight = p0.pool.inflight = 3
    for _ in range(20):
        wait(made, p2)
    went = 0
    while made.next(0) is not None:
        went += 1
    assert went == 5
    for _ in range(3):
        free(made, p0)
    while made.next(0) is not None:
        went += 1
    assert went == 7  # one of eight is for P1
    wait(made, p1)
    assert made.next(0).tier is p1
    assert made.inflight == 8


def test_p0_cannot_starve_the_others():
    made, p0, p1, p2 = gate(places=100, adaptive=one_limit(16), p0=1000)
    made.inflight = p0.pool.inflight = 500
    wait(made, p1)
    wait(made, p2)
    assert {made.next(0).tier, made.next(0).tier} == {p1, p2}
    wait(made, p1)
    assert made.next(0) is None  # an eighth of the limit, and no more


def test_near_the_limit_requests_are_sorted_first():
    _, _, p1, p2 = gate(places=100, adaptive=one_limit(32))
    assert p1.direct == p2.direct == 28
    assert p2.bound == 30


def test_the_agents_limit_replaces_the_gates_for_its_class():
    made, _, p1, p2 = gate(places=100, adaptive=one_limit(4))
    p1.external = 6
    made.refresh()
    for _ in range(10):
        wait(made, p1)
        wait(made, p2)
    tiers = []
    while (ticket := made.next(0)) is not None:
        tiers.append(ticket.tier)
    assert tiers.count(p1) == 6
    assert tiers.count(p2) <= 3


def test_an_agents_limit_of_nothing_still_lets_one_through():
    made, _, p1, _ = gate(places=9)
    p1.external = 0
    made.refresh()
    assert p1.bound == 1


def test_p2_can_be_left_out_of_a_turn():
    made, _, p1, p2 = gate(places=9)
    wait(made, p2)
    assert made.next(0, p2=False) is None
    wait(made, p1)
    assert made.next(0, p2=False).tier is p1
    assert made.next(0).tier is p2


def test_a_gate_takes_over_what_its_tiers_have():
    made, p0, p1, p2 = gate(places=2)
    wait(made, p1)
    wait(made, p1)
    made.next(0)
    p0.pool.inflight += 1
    again = Gate("h", [p0, p1, p2], None)
    assert (again.inflight, again.waiting) == (2, 1)
    assert p1.gate is again


# --- fairness


def served(made, tiers, rounds):
    """Serve `rounds` tickets, one place at a time; return cost by class."""
    total = dict.fromkeys(tiers, 0)
    for _ in range(rounds):
        ticket = made.next(0)
        if ticket is None:
            break
        total[ticket.tier] += ticket.cost
        free(made, ticket.tier)
    return total


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.lists(st.integers(1, 5000), min_size=40, max_size=40),
    st.lists(st.integers(1, 5000), min_size=40, max_size=40),
    st.integers(1, 40),
)
@settings(deadline=None)
def test_while_both_wait_shares_of_cost_differ_by_no_more_than_a_request_each(
    w1, w2, costs1, costs2, rounds
):
    made, _, p1, p2 = gate(weights=(w1, w2))
    for one, other in zip(costs1, costs2, strict=True):
        wait(made, p1, one)
        wait(made, p2, other)
    total = served(made, (p1, p2), rounds)
    if p1.waiting and p2.waiting:
        most = 5000 / w1 + 5000 / w2 + 2
        assert abs(total[p1] / w1 - total[p2] / w2) <= most


@given(st.integers(1, 1000), st.integers(1, 5000), st.integers(1, 5000))
@settings(deadline=None)
def test_p2_goes_after_a_bounded_share_of_p1(weight, cost1, cost2):
    made, _, p1, p2 = gate(weights=(weight, 1), queue=10**6)
    wait(made, p2, cost2)
    bound = cost2 * weight + cost1 + weight
    spent = 0
    while True:
        wait(made, p1, cost1)
        ticket = made.next(0)
        if ticket.tier is p2:
            break
        spent += cost1
        assert spent <= bound
        free(made, p1)


def test_equal_need_lets_p1_go_first():
    made, _, p1, p2 = gate(weights=(1, 1))
    wait(made, p2, 10)
    wait(made, p1, 10)
    assert made.next(0).tier is p1


def test_a_class_that_did_not_wait_has_saved_nothing_up():
    made, _, p1, p2 = gate(weights=(1, 1))
    for _ in range(50):
        wait(made, p2, 10)
    served(made, (p1, p2), 40)
    for _ in range(50):
        wait(made, p1, 10)
    total = served(made, (p1, p2), 10)
    assert total[p1] == total[p2] == 50


# --- conservation


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 6))
@settings(deadline=None, max_examples=60)
def test_nobody_is_lost_and_no_place_either(seed, places, queue):
    rnd = random.Random(seed)
    made, _, p1, p2 = gate(places=places, queue=queue, wait_s=0.5, adaptive=one_limit(places))
    now, came, went, late, out = 0, 0, [], 0, []
    waiting: list[Ticket] = []
    refused = 0
    for _ in range(300):
        now += rnd.randrange(50 * MS)
        step = rnd.random()
        if step < 0.5:
            came += 1
            taken = wait(made, rnd.choice((p1, p2)), rnd.randrange(1, 99), now)
            if isinstance(taken, Ticket):
                waiting.append(taken)
            else:
                refused += 1
        elif step < 0.6 and waiting:
            made.leave(waiting.pop(rnd.randrange(len(waiting))), now)
            out.append(1)
        elif step < 0.7 and waiting:
            made.run_out(waiting.pop(0), now, came)
            late += 1
        elif step < 0.85 and went:
            free(made, went.pop().tier)
        elif (ticket := made.next(now)) is not None:
            waiting.remove(ticket)
            if now < ticket.deadline_ns:
                went.append(ticket)
            else:
                made.refuse(ticket.tier, "queue_deadline", now, came)
                late += 1
        assert made.waiting == len(waiting) == p1.waiting + p2.waiting
        assert made.inflight == len(went) == p1.pool.inflight + p2.pool.inflight <= places
        assert p1.waiting <= queue
        tiers = (p1, p2)
        assert sum(t.came for t in tiers) == came
        assert sum(t.shed for t in tiers) == refused + late
        assert came == sum(t.went_waiting + t.shed + t.left + t.waiting for t in tiers)
    assert sum(t.left for t in (p1, p2)) == len(out)


# --- what was measured


def test_the_drain_rate_counts_only_time_with_a_queue():
    rate = DrainRate()
    assert rate.per_s(0) == 0.0
    for second in (0, 100):  # a queue of a second, twice, long apart
        rate.begin(second * S)
        for n in range(1, 11):
            rate.departed(second * S + n * S // 10)
        rate.end((second + 1) * S)
    assert rate.per_s(10**6 * S) == pytest.approx(10, rel=0.05)


def test_a_rate_of_a_moment_is_no_rate():
    rate = DrainRate()
    rate.begin(0)
    rate.departed(MS)
    assert rate.per_s(2 * MS) == 0.0


def test_a_queue_that_stands_still_drains_ever_slower():
    rate = DrainRate()
    rate.begin(0)
    for n in range(10):
        rate.departed(n * S // 10)
    assert rate.per_s(S) > rate.per_s(5 * S) > rate.per_s(60 * S)


@pytest.mark.parametrize(("per_s", "waiting", "said"), [(2, 8, 4), (100, 8, 1), (1, 18, 18)])
def test_retry_after_is_the_queue_over_the_rate(per_s, waiting, said):
    made, _, p1, _ = gate(queue=waiting, wait_s=10_000)
    p1.pool.inflight = made.inflight = 1
    for _ in range(waiting):
        wait(made, p1, now=0)
    for n in range(1, 2001):
        now = int(n * S / per_s)
        p1.drain.departed(now)
    refused = wait(made, p1, now=now)
    assert refused.retry_after_s == pytest.approx(said, rel=0.1, abs=1)
    assert refused.retry_helps


def test_retry_does_not_help_where_the_queue_outlasts_the_deadline():
    made, _, p1, _ = gate(queue=10, wait_s=2)
    for _ in range(10):
        wait(made, p1, now=0)
    for n in range(1, 11):
        p1.drain.departed(n * S)
    refused = wait(made, p1, now=10 * S)
    assert not refused.retry_helps
    assert refused.retry_after_s >= 9


def test_early_refusal_needs_enough_requests_and_room_in_the_budget():
    budget = ShedBudget(0.05)
    assert not budget.allows(REQUESTS_MIN - 1, 0)
    assert budget.allows(REQUESTS_MIN, 0)
    assert budget.allows(REQUESTS_MIN, 9)
    assert not budget.allows(REQUESTS_MIN, 10)
    assert not ShedBudget(0.0).allows(10**6, 0)
    assert not ShedBudget(0.003).allows(200, 0)  # 0.3 % of 200 is not one


def test_the_window_of_the_budget_rolls():
    budget = ShedBudget(0.1)
    for second in range(120):
        budget.roll(1000 if second else 0, 100)
    assert not budget.allows(1000, 100)  # all of it was long ago: nothing came since
    assert budget.allows(2000, 100)
    assert budget.over(2000, 201)
    assert not budget.over(2000, 200)


def test_early_refusal_only_when_the_deadline_cannot_be_met():
    made, _, p1, _ = gate(queue=100, wait_s=2, share=0.5)
    p1.pool.inflight = made.inflight = 1
    wait(made, p1, now=0)
    for n in range(1, 11):
        p1.drain.departed(n * S // 10)  # ten a second
    outcomes = [wait(made, p1, now=S, started=1000) for _ in range(40)]
    kinds = ["early" if isinstance(o, Refusal) else "waits" for o in outcomes]
    assert kinds[:15] == ["waits"] * 15
    assert kinds[-10:] == ["early"] * 10
    assert p1.shed_beyond == 0


# --- buckets


def test_a_bucket_gives_its_burst_then_its_rate():
    bucket = TokenBucket(2.0, 3, 0)
    assert [bucket.take(0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s(0) == 1
    assert not bucket.take(S // 2 - 1)
    assert bucket.take(S // 2)
    assert bucket.refused == 2


@given(st.floats(0.01, 1000), st.integers(0, 50), st.lists(st.integers(0, 3 * S), max_size=200))
@settings(deadline=None)
def test_a_bucket_never_gives_more_than_burst_and_rate(rate, burst, gaps):
    bucket = TokenBucket(rate, burst, 0)
    now = taken = 0
    for gap in gaps:
        now += gap
        taken += bucket.take(now)
        assert taken <= bucket.burst + now * rate / S + 1e-6


@given(st.floats(0.01, 100), st.integers(1, 5), st.integers(0, 10))
@settings(deadline=None)
def test_retry_after_is_true_to_the_bucket(rate, burst, elapsed_s):
    bucket = TokenBucket(rate, burst, 0)
    now = elapsed_s * S
    while bucket.take(now):
        pass
    wait_s = bucket.wait_s(now)
    assert wait_s >= 1
    assert bucket.take(now + wait_s * S)


def test_a_rate_below_one_still_gives_one_at_a_time():
    bucket = TokenBucket(0.1, 0, 0)
    assert bucket.take(0)
    assert bucket.wait_s(0) == 10
