"""kernels/cpu without Python around it: under sanitizers and before fences."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kernels import cpu

HERE = Path(__file__).resolve().parent
SOURCES = Path(cpu.__file__).resolve().parent
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="capability: AVX2 and kernels.cpu")


def built(folder, *flags, source=SOURCES):
    """Compile the driver with the kernels of `source`; skip where that cannot be done."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"capability: {COMPILER}")
    path = folder / "driver"
    files = [file for file in sorted(source.glob("*.c")) if "Python.h" not in includes(file)]
    done = subprocess.run(
        [COMPILER, "-g", "-fopenmp", "-Wall", "-Wextra", *flags, f"-I{source}", "-o", path,
         HERE / "cpu_driver.c", *files, "-lm"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if "cannot find" in done.stderr and "asan" in done.stderr:
        pytest.skip("capability: the sanitizers' libraries")
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def includes(file):
    """Return what a file includes, with what `door.h` includes where it is among that."""
    text = file.read_text()
    return text + (SOURCES / "door.h").read_text() if '"door.h"' in text else text


def run(driver, *words):
    return subprocess.run(
        [driver, *map(str, words)], check=False, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    return built(tmp_path_factory.mktemp("sanitized"), *SANITIZED)


@pytest.mark.slow
def test_sanitizers_find_nothing_in_random_shapes(sanitized):
    done = run(sanitized, "heap", 1, 60)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_sanitizers_report_an_output_that_is_4_bytes_short(sanitized):
    done = run(sanitized, "short", 1, 1)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "tiles.c" in done.stderr


@pytest.mark.slow
def test_nothing_is_touched_behind_any_array(tmp_path):
    done = run(built(tmp_path, "-O2"), "fenced", 2, 60)
    assert done.returncode == 0, done.stderr[-3000:]
