"""The fuzzer of kernels.sm4, a minute of it, in `make test`; `make fuzz` runs longer."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60


def sanitizers_library() -> Path | None:
    if shutil.which("gcc") is None:
        return None
    words = ["gcc", "-print-file-name=libasan.so"]
    found = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    return Path(found) if Path(found).is_absolute() else None


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)  # two builds, and cases that are under way at the end
def test_a_minute_of_fuzzing_finds_nothing() -> None:
    if sanitizers_library() is None:
        pytest.skip("capability: gcc with libasan")
    seed = str(random.SystemRandom().randrange(1 << 32))
    command = [sys.executable, "-m", "tests.fuzz.sm4", "--seconds", str(SECONDS), "--seed", seed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    assert done.stdout.count("all right") >= 2
