import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perf.sample import Samples

ROOT = Path(__file__).parents[3]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "perf.sample", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_shares_are_of_all_samples():
    samples = Samples()
    for _ in range(4):
        samples.take(signal.SIGPROF, sys._getframe())
    report = samples.show()
    assert report.count("4 samples") == 1
    assert report.count("100.0%  tests/unit/perf/test_sample.py:test_shares_are_of_all_sam") == 2


def test_its_help_is_its_own_and_starts_nothing():
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m perf.sample")
    assert "does not attach" in done.stdout
    assert "innermost" not in done.stdout


@pytest.mark.parametrize("arguments", [("--config", "/no/such.toml"), ("--pid", "1")])
def test_wrong_use_gives_its_code_and_at_most_one_report(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout.count("innermost line") <= 1
