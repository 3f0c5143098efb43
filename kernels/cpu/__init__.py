"""Products of FP32 with four-bit or FP16 weights on this CPU, for a few rows at a time.

What the GPU's kernels do, where there is no GPU: a decode step is bound by the bytes of weights.
Sums are FP32, and a weight is turned into FP32 exactly as its format says, so the result is that of
the unpacked weights up to the order of summation. For many rows `unpack` and a BLAS are faster.

Needs AVX2, FMA and F16C, and the extension: `AVAILABLE` says whether both are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kernels import quant

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    from kernels.cpu._products import Weights

    Float = NDArray[np.float32]

_products: ModuleType | None
try:
    from kernels.cpu import _products
except ImportError:
    _products = None

AVAILABLE: Final = _products is not None and _products.supported()
"""Whether products can be computed here."""
BLOCK: Final = 32
"""k is a multiple of this."""


class Matrix:
    """Weights [rows, k] that are kept small. Made by `four_bits`, `from_q4_1` or `halves`."""

    __slots__ = ("_weights", "k", "nbytes", "rows")

    def __init__(self, weights: Weights, rows: int, k: int, nbytes: int) -> None:
        self._weights = weights
        self.rows = rows
        self.k = k
        self.nbytes = nbytes

    def linear(self, x: Float, y: Float, threads: int) -> None:
        """Compute y [m, rows] = x [m, k] times the weights; both contiguous FP32."""
        assert _products is not None, "a Matrix is made by the extension"
        _products.linear(self._weights, x, y, threads)

    def unpack(self, out: Float, threads: int) -> None:
        """Write the weights as FP32 into `out` [rows, k]."""
        assert _products is not None, "a Matrix is made by the extension"
        _products.unpack(self._weights, out, threads)

    def ffn(self, down: Matrix, x: Float, middle: Float, y: Float, threads: int) -> None:
        """Compute y = down(silu(gate) * up), where this holds all gates and then all ups.

        `middle` [m, gates] is room for what lies between.
        """
        assert _products is not None, "a Matrix is made by the extension"
        _products.ffn(self._weights, down._weights, x, middle, y, threads)


def halves(values: NDArray[np.float16]) -> Matrix:
    """Return FP16 weights; the array is kept, not copied."""
    assert _products is not None, "callers ask AVAILABLE first"
    rows, k = values.shape
    return Matrix(_products.halves(values, rows, k), rows, k, values.nbytes)


def _made(codes: NDArray[np.uint8], meta: NDArray[np.uint32], group: int, *, zeros: bool) -> Matrix:
    assert _products is not None, "callers ask AVAILABLE first"
    rows, k = codes.shape[0], codes.shape[1] * 2
    made = _products.four_bits(codes, meta, rows, k, group.bit_length() - 1, zeros)
    return Matrix(made, rows, k, codes.nbytes + meta.nbytes)


def from_q4_1(raw: NDArray[np.uint8]) -> Matrix:
    """Return the weights of GGUF's Q4_1 rows [rows, k / 32 * 20]; nothing is lost.

    A block of 32: FP16 scale, FP16 minimum, 16 bytes of codes (low nibbles first).
    """
    blocks = raw.reshape(raw.shape[0], -1, 20)
    meta = np.ascontiguousarray(blocks[:, :, :4]).view(np.uint32)[:, :, 0]
    codes = np.ascontiguousarray(blocks[:, :, 4:]).reshape(raw.shape[0], -1)
    return _made(codes, np.ascontiguousarray(meta), BLOCK, zeros=False)


def four_bits(packed: quant.Packed) -> Matrix:
    """Return the weights of a packed matrix; its k must be a multiple of 32."""
    if packed.k % BLOCK:
        raise quant.QuantError(f"k = {packed.k} is no multiple of {BLOCK}")
    q = quant.unpack(packed).reshape(packed.rows, -1, 2, 16)
    codes = (q[:, :, 0] | q[:, :, 1] << 4).astype(np.uint8).reshape(packed.rows, -1)
    meta = np.ascontiguousarray(packed.meta.T)
    return _made(codes, meta, packed.group, zeros=not packed.minima)
