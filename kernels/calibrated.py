"""Four-bit codes chosen for what goes into the product, not for the weights alone.

Rounding one weight changes the output by as much as its input is large, and neighbours that are
still to be rounded can take that up again. So columns are rounded one after another, and what each
has lost is spread over the ones that follow, as far as the inputs' second moments say that they can
make up for it (the method is known as GPTQ; the columns keep their order here). Ranges are searched
as in `quant`, each column's error weighed by its input's mean square.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kernels import quant

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kernels.quant import Float, Packed

# Columns that make up for each other: bounds the moments to 128 MiB a slab, however wide a row is.
SLAB: Final = 4_096
# Added to each moment, as a share of their mean: keeps the inverse sound where inputs hardly vary.
_DAMPING: Final = 0.01


class Moments:
    """Second moments of a product's inputs, in slabs of `width` columns: a multiple of 128."""

    def __init__(self, k: int, width: int = SLAB) -> None:
        self.places = [slice(at, min(at + width, k)) for at in range(0, k, width)]
        self.slabs = [np.zeros((place.stop - place.start,) * 2) for place in self.places]
        self.k = k
        self.rows = 0

    def add(self, x: Float) -> None:
        """Take rows [m, k] into account."""
        self.rows += x.shape[0]
        for place, slab in zip(self.places, self.slabs, strict=True):
            part = x[:, place]
            np.add(slab, part.T @ part, out=slab)


def quantize(w: Float, group: int, moments: Moments) -> Packed:
    """Choose codes, scales and zero points for `w` [rows, k] by least error of the output.

    Raises `quant.QuantError` for weights or inputs that are not finite, and moments of no rows.
    """
    if group not in quant.GROUPS:
        raise quant.QuantError(f"group {group}: one of {', '.join(map(str, quant.GROUPS))}")
    if not np.isfinite(w).all():
        raise quant.QuantError("the weights hold an infinity or no number")
    if not moments.rows or moments.k != w.shape[1]:
        raise quant.QuantError("the moments are not those of this product's inputs")
    parts = [
        _slab(w[:, place].astype(np.float32), group, slab / moments.rows)
        for place, slab in zip(moments.places, moments.slabs, strict=True)
    ]
    q, scale, zero = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return quant.pack(
        q.astype(np.uint8), scale.astype(np.float16), zero.astype(np.float16), group, minima=False
    )


def _slab(w: Float, group: int, moments: NDArray[np.float64]) -> tuple[Float, Float, Float]:
    """Return codes [rows, k], scales and zero points [rows, groups] of one slab."""
    rows, k = w.shape
    square = np.diag(moments).astype(np.float32)
    if not np.isfinite(moments).all():
        raise quant.QuantError("the inputs hold an infinity or no number")
    spread = _spread(moments)
    q = np.empty((rows, k), np.float32)
    scales, zeros = [], []
    for first in range(0, k, group):
        last = min(first + group, k)
        blocks, there = quant.grouped(w[:, first:last], group)
        importance = np.zeros((1, group), np.float32)
        importance[0, : last - first] = square[first:last] if square.any() else 1.0
        scale, zero = (part[:, 0] for part in quant.ranges(blocks, importance * there, search=True))
        lost = np.empty((rows, last - first), np.float32)
        for column in range(first, last):
            codes = quant.codes_of(w[:, column, None], scale, zero)[:, 0]
            q[:, column] = codes
            error = (w[:, column] - (codes - zero) * scale) / spread[column, column]
            lost[:, column - first] = error
            w[:, column + 1 : last] -= np.outer(error, spread[column, column + 1 : last])
        w[:, last:] -= lost @ spread[first:last, last:]
        scales.append(scale)
        zeros.append(zero)
    return q, np.stack(scales, axis=1), np.stack(zeros, axis=1)


def _spread(moments: NDArray[np.float64]) -> Float:
    """Return the upper Cholesky factor of the damped moments' inverse.

    Row i, over its diagonal, says how much of column i's error each later column takes up.
    """
    k = len(moments)
    damping = _DAMPING * float(np.trace(moments)) / k
    damped = moments + np.eye(k) * (damping if damping > 0 else 1.0)
    upper: Float = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return upper
