"""Where a model's tensors come from: a GGUF file, or a Hugging Face folder of safetensors.

Both speak one interface. GGUF is dequantised block by block; in a folder a matrix may lie as
floats, or in four bits in compressed-tensors' pack-quantized form, with one addition of ours:
`weight_minimum` in place of a zero point, which is what GGUF's Q4_1 has.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from agent.engine import compact
from agent.engine.types import ModelFileError
from kernels import importers, quant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

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
_FLOATS: Final = {"F32", "F16", "F64", "BF16", "F8_E4M3", "F8_E5M2"}
_INDEX: Final = "model.safetensors.index.json"


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
    """Tensors of a folder of safetensors files; `shards` None: those its index names."""

    def __init__(self, folder: Path, shards: Sequence[str] | None = None) -> None:
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for name in _shards(folder) if shards is None else shards:
            path = folder / name
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as problem:
                raise ModelFileError(f"truncated or malformed {path.name}: {problem}") from None
            self._files[name] = file
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            self._where.update(dict.fromkeys(names, name))
        # Buffers that old exports wrote although they follow from the configuration.
        self._unused = {n for n in self._where if not n.endswith("rotary_emb.inv_freq")}

    def shape(self, role: str, layer: int) -> tuple[int, ...] | None:
        """See `TensorSource`."""
        name = NAMES[role][1].format(layer)
        if f"{name}_packed" in self._where:
            rows, cols = (int(v) for v in self._whole(f"{name}_shape", "I", (2,)))
            return rows, cols
        if name not in self._where:
            return None
        piece = self._piece(name)
        if piece.get_dtype() not in _FLOATS:
            raise ModelFileError(f"tensor {name} has type {piece.get_dtype()}, not a float")
        return tuple(piece.get_shape())

    def fill(self, out: torch.Tensor, role: str, layer: int) -> None:
        """See `TensorSource`."""
        name = NAMES[role][1].format(layer)
        small = self.packed(role, layer)
        if small is not None:
            out.copy_(torch.from_numpy(quant.dequantize(small)))
            return
        self._unused.discard(name)
        out.copy_(self._files[self._where[name]].get_tensor(name))

    def four_bits(self, role: str, layer: int) -> NDArray[np.uint8] | None:
        """See `TensorSource`; a folder has another form."""
        del role, layer
        return None

    def packed(self, role: str, layer: int) -> quant.Packed | None:
        """See `TensorSource`."""
        name = NAMES[role][1].format(layer)
        shape = self.shape(role, layer) if f"{name}_packed" in self._where else None
        if shape is None:
            return None
        rows, cols = shape
        words = self._whole(f"{name}_packed", "I32", (rows, -(-cols // 8)))
        scale = self._whole(f"{name}_scale", "", (rows, -1))
        groups = scale.shape[1]
        try:
            if f"{name}_minimum" in self._where:
                least = self._whole(f"{name}_minimum", "F16", (rows, groups))
                return importers.with_minima(words, scale, least, (rows, cols))
            zero = None
            if f"{name}_zero_point" in self._where:
                zero = self._whole(f"{name}_zero_point", "I32", (-(-rows // 8), groups))
            return importers.compressed_tensors(words, scale, zero, (rows, cols))
        except quant.QuantError as problem:
            raise ModelFileError(f"tensor {name}: {problem}") from None

    def _piece(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)

    def _whole(self, name: str, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a part of a packed matrix; `kind` "" is a float, -1 any length."""
        if name not in self._where:
            raise ModelFileError(f"the model has no tensor {name}")
        piece = self._piece(name)
        found, size = piece.get_dtype(), tuple(piece.get_shape())
        fits = len(size) == len(shape) and all(
            want in {-1, got} for want, got in zip(shape, size, strict=True)
        )
        if not fits or not (found.startswith(kind) if kind else found in _FLOATS):
            raise ModelFileError(f"tensor {name} is {found} {size}, expected {kind} {shape}")
        self._unused.discard(name)
        value = self._files[self._where[name]].get_tensor(name)
        array: NDArray[Any] = (value if kind else value.float()).numpy()
        return array

    def leftovers(self) -> set[str]:
        """See `TensorSource`."""
        return self._unused


def _shards(folder: Path) -> list[str]:
    index = folder / _INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelFileError(f"malformed {_INDEX}") from None
    for name in names:
        # The index is from outside: it may name files of its own folder only.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ModelFileError(f"malformed {_INDEX}: it names a file outside its folder")
    return names
