"""Matrices, guarded buffers and the host build, for the tests of the CUDA kernels."""

from __future__ import annotations

import shutil
from functools import cache

import numpy as np
import pytest

from kernels import build, launch, plans, quant

GUARD_BYTES = 256
GUARD = 0xA5


@cache
def host(*, falling=False):
    if shutil.which("g++") is None:
        pytest.skip("capability: g++")
    return launch.HostKernels(build.host(), falling=falling)


def run_dequant(packed, *, backend=None):
    backend = backend or host()
    w, guards = aligned(packed)
    out = Guarded((packed.rows, packed.k), np.float16)
    backend.run(plans.dequant(backend, w, out.array))
    for guard in guards:
        guard.check()
    return out.check()


def run_gemv(packed, x, *, paired=False, backend=None):
    backend = backend or host()
    w, guards = aligned(packed)
    given = guarded(x)
    outputs = packed.rows // 2 if paired else packed.rows
    out = Guarded((x.shape[0], outputs), np.float16)
    backend.run(plans.gemv(backend, w, given.array, out.array, paired=paired))
    for guard in (*guards, given):
        guard.check()
    return out.check()


def run_gemm(packed, x, *, shares=1, paired=False, backend=None, times=1):
    backend = backend or host()
    w, guards = aligned(packed)
    given = guarded(x)
    m, outputs = x.shape[0], packed.rows // 2 if paired else packed.rows
    out = Guarded((m, outputs), np.float16)
    floats, counts = plans.gemm_workspace(outputs, m, shares, paired=paired)
    partial, counters = Guarded((floats,), np.float32), Guarded((counts,), np.uint32, 0)
    plan = plans.gemm(
        backend, w, given.array, out.array,
        partial=partial.array, counters=counters.array, shares=shares, paired=paired,
    )  # fmt: skip
    for _ in range(times):
        backend.run(plan)
    for guard in (*guards, given, partial):
        guard.check()
    assert not counters.check().any(), "counters are left as they were found"
    return out.check()


def close(got, exact, size):
    """Return whether all is within 1e-3 of |x||w|, or of what FP16 itself can say."""
    error = np.abs(got.astype(np.float64) - exact)
    return (error <= 1e-3 * size + np.abs(exact) * 2.0**-10 + 2.0**-24).all()


def half_rows(rng, m, k):
    return rng.normal(0, 1, (m, k)).astype(np.float16)


class Guarded:
    """An array with bands before and after it that a kernel must leave alone."""

    def __init__(self, shape, dtype, fill=None):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.full(size + 2 * GUARD_BYTES + 16, GUARD, np.uint8)
        start = GUARD_BYTES + -(raw.ctypes.data + GUARD_BYTES) % 16
        self._raw, self._start, self._size = raw, start, size
        self.array = raw[start : start + size].view(dtype).reshape(shape)
        if fill is not None:
            self.array[...] = fill

    def check(self):
        before, after = self._raw[: self._start], self._raw[self._start + self._size :]
        assert (before == GUARD).all(), "written before the array"
        assert (after == GUARD).all(), "written after the array"
        return self.array


def guarded(array):
    return Guarded(array.shape, array.dtype, array)


def matrix(rng, rows, k, group, *, minima=False, extremes=True):
    """Return a random packed matrix; with `extremes` some zeros, subnormal and 0 scales."""
    groups = -(-k // group)
    q = rng.integers(0, 16, (rows, k), np.uint8)
    scale = rng.uniform(-0.02, 0.02, (rows, groups)).astype(np.float16)
    offset = (
        rng.uniform(-0.2, 0.2, (rows, groups)).astype(np.float16)
        if minima
        else rng.integers(0, 16, (rows, groups)).astype(np.float16)
    )
    if extremes:
        pick = rng.integers(0, 8, (rows, groups))
        scale[pick == 0] = 0.0
        scale[pick == 1] = np.float16(5.96e-8)  # the least subnormal
        scale[pick == 2] = np.float16(-3.1e-5)
        if not minima:
            offset[pick == 3] = 0
            offset[pick == 4] = 15
    return quant.pack(q, scale, offset, group, minima=minima)


def aligned(packed):
    """Return the same matrix with its arrays in guarded, 16-byte aligned memory, and the guards."""
    codes, meta = guarded(packed.codes), guarded(packed.meta)
    copy = quant.Packed(codes.array, meta.array, packed.k, packed.group, packed.minima)
    return copy, (codes, meta)


def same_bits(left, right):
    return np.array_equal(left.view(np.uint16), right.view(np.uint16))
