"""What perf.products and perf.engine make of measurements."""

import pytest

from kernels import cpu
from perf import engine, products


def entry(name, m, us, error=1e-6):
    return {"shape": "down", "rows_of_x": m, "name": name, "us": us, "ratio": 1.0, "error": error}


def test_ours_must_be_exact_enough_and_not_slower_over_the_whole_ffn():
    good = [
        entry(products.OURS, 1, 50.0), entry(products.OURS, 1, 70.0),
        entry(products.THEIRS, 1, 80.0, 1e-2), entry(products.THEIRS, 1, 60.0, 1e-2),
    ]  # fmt: skip
    assert products.missed(good) == []
    (line,) = products.missed([*good, entry(products.OURS, 8, 2.0), entry(products.THEIRS, 8, 1.0)])
    assert line == "8 rows: 2 us a layer, torch 1"
    (line,) = products.missed([entry(products.OURS, 32, 1.0, 2e-3)])
    assert "error 0.002" in line


@pytest.mark.skipif(not cpu.AVAILABLE, reason="capability: AVX2 and kernels.cpu")
def test_every_way_computes_the_same_product():
    entries = products.measure(1, 1)
    assert {each["name"] for each in entries} >= {products.OURS, products.THEIRS}
    for each in entries:
        exact = 1e-5 if each["name"] == products.OURS or "float32" in each["name"] else 2e-3
        assert 0 < each["error"] <= exact, each
        assert each["us"] > 0


def test_the_quiet_half_of_the_rounds_counts():
    rounds = [
        {"value": value, "foreign": foreign, "cpu_s": value / 10}
        for value, foreign in ((1.0, 0.0), (9.0, 0.9), (2.0, 0.1), (8.0, 0.5), (3.0, 0.2))
    ]
    assert engine.quiet_median(rounds) == 2.0
    assert engine.quiet_median(rounds, "cpu_s") == 0.2


def test_gates_hold_at_their_limits_and_not_beyond():
    figures = {name: limit for name, (limit, _, _) in engine.GATES.items()}
    assert engine.missed(figures) == []
    for name, (limit, kind, _) in engine.GATES.items():
        worse = figures | {name: limit * (0.99 if kind == "min" else 1.01)}
        assert [line.split(":")[0] for line in engine.missed(worse)] == [name]
