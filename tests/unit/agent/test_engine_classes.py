"""Places and blocks by class, fairness between tenants, and seeded loads against their promises."""

import random

import pytest

from agent.engine.blocks import BlockPool, chain_digest, tenant_root
from agent.engine.queue import TENANTS_MAX, ClassQueue
from agent.engine.scheduler import Seq, share
from tests.unit.agent.scheduler_kit import SIZE, Bench

P0, P1, P2 = 0, 1, 2


def seq(arrival, tenant="", cost=10, pending=10):
    return Seq(P1, arrival, [0] * pending, pending, cost, tenant)


def order_of(queue):
    found = []
    while queue:
        found.append(queue.pop().arrival)
    return found


# --- who is next ---------------------------------------------------------------------------------


def test_a_tenant_alone_is_served_in_order_of_arrival():
    queue = ClassQueue()
    for arrival in range(5):
        queue.push(seq(arrival, cost=100 - arrival))
    assert order_of(queue) == [0, 1, 2, 3, 4]


def test_a_hundred_requests_of_one_do_not_delay_anothers_first():
    queue = ClassQueue()
    for arrival in range(100):
        queue.push(seq(arrival, "loud"))
    queue.push(seq(100, "quiet"))
    queue.push(seq(101, "quiet"))
    assert order_of(queue)[:4] == [0, 100, 1, 101]


def test_tokens_count_not_requests():
    queue = ClassQueue()
    for arrival in range(3):
        queue.push(seq(arrival, "long", cost=1000))
    for arrival in range(3, 23):
        queue.push(seq(arrival, "short", cost=100))
    order = order_of(queue)
    assert sum(1 for arrival in order[:11] if arrival >= 3) >= 9


def test_who_was_idle_has_no_credit():
    queue = ClassQueue()
    for arrival in range(10):
        queue.push(seq(arrival, "steady"))
    for _ in range(5):
        queue.pop()
    for arrival in range(10, 20):
        queue.push(seq(arrival, "late"))
    assert order_of(queue)[:6] == [10, 5, 11, 6, 12, 7]


def test_preempted_ones_come_first_in_their_old_order():
    queue = ClassQueue()
    queue.push(seq(9))
    for arrival in (5, 2, 7):
        queue.put_back(seq(arrival))
    assert [s.arrival for s in queue.preempted] == [2, 5, 7]
    assert queue.head().arrival == 2
    assert order_of(queue) == [2, 5, 7, 9]


def test_removing_is_by_identity_and_says_so():
    queue = ClassQueue()
    one, two, three = seq(1, "a"), seq(2, "a"), seq(3, "b")
    for item in (one, two):
        queue.push(item)
    queue.put_back(three)
    assert queue.remove(one)
    assert queue.remove(three)
    assert not queue.remove(one)
    assert order_of(queue) == [2]
    assert queue.head() is None


def test_tenants_are_bounded():
    queue = ClassQueue()
    queue.push(seq(0, "stays"))
    for arrival in range(1, 3 * TENANTS_MAX):
        queue.push(seq(arrival, f"t{arrival}"))
        queue.remove(next(s for s in queue if s.arrival == arrival))
    assert len(queue._finish) <= TENANTS_MAX
    assert order_of(queue) == [0]
    assert queue._finish == {}


# --- the prefill budget --------------------------------------------------------------------------


def parts(budget, *wants):
    reading = [seq(i, tenant, pending=count) for i, (tenant, count) in enumerate(wants)]
    return {s.arrival: count for s, count in share(budget, reading)}


def test_tenants_share_a_steps_prompt_tokens():
    assert parts(90, ("a", 100), ("b", 100), ("c", 100)) == {0: 30, 1: 30, 2: 30}
    assert parts(90, ("a", 10), ("b", 100), ("c", 100)) == {0: 10, 1: 40, 2: 40}
    assert parts(90, ("a", 100), ("a", 100), ("b", 100)) == {0: 45, 2: 45}


def test_within_a_tenant_the_first_is_read_first():
    assert parts(90, ("a", 100), ("a", 100)) == {0: 90}
    assert parts(90, ("a", 60), ("a", 100)) == {0: 60, 1: 30}


@pytest.mark.parametrize("budget", [0, -3])
def test_no_budget_reads_nothing(budget):
    assert parts(budget, ("a", 5)) == {}


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_is_spent_whole_and_never_passed(seed):
    rng = random.Random(seed)
    for _ in range(200):
        wants = [(rng.choice("abc"), rng.randrange(1, 50)) for _ in range(rng.randrange(1, 8))]
        budget = rng.randrange(1, 120)
        given = parts(budget, *wants)
        assert sum(given.values()) == min(budget, sum(count for _, count in wants))
        assert all(0 < count <= wants[i][1] for i, count in given.items())


# --- places --------------------------------------------------------------------------------------


def test_reserved_places_are_p0s_alone():
    bench = Bench(slots=3, reserved=1)
    for _ in range(4):
        bench.add(range(4))
    bench.step()
    assert bench.scheduler.by_class() == {"P0": (0, 0), "P1": (2, 2), "P2": (0, 0)}
    for _ in range(3):
        bench.add(range(4), rank=P0)
    bench.step()
    assert bench.scheduler.by_class()["P0"] == (1, 2)


def test_one_place_is_left_whatever_is_reserved():
    bench = Bench(slots=1, reserved=5)
    bench.add(range(4), rank=P2)
    assert set(bench.step()) == {0}


def test_a_better_class_takes_the_place_of_the_worst_p2_which_keeps_its_blocks():
    bench = Bench(slots=2)
    early, late = (bench.add(range(8), new=8, rank=P2) for _ in range(2))
    bench.step()
    bench.step()
    bench.add(range(4), new=2, rank=P0)
    assert set(bench.step()) == {0, 2}
    assert late not in bench.scheduler.running
    assert (late.computed, len(late.table)) == (9, 3)
    assert early.preemptions == 0
    bench.step()
    assert bench.step()[1] == (9, 1), "it goes on where it was: nothing is computed again"
    assert bench.scheduler.recomputed_tokens == 0
    bench.drain()


def test_p1_is_not_put_out_for_a_place():
    bench = Bench(slots=1)
    first = bench.add(range(4), rank=P1)
    bench.step()
    bench.add(range(4), rank=P0)
    assert set(bench.step()) == {0}
    assert first.preemptions == 0


def test_p2_is_not_put_out_for_p2():
    bench = Bench(slots=1)
    bench.add(range(4), rank=P2)
    bench.step()
    bench.add(range(4), rank=P2)
    assert set(bench.step()) == {0}
    assert bench.scheduler.preemptions == 0


# --- blocks --------------------------------------------------------------------------------------


def test_only_as_many_blocks_are_given_up_as_are_wanted():
    bench = Bench(blocks=8, slots=1)
    low = bench.add(range(20), new=4, rank=P2)
    bench.step()
    bench.add(range(12), new=2, rank=P0)
    assert set(bench.step()) == {1}
    assert (len(low.table), low.computed) == (5, 20), "a place was taken, and no block was short"
    bench.add(range(100, 116), new=2, rank=P0)
    while 2 not in bench.step():
        pass
    assert (len(low.table), low.computed) == (4, 16)
    assert bench.scheduler.recomputed_tokens == 4
    bench.drain()
    assert low.tokens[20:] == [7] * 4


def test_what_was_given_up_is_found_again_in_the_prefix_cache():
    bench = Bench(blocks=8, slots=1, caching=True)
    low = bench.add(range(20), new=4, rank=P2)
    bench.step()
    high = bench.add(range(100, 116), new=1, rank=P0)
    bench.step()
    assert high.tokens[16:] == [7]
    assert len(low.table) == 4
    # One of the four free ones holds the fifth block of the low one, and it was not needed.
    assert bench.step()[0][0] >= 16
    bench.drain()


def test_shared_blocks_do_not_count_twice_when_room_is_made():
    bench = Bench(blocks=6, slots=4, caching=True)
    bench.add(range(8), new=1)
    bench.drain()
    for _ in range(2):
        bench.add([*range(8), 9], new=6, rank=P2)
    bench.step()
    assert bench.pool.held == 4
    big = bench.add(range(50, 66), new=8, rank=P0)
    bench.drain()
    assert len(big.tokens) == 24


def test_cancelling_a_preempted_one_frees_what_it_kept():
    bench = Bench(slots=1)
    low = bench.add(range(8), rank=P2)
    bench.step()
    bench.add(range(4), new=1, rank=P0)
    bench.step()
    assert low.table
    bench.remove(low)
    assert bench.pool.held == 0
    assert low.table == []
    assert bench.scheduler.recomputed_tokens == 0


def test_blocks_that_only_the_given_tables_hold_would_be_free():
    pool = BlockPool(6, SIZE, b"")
    one, two = pool.take(3), pool.take(2)
    pool.hold(one[:1])
    assert pool.freed_by([one], []) == 2
    assert pool.freed_by([one, one[:1]], []) == 3
    assert pool.freed_by([one, two], two) == 2


# --- tenants and prefixes ------------------------------------------------------------------------


def test_a_prefix_is_not_shared_between_tenants():
    bench = Bench(caching=True)
    bench.add(range(12), new=1, tenant="a")
    bench.drain()
    bench.add([*range(12), 50], new=1, tenant="b")
    assert bench.step() == {1: (0, 13)}
    bench.add([*range(12), 50], new=1, tenant="a")
    assert bench.step() == {2: (12, 1)}


def test_tenant_roots_differ_and_nobodys_is_the_pools():
    roots = {tenant_root(b"r", tenant) for tenant in ("", "a", "b", "a\0b")}
    assert len(roots) == 4
    assert tenant_root(b"r", "") == b"r"
    assert chain_digest(tenant_root(b"r", "a"), [1]) != chain_digest(b"r", [1])


# --- seeded loads --------------------------------------------------------------------------------


def load(seed, *, blocks=24, slots=4, reserved=1, count=60, caching=True):
    """Run a random load of all classes and tenants to its end, with cancellations."""
    rng = random.Random(seed)
    bench = Bench(blocks=blocks, slots=slots, prefill=16, busy=6, caching=caching,
                  reserved=reserved)  # fmt: skip
    made, gone = [], set()
    while len(made) < count or bench.living:
        if len(made) < count and rng.random() < 0.35:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
            made.append(
                bench.add(prompt, rng.randrange(1, 20), rng.choice((P0, P1, P2, P2)),
                          rng.choice("abc"))
            )  # fmt: skip
        if made and rng.random() < 0.02:
            victim = rng.choice(made)
            gone.add(victim.arrival)
            bench.remove(victim)
        bench.step()
        assert bench.steps < 8_000, "the load never drained"
    return bench, [s for s in made if s.arrival not in gone]


@pytest.mark.parametrize("seed", range(12))
def test_every_load_ends_whole_with_nothing_held(seed):
    bench, left = load(seed, caching=bool(seed % 3), blocks=16 + seed, reserved=seed % 3)
    assert all(len(s.tokens) == s.tokens_max for s in left)
    assert all(set(s.tokens[s.prompt_tokens :]) == {7} for s in left)
    assert (bench.pool.held, bench.scheduler.waiting) == (0, 0)
    assert bench.pool.available == bench.pool.total


def test_such_loads_do_preempt():
    assert sum(load(seed)[0].scheduler.preemptions for seed in range(4)) > 10


def flood(reserved, slots=4):
    """P2 all the time, a P0 now and then; return the steps each P0 took to its first token."""
    rng = random.Random(3)
    bench, taken = Bench(blocks=64, slots=slots, prefill=32, busy=16, reserved=reserved), []
    for turn in range(400):
        while bench.scheduler.waiting < 6:
            bench.add([rng.randrange(9) for _ in range(24)], 30, P2, rng.choice("ab"))
        asked = bench.add([1] * 12, 4, P0) if turn % 10 == 0 else None
        began = bench.steps
        bench.step()
        if asked is not None:
            while asked.arrival not in bench.first_token_at:
                bench.step()
            taken.append(bench.first_token_at[asked.arrival] - began)
    return taken, bench


@pytest.mark.parametrize("reserved", [0, 1])
def test_p0_has_its_first_token_in_one_step_whatever_p2_does(reserved):
    taken, bench = flood(reserved)
    assert max(taken) == 1
    if reserved:
        assert bench.scheduler.preemptions == 0, "the reserved place was enough"
    else:
        assert bench.scheduler.preemptions > 0
    assert bench.scheduler.recomputed_tokens == 0, "a place costs no tokens"


def test_a_loud_tenant_does_not_slow_a_quiet_one():
    """One tenant keeps thirty requests waiting; another asks one at a time."""
    bench, waits = Bench(blocks=128, slots=4, prefill=32, busy=32), []
    mine, began = None, 0
    for _ in range(600):
        while bench.scheduler.waiting < 30:
            bench.add([1] * 8, 12, P1, "loud")
        if mine is None:
            mine, began = bench.add([2] * 8, 12, P1, "quiet"), bench.steps
        bench.step()
        if mine not in bench.living:
            waits.append(bench.steps - began)
            mine = None
    # Twelve steps of its own, at most one turn of four places before it, and its reading.
    assert max(waits) <= 12 + 12 + 3
    assert len(waits) > 20
