"""The short soak: nothing may be left of clients and engines that died at any moment."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.blackbox.node import environment, free_base

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the load generator")
def test_a_short_soak_leaves_nothing(tmp_path):
    # Memory still warms up in so short a time: the bound finds only what runs away.
    options = ["--minutes", "0.2", "--mb", "60", "--json", str(tmp_path / "soak.json")]
    done = subprocess.run(
        [sys.executable, "-m", "perf.soak", *options, "--port-base", str(free_base())],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads((tmp_path / "soak.json").read_text())
    assert outcome["facts"]["engine_deaths"] >= 1
    assert sum(outcome["facts"]["clients_left"].values()) > 50
