"""The pump's tests (kernels/wire/pump.c) once more, under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fuzz import builds
from tests.fuzz.wire import MODULE, ROOT, SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable

RACE = 66  # what the sanitizer ends with
RUN = """
import sys
import pytest
from tests.fuzz import builds
builds.load(sys.argv[1], sys.argv[2])
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", sys.argv[3]]))
"""


def _sanitizer() -> str:
    """Return the path of libtsan, "" without one."""
    if shutil.which("gcc") is None:
        return ""
    command = ["gcc", "-print-file-name=libtsan.so"]
    named = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return os.path.realpath(named) if Path(named).is_absolute() else ""


@pytest.fixture
def under_sanitizer() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with the sanitizer loaded, at fixed addresses, which it cannot do without."""
    library = _sanitizer()
    if not library:
        pytest.skip("no gcc with libtsan")
    fixed = ["setarch", "-R"]
    if shutil.which("setarch") is None or subprocess.run([*fixed, "true"], check=False).returncode:
        pytest.skip("no setarch that may fix addresses (util-linux, personality)")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": library,
            "TSAN_OPTIONS": f"exitcode={RACE}",
        }
        command = [*fixed, sys.executable, *words]
        return subprocess.run(
            command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True
        )

    return run


def test_no_data_race_between_the_pump_and_the_loop(
    under_sanitizer: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    extension = builds.build(SOURCES, tmp_path / "tsan", "-O1", "-g", "-fsanitize=thread")
    done = under_sanitizer("-c", RUN, MODULE, str(extension), "tests/unit/kernels/test_pump.py")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
