"""Weights that stay small in memory on a CPU: four bits or FP16, computed with in float32.

Few rows of x go through `kernels.cpu`, which reads the small form. Many rows (a prompt) unpack one
matrix at a time into a scratch that all share, and use the BLAS: that is faster from some tens of
rows on, and the scratch is as large as the largest matrix that is used so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn import functional

from kernels import cpu

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kernels import quant

AVAILABLE: Final = cpu.AVAILABLE
# Rows of x up to which the small form is multiplied as it is.
FEW_ROWS: Final = 32


class Scratch:
    """Room for one unpacked matrix, kept at the largest size asked for."""

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def room(self, rows: int, cols: int) -> torch.Tensor:
        """Return float32 [rows, cols] of unspecified values, valid until the next call."""
        if self._room.numel() < rows * cols:
            self._room = torch.empty(rows * cols)
        return self._room[: rows * cols].view(rows, cols)


class Compact:
    """A weight [out, in] in its small form. One thread at a time."""

    __slots__ = ("_scratch", "bits", "group", "matrix")

    def __init__(
        self, matrix: cpu.Matrix, scratch: Scratch, bits: int, group: int | None = None
    ) -> None:
        self.matrix = matrix
        self._scratch = scratch
        self.bits = bits
        self.group = group

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.matrix.rows, self.matrix.k

    @property
    def nbytes(self) -> int:
        """Bytes of the small form."""
        return self.matrix.nbytes

    def numel(self) -> int:
        """Count of numbers."""
        return self.matrix.rows * self.matrix.k

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [rows, in] times the weight's transpose, float32 [rows, out]."""
        if x.shape[0] > FEW_ROWS:
            return functional.linear(x, self.unpacked())
        out = torch.empty(x.shape[0], self.matrix.rows)
        if not x.shape[0]:  # a step that only reads a part of a prompt wants no logits
            return out
        threads = torch.get_num_threads()
        self.matrix.linear(x.contiguous().numpy(), out.numpy(), threads)
        return out

    def ffn(self, down: Compact, x: torch.Tensor) -> torch.Tensor:
        """Return down(silu(gate) * up) for few rows, where this holds gates and then ups."""
        out = torch.empty(x.shape[0], down.shape[0])
        middle = torch.empty(x.shape[0], down.shape[1])
        self.matrix.ffn(
            down.matrix,
            x.contiguous().numpy(),
            middle.numpy(),
            out.numpy(),
            torch.get_num_threads(),
        )
        return out

    def unpacked(self) -> torch.Tensor:
        """Return the weight in float32, in the scratch: valid until another is unpacked."""
        room = self._scratch.room(*self.shape)
        self.matrix.unpack(room.numpy(), torch.get_num_threads())
        return room


def fits(cols: int) -> bool:
    """Return whether weights with so many inputs can be held small."""
    return AVAILABLE and cols % cpu.BLOCK == 0


def from_halves(weight: torch.Tensor, scratch: Scratch) -> Compact:
    """Return a float16 tensor's small form; the memory is shared."""
    return Compact(cpu.halves(weight.numpy()), scratch, 16)


def from_q4_1(raw: NDArray[np.uint8], scratch: Scratch) -> Compact:
    """Return rows of GGUF's Q4_1 blocks as they are, at their own group of 32."""
    return Compact(cpu.from_q4_1(raw), scratch, 4, cpu.BLOCK)


def from_packed(packed: quant.Packed, scratch: Scratch) -> Compact:
    """Return four-bit weights of any group; the last group of a row may be short."""
    return Compact(cpu.four_bits(packed), scratch, 4, packed.group)


def q4_0_as_q4_1(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return Q4_0 blocks (scale, codes less 8) as Q4_1 blocks: the minimum is -8 scales, exact.

    Eight times an FP16 number is one, but for an overflow that no weight comes near.
    """
    blocks = raw.reshape(raw.shape[0], -1, 18)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")
    least = (scale * np.float16(-8)).view(np.uint8)
    return np.concatenate((blocks[:, :, :2], least, blocks[:, :, 2:]), axis=2).reshape(
        raw.shape[0], -1
    )
