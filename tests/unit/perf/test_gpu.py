"""`perf.gpu` without a GPU: its judgement, and a dry run of all of it through the host build."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from perf.gpu import __main__ as command
from perf.gpu import cases
from perf.gpu.cases import BIG, MIDDLE, Row


def row(shape, m, *, times, share, route="gemm"):
    copy = 4e12
    seconds = cases.weight_bytes(*shape) / copy / share
    return Row(*shape, m, route, seconds, seconds * times, copy)


def test_bytes_are_those_of_the_layout():
    assert cases.weight_bytes(128, 1) == 64 + 4
    assert cases.weight_bytes(576, 2) == 2 * (288 + 5 * 4)
    assert cases.dequant_bytes(128, 1) == 68 + 256
    assert cases.buffers(100, 1000) * 100 > 4000


def test_every_gate_holds_at_its_limit_and_is_missed_below():
    good = [
        row(shape, m, times=gate.times + 0.01, share=max(gate.share, 0.5) + 0.001)
        for (shape, m), gate in cases.GATES.items()
    ]
    assert cases.missed(good, 0.91, 4.9) == []
    for index, ((shape, m), gate) in enumerate(cases.GATES.items()):
        slow = [*good]
        slow[index] = row(shape, m, times=gate.times - 0.01, share=0.99)
        assert len(cases.missed(slow, 0.91, 4.9)) == 1
    assert "dequant" in cases.missed(good, 0.89, 4.9)[0]
    assert "launch" in cases.missed(good, 0.91, 5.1)[0]
    narrow = [row(BIG, 1, times=9.0, share=0.79), row(MIDDLE, 1, times=9.0, share=0.66)]
    assert len(cases.missed(narrow, 0.91, 1.0)) == 1
    beyond = [row(BIG, 256, times=0.94, share=0.1, route="dequant")]
    assert len(cases.missed(beyond, 0.91, 1.0)) == 1


def test_a_dry_run_checks_every_route_and_writes_both_files(tmp_path, monkeypatch, capsys):
    if shutil.which("g++") is None:
        pytest.skip("capability: g++")
    result, table = tmp_path / "gpu.json", tmp_path / "table.json"
    table.write_text('{"devices": {"other": {"gemv": 1, "gemm": 2}}}')
    words = ["perf.gpu", "--dry-run", "--json", str(result), "--table", str(table)]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 0
    assert "x torch" in capsys.readouterr().out
    found = json.loads(result.read_text())
    assert found["missed"] == []
    assert found["gpu"] == {"dry": True}
    assert set(found["seconds"]["256x72"]["1"]) == {"gemv", "gemm", "dequant"}
    assert set(found["seconds"]["256x72"]["65"]) == {"dequant"}
    assert set(json.loads(table.read_text())["devices"]) == {"other", "host"}


def test_a_wrong_result_is_a_missed_run(monkeypatch, capsys):
    if shutil.which("g++") is None:
        pytest.skip("capability: g++")
    monkeypatch.setattr(command.reference, "linear", lambda _w, x: x[:, :1] * 0.0 + 7.0)
    monkeypatch.setattr(sys, "argv", ["perf.gpu", "--dry-run"])
    assert command.main() == 1
    assert "wrong" in capsys.readouterr().err


def test_without_a_gpu_the_run_cannot_be_made(monkeypatch, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("capability: a machine without a GPU")
    monkeypatch.setattr(sys, "argv", ["perf.gpu"])
    assert command.main() == 2
    assert "no GPU to measure on" in capsys.readouterr().err
