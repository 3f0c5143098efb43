"""The forms in which a folder may hold a matrix in four bits, as its `quantization_config` says.

Each reads the tensors that stand in place of a matrix's `weight` and leaves every value as it is.
A form we do not read is refused by name, before anything is read: the same tensors with other
settings would be other weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from agent.engine.types import ModelFileError
from kernels import importers, quant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from agent.engine.shards import Shards

_WORD: Final = 8  # codes in an int32


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix in four bits. `order`: which of the file's columns each of its columns is."""

    packed: quant.Packed
    order: NDArray[np.intp] | None = None

    def dequantized(self) -> NDArray[np.float32]:
        """Return its values, columns in the file's order."""
        values = quant.dequantize(self.packed)
        if self.order is None:
            return values
        out = np.empty_like(values)
        out[:, self.order] = values
        return out


class Form(Protocol):
    """How matrices are stored; `name` is that of a matrix's `weight`."""

    def shape(self, shards: Shards, name: str) -> tuple[int, int] | None:
        """Return rows and columns, None for what is not held in four bits."""
        ...

    def read(self, shards: Shards, name: str, shape: tuple[int, int]) -> Stored:
        """Return a matrix; raises `ModelFileError`, `quant.QuantError`."""
        ...


class CompressedTensors:
    """pack-quantized, with `weight_minimum` in place of a zero point as an addition of ours."""

    def shape(self, shards: Shards, name: str) -> tuple[int, int] | None:
        """See `Form`."""
        if f"{name}_packed" not in shards:
            return None
        rows, cols = (int(v) for v in shards.part(f"{name}_shape", "I", (2,)))
        return rows, cols

    def read(self, shards: Shards, name: str, shape: tuple[int, int]) -> Stored:
        """See `Form`."""
        rows, cols = shape
        words = shards.part(f"{name}_packed", "I32", (rows, -(-cols // _WORD)))
        scale = shards.part(f"{name}_scale", "", (rows, -1))
        groups = scale.shape[1]
        if f"{name}_minimum" in shards:
            least = shards.part(f"{name}_minimum", "F16", (rows, groups))
            return Stored(importers.with_minima(words, scale, least, shape))
        zero = None
        if f"{name}_zero_point" in shards:
            zero = shards.part(f"{name}_zero_point", "I32", (-(-rows // _WORD), groups))
        return Stored(importers.compressed_tensors(words, scale, zero, shape))


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ of a version, in groups of so many columns; `act_order`: which are told by `g_idx`."""

    version: int
    group: int
    act_order: bool

    def shape(self, shards: Shards, name: str) -> tuple[int, int] | None:
        """See `Form`."""
        found = _words(shards, name)
        return None if found is None else (found[1], found[0] * _WORD)

    def read(self, shards: Shards, name: str, shape: tuple[int, int]) -> Stored:
        """See `Form`."""
        rows, cols = shape
        base, groups = name.removesuffix("weight"), -(-cols // self.group)
        words = shards.part(f"{base}qweight", "I32", (cols // _WORD, rows))
        zeros = shards.part(f"{base}qzeros", "I32", (groups, -(-rows // _WORD)))
        scales = shards.part(f"{base}scales", "", (groups, rows))
        g_idx = None
        if self.act_order or f"{base}g_idx" in shards:
            g_idx = shards.part(f"{base}g_idx", "I32", (cols,))
        packed, order = importers.gptq(words, zeros, scales, g_idx, version=self.version)
        return Stored(packed, order)


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ's GEMM form, in groups of so many columns."""

    group: int

    def shape(self, shards: Shards, name: str) -> tuple[int, int] | None:
        """See `Form`."""
        found = _words(shards, name)
        return None if found is None else (found[1] * _WORD, found[0])

    def read(self, shards: Shards, name: str, shape: tuple[int, int]) -> Stored:
        """See `Form`."""
        rows, cols = shape
        base, groups = name.removesuffix("weight"), -(-cols // self.group)
        words = shards.part(f"{base}qweight", "I32", (cols, rows // _WORD))
        zeros = shards.part(f"{base}qzeros", "I32", (groups, rows // _WORD))
        scales = shards.part(f"{base}scales", "", (groups, rows))
        return Stored(importers.awq(words, zeros, scales))


def _words(shards: Shards, name: str) -> tuple[int, int] | None:
    words = f"{name.removesuffix('weight')}qweight"
    if not name.endswith("weight") or words not in shards:
        return None
    kind, shape = shards.form(words)
    if len(shape) != 2:
        raise ModelFileError(f"tensor {words} is {kind} {shape}, expected two dimensions")
    return shape[0], shape[1]


def form_of(config: Mapping[str, Any]) -> Form:
    """Return the form that a model's `config.json` names; raises `ModelFileError`."""
    settings = config.get("quantization_config")
    if settings is None:
        return CompressedTensors()
    if not isinstance(settings, dict):
        raise ModelFileError("malformed config.json: quantization_config is no object")
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return CompressedTensors()
    if method not in ("gptq", "awq"):
        raise ModelFileError(
            f"quantization {method!r} is not supported (compressed-tensors, gptq, awq are)"
        )
    bits = settings.get("bits", settings.get("w_bit"))
    group = settings.get("group_size", settings.get("q_group_size"))
    if bits != 4:
        raise ModelFileError(f"{method} with {bits} bits is not supported (4 are)")
    if group not in quant.GROUPS:
        raise ModelFileError(
            f"{method} with groups of {group} is not supported ({quant.GROUPS} are)"
        )
    if method == "awq":
        kind = settings.get("version", "gemm")
        if str(kind).lower() != "gemm" or settings.get("zero_point", True) is not True:
            raise ModelFileError(
                f"awq's form {kind!r} is not supported (gemm, with zero points, is)"
            )
        return Awq(int(group))
    kind = settings.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise ModelFileError(f"gptq's form {kind!r} is not supported (gptq and gptq_v2 are)")
    order = settings.get("desc_act", False)
    return Gptq(1 if kind == "gptq" else 2, int(group), act_order=order is not False)
