"""A Llama/Qwen2 forward pass over a paged KV cache, in plain torch operators.

One call computes a mixed batch: rows of many sequences, some decoding one token, some reading a
piece of a prompt. It never decides what to compute (scheduler) or what to pick (sampler).

The order of operations is that of the reference implementation (norm in float32, rotary by halves,
softmax over scaled scores), so that greedy output in float32 is the same.

Speed on a CPU, as measured (docs/engine.md): one token is bound by reading the weights once. The
BLAS runs a product with one column on one thread and a row-major product of few rows slowly;
weight-times-columns, and for one token the weight cut in slabs, reach the memory's full rate.
With small weights the layers are one call (`stack.py`) for as many tokens as a decode step has.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

from agent.engine.compact import FEW_ROWS, Compact
from agent.engine.stack import ROWS_MAX, stack_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.engine.spec import ModelSpec
    from agent.engine.weights import LayerWeights, Weight, Weights

# Slabs a weight is cut into for a single row; rows up to which weight-times-columns wins.
_SLABS: Final = 4
_FEW_ROWS: Final = 32


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tokens of one sequence from position `start`, and the blocks of its tokens so far.

    `table` covers at least `start + count` tokens. `logits`: those of the last token are wanted.
    """

    token_ids: Sequence[int]
    start: int
    table: Sequence[int]
    logits: bool


@dataclass(frozen=True, slots=True)
class _Segment:
    """Where a span lies in the batch, which blocks it looks at and what it may see."""

    first: int
    count: int
    length: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


class Linear:
    """A product with a weight [out, in], by whichever route is fastest for the count of rows."""

    __slots__ = ("_bias", "_compact", "_slabs", "_weight", "_wide")

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        rows, cols = weight.shape
        self._bias = bias
        self._compact: Compact | None = None
        if isinstance(weight, Compact):
            self._compact = weight
            return
        self._weight = weight
        # The routes below are for a CPU's BLAS; an accelerator's own choice is best.
        self._wide = weight.device.type != "cpu" or weight.dtype != torch.float32
        self._slabs = (
            None if self._wide or rows % _SLABS else weight.view(_SLABS, rows // _SLABS, cols)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] of `x` [rows, in]."""
        if self._compact is not None:
            y = self._compact.product(x)
            return y if self._bias is None else y.add_(self._bias)
        count = x.shape[0]
        if self._wide or count > _FEW_ROWS:
            return functional.linear(x, self._weight, self._bias)
        if count == 1 and self._slabs is not None:
            # The column must be a transposed row: with the strides of a plain view the BLAS takes
            # a route five times slower.
            column = x.t()[None].expand(_SLABS, -1, -1)
            y = torch.bmm(self._slabs, column).view(1, -1)
        else:
            y = torch.mm(self._weight, x.t()).t().contiguous()
        return y if self._bias is None else y.add_(self._bias)


class _Ffn:
    """down(silu(gate(x)) * up(x)); for few rows and small weights one call."""

    __slots__ = ("_down", "_gate_up", "_whole")

    def __init__(self, gate_up: Weight, down: Weight) -> None:
        self._whole: tuple[Compact, Compact] | None = None
        if isinstance(gate_up, Compact) and isinstance(down, Compact):
            self._whole = gate_up, down
        self._gate_up = Linear(gate_up)
        self._down = Linear(down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._whole is not None and x.shape[0] <= FEW_ROWS:
            return self._whole[0].ffn(self._whole[1], x)
        h = self._gate_up(x)
        gates = h.shape[1] // 2
        return self._down(functional.silu(h[:, :gates]).mul_(h[:, gates:]))


class _Layer:
    __slots__ = ("attn_norm", "ffn", "ffn_norm", "out", "qkv")

    def __init__(self, weights: LayerWeights) -> None:
        self.attn_norm = weights.attn_norm
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.out = Linear(weights.out)
        self.ffn_norm = weights.ffn_norm
        self.ffn = _Ffn(weights.gate_up, weights.down)


class Model:
    """Weights plus a KV cache of `blocks` blocks of `block_size` tokens. One thread at a time."""

    def __init__(self, spec: ModelSpec, weights: Weights, *, blocks: int, block_size: int) -> None:
        self._spec = spec
        self._embed = weights.embed
        self._layers = [_Layer(layer) for layer in weights.layers]
        self._final_norm = weights.final_norm
        self._head = Linear(weights.head)
        self._compute = weights.compute
        self._block_size = block_size
        self.device = weights.embed.device
        shape = (spec.layers, 2, blocks, block_size, spec.kv_heads, spec.head_dim)
        # Not filled: the system maps a page when it is first written, so an idle pool costs no
        # memory. Only slots that a step has written are ever read.
        self.kv = torch.empty(shape, dtype=weights.kv, device=self.device)
        self._stack = stack_of(spec, weights, self.kv)
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
        inverse = 1.0 / (spec.rope_theta**half)
        if spec.rope_factors is not None:
            inverse = inverse / torch.tensor(spec.rope_factors)
        self._inverse = inverse.to(self.device)
        # One sequence's keys and values of one layer, gathered: reused, since fresh memory of this
        # size costs more in page faults than the copy itself.
        self._gathered = torch.empty(0, dtype=self.kv.dtype, device=self.device)
        self._widened = torch.empty(0, dtype=self._compute, device=self.device)

    @property
    def whole_steps(self) -> bool:
        """Whether a step of few rows goes through all layers in one call."""
        return self._stack is not None

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Compute all spans, fill their blocks and return logits [spans that want them, vocab].

        Logits are float32 whatever the weights are.
        """
        spec, device = self._spec, self.device
        ids = [token for span in spans for token in span.token_ids]
        positions = [p for s in spans for p in range(s.start, s.start + len(s.token_ids))]
        x = functional.embedding(torch.tensor(ids, device=device), self._embed).to(self._compute)
        cos, sin = self._rotary(torch.tensor(positions, device=device))
        if self._stack is not None and len(ids) <= ROWS_MAX:
            x = self._stack.step(x, cos, sin, positions, spans)
        else:
            x = self._one_by_one(x, cos, sin, spans)
        ends = itertools.accumulate(len(span.token_ids) for span in spans)
        last = [end - 1 for end, span in zip(ends, spans, strict=True) if span.logits]
        x = x[torch.tensor(last, dtype=torch.int64, device=device)]
        x = functional.rms_norm(x, (spec.hidden,), self._final_norm, spec.rms_eps)
        return self._head(x).float()

    def _one_by_one(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spans: Sequence[Span]
    ) -> torch.Tensor:
        """Take `x` through the layers, operator by operator."""
        spec = self._spec
        slots = torch.tensor(self._slots(spans), device=self.device)
        segments = self._segments(spans)
        # The sine of the first half is negated: see `_attention`.
        cos = torch.cat((cos, cos), dim=-1)[:, None, :].to(self._compute)
        sin = torch.cat((-sin, sin), dim=-1)[:, None, :].to(self._compute)
        for index, layer in enumerate(self._layers):
            h = functional.rms_norm(x, (spec.hidden,), layer.attn_norm, spec.rms_eps)
            h = self._attention(index, layer.qkv(h), cos, sin, slots, segments)
            x = x + layer.out(h)
            h = functional.rms_norm(x, (spec.hidden,), layer.ffn_norm, spec.rms_eps)
            x = x + layer.ffn(h)
        return x

    def _slots(self, spans: Sequence[Span]) -> list[int]:
        size = self._block_size
        return [
            span.table[position // size] * size + position % size
            for span in spans
            for position in range(span.start, span.start + len(span.token_ids))
        ]

    def _segments(self, spans: Sequence[Span]) -> list[_Segment]:
        segments, first = [], 0
        for span in spans:
            count = len(span.token_ids)
            length = span.start + count
            used = -(-length // self._block_size)
            blocks = torch.tensor(span.table[:used], device=self.device)
            mask = None
            # A single token sees everything; from position 0 the kernel's own causal mask fits.
            if count > 1 and span.start > 0:
                mask = torch.full((count, length), float("-inf"), dtype=self._compute)
                mask = mask.triu_(span.start + 1).to(self.device)
            segments.append(_Segment(first, count, length, blocks, mask))
            first += count
        return segments

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [rows, half a head], float32."""
        angles = positions.float()[:, None] * self._inverse[None, :]
        return angles.cos(), angles.sin()

    def _attention(
        self,
        index: int,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        segments: Sequence[_Segment],
    ) -> torch.Tensor:
        spec = self._spec
        heads, dim = spec.heads, spec.head_dim
        qkv = qkv.view(qkv.shape[0], heads + 2 * spec.kv_heads, dim)
        rotated = qkv[:, : heads + spec.kv_heads]
        # Rotary by halves: the other half of each head, rolled over, carries the sine.
        rotated = rotated * cos + rotated.roll(dim // 2, -1) * sin
        query, key = rotated[:, :heads], rotated[:, heads:]
        keys, values = self.kv[index].flatten(1, 2)
        keys.index_copy_(0, slots, key.to(keys.dtype))
        values.index_copy_(0, slots, qkv[:, heads + spec.kv_heads :].to(keys.dtype))
        if len(segments) == 1:
            return self._attend(index, query, segments[0])
        out = qkv.new_empty(qkv.shape[0], heads * dim)
        for segment in segments:
            rows = slice(segment.first, segment.first + segment.count)
            out[rows] = self._attend(index, query[rows], segment)
        return out

    def _attend(self, index: int, query: torch.Tensor, segment: _Segment) -> torch.Tensor:
        spec, length = self._spec, segment.length
        layer = self.kv[index]
        shape = (2, segment.blocks.numel(), *layer.shape[2:])
        size = math.prod(shape)
        if size > self._gathered.numel():
            self._gathered = layer.new_empty(2 * size)
        gathered = self._gathered[:size].view(shape)
        torch.index_select(layer, 1, segment.blocks, out=gathered)
        if self.kv.dtype != self._compute:
            if size > self._widened.numel():
                self._widened = query.new_empty(2 * size)
            gathered = self._widened[:size].view(shape).copy_(gathered)
        keys, values = gathered.flatten(1, 2)[:, :length]
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=segment.mask,
            is_causal=segment.count > 1 and segment.mask is None,
            enable_gqa=spec.heads != spec.kv_heads,
        )
        return out[0].transpose(0, 1).reshape(segment.count, spec.heads * spec.head_dim)
