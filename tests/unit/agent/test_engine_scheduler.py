import random

import pytest

from tests.unit.agent.scheduler_kit import Bench


def test_a_prompt_is_read_in_bounded_pieces_then_decoded():
    bench = Bench(prefill=6)
    bench.add(range(10))
    assert [bench.step()[0] for _ in range(4)] == [(0, 6), (6, 4), (10, 1), (11, 1)]


def test_a_long_prompt_does_not_stall_a_decode():
    bench = Bench(prefill=64, busy=5)
    bench.add(range(3), new=20)
    bench.step()
    bench.add(range(40))
    for _ in range(8):
        step = bench.step()
        assert step[0][1] == 1
        assert step[1][1] <= 5


def test_sequences_join_and_leave_between_steps():
    bench = Bench()
    bench.add(range(4), new=2)
    bench.step()
    bench.add(range(5), new=3)
    assert set(bench.step()) == {0, 1}
    assert set(bench.step()) == {1}
    bench.step()
    assert bench.step() == {}
    assert bench.scheduler.pool.held == 0


def test_classes_are_admitted_in_order():
    bench = Bench(slots=1)
    low, normal, high = (bench.add(range(4), new=1, rank=rank) for rank in (2, 1, 0))
    order = [next(iter(bench.step())) for _ in range(3)]
    assert order == [high.arrival, normal.arrival, low.arrival]


def test_a_class_is_served_in_order_of_arrival():
    bench = Bench(slots=1)
    for _ in range(3):
        bench.add(range(4), new=1)
    assert [next(iter(bench.step())) for _ in range(3)] == [0, 1, 2]


def test_prefill_budget_goes_to_the_better_class_first():
    bench = Bench(prefill=8)
    bench.add(range(8), rank=2)
    bench.add(range(8), rank=0)
    assert bench.step() == {1: (0, 8)}


def test_slots_bound_what_runs():
    bench = Bench(slots=2)
    for _ in range(5):
        bench.add(range(2))
    bench.step()
    assert (len(bench.scheduler.running), bench.scheduler.waiting) == (2, 3)


def test_the_worst_sequence_is_preempted_and_finishes_later():
    bench = Bench(blocks=6)
    first = bench.add(range(8), new=10)
    second = bench.add(range(8), new=10, rank=2)
    steps = 0
    while first in bench.scheduler.running or second.tokens[8:] != [7] * 10:
        bench.step()
        steps += 1
        assert steps < 100
    assert first.preemptions == 0
    assert second.preemptions >= 1
    assert bench.scheduler.pool.held == 0


def test_a_better_class_takes_blocks_from_a_worse_one():
    bench = Bench(blocks=4)
    low = bench.add(range(12), new=4, rank=2)
    bench.step()
    bench.add(range(12), new=4, rank=0)
    assert 1 in bench.step()
    assert low.preemptions == 1


def test_the_same_class_waits_and_nobody_is_preempted_for_it():
    bench = Bench(blocks=4)
    first = bench.add(range(12), new=4)
    bench.step()
    bench.add(range(12), new=4)
    assert set(bench.step()) == {0}
    assert first.preemptions == 0


def test_nobody_is_preempted_in_vain():
    bench = Bench(blocks=6)
    bench.add(range(14), new=2, rank=0)
    low = bench.add(range(4), new=2, rank=2)
    bench.step()
    bench.add(range(16), new=4, rank=1)
    bench.step()
    assert low.preemptions == 0


def test_a_shared_prefix_is_computed_once():
    bench = Bench(caching=True)
    bench.add(range(12), new=1)
    bench.step()
    bench.add([*range(12), 50, 51], new=1)
    assert bench.step() == {1: (12, 2)}
    assert (bench.scheduler.prefix_queried, bench.scheduler.prefix_hit) == (26, 12)


def test_an_identical_prompt_still_computes_its_last_token():
    bench = Bench(caching=True)
    for _ in range(2):
        bench.add(range(12), new=1)
        last = bench.step()
    assert last == {1: (8, 4)}


def test_removing_a_waiting_sequence_leaves_the_others():
    bench = Bench(slots=1)
    bench.add(range(4))
    gone = bench.add(range(4))
    bench.step()
    bench.remove(gone)
    bench.remove(gone)
    assert bench.scheduler.waiting == 0
    assert set(bench.step()) == {0}


def test_a_sequence_that_could_never_fit_is_our_own_bug():
    with pytest.raises(AssertionError):
        Bench(blocks=2).add(range(8), new=1)


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_always_drain(seed):
    rng = random.Random(seed)
    bench = Bench(blocks=10, slots=4, prefill=16, busy=4, caching=bool(seed % 2))
    sequences, steps = [], 0
    while len(sequences) < 40 or bench.scheduler.running or bench.scheduler.waiting:
        if len(sequences) < 40 and rng.random() < 0.3:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 24))]
            sequences.append(bench.add(prompt, new=rng.randrange(1, 16), rank=rng.randrange(3)))
        if sequences and rng.random() < 0.02:
            bench.remove(rng.choice(sequences))
        bench.step()
        steps += 1
        assert steps < 5_000, "the load never drained"
    assert bench.scheduler.pool.held == 0
    assert bench.scheduler.preemptions > 0
