"""The default model with small weights beside itself in float32, teacher-forced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agent.engine import compact, load
from agent.engine.model import Model, Span

TEXT = Path(__file__).resolve().parents[2] / "docs" / "audit.md"
TOKENS = 240
pytestmark = pytest.mark.skipif(not compact.AVAILABLE, reason="capability: AVX2 and kernels.cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Two would wait for each other for seconds where another process has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(path, ids, *, small):
    """Return logits after each piece of the text, and where the pieces end.

    Pieces of 6 tokens, then 40 and 140 at once, then single ones: each way that a step is computed.
    """
    spec, _, weights = load.read_model(
        path, torch.float32, torch.device("cpu"), lambda _fraction: None, small=small
    )
    model = Model(spec, weights, blocks=TOKENS // 16, block_size=16)
    table = list(range(TOKENS // 16))
    ends = [*range(6, TOKENS - 191, 6), TOKENS - 152, *range(TOKENS - 12, TOKENS + 1)]
    rows = []
    for start, end in zip([0, *ends], ends, strict=False):
        rows.append(model.forward([Span(ids[start:end], start, table, logits=True)]))
    return torch.cat(rows), ends


@pytest.mark.timeout(400)
def test_the_best_token_differs_only_where_float32_itself_hardly_prefers_one(model_path):
    _, tokenizer, _ = load.read_model(
        model_path, torch.float32, torch.device("cpu"), lambda _fraction: None, small=True
    )
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: TOKENS + 1]
    plain, ends = logits(model_path, ids, small=False)
    small, _ = logits(model_path, ids, small=True)
    two = plain.topk(2).values
    gap = two[:, 0] - two[:, 1]
    other = plain.argmax(-1) != small.argmax(-1)
    assert (gap[other] < 0.05).all(), gap[other]
    after = torch.tensor([ids[end] for end in ends])
    losses = [torch.nn.functional.cross_entropy(rows, after).item() for rows in (plain, small)]
    assert losses[1] - losses[0] == pytest.approx(0.0, abs=0.004)
