"""Small weights in the engine: the same tokens as in float32, from a third of the memory."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from agent.engine import compact, sources, weights
from agent.engine.gguf_file import GgufFile
from agent.engine.load import load_engine
from agent.engine.model import Model, Span
from agent.engine.spec import from_gguf
from agent.engine.types import Sampling
from tests.unit.agent import engine_kit as kit

pytestmark = pytest.mark.skipif(not compact.AVAILABLE, reason="capability: AVX2 and kernels.cpu")


def loaded(path, *, small):
    with GgufFile(path) as file:
        spec = from_gguf(file, None)
        source = sources.GgufSource(file)
        cpu = torch.device("cpu")
        found = weights.load_weights(
            spec, source, torch.float32, cpu, lambda _fraction: None, small=small
        )
    return spec, found


def logits(spec, found, prompt, steps=()):
    """Return logits after the prompt and after each further token."""
    model = Model(spec, found, blocks=8, block_size=16)
    table = list(range(8))
    rows = [model.forward([Span(prompt, 0, table, logits=True)])]
    for count, token in enumerate(steps):
        rows.append(model.forward([Span([token], len(prompt) + count, table, logits=True)]))
    return torch.cat(rows).double()


def rounded():
    """Return the kit's tensors as FP16 holds them: the small form of all but the FFN is exact."""
    return {name: value.half().float() for name, value in kit.tensors(3).items()}


@pytest.mark.parametrize("length", [1, 7, 40])
def test_logits_are_those_of_the_same_weights_unpacked(tmp_path, length):
    path = kit.write_gguf(tmp_path / "m.gguf", rounded(), kind="Q4_1")
    prompt = kit.random_prompt(1, length)
    steps = kit.random_prompt(2, 5)
    spec, small = loaded(path, small=True)
    _, plain = loaded(path, small=False)
    assert isinstance(small.layers[0].gate_up, compact.Compact)
    assert small.layers[0].gate_up.bits == 4
    assert small.layers[0].qkv.bits == 16
    one, two = logits(spec, small, prompt, steps), logits(spec, plain, prompt, steps)
    # Attention's Q4_1 weights are rounded to FP16; the FFN's lose nothing.
    assert (one - two).abs().max() <= 3e-3 * two.abs().max()
    top = two.topk(2).values
    sure = top[:, 0] - top[:, 1] >= 0.05
    assert torch.equal(one.argmax(-1)[sure], two.argmax(-1)[sure])
    assert small.parameters == plain.parameters


def test_batches_of_any_size_give_the_rows_of_single_requests(tmp_path):
    path = kit.write_gguf(tmp_path / "m.gguf", rounded(), kind="Q4_0")
    spec, small = loaded(path, small=True)
    model = Model(spec, small, blocks=64, block_size=16)
    prompts = [kit.random_prompt(seed, 3) for seed in range(14)]
    spans = [Span(p, 0, [4 * i], logits=True) for i, p in enumerate(prompts)]
    together = model.forward(spans)
    for span, row in zip(spans, together, strict=True):
        alone = model.forward([span])[0]
        assert (alone - row).abs().max() <= 2e-3 * row.abs().max()


def test_q4_0_is_taken_over_exactly():
    rng = np.random.default_rng(0)
    w = rng.normal(0, 1, (5, 96)).astype(np.float32)
    raw = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q4_0)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0)
    got = gguf.quants.dequantize(compact.q4_0_as_q4_1(raw), gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(got, expected)


def test_a_weight_that_fp16_cannot_hold_stays_as_it_is(tmp_path):
    named = kit.tensors(4)
    named["model.layers.0.self_attn.o_proj.weight"][0, 0] = 1e6
    named["model.embed_tokens.weight"][5, 5] = -1e9
    spec, small = loaded(kit.write_gguf(tmp_path / "m.gguf", named), small=True)
    assert isinstance(small.layers[0].out, torch.Tensor)
    assert small.embed.dtype == torch.float32
    assert isinstance(small.layers[1].out, compact.Compact)
    assert logits(spec, small, kit.random_prompt(0, 3)).isfinite().all()


def test_an_engine_runs_on_small_weights_from_a_file_and_from_a_folder(tmp_path):
    named = rounded()
    prompt = kit.random_prompt(5, 9)
    for source in (
        kit.write_gguf(tmp_path / "m.gguf", named), kit.write_folder(tmp_path / "hf", named),
    ):  # fmt: skip
        engine = load_engine(str(source), kv_tokens=256, dtype="int4")
        try:
            assert engine.info.dtype == "int4"
            assert engine.info.parameters == sum(t.numel() for t in named.values())
            got = kit.collect(engine, prompt, Sampling(6, temperature=0.0))
        finally:
            engine.close()
        assert got.token_ids == kit.greedy(named, prompt, len(got.token_ids))
        assert got.token_ids


def test_small_weights_need_a_cpu_that_can():
    with pytest.raises(ValueError, match=r"device|int4"):
        load_engine("anywhere", dtype="int4", device="cuda")
