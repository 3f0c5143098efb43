"""Model files -> the tensors the model computes with.

Q, K and V become one matrix, gate and up another, so that a layer is four products. Every tensor's
shape is checked against the spec before it is read, and a tensor nobody asked for is an error: it
would mean other mathematics than ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch

from agent.engine import compact
from agent.engine.types import ModelFileError
from kernels import quant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.engine.sources import TensorSource
    from agent.engine.spec import ModelSpec

_FFN: Final = {"gate", "up", "down"}
# A matrix that the model multiplies with.
Weight: TypeAlias = "torch.Tensor | compact.Compact"


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


class Loader:
    """Reads a model piece by piece; `scratch`: small forms are wanted (on a CPU)."""

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
        """Return the rows of the vocabulary."""
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
        stored = [self._source.packed(role, layer) for role, _ in parts]
        whole = quant.joined([piece for piece in stored if piece is not None])
        if whole is not None and all(stored):
            return compact.from_packed(whole, self._scratch)
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
        """Return one layer; raises `ModelFileError`."""
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
    loader = Loader(spec, source, dtype, device, compact.Scratch() if small else None)
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
