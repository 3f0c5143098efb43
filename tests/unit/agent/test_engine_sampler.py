import collections

import pytest
import torch

from agent.engine.sampler import pick, uniform
from agent.engine.types import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -50.0])


def draws(count, logits=LOGITS, seed=1, **sampling):
    settings = Sampling(1, **sampling)
    return [pick(logits, settings, seed, index) for index in range(count)]


def test_temperature_zero_takes_the_largest():
    assert set(draws(20, temperature=0.0)) == {0}


def test_temperature_zero_takes_the_first_of_equals():
    assert draws(1, torch.tensor([0.0, 3.0, 3.0]), temperature=0.0) == [1]


def test_frequencies_follow_the_probabilities():
    counts = collections.Counter(draws(4_000))
    expected = torch.softmax(LOGITS.double(), 0)
    for token in range(4):
        assert abs(counts[token] / 4_000 - float(expected[token])) < 0.03
    assert counts[4] == 0


def test_a_seed_repeats_and_another_differs():
    assert draws(50, seed=7) == draws(50, seed=7)
    assert draws(50, seed=7) != draws(50, seed=8)


def test_a_draw_depends_on_its_index_alone():
    settings = Sampling(1)
    assert pick(LOGITS, settings, 3, 17) == draws(18, seed=3)[17]


def test_a_slightly_different_batch_draws_the_same_token():
    noisy = LOGITS + torch.randn(5, generator=torch.Generator().manual_seed(0)) * 1e-6
    assert draws(300) == draws(300, noisy)


def test_draws_are_uniform_in_the_half_open_interval():
    values = [uniform(5, index) for index in range(2_000)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.03


def test_a_tiny_top_p_leaves_the_likeliest():
    assert set(draws(100, top_p=1e-9)) == {0}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    # Probabilities: 0.644, 0.237, 0.087, 0.032.
    assert set(draws(400, top_p=0.64)) == {0}
    assert set(draws(400, top_p=0.65)) == {0, 1}
    assert set(draws(400, top_p=0.9)) == {0, 1, 2}


def test_top_p_of_one_keeps_all():
    assert set(draws(2_000, top_p=1.0)) == {0, 1, 2, 3}


def test_top_p_wider_than_the_first_look_still_holds():
    flat = torch.zeros(5_000)
    seen = draws(1_000, flat, top_p=0.5)
    assert len(set(seen)) > 512
    assert max(collections.Counter(seen).values()) < 20


def test_equal_logits_in_one_vocabulary_entry():
    assert draws(3, torch.tensor([5.0])) == [0, 0, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature):
    assert set(draws(50, LOGITS * 1e6, temperature=temperature)) == {0}


def test_a_high_temperature_flattens():
    hot, cold = (collections.Counter(draws(2_000, temperature=t))[0] for t in (2.0, 0.5))
    assert hot < cold


def test_a_masked_token_is_never_drawn():
    masked = torch.tensor([0.0, float("-inf"), 0.0])
    assert set(draws(300, masked)) == {0, 2}


@pytest.mark.parametrize(
    "logits",
    [[float("nan")] * 3, [1.0, float("nan"), 0.0], [float("-inf")] * 3, [float("inf"), 0.0, 0.0]],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_number_are_an_error(logits, temperature):
    with pytest.raises(ArithmeticError, match="no finite logits"):
        draws(1, torch.tensor(logits), temperature=temperature)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
        ("top_p", 0.0), ("top_p", 1.1), ("top_p", float("nan")),
        ("stop", ("",)), ("stop", ("x",) * 17),
    ],
)  # fmt: skip
def test_sampling_outside_its_bounds_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{"max_tokens": 1, field: value})
