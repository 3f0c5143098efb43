"""Four bits to FP16 through the host build: bit-equal to NumPy, for every shape and odd value."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import quant, reference
from tests.unit.kernels import cuda_kit as kit


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("group", quant.GROUPS)
def test_bits_equal_numpy_on_fuzzed_shapes(group, minima):
    rng = np.random.default_rng(group + minima)
    shapes = [(1, 1), (3, 7), (2, 8), (5, group), (4, group + 1), (7, 576), (9, 1000), (3, 1024)]
    shapes += [(int(rng.integers(1, 20)), int(rng.integers(1, 1024))) for _ in range(12)]
    for rows, k in shapes:
        packed = kit.matrix(rng, rows, k, group, minima=minima)
        assert kit.same_bits(kit.run_dequant(packed), reference.dequant(packed)), (rows, k)


@pytest.mark.parametrize("zero", [0, 15])
def test_every_code_at_the_extreme_zero_points(zero):
    q = np.tile(np.arange(16, dtype=np.uint8), (2, 8))
    scale = np.array([[0.37], [-1.9]], np.float16)
    offset = np.full((2, 1), zero, np.float16)
    packed = quant.pack(q, scale, offset, 128, minima=False)
    expected = (q.astype(np.float16) - np.float16(zero)) * scale  # NumPy's own half arithmetic
    assert kit.same_bits(kit.run_dequant(packed), expected)


def test_every_scale_there_is_with_every_difference():
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = scales[np.isfinite(scales)]
    for code, zero in ((0, 15), (1, 0), (7, 4), (15, 0), (5, 5)):
        q = np.full((scales.size, 1), code, np.uint8)
        offset = np.full((scales.size, 1), zero, np.float16)
        packed = quant.pack(q, scales[:, None], offset, 32, minima=False)
        with np.errstate(over="ignore"):
            expected = (q.astype(np.float16) - np.float16(zero)) * scales[:, None]
        got = kit.run_dequant(packed)
        assert kit.same_bits(got, expected)
        assert kit.same_bits(got, reference.dequant(packed))


def test_minima_round_once_where_two_roundings_would_differ():
    rng = np.random.default_rng(5)
    scale = rng.integers(0, 0x7C00, (40_000, 1), np.uint16).view(np.float16)
    least = (rng.integers(0, 0xFC00, (40_000, 1), np.uint16) | 0).view(np.float16)
    least[~np.isfinite(least)] = 0
    q = rng.integers(0, 16, (40_000, 1), np.uint8)
    packed = quant.pack(q, scale, least, 32, minima=True)
    expected = reference.dequant(packed)
    with np.errstate(over="ignore", invalid="ignore"):
        twice = q.astype(np.float16) * scale + least
    assert not np.array_equal(twice.view(np.uint16), expected.view(np.uint16))
    assert kit.same_bits(kit.run_dequant(packed), expected)


def test_order_of_threads_does_not_matter():
    packed = kit.matrix(np.random.default_rng(3), 11, 333, 64)
    assert kit.same_bits(
        kit.run_dequant(packed, backend=kit.host(falling=True)), kit.run_dequant(packed)
    )
