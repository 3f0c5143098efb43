"""Reading a text gives the engine's own logits, and the perplexity they make."""

from __future__ import annotations

import math

import pytest
import torch

from agent.engine import compact, reading
from agent.engine.load import read_model
from agent.engine.model import Model, Span
from tests.unit.agent import engine_kit as kit


def loaded(path, *, small=False):
    return read_model(path, torch.float32, torch.device("cpu"), lambda _share: None, small=small)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_last_rows_logits_are_the_engines(tmp_path, architecture):
    named = kit.tensors(1, bias=architecture == "qwen2")
    spec, _, weights = loaded(kit.write_folder(tmp_path, named, architecture=architecture))
    tokens = kit.random_prompt(2, 75)
    reader = reading.Reader(spec, weights)
    x = reader.start(tokens)
    for layer in weights.layers:
        x = reader.layer(x, layer)
    model = Model(spec, weights, blocks=8, block_size=16)
    engine = model.forward([Span(tokens, 0, list(range(8)), logits=True)])
    assert torch.allclose(reader.logits(x)[-1:], engine, atol=1e-4)


@pytest.mark.skipif(not compact.AVAILABLE, reason="capability: AVX2 and kernels.cpu")
def test_small_weights_are_read_as_the_engine_computes_with_them(tmp_path):
    path = kit.write_gguf(tmp_path / "m.gguf", kit.tensors(1), kind="Q4_1")
    spec, _, weights = loaded(path, small=True)
    tokens = kit.random_prompt(2, 33)
    reader = reading.Reader(spec, weights)
    x = reader.start(tokens)
    for layer in weights.layers:
        x = reader.layer(x, layer)
    model = Model(spec, weights, blocks=8, block_size=16)
    engine = model.forward([Span(tokens, 0, list(range(8)), logits=True)])
    assert torch.allclose(reader.logits(x)[-1:], engine, atol=1e-4)


def test_the_loss_is_that_of_the_definition(tmp_path):
    named = kit.tensors(3)
    spec, _, weights = loaded(kit.write_folder(tmp_path, named))
    tokens = kit.random_prompt(4, 12)
    by_hand = -sum(
        kit.reference_logits(named, tokens[:count]).log_softmax(-1)[tokens[count]].item()
        for count in range(1, len(tokens))
    )
    loss = reading.Reader(spec, weights).read(tokens)
    assert loss == pytest.approx(by_hand, rel=1e-4)
    assert reading.perplexity(loss, 11) == pytest.approx(math.exp(by_hand / 11), rel=1e-4)


def test_each_product_shows_what_goes_into_it(tmp_path):
    spec, _, weights = loaded(kit.write_folder(tmp_path, kit.tensors(3)))
    reader = reading.Reader(spec, weights)
    seen = {}
    reader.layer(reader.start([5, 6, 7]), weights.layers[0], seen.__setitem__)
    assert {name: tuple(x.shape) for name, x in seen.items()} == {
        "qkv": (3, kit.HIDDEN), "out": (3, kit.HIDDEN),
        "gate_up": (3, kit.HIDDEN), "down": (3, kit.FFN),
    }  # fmt: skip


def test_windows_are_whole_and_scored_but_for_their_first_token(tmp_path):
    _, tokenizer, _ = loaded(kit.write_folder(tmp_path, kit.tensors(3)))
    parts = reading.windows(tokenizer, ["x" * 1_300])
    assert [len(part) for part in parts] == [512, 512]
    assert reading.scored(parts) == 1_022
    assert len(reading.windows(tokenizer, ["x" * 1_300], limit=1)) == 1
    assert [len(part) for part in reading.windows(tokenizer, ["xyz"])] == [3]
    with pytest.raises(ValueError, match="two tokens"):
        reading.windows(tokenizer, ["x"])


def test_texts_take_turns(tmp_path):
    _, tokenizer, _ = loaded(kit.write_folder(tmp_path, kit.tensors(3)))
    first, second = "x" * 1_100, "y" * 512
    parts = reading.windows(tokenizer, [first, second])
    x, y = tokenizer.encode("x"), tokenizer.encode("y")
    assert [part[:1] for part in parts] == [x, y, x]


def test_the_shipped_texts_have_nothing_in_common():
    held, calibration = reading.shipped("held_out"), reading.shipped("calibration")
    assert len(held) == len(calibration) == len(reading.KINDS)
    sentences = {s for text in calibration for s in text.split(". ") if len(s) > 40}
    assert len(sentences) > 100
    assert not sentences & {s for text in held for s in text.split(". ")}
    # 8,192 tokens of a tokenizer with at most five characters a token.
    assert sum(map(len, held)) > 5 * 8_192
