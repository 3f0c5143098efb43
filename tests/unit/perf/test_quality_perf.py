"""The gates of perf.quality, and a run of it on a model of two layers."""

from __future__ import annotations

import math

import pytest

from perf import quality
from tests.unit.agent import engine_kit as kit

GOOD = {
    "default_ratio": 1.0, "own_group_ratio": 1.0, "group_128_ratio": 1.05, "scored_tokens": 9_000.0,
}  # fmt: skip


def test_what_holds_is_not_listed():
    assert quality.missed(GOOD) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("default_ratio", 1.003), ("default_ratio", 0.997), ("own_group_ratio", math.nan),
        ("group_128_ratio", 1.151), ("scored_tokens", 8_191.0),
    ],
)  # fmt: skip
def test_a_gate_that_is_missed_is_named(name, value):
    (line,) = quality.missed(GOOD | {name: value})
    assert line.startswith(f"{name}: ")


def test_all_figures_come_from_a_real_run(tmp_path):
    path = kit.write_gguf(tmp_path / "m.gguf", kit.tensors(2), kind="Q4_1")
    figures, errors = quality.measure(path, tmp_path, windows=4)
    assert set(quality.GATES) <= set(figures)
    assert figures["scored_tokens"] == 4 * 511
    assert figures["own_group_ratio"] == pytest.approx(1.0, abs=0.002)
    assert figures["default_ratio"] == pytest.approx(1.0, abs=0.002)
    assert figures["group_128_ratio"] != 1.0
    assert all(f"group_128_ratio_{kind}" in figures for kind in ("novel", "manual"))
    assert len(errors) == 2 * kit.LAYERS
