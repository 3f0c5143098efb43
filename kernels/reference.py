"""What the kernels must compute, in NumPy, by definition and without regard to speed.

Written from the description of the layout in `cuda/int4.h` and nothing else: it shares no code with
the packing in `kernels.quant`, so that a mistake there is not repeated here. Products are computed
in float64 from the FP16 weights that `dequant` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kernels.quant import Packed

    Half = NDArray[np.float16]
    Double = NDArray[np.float64]

_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def codes(packed: Packed) -> NDArray[np.uint8]:
    """Return the codes [rows, k], 0 to 15."""
    rows = packed.codes.shape[0]
    out = np.zeros((rows, packed.codes.shape[1] * 8), np.uint8)
    for nibble, place in enumerate(_ORDER):
        out[:, place::8] = packed.codes >> (4 * nibble) & 15
    return out[:, : packed.k]


def dequant(packed: Packed) -> Half:
    """Return the FP16 weights [rows, k]: exact until the one rounding at the end."""
    q = codes(packed).astype(np.float64)
    halves = packed.meta.astype("<u4").view("<f2").astype(np.float64)
    scale, offset = halves[:, 0::2].T, halves[:, 1::2].T
    group = np.arange(packed.k) // packed.group
    s, o = scale[:, group], offset[:, group]
    # 15 bits times 11, plus 11: float64 holds it whole. `* s` alone keeps the sign of a zero.
    exact = q * s + o if packed.minima else (q - o) * s
    with np.errstate(over="ignore"):  # to infinity, as the hardware does
        return exact.astype(np.float16)


def linear(packed: Packed, x: Half) -> Double:
    """Return x [m, k] times the weights' transpose, [m, rows]."""
    product: Double = x.astype(np.float64) @ dequant(packed).astype(np.float64).T
    return product


def scale_of(packed: Packed, x: Half) -> Double:
    """Return |x||w| of each product, [m, rows]: what its error is measured against."""
    w = np.linalg.norm(dequant(packed).astype(np.float64), axis=1)
    size: Double = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * w[None, :]
    return size


def silu(x: Double) -> Double:
    """Return x * sigmoid(x)."""
    result: Double = x / (1.0 + np.exp(-x))
    return result


def gate_up(packed: Packed, x: Half) -> Double:
    """Return silu(gate) * up, [m, rows / 2]; the gate's rows come first."""
    both = linear(packed, x)
    half = both.shape[1] // 2
    result: Double = silu(both[:, :half]) * both[:, half:]
    return result


def rms_norm(x: Half, weight: Half, eps: float) -> Double:
    """Return x [rows, hidden] over its root mean square, times the weight."""
    wide = x.astype(np.float64)
    root = np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    result: Double = wide / root * weight.astype(np.float64)
    return result


def rope(x: Half, positions: NDArray[np.int32], inverse: NDArray[np.float32]) -> Double:
    """Turn x [rows, heads, dim] by its position, pairs (i, i + dim / 2)."""
    wide = x.astype(np.float64)
    half = x.shape[-1] // 2
    angle = positions[:, None].astype(np.float64) * inverse[None, :].astype(np.float64)
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    low, high = wide[..., :half], wide[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def paged_attention(
    query: Half, keys: Half, values: Half, table: NDArray[np.int32], lengths: NDArray[np.int32]
) -> Double:
    """Return attention of one new token for each sequence, [sequences, heads, dim].

    keys, values [blocks, block size, kv heads, dim]; table [sequences, most blocks].
    """
    sequences, heads, dim = query.shape
    size, kv_heads = keys.shape[1:3]
    out: Any = np.zeros((sequences, heads, dim))
    for sequence in range(sequences):
        length = int(lengths[sequence])
        at = [(table[sequence, p // size], p % size) for p in range(length)]
        for head in range(heads):
            kv = head // (heads // kv_heads)
            k = np.array([keys[b, i, kv] for b, i in at], np.float64)
            v = np.array([values[b, i, kv] for b, i in at], np.float64)
            score = k @ query[sequence, head].astype(np.float64) / np.sqrt(dim)
            weight = np.exp(score - score.max())
            out[sequence, head] = weight @ v / weight.sum()
    result: Double = out
    return result
