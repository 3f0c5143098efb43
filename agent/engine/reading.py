"""How well a model reads a text: perplexity, and each product on its way there.

A text is read in windows, each from its own beginning, all rows of a window at once: no KV pages,
no scheduler. The mathematics is `agent.engine.model`'s (a test holds the two together), layer by
layer, so that a caller can put another weight into one product and read on from that layer.
Memory: one window's rows in each layer, and logits of 64 rows.
"""

from __future__ import annotations

import itertools
import math
from importlib import resources
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch.nn import functional

from agent.engine.compact import Compact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.engine.spec import ModelSpec
    from agent.engine.types import Tokenizer
    from agent.engine.weights import LayerWeights, Weight, Weights

WINDOW: Final = 512
# A novel, and a manual of today: what is chosen on one kind alone costs dearly on the other.
KINDS: Final = ("novel", "manual")
_LOGIT_ROWS: Final = 64
_NATS_MAX: Final = 700.0  # exp of more is beyond a float
# A product's name and the rows that go into it.
Seen = "Callable[[str, torch.Tensor], None]"


def shipped(part: Literal["calibration", "held_out"]) -> list[str]:
    """Return the shipped texts of a part, one of each of `KINDS` (agent/texts/NOTICE)."""
    folder = resources.files("agent") / "texts"
    return [(folder / f"{part}-{kind}.txt").read_text(encoding="utf-8") for kind in KINDS]


def windows(
    tokenizer: Tokenizer, texts: Sequence[str], *, limit: int | None = None
) -> list[list[int]]:
    """Return the texts' whole windows of tokens, in turn one of each; `limit` of them at most.

    A text shorter than a window is one window; raises ValueError for one of less than two tokens.
    """
    columns = []
    for text in texts:
        ids = tokenizer.encode(text)
        if len(ids) < 2:
            raise ValueError("the text has less than two tokens")
        ends = range(WINDOW, len(ids) + 1, WINDOW)
        columns.append([ids[end - WINDOW : end] for end in ends] or [ids])
    turns = itertools.zip_longest(*columns)
    return [window for turn in turns for window in turn if window is not None][:limit]


def product(weight: Weight, x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, in] times a weight's transpose."""
    return weight.product(x) if isinstance(weight, Compact) else functional.linear(x, weight)


class Reader:
    """A model's layers, one window at a time. One thread at a time."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
        inverse = 1.0 / (spec.rope_theta**half)
        if spec.rope_factors is not None:
            inverse = inverse / torch.tensor(spec.rope_factors)
        angles = torch.arange(WINDOW).float()[:, None] * inverse[None, :]
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1)[:, None, :].to(weights.compute)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None, :].to(weights.compute)

    @torch.inference_mode()
    def start(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the rows that the first layer takes; at most `WINDOW` tokens."""
        embed = functional.embedding(torch.tensor(tokens), self.weights.embed)
        return embed.to(self.weights.compute)

    @torch.inference_mode()
    def layer(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        seen: Callable[[str, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Return a window's rows after a layer; `seen` gets what goes into each product."""
        spec = self.spec

        def times(name: str, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
            if seen is not None:
                seen(name, rows)
            return product(weight, rows)

        h = functional.rms_norm(x, (spec.hidden,), layer.attn_norm, spec.rms_eps)
        qkv = times("qkv", layer.qkv, h)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        x = x + times("out", layer.out, self._attention(qkv))
        h = functional.rms_norm(x, (spec.hidden,), layer.ffn_norm, spec.rms_eps)
        both = times("gate_up", layer.gate_up, h)
        h = functional.silu(both[:, : spec.ffn]) * both[:, spec.ffn :]
        return x + times("down", layer.down, h)

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        spec, count = self.spec, qkv.shape[0]
        rows = qkv.view(count, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        turned = rows[:, : spec.heads + spec.kv_heads]
        turned = turned * self._cos[:count] + (
            turned.roll(spec.head_dim // 2, -1) * self._sin[:count]
        )
        # Keys and values are kept as the engine's cache keeps them.
        keys = turned[:, spec.heads :].to(self.weights.kv).to(qkv.dtype)
        values = rows[:, spec.heads + spec.kv_heads :].to(self.weights.kv).to(qkv.dtype)
        out = functional.scaled_dot_product_attention(
            turned[:, : spec.heads].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=spec.heads != spec.kv_heads,
        )
        return out[0].transpose(0, 1).reshape(count, spec.heads * spec.head_dim)

    @torch.inference_mode()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, float32, of rows that left the last layer."""
        spec = self.spec
        h = functional.rms_norm(x, (spec.hidden,), self.weights.final_norm, spec.rms_eps)
        return product(self.weights.head, h).float()

    @torch.inference_mode()
    def loss(self, x: torch.Tensor, tokens: Sequence[int]) -> float:
        """Return the sum of -ln p of each token after the first, from rows of the last layer."""
        after = torch.tensor(tokens[1:])
        return sum(
            functional.cross_entropy(
                self.logits(x[at : at + _LOGIT_ROWS][: len(after) - at]),
                after[at : at + _LOGIT_ROWS],
                reduction="sum",
            ).item()
            for at in range(0, len(after), _LOGIT_ROWS)
        )

    def read(self, tokens: Sequence[int]) -> float:
        """Return a window's loss."""
        x = self.start(tokens)
        for layer in self.weights.layers:
            x = self.layer(x, layer)
        return self.loss(x, tokens)


def perplexity(loss: float, tokens: int) -> float:
    """Return the perplexity of a summed loss over so many scored tokens.

    Raises ValueError for a loss that is no number, or that no perplexity's exponent can be.
    """
    each = loss / tokens
    if not each < _NATS_MAX:
        raise ValueError(f"a loss of {each:g} nats for each token of the text")
    return math.exp(each)


def relative_error(lost: torch.Tensor, whole: torch.Tensor) -> float:
    """Return |lost| / |whole|; 0 for what was nothing and still is."""
    error = torch.linalg.norm(lost)
    return float(error / torch.linalg.norm(whole)) if error else 0.0


def scored(parts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens of these windows are scored: all but each one's first."""
    return sum(len(part) - 1 for part in parts)
