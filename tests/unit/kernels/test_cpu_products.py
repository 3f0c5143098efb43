"""Products with small weights on this CPU, against float64 of what each format says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kernels import cpu, quant, reference
from tests.unit.kernels import cuda_kit as kit

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="capability: AVX2 and kernels.cpu")

THREADS = (1, 2, 3)


def linear(matrix, x, threads=2):
    given = kit.guarded(x)
    y = kit.Guarded((x.shape[0], matrix.rows), np.float32)
    matrix.linear(given.array, y.array, threads)
    given.check()
    return y.check()


def exact(w, x):
    return x.astype(np.float64) @ w.astype(np.float64).T


def close(got, w, x):
    # With four bits x is rounded to 16 bits: at most 2^-16 of a block's greatest.
    size = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(
        w.astype(np.float64), axis=1
    )
    return (np.abs(got - exact(w, x)) <= 3e-5 * size + 1e-12).all()


def floats(packed):
    """Return a packed matrix's weights before they are rounded to FP16."""
    halves = packed.meta.view("<f2").astype(np.float64)
    group = np.arange(packed.k) // packed.group
    scale, offset = halves[:, 0::2].T[:, group], halves[:, 1::2].T[:, group]
    q = reference.codes(packed).astype(np.float64)
    return q * scale + offset if packed.minima else (q - offset) * scale


def rows_of_x(rng, m, k):
    return rng.normal(0, 1, (m, k)).astype(np.float32)


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("group", quant.GROUPS)
def test_four_bits_at_every_count_of_rows(group, minima):
    rng = np.random.default_rng(group)
    for rows, k in ((1, 32), (7, 96), (10, 576), (5, 160)):
        packed = kit.matrix(rng, rows, k, group, minima=minima)
        matrix = cpu.four_bits(packed)
        for m in (*range(1, 18), 31, 32, 33, 45):
            x = rows_of_x(rng, m, k)
            assert close(linear(matrix, x, THREADS[m % 3]), floats(packed), x), (rows, k, m)


@pytest.mark.parametrize("minima", [False, True])
def test_scale_and_offset_that_cancel_leave_what_they_should(minima):
    rng = np.random.default_rng(6)
    q = rng.integers(14, 16, (4, 96), np.uint8)
    scale = np.full((4, 3), 0.5, np.float16)
    offset = np.full((4, 3), -7.5 if minima else 15, np.float16)
    packed = quant.pack(q, scale, offset, 32, minima=minima)
    x = rows_of_x(rng, 5, 96)
    assert close(linear(cpu.four_bits(packed), x), floats(packed), x)


def test_blocks_of_x_of_any_size_and_what_is_not_finite():
    rng = np.random.default_rng(7)
    packed = kit.matrix(rng, 6, 128, 32, minima=True, extremes=False)
    matrix = cpu.four_bits(packed)
    x = rows_of_x(rng, 4, 128) * np.repeat(np.float32([1e-38, 1e-3, 0, 1e20]), 32)
    assert close(linear(matrix, x), floats(packed), x)
    for bad in (np.nan, np.inf, -np.inf):
        x[2, 77] = bad
        finite = np.isfinite(linear(matrix, x)).all(axis=1)
        assert finite.tolist() == [True, True, False, True]


@pytest.mark.parametrize("small", [False, True])
def test_a_row_has_the_same_bits_whatever_it_is_multiplied_with(small):
    rng = np.random.default_rng(8)
    packed = kit.matrix(rng, 11, 192, 32)
    matrix = cpu.four_bits(packed) if small else cpu.halves(floats(packed).astype(np.float16))
    x = rows_of_x(rng, 45, 192)
    whole = linear(matrix, x)
    for m in (1, 2, 3, 4, 7, 8, 31):
        pieces = [linear(matrix, x[at : at + m].copy()) for at in range(0, 45, m)]
        assert np.array_equal(np.concatenate(pieces), whole), m


def test_halves_at_every_count_of_rows():
    rng = np.random.default_rng(1)
    for rows, k in ((1, 32), (6, 64), (11, 576)):
        w = rng.normal(0, 1, (rows, k)).astype(np.float16)
        matrix = cpu.halves(w)
        for m in (1, 2, 3, 8, 15):
            x = rows_of_x(rng, m, k)
            assert close(linear(matrix, x, THREADS[m % 3]), w, x)


def test_gguf_q4_1_loses_nothing():
    rng = np.random.default_rng(2)
    w = rng.normal(0, 0.05, (9, 192)).astype(np.float32)
    raw = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q4_1)
    matrix = cpu.from_q4_1(raw)
    out = np.empty((9, 192), np.float32)
    matrix.unpack(out, 2)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
    # gguf rounds the product and the sum, a multiply-add once: the last bit may differ.
    assert np.abs(out - expected).max() <= 2.0**-23 * np.abs(expected).max()
    x = rows_of_x(rng, 3, 192)
    assert close(linear(matrix, x), out, x)


@pytest.mark.parametrize("minima", [False, True])
def test_unpacked_weights_are_what_products_use(minima):
    packed = kit.matrix(np.random.default_rng(3), 13, 576, 128, minima=minima)
    out = kit.Guarded((13, 576), np.float32)
    cpu.four_bits(packed).unpack(out.array, 2)
    assert np.allclose(out.check(), floats(packed), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("m", [1, 2, 5, 8, 40])
def test_a_whole_ffn(m):
    rng = np.random.default_rng(m)
    hidden, gates = 96, 160
    wide = kit.matrix(rng, 2 * gates, hidden, 32, minima=True)
    narrow = kit.matrix(rng, hidden, gates, 64)
    x = rows_of_x(rng, m, hidden)
    middle, y = kit.Guarded((m, gates), np.float32), kit.Guarded((m, hidden), np.float32)
    for threads in THREADS:
        y.array.fill(np.nan)
        cpu.four_bits(wide).ffn(cpu.four_bits(narrow), x, middle.array, y.array, threads)
        both = exact(floats(wide), x)
        between = reference.silu(both[:, :gates]) * both[:, gates:]
        expected = between @ floats(narrow).T
        middle.check()
        assert np.abs(y.check() - expected).max() <= 5e-4 * np.abs(expected).max()


def test_sizes_that_do_not_belong_together_are_refused():
    packed = kit.matrix(np.random.default_rng(4), 8, 64, 32)
    matrix = cpu.four_bits(packed)
    x, y = np.zeros((2, 64), np.float32), np.zeros((2, 8), np.float32)
    for given, target, threads in (
        (x[:, :63].copy(), y, 1), (x, y[:1], 1), (x[:0], y[:0], 1), (x, y, 0), (x, y, 10_000),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="belong together"):
            matrix.linear(given, target, threads)
    with pytest.raises(ValueError, match="belong together"):
        matrix.unpack(np.zeros((8, 63), np.float32), 1)
    with pytest.raises(ValueError, match="belong together"):
        matrix.ffn(matrix, x, x, y, 1)
    with pytest.raises((ValueError, BufferError)):
        matrix.linear(x[:, ::2], y, 1)
    with pytest.raises(quant.QuantError, match="multiple of 32"):
        cpu.four_bits(kit.matrix(np.random.default_rng(5), 3, 40, 32))
    with pytest.raises(ValueError, match="belong together"):
        cpu.halves(np.zeros((3, 33), np.float16))
