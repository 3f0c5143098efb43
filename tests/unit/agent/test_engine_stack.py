"""All layers in one call beside the same model layer by layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from agent.engine import compact
from agent.engine.model import Model, Span
from agent.engine.spec import ModelSpec
from agent.engine.stack import ROWS_MAX, stack_of
from agent.engine.weights import LayerWeights, Weights

pytestmark = pytest.mark.skipif(not compact.AVAILABLE, reason="capability: AVX2 and kernels.cpu")

SPEC = ModelSpec(
    architecture="qwen2", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=50,
    context=512, rms_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip


def made(spec=SPEC):
    """Return random weights in their small form."""
    generator = torch.Generator().manual_seed(1)
    scratch = compact.Scratch()

    def matrix(rows, cols):
        values = torch.randn(rows, cols, generator=generator) * cols**-0.5
        return compact.from_halves(values.half(), scratch)

    def vector(size):
        return torch.rand(size, generator=generator) + 0.5

    width, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm=vector(spec.hidden), qkv=matrix(width + 2 * kv, spec.hidden),
            qkv_bias=vector(width + 2 * kv), out=matrix(spec.hidden, width),
            ffn_norm=vector(spec.hidden), gate_up=matrix(2 * spec.ffn, spec.hidden),
            down=matrix(spec.hidden, spec.ffn),
        )
        for _ in range(spec.layers)
    )  # fmt: skip
    embed = torch.randn(spec.vocab, spec.hidden, generator=generator).half()
    return Weights(
        embed=embed, layers=layers, final_norm=vector(spec.hidden),
        head=compact.from_halves(embed, scratch), tied=True, compute=torch.float32,
        kv=torch.float16,
    )  # fmt: skip


def both(weights):
    """Return a model that takes all layers in one call, and one that does not."""
    models = [Model(SPEC, weights, blocks=32, block_size=16) for _ in range(2)]
    assert models[0]._stack is not None
    models[1]._stack = None
    return models


def close(one, two):
    return (one - two).abs().max() <= 5e-3 * two.abs().max()


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, ROWS_MAX, ROWS_MAX + 1])
def test_a_prompt_and_the_steps_after_it(length):
    models = both(made())
    table = [5, 3, *range(8, 20)]
    prompt = [(7 * i + 3) % SPEC.vocab for i in range(length)]
    for spans in (
        [Span(prompt, 0, table, logits=True)],
        *([Span([i], length + i, table, logits=True)] for i in range(3)),
    ):
        one, two = (model.forward(spans) for model in models)
        assert close(one, two)


def test_steps_that_read_and_decode_at_once():
    models = both(made())
    tables = [list(range(4 * i, 4 * i + 4)) for i in range(6)]
    starts = [
        [Span([i + 1] * (3 + 9 * i), 0, table, logits=True)] for i, table in enumerate(tables)
    ]
    mixed = [
        Span([9] if i % 2 else [4, 5, 6, 7] * 3, 3 + 9 * i, table, logits=i != 2)
        for i, table in enumerate(tables)
    ]
    for spans in (*starts, mixed):
        one, two = (model.forward(spans) for model in models)
        assert one.shape[0] == sum(span.logits for span in spans)
        assert close(one, two)


@pytest.mark.parametrize("change", [{"head_dim": 24, "heads": 4}, {"head_dim": 272, "heads": 2}])
def test_heads_of_another_size_go_layer_by_layer(change):
    spec = dataclasses.replace(SPEC, **change)
    kv = torch.empty((spec.layers, 2, 4, 16, spec.kv_heads, spec.head_dim), dtype=torch.float16)
    assert stack_of(spec, made(spec), kv) is None


def test_a_matrix_or_a_cache_in_float32_goes_layer_by_layer():
    weights = made()
    kv = torch.empty((SPEC.layers, 2, 4, 16, SPEC.kv_heads, SPEC.head_dim), dtype=torch.float16)
    assert stack_of(SPEC, weights, kv) is not None
    assert stack_of(SPEC, weights, kv.float()) is None
    changed = dataclasses.replace(weights.layers[1], out=torch.zeros(64, 64))
    other = dataclasses.replace(weights, layers=(weights.layers[0], changed))
    assert stack_of(SPEC, other, kv) is None
