"""Our four-bit weights -> the tensors of a safetensors folder.

The form is compressed-tensors' pack-quantized (vllm-project/compressed-tensors), which
`importers.compressed_tensors` reads. Two things go beyond it, and other programs may not take them:
a short last group, and `minimum` in place of a zero point (`importers.with_minima`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.quant import Packed, unpack

if TYPE_CHECKING:
    from numpy.typing import NDArray


def tensors(packed: Packed) -> dict[str, NDArray[Any]]:
    """Return the tensors of one matrix by what comes after `weight_` in their names."""
    halves = np.ascontiguousarray(packed.meta.T).view(np.float16)
    scale, offset = np.ascontiguousarray(halves[:, 0::2]), np.ascontiguousarray(halves[:, 1::2])
    parts: dict[str, NDArray[Any]] = {
        "packed": _words(unpack(packed)),
        "scale": scale,
        "shape": np.array([packed.rows, packed.k], np.int64),
    }
    if packed.minima:
        parts["minimum"] = offset
    else:
        zero = np.ascontiguousarray(offset.T).astype(np.uint8)
        parts["zero_point"] = np.ascontiguousarray(_words(zero).T)
    return parts


def _words(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return codes [a, b] as words [a, b / 8], the first in the lowest nibble."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8))).astype(np.uint32)
    eight = padded.reshape(codes.shape[0], -1, 8)
    words = np.zeros(eight.shape[:2], np.uint32)
    for nibble in range(8):
        words |= eight[:, :, nibble] << np.uint32(4 * nibble)
    return words.view(np.int32)
