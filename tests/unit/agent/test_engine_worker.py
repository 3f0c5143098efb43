import threading

import pytest
import torch

from agent.engine.load import load_engine
from agent.engine.types import ContextExceeded, EngineClosed, QueueFull, Sampling
from kernels.cpu import AVAILABLE
from tests.unit.agent.engine_kit import (
    CONTEXT,
    TOKENS,
    VOCAB,
    Collected,
    collect,
    collect_all,
    random_prompt,
    steered,
    tensors,
    write_gguf,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # Without end tokens in reach the model goes on for as long as it is asked to.
    named = tensors(5, scale=2.0)
    named["model.embed_tokens.weight"][:3] = 0.0
    return write_gguf(tmp_path_factory.mktemp("m") / "m.gguf", named)


@pytest.fixture
def make(path):
    engines = []

    def make_engine(source=path, **options):
        engines.append(load_engine(str(source), **({"kv_tokens": 2048} | options)))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def says(make, tmp_path):
    """Return an engine that says a text, byte by byte, and a prompt that starts it."""

    def make_saying(text):
        ids = [TOKENS.index("A"), *(3 + byte for byte in text)]
        # Every byte once, since each token has one successor; token 2 ends the turn.
        engine = make(write_gguf(tmp_path / "said.gguf", steered([*ids, 2])))
        return engine, ids[:1]

    return make_saying


class Gate:
    """Holds the engine thread inside a callback until opened."""

    def __init__(self):
        self.entered = threading.Event()
        self.open = threading.Event()

    def take(self, _delta):
        self.entered.set()
        assert self.open.wait(60)


def is_idle(stats):
    return (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("cache", [True, False])
def test_eight_at_once_give_what_each_gives_alone(make, cache):
    engine = make(prefix_cache=cache, prefill_tokens=48, prefill_tokens_busy=7)
    requests = [
        (random_prompt(seed, 5 + 23 * seed), Sampling(24, temperature=0.0)) for seed in range(8)
    ]
    alone = [collect(engine, *request).token_ids for request in requests]
    together = [got.token_ids for got in collect_all(engine, requests)]
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > 1
    assert all(len(tokens) == 24 for tokens in alone)
    assert is_idle(engine.stats())


def test_a_seed_repeats_alone_and_in_company(make):
    engine = make()
    request = (random_prompt(1, 20), Sampling(30, temperature=1.0, top_p=0.9, seed=11))
    other = (random_prompt(2, 40), Sampling(30, temperature=1.3, seed=12))
    alone = collect(engine, *request).token_ids
    assert collect(engine, *request).token_ids == alone
    assert collect_all(engine, [other, request, other])[1].token_ids == alone
    assert collect(engine, request[0], Sampling(30, seed=12)).token_ids != alone


def test_without_a_seed_two_runs_differ(make):
    engine = make()
    request = (random_prompt(1, 8), Sampling(30, temperature=2.0))
    assert collect(engine, *request).token_ids != collect(engine, *request).token_ids


def test_preempted_sequences_give_the_same_tokens(make):
    requests = [(random_prompt(s, 30), Sampling(60, temperature=1.0, seed=s)) for s in range(5)]
    free = [got.token_ids for got in collect_all(make(), requests)]
    tight = make(kv_tokens=176)
    assert [got.token_ids for got in collect_all(tight, requests)] == free
    stats = tight.stats()
    assert stats.preemptions_total > 0
    assert is_idle(stats)


def test_a_repeated_prompt_is_taken_from_the_cache(make):
    engine = make()
    prompt, sampling = random_prompt(3, 100), Sampling(8, temperature=0.0)
    first = Collected()
    assert engine.submit(prompt, sampling, first.take).prompt_tokens == 100
    assert first.done.wait(60)
    again = Collected()
    generation = engine.submit(prompt, sampling, again.take)
    assert again.done.wait(60)
    assert generation.cached_tokens == 96
    assert again.token_ids == first.token_ids
    stats = engine.stats()
    assert (stats.prefix_tokens_queried_total, stats.prefix_tokens_hit_total) == (200, 96)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_step_that_reads_without_picking(make, dtype):
    """A prompt longer than a step: the steps before its last one want no logits."""
    if dtype == "int4" and not AVAILABLE:
        pytest.skip("capability: a CPU with AVX2 and the extension kernels.cpu")
    engine = make(dtype=dtype, prefill_tokens=32)
    got = collect(engine, random_prompt(6, 100), Sampling(3, temperature=0.0))
    assert (got.finish, len(got.token_ids)) == ("length", 3)


def test_another_tenants_prefix_is_not_found(make):
    engine = make()
    prompt, sampling = random_prompt(3, 100), Sampling(2, temperature=0.0)
    found = []
    for tenant in ("a", "b", "a", ""):
        got = Collected()
        generation = engine.submit(prompt, sampling, got.take, "P1", tenant)
        assert got.done.wait(60)
        found.append((generation.cached_tokens, got.token_ids))
    assert [cached for cached, _ in found] == [0, 0, 96, 0]
    assert len({tuple(tokens) for _, tokens in found}) == 1


def test_a_p2_that_lost_its_place_gives_the_same_tokens(make):
    engine = make(max_sequences=1)
    prompt, sampling = random_prompt(4, 40), Sampling(60, temperature=1.0, seed=4)
    alone = collect(engine, prompt, sampling).token_ids
    low, high = Collected(), Collected()
    begun = threading.Event()

    def take(delta):
        low.take(delta)
        if len(low.deltas) == 5:
            engine.submit(random_prompt(5, 8), Sampling(3, temperature=0.0), high.take, "P0")
            begun.set()

    engine.submit(prompt, sampling, take, "P2")
    assert begun.wait(60)
    assert high.done.wait(60)
    assert not low.done.is_set()
    assert low.done.wait(60)
    assert low.token_ids == alone
    stats = engine.stats()
    assert (stats.preemptions_total, stats.recomputed_tokens_total) == (1, 0)


def test_max_tokens_ends_with_length(make):
    got = collect(make(), random_prompt(1, 4), Sampling(5, temperature=0.0))
    assert (got.finish, len(got.token_ids), len(got.deltas)) == ("length", 5, 5)


def test_a_text_is_said_to_its_end(says):
    engine, prompt = says("Hi,über😀".encode())
    got = collect(engine, prompt, Sampling(50, temperature=0.0))
    assert (got.text, got.finish) == ("Hi,über😀", "stop")
    assert got.token_ids[-1] == 2
    assert all("\ufffd" not in delta.text for delta in got.deltas)


def test_a_cut_inside_a_character_leaves_no_broken_text(says):
    engine, prompt = says("é😀".encode())
    for count in range(1, 7):
        got = collect(engine, prompt, Sampling(count, temperature=0.0))
        assert got.text == "é😀".encode()[:count].decode("utf-8", "ignore")


def test_a_stop_string_over_tokens_ends_the_text(says):
    engine, prompt = says(b"one, TWx")
    got = collect(engine, prompt, Sampling(50, temperature=0.0, stop=(", TW",)))
    assert (got.text, got.finish) == ("one", "stop")
    assert len(got.token_ids) == len("one, TW")


def test_a_stop_string_that_never_comes_takes_nothing_away(says):
    engine, prompt = says(b"one, TW")
    got = collect(engine, prompt, Sampling(50, temperature=0.0, stop=(", TWx", "z")))
    assert (got.text, got.finish) == ("one, TW", "stop")


def test_cancelling_frees_slot_and_blocks_before_the_last_delta(make):
    engine = make()
    got, seen = Collected(), []

    def take(delta):
        if delta.finish_reason:
            seen.append(engine.stats())
        elif len(got.deltas) == 3:
            generation.cancel()
        got.take(delta)

    ready = threading.Event()

    def first(delta):
        assert ready.wait(60)
        take(delta)

    generation = engine.submit(random_prompt(1, 40), Sampling(400, temperature=0.0), first)
    ready.set()
    assert got.done.wait(60)
    assert got.finish == "cancelled"
    assert len(got.token_ids) < 10
    assert is_idle(seen[0])
    generation.cancel()
    assert engine.stats().finished_total["cancelled"] == 1


def test_cancelling_while_waiting_ends_at_once(make):
    engine = make(max_sequences=1)
    gate, waiting = Gate(), Collected()
    running = engine.submit(random_prompt(1, 4), Sampling(300, temperature=0.0), gate.take)
    assert gate.entered.wait(60)
    engine.submit(random_prompt(2, 4), Sampling(5), waiting.take).cancel()
    running.cancel()
    gate.open.set()
    assert waiting.done.wait(60)
    assert (waiting.finish, waiting.token_ids) == ("cancelled", [])


def test_others_go_on_when_one_is_cancelled(make):
    engine = make()
    prompt, sampling = random_prompt(2, 30), Sampling(40, temperature=0.0)
    alone = collect(engine, prompt, sampling).token_ids
    victim, survivor = Collected(), Collected()
    generation = engine.submit(random_prompt(9, 60), Sampling(400, temperature=0.0), victim.take)
    engine.submit(prompt, sampling, survivor.take)
    generation.cancel()
    assert survivor.done.wait(60)
    assert victim.done.wait(60)
    assert survivor.token_ids == alone


def test_a_full_queue_is_refused_and_recovers(make):
    engine = make(max_sequences=1, max_waiting=2)
    gate, waiting = Gate(), [Collected(), Collected()]
    running = engine.submit(random_prompt(1, 4), Sampling(300, temperature=0.0), gate.take)
    assert gate.entered.wait(60)
    for collected in waiting:
        engine.submit([5], Sampling(2, temperature=0.0), collected.take)
    with pytest.raises(QueueFull) as caught:
        engine.submit([5], Sampling(2), lambda _: None)
    assert caught.value.limit == 2
    assert engine.stats().waiting == 2
    running.cancel()
    gate.open.set()
    assert all(collected.done.wait(60) for collected in waiting)
    assert collect(engine, [5], Sampling(2, temperature=0.0)).finish == "length"


@pytest.mark.parametrize(("prompt", "new"), [(CONTEXT, 1), (1, CONTEXT), (500, 13)])
def test_a_request_beyond_the_context_names_the_numbers(make, prompt, new):
    with pytest.raises(ContextExceeded) as caught:
        make().submit([5] * prompt, Sampling(new), lambda _: None)
    error = caught.value
    assert (error.prompt_tokens, error.max_tokens, error.context_length) == (prompt, new, CONTEXT)


def test_a_request_that_fills_the_context_runs(make):
    got = collect(make(), random_prompt(4, CONTEXT - 3), Sampling(3, temperature=0.0))
    assert got.finish == "length"


def test_a_small_kv_cache_bounds_the_context(make):
    engine = make(kv_tokens=32)
    with pytest.raises(ContextExceeded) as caught:
        engine.submit([5] * 30, Sampling(3), lambda _: None)
    assert caught.value.context_length == 32
    assert collect(engine, [5] * 30, Sampling(2, temperature=0.0)).finish == "length"


@pytest.mark.parametrize(
    ("prompt", "qos", "message"),
    [([], "P1", "at least one token"), ([VOCAB], "P1", "token ids"), ([-1], "P1", "token ids"),
     ([5], "P3", "one of P0, P1, P2"), ([5], "", "one of")],
)  # fmt: skip
def test_a_bad_submission_is_named(make, prompt, qos, message):
    with pytest.raises(ValueError, match=message):
        make().submit(prompt, Sampling(1), lambda _: None, qos)


def test_a_better_class_is_served_first(make):
    engine = make(max_sequences=1)
    gate, order, left = Gate(), [], threading.Semaphore(0)
    running = engine.submit(random_prompt(1, 4), Sampling(300, temperature=0.0), gate.take)
    assert gate.entered.wait(60)

    def note(name):
        def take(_delta):
            order.append(name)
            left.release()

        return take

    for qos in ("P2", "P1", "P0"):
        engine.submit([7], Sampling(1, temperature=0.0), note(qos), qos)
    running.cancel()
    gate.open.set()
    assert all(left.acquire(timeout=60) for _ in range(3))
    assert order == ["P0", "P1", "P2"]


def test_a_failing_step_ends_its_sequences_and_nothing_else(make, monkeypatch):
    engine = make()
    whole = engine._model.forward

    def fail(_spans):
        monkeypatch.setattr(engine._model, "forward", whole)
        raise RuntimeError("secret text of the prompt")

    monkeypatch.setattr(engine._model, "forward", fail)
    got = collect(engine, [5, 6], Sampling(3, temperature=0.0))
    assert got.finish == "error"
    assert got.deltas[-1].error == "the model step failed (RuntimeError)"
    assert is_idle(engine.stats())
    assert collect(engine, [5, 6], Sampling(3, temperature=0.0)).finish == "length"


def test_a_model_of_nan_ends_with_an_error(make, tmp_path):
    named = tensors() | {"model.norm.weight": torch.full((32,), float("nan"))}
    engine = make(write_gguf(tmp_path / "nan.gguf", named))
    got = collect(engine, [5, 6], Sampling(3))
    assert (got.finish, got.deltas[-1].error) == ("error", "the model gave no finite logits")
    assert is_idle(engine.stats())


def test_a_callback_that_raises_costs_only_its_own_generation(make):
    engine = make()

    def explode(_delta):
        raise ValueError("a bug of the caller")

    engine.submit(random_prompt(1, 4), Sampling(300, temperature=0.0), explode)
    assert collect(engine, [5], Sampling(20, temperature=0.0)).finish == "length"
    assert engine.stats().finished_total["cancelled"] == 1


def test_closing_ends_everything_and_refuses_more(make):
    engine = make(max_sequences=1)
    running, waiting = Collected(), Collected()
    engine.submit(random_prompt(1, 4), Sampling(400, temperature=0.0), running.take)
    engine.submit(random_prompt(2, 4), Sampling(400, temperature=0.0), waiting.take)
    engine.close()
    engine.close()
    assert (running.finish, waiting.finish) == ("cancelled", "cancelled")
    with pytest.raises(EngineClosed):
        engine.submit([5], Sampling(1), lambda _: None)
    assert is_idle(engine.stats())


def test_stats_count_tokens_and_endings(make):
    engine = make()
    collect_all(engine, [([5, 6, 7], Sampling(4, temperature=0.0)) for _ in range(3)])
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (9, 12)
    assert stats.finished_total == {"stop": 0, "length": 3, "cancelled": 0, "error": 0}
    assert stats.steps_total >= 4
    assert stats.step_seconds_total > 0
    assert (stats.kv_blocks_total, stats.sequences_limit, stats.waiting_limit) == (128, 16, 256)
