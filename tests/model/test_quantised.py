"""The default model, quantised: lossless at its own group, within the budget at 128."""

from __future__ import annotations

import json

import pytest
import torch

from agent.engine import compact
from agent.engine.convert import Options, convert
from agent.engine.load import load_engine, read_model
from agent.engine.types import Sampling
from tests.unit.agent.engine_kit import collect

WINDOWS = 3


def silent(_phase, _share):
    pass


@pytest.fixture(autouse=True)
def one_thread():
    """Two would wait for each other for seconds where another process has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(600)
def test_at_its_own_group_nothing_is_lost(model_path, tmp_path):
    options = Options(group=32, plain=True, windows=WINDOWS)
    manifest = convert(model_path, tmp_path / "own", options, silent)
    assert manifest["quality"]["ratio"] == pytest.approx(1.0, abs=0.002)
    quality = json.loads((tmp_path / "own" / "quality.json").read_text())
    assert {row["output_error"] for row in quality["output_errors"]} == {0.0}
    cpu = torch.device("cpu")
    both = [
        read_model(path, torch.float32, cpu, lambda _share: None, small=False)[2]
        for path in (model_path, tmp_path / "own")
    ]
    for one, two in zip(*(weights.layers for weights in both), strict=True):
        assert torch.equal(one.gate_up, two.gate_up)
        assert torch.equal(one.down, two.down)
        assert torch.equal(one.qkv.half().float(), two.qkv)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_group_128_it_stays_within_the_budget_and_still_knows_paris(model_path, tmp_path):
    out = tmp_path / "wide"
    manifest = convert(model_path, out, Options(windows=WINDOWS), silent)
    assert manifest["quality"]["ratio"] <= 1.15
    dtype = "int4" if compact.AVAILABLE else "float32"
    engine = load_engine(str(out), dtype=dtype, threads=1, kv_tokens=512)
    try:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = engine.tokenizer.apply_chat(question)
        answer = collect(engine, prompt, Sampling(24, temperature=0.0), timeout_s=300)
    finally:
        engine.close()
    assert "Paris" in answer.text
