"""Other projects' four-bit weights -> ours, without changing a value where that is possible.

Each function takes the arrays as the file holds them and returns `Packed`. Values are kept exactly,
but for scales that are not FP16 in the file (bfloat16, FP32): those are rounded to FP16, and
refused where FP16 cannot hold them. Q8_0 holds more than four bits and is quantised anew.

The forms were read in these projects' own sources: ggml-org/ggml, AutoGPTQ/AutoGPTQ,
casper-hansen/AutoAWQ, vllm-project/compressed-tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kernels.quant import GROUPS, Packed, QuantError, pack, quantize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int32]
    Codes = NDArray[np.uint8]
    Half = NDArray[np.float16]

_BLOCK: Final = 32
# AWQ's word holds the output ORDER[i] of its eight in nibble i.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_NATURAL: Final = tuple(range(8))


def gguf(raw: NDArray[np.uint8], kind: str, *, group: int = 128) -> Packed:
    """Return rows of GGUF blocks, [rows, bytes]; kind "Q4_0", "Q4_1" or "Q8_0".

    Q4_0 and Q4_1 keep their own group of 32; `group` is Q8_0's new one.
    """
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
    if kind not in sizes:
        raise QuantError(f"GGUF's {kind}: one of {', '.join(sizes)}")
    rows, row_bytes = raw.shape
    if not row_bytes or row_bytes % sizes[kind]:
        raise QuantError(f"rows of {row_bytes} bytes are no blocks of {kind}")
    blocks = raw.reshape(rows, -1, sizes[kind])
    head = np.ascontiguousarray(blocks[:, :, : sizes[kind] - (32 if kind == "Q8_0" else 16)])
    halves: Half = head.view(np.float16)
    scale = np.ascontiguousarray(halves[:, :, 0])
    if kind == "Q8_0":
        codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).astype(np.float32)
        return quantize((codes * scale[..., None].astype(np.float32)).reshape(rows, -1), group)
    nibbles = blocks[:, :, -16:]
    q = np.concatenate((nibbles & 15, nibbles >> 4), axis=2).reshape(rows, -1)
    if kind == "Q4_0":
        return pack(q, scale, np.full_like(scale, 8), _BLOCK, minima=False)
    return pack(q, scale, np.ascontiguousarray(halves[:, :, 1]), _BLOCK, minima=True)


def gptq(
    qweight: Words,
    qzeros: Words,
    scales: NDArray[Any],
    g_idx: NDArray[np.int32] | None = None,
    *,
    version: int = 1,
) -> tuple[Packed, NDArray[np.intp] | None]:
    """Return GPTQ weights, and the order of their columns if the file's own is another one.

    qweight [k / 8, rows], qzeros [groups, rows / 8], scales [groups, rows]. Version 1 stores a zero
    point less 1. With `g_idx` (act-order) columns of one group lie apart: ours are sorted by group,
    and x must be taken as x[:, order].
    """
    if version not in {1, 2}:
        raise QuantError(f"GPTQ version {version}: 1 or 2")
    q = _words(qweight.T, _NATURAL)
    zero = _words(qzeros, _NATURAL)[:, : qweight.shape[1]].T
    if version == 1:
        zero = zero + 1
        if zero.max(initial=0) > 15:
            raise QuantError("a zero point of 16: this file is of GPTQ version 2")
    k, groups = q.shape[1], scales.shape[0]
    order = None
    if g_idx is not None:
        if g_idx.shape != (k,) or g_idx.min(initial=0) < 0 or g_idx.max(initial=0) >= groups:
            raise QuantError(f"g_idx does not name one of {groups} groups for each column")
        counts = np.bincount(g_idx, minlength=groups)
        if groups > 1 and (counts[:-1] != _group(k, scales.T)).any():
            raise QuantError("g_idx does not give every group the same number of columns")
        if (np.diff(g_idx) < 0).any():
            order = np.argsort(g_idx, kind="stable")
            q = q[:, order]
    return _packed(q, scales.T, zero), order


def awq(qweight: Words, qzeros: Words, scales: NDArray[Any]) -> Packed:
    """Return AWQ weights (its GEMM form): qweight [k, rows / 8], qzeros [groups, rows / 8]."""
    return _packed(_words(qweight, _AWQ_ORDER).T, scales.T, _words(qzeros, _AWQ_ORDER).T)


def compressed_tensors(
    weight_packed: Words,
    weight_scale: NDArray[Any],
    weight_zero_point: Words | None,
    shape: tuple[int, int],
) -> Packed:
    """Return compressed-tensors' pack-quantized weights.

    weight_packed [rows, k / 8], codes plus 8; weight_scale [rows, groups]; weight_zero_point
    [rows / 8, groups], plus 8 too, or None where the weights are symmetric; `shape` (rows, k).
    """
    rows, k = shape
    q = _words(weight_packed, _NATURAL)[:, :k]
    if weight_zero_point is None:
        zero = np.full(weight_scale.shape, 8, np.uint8)
    else:
        zero = _words(np.ascontiguousarray(weight_zero_point.T), _NATURAL)[:, :rows].T
    if q.shape != shape:
        raise QuantError(f"weight_packed holds {q.shape}, the shape says {shape}")
    return _packed(q, weight_scale, zero)


def with_minima(
    weight_packed: Words, weight_scale: NDArray[Any], minimum: Half, shape: tuple[int, int]
) -> Packed:
    """Return weights as `exporters.tensors` writes those that have minima, not zero points."""
    q = _words(weight_packed, _NATURAL)[:, : shape[1]]
    if q.shape != shape:
        raise QuantError(f"weight_packed holds {q.shape}, the shape says {shape}")
    scale = np.ascontiguousarray(weight_scale).astype(np.float16)
    return pack(np.ascontiguousarray(q), scale, minimum, _group(shape[1], scale), minima=True)


def _words(words: Words, order: tuple[int, ...]) -> Codes:
    """Return the codes of words [a, b] as [a, 8 b], nibble i at place order[i] of its eight."""
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    out = np.empty((*unsigned.shape, 8), np.uint8)
    for nibble, place in enumerate(order):
        out[:, :, place] = unsigned >> np.uint32(4 * nibble) & np.uint32(15)
    return out.reshape(unsigned.shape[0], -1)


def _packed(q: Codes, scale: NDArray[Any], zero: Codes) -> Packed:
    """Lay out codes [rows, k] with scales and zero points [rows, groups]; k tells the group."""
    group = _group(q.shape[1], scale)
    with np.errstate(over="ignore"):
        halves = np.ascontiguousarray(scale).astype(np.float16)
    return pack(np.ascontiguousarray(q), halves, zero.astype(np.float16), group, minima=False)


def _group(k: int, scale: NDArray[Any]) -> int:
    groups = scale.shape[1]
    fitting = [group for group in GROUPS if -(-k // group) == groups]
    if not fitting:
        raise QuantError(f"{k} columns in {groups} groups: groups are 32, 64 or 128 wide")
    return fitting[0]
