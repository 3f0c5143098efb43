"""All layers in one call, for the few tokens of a decode step on a CPU with small weights.

A step of one token is some ten milliseconds, of which thirty layers of single operators took a
third: as many calls, as many rounds of threads meeting. `kernels.cpu` runs the whole stack in one
parallel region; more than `kernels.cpu` takes at a time go piece after piece. Where it cannot (a
matrix that stayed in float32, an odd head size) or need not (more rows), the model goes layer by
layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from agent.engine.compact import Compact
from kernels import cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.engine.model import Span
    from agent.engine.spec import ModelSpec
    from agent.engine.weights import LayerWeights, Weights
    from kernels.cpu._products import Layer

ROWS_MAX: Final = 4 * cpu.STEP_ROWS_MAX
"""Tokens up to which the stack is as fast as the BLAS with unpacked weights, or faster."""


class Stack:
    """The layers of a model; writes its keys and values. One thread at a time."""

    def __init__(self, layers: cpu.Stack, kv: torch.Tensor) -> None:
        self._layers = layers
        self._kv = kv.numpy()

    def step(
        self,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        positions: Sequence[int],
        spans: Sequence[Span],
    ) -> torch.Tensor:
        """Return `x` [tokens, hidden] after all layers; cosines and sines [tokens, half a head]."""
        offsets: list[int] = []
        tables: list[int] = []
        for span in spans:
            offsets += [len(tables)] * len(span.token_ids)
            tables += span.table
        rows, angles = x.numpy(), (cosines.numpy(), sines.numpy())
        places, starts = np.array(positions, np.int64), np.array(offsets, np.int64)
        blocks, threads = np.array(tables, np.int32), torch.get_num_threads()
        # A prompt's later tokens find the earlier ones in the cache.
        for first in range(0, len(positions), cpu.STEP_ROWS_MAX):
            piece = slice(first, first + cpu.STEP_ROWS_MAX)
            self._layers.step(
                rows[piece],
                (angles[0][piece], angles[1][piece]),
                places[piece],
                starts[piece],
                blocks,
                self._kv,
                threads,
            )
        return x


def stack_of(spec: ModelSpec, weights: Weights, kv: torch.Tensor) -> Stack | None:
    """Return the model's layers as one, or None where they are not all small or do not fit."""
    if kv.dtype != torch.float16 or kv.device.type != "cpu" or spec.head_dim % 16:
        return None
    if spec.head_dim > cpu.HEAD_MAX:
        return None
    layers = [_layer(layer) for layer in weights.layers]
    whole = [layer for layer in layers if layer is not None]
    if len(whole) < len(layers):
        return None
    made = cpu.Stack(
        whole,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        dim=spec.head_dim,
        eps=spec.rms_eps,
    )
    return Stack(made, kv)


def _layer(layer: LayerWeights) -> Layer | None:
    qkv, out, gate_up, down = layer.qkv, layer.out, layer.gate_up, layer.down
    if not (
        isinstance(qkv, Compact)
        and isinstance(out, Compact)
        and isinstance(gate_up, Compact)
        and isinstance(down, Compact)
    ):
        return None
    return cpu.layer(
        (qkv.matrix, out.matrix, gate_up.matrix, down.matrix),
        (layer.attn_norm.numpy(), layer.ffn_norm.numpy()),
        None if layer.qkv_bias is None else layer.qkv_bias.numpy(),
    )
