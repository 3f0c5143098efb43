"""Model files -> the tensors the model computes with.

Two sources speak one interface: a GGUF file (dequantised block by block) and a Hugging Face folder
of safetensors. Q, K and V become one matrix, gate and up another, so that a layer is four products.
Every tensor's shape is checked against the spec before it is read, and a tensor nobody asked for is
an error: it would mean other mathematics than ours.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from agent.engine import compact
from agent.engine.types import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from agent.engine.gguf_file import GgufFile
    from agent.engine.spec import ModelSpec

# role: (GGUF's name, Hugging Face's name); {} is the layer.
_NAMES: Final = {
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
_FFN: Final = {"gate", "up", "down"}
_ROPE_FREQS: Final = "rope_freqs.weight"
# Rows converted at a time: bounds the memory beside the result.
_ROWS: Final = 8_192
_FLOATS: Final = {"F32", "F16", "F64", "BF16", "F8_E4M3", "F8_E5M2"}
_INDEX: Final = "model.safetensors.index.json"


# A matrix that the model multiplies with.
Weight: TypeAlias = "torch.Tensor | compact.Compact"


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
        info = self._file.tensors.get(_NAMES[role][0].format(layer))
        return None if info is None else info.shape

    def fill(self, out: torch.Tensor, role: str, layer: int) -> None:
        """See `TensorSource`."""
        name = _NAMES[role][0].format(layer)
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
        name = _NAMES[role][0].format(layer)
        info = self._file.tensors[name]
        if info.kind.name not in {"Q4_0", "Q4_1"}:
            return None
        self._unused.discard(name)
        raw = np.frombuffer(self._file.read(info.offset, info.nbytes), np.uint8)
        raw = raw.reshape(info.shape[0], -1)
        return raw if info.kind.name == "Q4_1" else compact.q4_0_as_q4_1(raw)

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
    """Tensors of a folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for name in _shards(folder):
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
        name = _NAMES[role][1].format(layer)
        if name not in self._where:
            return None
        piece = self._files[self._where[name]].get_slice(name)
        if piece.get_dtype() not in _FLOATS:
            raise ModelFileError(f"tensor {name} has type {piece.get_dtype()}, not a float")
        return tuple(piece.get_shape())

    def fill(self, out: torch.Tensor, role: str, layer: int) -> None:
        """See `TensorSource`."""
        name = _NAMES[role][1].format(layer)
        self._unused.discard(name)
        out.copy_(self._files[self._where[name]].get_tensor(name))

    def four_bits(self, role: str, layer: int) -> NDArray[np.uint8] | None:
        """See `TensorSource`; such a folder holds floats."""
        del role, layer
        return None

    def leftovers(self) -> set[str]:
        """See `TensorSource`."""
        return self._unused


def _shards(folder: Path) -> list[str]:
    index = folder / _INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelFileError(f"malformed {_INDEX}") from None
    for name in names:
        # The index is from outside: it may name files of its own folder only.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ModelFileError(f"malformed {_INDEX}: it names a file outside its folder")
    return names


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer: four products and two norms."""

    attn_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    out: Weight
    ffn_norm: torch.Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. `tied`: the head is the embedding.

    `compute`: what is computed in; `kv`: what keys and values are kept in.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Weight
    tied: bool
    compute: torch.dtype
    kv: torch.dtype

    @property
    def parameters(self) -> int:
        """Count of numbers, a tied head once."""
        total = self.embed.numel() + self.final_norm.numel()
        if not self.tied:
            total += self.head.numel()
        for layer in self.layers:
            total += layer.attn_norm.numel() + layer.ffn_norm.numel()
            total += sum(w.numel() for w in (layer.qkv, layer.out, layer.gate_up, layer.down))
            total += 0 if layer.qkv_bias is None else layer.qkv_bias.numel()
        return total


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        scratch: compact.Scratch | None,
    ) -> None:
        self._spec = spec
        self._scratch = scratch
        self._source = source
        self._dtype = dtype
        self._device = device

    def read(
        self,
        *parts: tuple[str, int],
        cols: int | None,
        layer: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the named tensors as one; each part is (role, rows); `cols` None: a vector."""
        self._check(parts, cols, layer)
        rows = sum(count for _, count in parts)
        shape = (rows,) if cols is None else (rows, cols)
        out = torch.empty(shape, dtype=dtype or self._dtype)
        first = 0
        for role, count in parts:
            target = out[first : first + count]
            self._source.fill(target, role, layer)
            if self._spec.permuted and role[0] in "qk":
                _unpermute(target, self._spec.head_dim)
            first += count
        return out.to(self._device)

    def embedding(self) -> torch.Tensor:
        dtype = torch.float16 if self._small(self._spec.hidden) else None
        embed = self.read(("embed", self._spec.vocab), cols=self._spec.hidden, dtype=dtype)
        return (
            embed
            if embed.isfinite().all()
            else self.read(("embed", self._spec.vocab), cols=self._spec.hidden)
        )

    def weight(self, *parts: tuple[str, int], cols: int, layer: int = 0) -> Weight:
        """Return the same for a product: in its small form where that is wanted and possible."""
        if not self._small(cols):
            return self.read(*parts, cols=cols, layer=layer)
        assert self._scratch is not None, "small forms were asked for"
        self._check(parts, cols, layer)
        if parts[0][0] in _FFN:
            found = [self._source.four_bits(role, layer) for role, _ in parts]
            raw = [rows for rows in found if rows is not None]
            if len(raw) == len(parts):
                return compact.from_q4_1(np.concatenate(raw), self._scratch)
        halves = self.read(*parts, cols=cols, layer=layer, dtype=torch.float16)
        if not halves.isfinite().all():  # a weight beyond 65,504
            return self.read(*parts, cols=cols, layer=layer)
        return compact.from_halves(halves, self._scratch)

    def head(self, embed: torch.Tensor) -> Weight:
        """Return the head's weight where it is the embedding."""
        if embed.dtype != torch.float16 or self._scratch is None:
            return embed
        return compact.from_halves(embed, self._scratch)

    def _small(self, cols: int) -> bool:
        return self._scratch is not None and compact.fits(cols)

    def _check(self, parts: Sequence[tuple[str, int]], cols: int | None, layer: int) -> None:
        for role, count in parts:
            expected = (count,) if cols is None else (count, cols)
            found = self._source.shape(role, layer)
            if found != expected:
                name = f"{role} of layer {layer}"
                raise ModelFileError(
                    f"the model has no tensor for {name}"
                    if found is None
                    else f"the tensor for {name} has shape {found}, expected {expected}"
                )

    def layer(self, index: int) -> LayerWeights:
        spec = self._spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        biases = [self._source.shape(f"{role}_bias", index) is not None for role in "qkv"]
        if any(biases) and not all(biases):
            raise ModelFileError(f"layer {index} has some of the QKV biases and not others")
        qkv = (("q", queries), ("k", keys), ("v", keys))
        bias = tuple((f"{role}_bias", rows) for role, rows in qkv)
        return LayerWeights(
            attn_norm=self.read(("attn_norm", spec.hidden), cols=None, layer=index),
            qkv=self.weight(*qkv, cols=spec.hidden, layer=index),
            qkv_bias=self.read(*bias, cols=None, layer=index) if all(biases) else None,
            out=self.weight(("o", spec.hidden), cols=queries, layer=index),
            ffn_norm=self.read(("ffn_norm", spec.hidden), cols=None, layer=index),
            gate_up=self.weight(
                ("gate", spec.ffn), ("up", spec.ffn), cols=spec.hidden, layer=index
            ),
            down=self.weight(("down", spec.hidden), cols=spec.ffn, layer=index),
        )


def _unpermute(target: torch.Tensor, head_dim: int) -> None:
    """Turn rows from interleaved pairs (GGUF's llama) into halves, head by head, in place."""
    pairs = target.view(-1, head_dim // 2, 2, *target.shape[1:])
    target.copy_(pairs.transpose(1, 2).reshape(target.shape))


def load_weights(
    spec: ModelSpec,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None],
    *,
    small: bool = False,
) -> Weights:
    """Read every tensor; `on_progress` gets the fraction done. Raises `ModelFileError`.

    `small`: on a CPU, in float32: FFN weights stay as four bits where the file holds them so, and
    other matrices are kept in FP16. Nothing is quantised here.
    """
    loader = _Loader(spec, source, dtype, device, compact.Scratch() if small else None)
    embed = loader.embedding()
    on_progress(0.2)
    layers = []
    for index in range(spec.layers):
        layers.append(loader.layer(index))
        on_progress(0.2 + 0.8 * (index + 1) / spec.layers)
    tied = source.shape("head", 0) is None
    weights = Weights(
        embed=embed,
        layers=tuple(layers),
        final_norm=loader.read(("final_norm", spec.hidden), cols=None),
        head=loader.head(embed) if tied else loader.weight(("head", spec.vocab), cols=spec.hidden),
        tied=tied,
        compute=dtype,
        kv=torch.float16 if small else dtype,
    )
    unused = source.leftovers()
    if unused:
        raise ModelFileError(
            f"tensor {min(unused)} has no place in a {spec.architecture} model"
            + (f" (and {len(unused) - 1} more)" if len(unused) > 1 else "")
        )
    return weights
