"""Products with four-bit weights through the host build, against float64 of the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import launch, plans, quant, reference
from tests.unit.kernels import cuda_kit as kit

# (rows of x, rows of weights, k): tails of every kind, and the shapes of the default model's FFN.
SHAPES = [(1, 1, 1), (2, 7, 31), (3, 9, 40), (4, 17, 576), (1, 64, 1000), (4, 24, 129)]
GEMM_SHAPES = [(1, 8, 8), (5, 65, 576), (8, 64, 128), (9, 70, 1024), (16, 33, 264), (33, 66, 520)]


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("group", quant.GROUPS)
def test_gemv_equals_the_oracle_at_odd_shapes(group, minima):
    rng = np.random.default_rng(group + 1)
    for m, rows, k in SHAPES:
        packed = kit.matrix(rng, rows, k, group, minima=minima)
        x = kit.half_rows(rng, m, k)
        size = reference.scale_of(packed, x)
        for falling in (False, True):
            got = kit.run_gemv(packed, x, backend=kit.host(falling=falling))
            assert kit.close(got, reference.linear(packed, x), size), (m, rows, k, falling)


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("group", quant.GROUPS)
def test_gemm_equals_the_oracle_at_odd_shapes(group, minima):
    rng = np.random.default_rng(group + 2)
    for m, rows, k in GEMM_SHAPES:
        packed = kit.matrix(rng, rows, k, group, minima=minima)
        x = kit.half_rows(rng, m, k)
        size = reference.scale_of(packed, x)
        for falling in (False, True):
            got = kit.run_gemm(packed, x, backend=kit.host(falling=falling))
            assert kit.close(got, reference.linear(packed, x), size), (m, rows, k, falling)


@pytest.mark.parametrize(("m", "shares"), [(3, 2), (16, 3), (64, 4)])
def test_gemm_shared_between_blocks_is_whole_and_repeats(m, shares):
    rng = np.random.default_rng(m)
    packed = kit.matrix(rng, 70, 1000, 64)
    x = kit.half_rows(rng, m, 1000)
    got = kit.run_gemm(packed, x, shares=shares, times=2)
    assert kit.close(got, reference.linear(packed, x), reference.scale_of(packed, x))
    again = kit.run_gemm(packed, x, shares=shares, backend=kit.host(falling=True))
    assert kit.same_bits(got, again)


@pytest.mark.parametrize("run", [kit.run_gemv, kit.run_gemm])
@pytest.mark.parametrize(("m", "outputs", "k"), [(1, 5, 72), (4, 40, 576), (2, 96, 1024)])
def test_gate_and_up_in_one_launch(run, m, outputs, k):
    rng = np.random.default_rng(outputs)
    packed = kit.matrix(rng, 2 * outputs, k, 128, extremes=False)
    x = kit.half_rows(rng, m, k)
    exact = reference.gate_up(packed, x)
    size = reference.scale_of(packed, x)
    # An error of either factor is carried by the other.
    both = np.abs(reference.linear(packed, x)).max() + 1.0
    for falling in (False, True):
        got = run(packed, x, paired=True, backend=kit.host(falling=falling)).astype(np.float64)
        bound = 1e-3 * np.maximum(size[:, :outputs], size[:, outputs:]) * both
        assert (np.abs(got - exact) <= bound + np.abs(exact) * 2.0**-10).all()
        assert np.abs(got - exact).max() <= 4e-3 * np.abs(exact).max()


def test_two_launches_are_a_whole_ffn():
    rng = np.random.default_rng(9)
    hidden, ffn, m = 144, 384, 5
    wide = kit.matrix(rng, 2 * ffn, hidden, 32, extremes=False)
    narrow = kit.matrix(rng, hidden, ffn, 64, extremes=False)
    x = kit.half_rows(rng, m, hidden)
    got = kit.run_gemm(narrow, kit.run_gemm(wide, x, paired=True), shares=1).astype(np.float64)
    middle = reference.gate_up(wide, x)
    exact = middle @ reference.dequant(narrow).astype(np.float64).T
    assert np.abs(got - exact).max() <= 2e-3 * np.abs(exact).max()


def test_kernels_agree_with_each_other_to_the_last_bits_of_fp16():
    rng = np.random.default_rng(11)
    packed = kit.matrix(rng, 64, 576, 128)
    x = kit.half_rows(rng, 4, 576)
    one, two = (
        kit.run_gemv(packed, x).astype(np.float64),
        kit.run_gemm(packed, x).astype(np.float64),
    )
    assert np.abs(one - two).max() <= 2.0**-10 * np.abs(one).max()


def test_x_beyond_k_is_never_counted():
    """The padding of a row holds codes; with a zero point they are not zero weights."""
    packed = quant.pack(
        np.zeros((8, 33), np.uint8), np.ones((8, 2), np.float16), np.full((8, 2), 15, np.float16),
        32, minima=False,
    )  # fmt: skip
    got = kit.run_gemv(packed, np.ones((1, 33), np.float16))
    assert (got == -15.0 * 33).all()


def test_plans_refuse_what_would_read_or_write_beside_an_array():
    backend = kit.host()
    rng = np.random.default_rng(1)
    packed, _ = kit.aligned(kit.matrix(rng, 16, 64, 32))
    x, out = kit.guarded(kit.half_rows(rng, 2, 64)).array, kit.Guarded((2, 16), np.float16).array
    odd = kit.Guarded((2 * 64 + 1,), np.float16).array[1:].reshape(2, 64)
    for words, given, target in (
        ("x has shape", x[:, :32], out),
        ("x has type", x.astype(np.float32), out),
        ("x is not contiguous", np.asfortranarray(x), out),
        ("past a multiple of 16", odd, out),
        ("out has shape", x, out[:1]),
        ("neither NumPy's", x.tolist(), out),
    ):
        with pytest.raises(launch.LaunchError, match=words):
            plans.gemv(backend, packed, given, target)
    wide = kit.guarded(kit.half_rows(rng, 5, 64)).array
    with pytest.raises(launch.LaunchError, match="takes 1 to 4"):
        plans.gemv(backend, packed, wide, kit.Guarded((5, 16), np.float16).array)
    small = np.zeros(4, np.float32)
    with pytest.raises(launch.LaunchError, match="at least"):
        plans.gemm(
            backend, packed, x, out, partial=small, counters=np.zeros(1, np.uint32), shares=1
        )
