"""Products of FP32 with four-bit or FP16 weights on this CPU, for a few rows at a time.

What the GPU's kernels do, where there is no GPU: a decode step is bound by the bytes of weights.
Weights are what their format says, exactly; with four-bit ones x is rounded to 16 bits a block of
32, which costs some 1e-5 of |x||w|. Sums are FP32. For many rows `unpack` and a BLAS are faster.

Needs AVX2, FMA and F16C, and the extension: `AVAILABLE` says whether both are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kernels import quant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from kernels.cpu._products import Layer, Weights

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
STEP_ROWS_MAX: Final = 32
"""Tokens of one `Stack.step`."""
HEAD_MAX: Final = 256
"""A head's size in a `Stack` is a multiple of 16 up to this."""


class Matrix:
    """Weights [rows, k] that are kept small. Made by `four_bits`, `from_q4_1` or `halves`.

    `weights` is the extension's own.
    """

    __slots__ = ("k", "nbytes", "rows", "weights")

    def __init__(self, weights: Weights, rows: int, k: int, nbytes: int) -> None:
        self.weights = weights
        self.rows = rows
        self.k = k
        self.nbytes = nbytes

    def linear(self, x: Float, y: Float, threads: int) -> None:
        """Compute y [m, rows] = x [m, k] times the weights; both contiguous FP32."""
        assert _products is not None, "a Matrix is made by the extension"
        _products.linear(self.weights, x, y, threads)

    def unpack(self, out: Float, threads: int) -> None:
        """Write the weights as FP32 into `out` [rows, k]."""
        assert _products is not None, "a Matrix is made by the extension"
        _products.unpack(self.weights, out, threads)

    def ffn(self, down: Matrix, x: Float, middle: Float, y: Float, threads: int) -> None:
        """Compute y = down(silu(gate) * up), where this holds all gates and then all ups.

        `middle` [m, gates] is room for what lies between.
        """
        assert _products is not None, "a Matrix is made by the extension"
        _products.ffn(self.weights, down.weights, x, middle, y, threads)


class Stack:
    """All layers of a Llama-class model, for a few tokens at a time.

    `layers`: what `layer` returns. `dim` is a head's, a multiple of 16, at most 256. Raises
    ValueError for shapes that do not belong together.
    """

    __slots__ = ("_stack",)

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
    ) -> None:
        assert _products is not None, "callers ask AVAILABLE first"
        self._stack = _products.stack(tuple(layers), hidden, heads, kv_heads, dim, eps)

    def step(
        self,
        x: Float,
        angles: tuple[Float, Float],
        positions: NDArray[np.int64],
        offsets: NDArray[np.int64],
        tables: NDArray[np.int32],
        kv: NDArray[np.float16],
        threads: int,
    ) -> None:
        """Take x [m, hidden] through all layers, in place, and keep its keys and values.

        `angles`: cosines and sines [m, dim / 2]. Token i is at `positions[i]` of the sequence whose
        blocks begin at `tables[offsets[i]]`. `kv`: [layers, 2, blocks, block tokens, kv_heads,
        dim]. Raises ValueError for sizes, positions and blocks that do not belong together.
        """
        assert _products is not None, "a Stack is made by the extension"
        _products.step(
            self._stack, x, *angles, positions, offsets, tables, kv, kv.shape[3], threads
        )


def layer(
    products: tuple[Matrix, Matrix, Matrix, Matrix],
    norms: tuple[Float, Float],
    qkv_bias: Float | None = None,
) -> Layer:
    """Return a layer for a `Stack`: QKV, out, gates and ups, down; norms of attention and FFN."""
    qkv, out, gate_up, down = (matrix.weights for matrix in products)
    return (qkv, out, gate_up, down, *norms, qkv_bias)


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
