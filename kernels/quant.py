"""Four-bit weights: our layout, how to get into it, and how to choose the codes.

The layout is described in `cuda/int4.h`. A group is 32, 64 or 128 neighbours of k in one row; the
last may be short. With zero points a weight is (q - z) * s, with minima q * s + m. Importers of
other projects' files are in `kernels.importers`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Codes = NDArray[np.uint8]
    Half = NDArray[np.float16]
    Float = NDArray[np.float32]

GROUPS: Final = (32, 64, 128)
# Nibble i of a word holds this k of the word's eight.
ORDER: Final = np.array([0, 2, 4, 6, 1, 3, 5, 7])
# Rows start at 16 bytes.
_ROW_WORDS: Final = 4
_HALF_MAX: Final = 65_504.0
# Ranges tried around each group's own, from this share of it up to all of it.
_SEARCH_FROM: Final = 0.70
_SEARCH_STEPS: Final = 16
# Rows quantised at a time: bounds the memory beside the result.
_CHUNK_ROWS: Final = 1_024


class QuantError(ValueError):
    """Weights that cannot be held in four bits as they are given; the message says why."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [rows, k] of four-bit weights.

    `codes` uint32 [rows, words]; `meta` uint32 [groups, rows]: FP16 scale below FP16 offset, which
    is a zero point or, with `minima`, the group's least value.
    """

    codes: NDArray[np.uint32]
    meta: NDArray[np.uint32]
    k: int
    group: int
    minima: bool

    @property
    def rows(self) -> int:
        """Outputs of the product."""
        return int(self.codes.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return int(self.codes.nbytes + self.meta.nbytes)


def row_words(k: int) -> int:
    """Return the words of 8 codes that a row of k weights takes."""
    return -(-k // (8 * _ROW_WORDS)) * _ROW_WORDS


def pack(q: Codes, scale: Half, offset: Half, group: int, *, minima: bool) -> Packed:
    """Lay out codes [rows, k] with scale and offset [rows, groups].

    Raises `QuantError` for shapes that do not belong together and values out of range.
    """
    rows, k = q.shape
    groups = -(-k // group) if group in GROUPS else 0
    if not groups:
        raise QuantError(f"group {group}: one of {', '.join(map(str, GROUPS))}")
    for name, part in (("scales", scale), ("offsets", offset)):
        if part.shape != (rows, groups):
            raise QuantError(f"{name} have shape {part.shape}, expected {(rows, groups)}")
        if not np.isfinite(part).all():
            raise QuantError(f"{name} hold an infinity or no number: FP16 cannot hold this weight")
    if q.size and int(q.max()) > 15:
        raise QuantError("a code is above 15")
    if not minima and not np.isin(offset, np.arange(16)).all():
        raise QuantError("a zero point is not a whole number from 0 to 15")
    padded = np.zeros((rows, row_words(k) * 8), np.uint32)
    padded[:, :k] = q
    words = padded.reshape(rows, -1, 8)[:, :, ORDER]
    codes = np.zeros(words.shape[:2], np.uint32)
    for nibble in range(8):
        codes |= words[:, :, nibble] << np.uint32(4 * nibble)
    low = np.ascontiguousarray(scale, np.float16).view(np.uint16).astype(np.uint32)
    high = np.ascontiguousarray(offset, np.float16).view(np.uint16).astype(np.uint32)
    meta = np.ascontiguousarray((low | high << np.uint32(16)).T)
    return Packed(codes, meta, k, group, minima)


def unpack(packed: Packed) -> Codes:
    """Return the codes [rows, k] of a packed matrix."""
    out = np.empty((*packed.codes.shape, 8), np.uint8)
    for nibble, place in enumerate(ORDER):
        out[:, :, place] = packed.codes >> np.uint32(4 * nibble) & np.uint32(15)
    return out.reshape(packed.rows, -1)[:, : packed.k]


def dequantize(packed: Packed) -> Float:
    """Return the weights [rows, k] in FP32, before FP16 rounds them: what the CPU computes with."""
    halves = np.ascontiguousarray(packed.meta.T).view(np.float16).astype(np.float32)
    places = np.arange(packed.k) // packed.group
    scale, offset = halves[:, 0::2][:, places], halves[:, 1::2][:, places]
    q = unpack(packed).astype(np.float32)
    return q * scale + offset if packed.minima else (q - offset) * scale


def joined(parts: list[Packed]) -> Packed | None:
    """Return matrices of one form below one another, or None where their forms differ."""
    if len({(part.k, part.group, part.minima) for part in parts}) != 1:
        return None
    return replace(
        parts[0],
        codes=np.concatenate([part.codes for part in parts]),
        meta=np.ascontiguousarray(np.concatenate([part.meta for part in parts], axis=1)),
    )


def grouped(w: Float, group: int) -> tuple[Float, NDArray[np.bool_]]:
    """Return the weights as [rows, groups, group] and which of these places exist."""
    rows, k = w.shape
    groups = -(-k // group)
    # A short last group is filled with its own last value: it changes neither least nor greatest.
    filled = np.pad(w, ((0, 0), (0, groups * group - k)), mode="edge")
    there = np.arange(groups * group).reshape(groups, group) < k
    return filled.reshape(rows, groups, group), there


def quantize(w: Float, group: int, *, search: bool = True) -> Packed:
    """Choose codes, scales and zero points for `w` [rows, k] by least squared error.

    Without `search` each group's range is its own least to greatest value (round to nearest). With
    it, narrower ranges are tried and the best of each group is kept: a few clipped weights cost
    less than coarse steps for all. Zero points lie in 0..15, so a range always includes 0.
    """
    if group not in GROUPS:
        raise QuantError(f"group {group}: one of {', '.join(map(str, GROUPS))}")
    if not np.isfinite(w).all():
        raise QuantError("the weights hold an infinity or no number")
    parts = [
        _quantize_rows(w[at : at + _CHUNK_ROWS], group, search=search)
        for at in range(0, w.shape[0], _CHUNK_ROWS)
    ]
    q, scale, zero = (np.concatenate(part) for part in zip(*parts, strict=True))
    return pack(q[:, : w.shape[1]], scale, zero, group, minima=False)


def _quantize_rows(w: Float, group: int, *, search: bool) -> tuple[Codes, Half, Half]:
    blocks, there = grouped(w.astype(np.float32), group)
    scale, zero = ranges(blocks, there.astype(np.float32), search=search)
    codes = codes_of(blocks, scale, zero).astype(np.uint8).reshape(w.shape[0], -1)
    return codes, scale.astype(np.float16), zero.astype(np.float16)


def ranges(blocks: Float, importance: Float, *, search: bool) -> tuple[Float, Float]:
    """Return scales and zero points of blocks [rows, groups, group].

    `importance` [groups, group] weighs the squared error of each place, 0: nothing is there.
    """
    low = np.minimum(blocks.min(-1), 0.0)
    high = np.maximum(blocks.max(-1), 0.0)
    best: list[NDArray[np.float32]] = []
    least = np.full(low.shape, np.inf, np.float32)
    shares = np.linspace(1.0, _SEARCH_FROM, _SEARCH_STEPS) if search else [1.0]
    for share in shares:
        scale, zero = _range(low * np.float32(share), high * np.float32(share))
        q = codes_of(blocks, scale, zero)
        lost = ((q - zero[..., None]) * scale[..., None] - blocks) ** 2
        error = (lost * importance).sum(-1)
        better = error < least
        least = np.where(better, error, least)
        best = (
            [np.where(better, new, old) for new, old in zip((scale, zero), best, strict=True)]
            if best
            else [scale, zero]
        )
    scale, zero = best
    return scale, zero


def _range(low: Float, high: Float) -> tuple[Float, Float]:
    """Return scale, as FP16 will hold it, and zero point of ranges that include 0."""
    scale = np.minimum((high - low) / 15.0, _HALF_MAX).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(scale > 0, np.clip(np.rint(-low / scale), 0, 15), 0.0)
    return scale, zero.astype(np.float32)


def codes_of(blocks: Float, scale: Float, zero: Float) -> Float:
    """Return the nearest codes of blocks [..., group] with scales and zero points [...]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        q = np.where(
            scale[..., None] > 0, np.rint(blocks / scale[..., None]) + zero[..., None], 0.0
        )
    return np.clip(q, 0, 15).astype(np.float32)
