"""Where a model's tensors come from: a GGUF file, or a Hugging Face folder of safetensors.

Both speak one interface. GGUF is dequantised block by block; in a folder a matrix may lie as
floats, or in four bits in one of several forms (`forms`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from agent.engine import compact
from agent.engine.forms import CompressedTensors
from agent.engine.shards import FLOATS, Shards
from agent.engine.types import ModelFileError
from kernels import quant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from agent.engine.forms import Form, Stored
    from agent.engine.gguf_file import GgufFile

# role: (GGUF's name, Hugging Face's name); {} is the layer.
NAMES: Final = {
    "embed": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
    "attn_norm": ("blk.{}.attn_norm.weight", "model.layers.{}.input_layernorm.weight"),
    "ffn_norm": ("blk.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    "q": ("blk.{}.attn_q.weight", "model.layers.{}.self_attn.q_proj.weight"),
    "k": ("blk.{}.attn_k.weight", "model.layers.{}.self_attn.k_proj.weight"),
    "v": ("blk.{}.attn_v.weight", "model.layers.{}.self_attn.v_proj.weight"),
    "q_bias": ("blk.{}.attn_q.bias", "model.layers.{}.self_attn.q_proj.bias"),
    "k_bias": ("blk.{}.attn_k.bias", "model.layers.{}.self_attn.k_proj.bias"),
    "v_bias": ("blk.{}.attn_v.bias", "model.layers.{}.self_attn.v_proj.bias"),
    "o": ("blk.{}.attn_output.weight", "model.layers.{}.self_attn.o_proj.weight"),
    "gate": ("blk.{}.ffn_gate.weight", "model.layers.{}.mlp.gate_proj.weight"),
    "up": ("blk.{}.ffn_up.weight", "model.layers.{}.mlp.up_proj.weight"),
    "down": ("blk.{}.ffn_down.weight", "model.layers.{}.mlp.down_proj.weight"),
}
_ROPE_FREQS: Final = "rope_freqs.weight"
# Rows converted at a time: bounds the memory beside the result.
_ROWS: Final = 8_192


class TensorSource(Protocol):
    """Where tensors come from, by role and layer."""

    def shape(self, role: str, layer: int) -> tuple[int, ...] | None:
        """Return a tensor's shape, rows first, or None if the file has none."""
        ...

    def fill(self, out: torch.Tensor, role: str, layer: int) -> None:
        """Convert a tensor into `out`, which has its shape."""
        ...

    def four_bits(self, role: str, layer: int) -> NDArray[np.uint8] | None:
        """Return rows of Q4_1 blocks if the file holds a tensor so; it then counts as filled."""
        ...

    def packed(self, role: str, layer: int) -> quant.Packed | None:
        """Return a matrix that a folder holds in four bits; it then counts as filled."""
        ...

    def leftovers(self) -> set[str]:
        """Return names of tensors that were never filled from."""
        ...


class GgufSource:
    """Tensors of a GGUF file; rows of Q and K in GGUF's own order."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._unused = set(file.tensors) - {_ROPE_FREQS}

    def shape(self, role: str, layer: int) -> tuple[int, ...] | None:
        """See `TensorSource`."""
        info = self._file.tensors.get(NAMES[role][0].format(layer))
        return None if info is None else info.shape

    def fill(self, out: torch.Tensor, role: str, layer: int) -> None:
        """See `TensorSource`."""
        name = NAMES[role][0].format(layer)
        info = self._file.tensors[name]
        self._unused.discard(name)
        flat = len(info.shape) == 1
        total = 1 if flat else info.shape[0]
        target = out.view(1, -1) if flat else out
        block, block_bytes = GGML_QUANT_SIZES[info.kind]
        row_bytes = info.shape[-1] // block * block_bytes
        for first in range(0, total, _ROWS):
            rows = min(_ROWS, total - first)
            start = info.offset + first * row_bytes
            raw = np.frombuffer(self._file.read(start, rows * row_bytes), np.uint8)
            if info.kind.name in {"F32", "F16"}:
                values = raw.view(np.float32 if info.kind.name == "F32" else np.float16)
            else:
                try:
                    values = dequantize(raw.reshape(rows, row_bytes), info.kind)
                except NotImplementedError:
                    raise ModelFileError(
                        f"tensor {name}: quantisation {info.kind.name} is not supported"
                    ) from None
            # Frombuffer gives read-only memory; copy_ only reads it, but torch warns unless told.
            values = np.require(values, requirements="W").reshape(rows, -1)
            target[first : first + rows].copy_(torch.from_numpy(values))

    def four_bits(self, role: str, layer: int) -> NDArray[np.uint8] | None:
        """See `TensorSource`."""
        name = NAMES[role][0].format(layer)
        info = self._file.tensors[name]
        if info.kind.name not in {"Q4_0", "Q4_1"}:
            return None
        self._unused.discard(name)
        raw = np.frombuffer(self._file.read(info.offset, info.nbytes), np.uint8)
        raw = raw.reshape(info.shape[0], -1)
        return raw if info.kind.name == "Q4_1" else compact.q4_0_as_q4_1(raw)

    def packed(self, role: str, layer: int) -> quant.Packed | None:
        """See `TensorSource`; such a file holds GGUF's own blocks."""
        del role, layer
        return None

    def leftovers(self) -> set[str]:
        """See `TensorSource`."""
        return self._unused


def rope_factors(file: GgufFile) -> tuple[float, ...] | None:
    """Return the values of GGUF's `rope_freqs` tensor, if it has one."""
    info = file.tensors.get(_ROPE_FREQS)
    if info is None:
        return None
    if info.kind.name != "F32" or info.nbytes > 4_096:
        raise ModelFileError("malformed GGUF: rope_freqs is not a short list of F32")
    return tuple(np.frombuffer(file.read(info.offset, info.nbytes), np.float32).tolist())


class FolderSource:
    """Tensors of a folder of safetensors files; `shards` None: those its index names.

    `form`: how matrices in four bits are stored.
    """

    def __init__(
        self, folder: Path, shards: Sequence[str] | None = None, form: Form | None = None
    ) -> None:
        self._shards = Shards(folder, shards)
        self._form: Form = form or CompressedTensors()

    def shape(self, role: str, layer: int) -> tuple[int, ...] | None:
        """See `TensorSource`."""
        name = NAMES[role][1].format(layer)
        small = self._form.shape(self._shards, name)
        if small is not None:
            return small
        if name not in self._shards:
            return None
        kind, shape = self._shards.form(name)
        if kind not in FLOATS:
            raise ModelFileError(f"tensor {name} has type {kind}, not a float")
        return shape

    def fill(self, out: torch.Tensor, role: str, layer: int) -> None:
        """See `TensorSource`."""
        name = NAMES[role][1].format(layer)
        stored = self._stored(name)
        if stored is not None:
            out.copy_(torch.from_numpy(stored.dequantized()))
            return
        out.copy_(self._shards.tensor(name))

    def four_bits(self, role: str, layer: int) -> NDArray[np.uint8] | None:
        """See `TensorSource`; a folder has another form."""
        del role, layer
        return None

    def packed(self, role: str, layer: int) -> quant.Packed | None:
        """See `TensorSource`; None also where columns would have to be taken in another order."""
        stored = self._stored(NAMES[role][1].format(layer))
        return None if stored is None or stored.order is not None else stored.packed

    def _stored(self, name: str) -> Stored | None:
        shape = self._form.shape(self._shards, name)
        if shape is None:
            return None
        try:
            return self._form.read(self._shards, name, shape)
        except quant.QuantError as problem:
            raise ModelFileError(f"tensor {name}: {problem}") from None

    def leftovers(self) -> set[str]:
        """See `TensorSource`. Biases of nothing but zeros, which GPTQ's tools write, are none."""
        found = tuple(self._shards.unused)
        return {n for n in found if not n.endswith("_proj.bias") or self._shards.tensor(n).any()}
