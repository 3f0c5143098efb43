"""Where a measurement goes (perf/output.py)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from perf import output, proxy

RESULT = {"what": "perf.test", "value": 1}


def parsed(*words: str) -> Path | None:
    """Return what `--json` gives."""
    parser = argparse.ArgumentParser()
    output.add_json(parser)
    chosen: Path | None = parser.parse_args(words).json
    return chosen


def test_the_table_goes_out(capsys: pytest.CaptureFixture[str]) -> None:
    output.put(parsed(), RESULT, "the table")
    assert capsys.readouterr() == ("the table\n", "")


def test_alone_it_prints_the_result_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    output.put(parsed("--json"), RESULT, "the table")
    said = capsys.readouterr()
    assert json.loads(said.out) == RESULT
    assert said.err == "the table\n"


def test_a_file_is_written_beside_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In a folder that is made for it, and whole: no draft is left."""
    target = tmp_path / "results" / "test.json"
    output.put(parsed("--json", str(target)), RESULT, "the table")
    assert capsys.readouterr().out == "the table\n"
    assert json.loads(target.read_text()) == RESULT
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ("relay,envoy", ["direct", "relay", "envoy", "tongguan", "tongguan-passthrough"]),
        ("direct,relay", ["direct", "relay", "tongguan", "tongguan-passthrough"]),
        ("relay,tongguan", ["relay", "tongguan"]),
    ],
)
def test_other_peers_stand_beside_both_sidecars(named: str, part: list[str]) -> None:
    assert proxy.with_ours(named.split(",")) == part


def test_a_plot_needs_a_file() -> None:
    chosen = argparse.Namespace(json=output.OUT, plot=Path("x.png"), resume=False)
    with pytest.raises(proxy.PeerError, match="name it"):
        proxy.run(chosen)
