"""Fuzz kernels.wire under AddressSanitizer and UndefinedBehaviorSanitizer beside its pure twins.

    .venv/bin/python tests/fuzz/wire.py                 60 s, a new seed
    .venv/bin/python tests/fuzz/wire.py --seconds 600 --seed 7

Builds the extension twice with gcc into a temporary directory, as shipped and without SSE2, and
runs half of the time with each. What C takes must be what the twin says, and no read may leave a
buffer.
Needs gcc with libasan. Exit codes: 0 nothing found, 1 a difference or a sanitizer's report.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels" / "wire"
FLAGS = (
    "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
)  # fmt: skip
MODULE = "kernels.wire._wire"


def build(folder: Path, name: str, *more: str) -> Path:
    """Compile all sources into one sanitized extension."""
    target = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_path("include")
    sources = sorted(map(str, SOURCES.glob("*.c")))
    subprocess.run(
        ["gcc", *FLAGS, *more, f"-isystem{include}", *sources, "-o", str(target)], check=True
    )
    return target


def start(extension: Path, seconds: float, seed: int) -> int:
    """Run this file again with the sanitizers loaded before Python; its exit code."""
    library = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": str(Path(library).resolve()),
        # Python frees little at its end; every object has a block of its own, so that a read
        # behind its end is seen.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, __file__, "--extension", str(extension)]
    command += ["--seconds", str(seconds), "--seed", str(seed)]
    return subprocess.run(command, check=False, env=environment).returncode


def fuzz(extension: str, seconds: float, seed: int) -> int:
    """Compare damaged traffic until the time is over."""
    spec = importlib.util.spec_from_file_location(MODULE, extension)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[MODULE])
    from tests.unit.kernels import wire_cases

    assert wire_cases.wire._wire.__file__ == extension
    rng = random.Random(seed)
    pairs = wire_cases.readers()
    deadline = time.monotonic() + seconds
    cases = taken = 0
    while time.monotonic() < deadline:
        for name, pair in pairs.items():
            for _ in range(50):
                data = wire_cases.damaged(rng, name)
                cases += 1
                taken += wire_cases.agrees(pair, *wire_cases.arguments(rng, name, data))
    print(f"{Path(extension).stem.partition('.')[0]}: {cases} cases, {taken} taken, all agree")
    return 0


def main() -> int:
    """Build and run both, or be one of the runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--extension", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.extension:
        return fuzz(chosen.extension, chosen.seconds, chosen.seed)
    print(f"seed {chosen.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("shipped", ()), ("portable", ("-DWIRE_PORTABLE",))):
            extension = build(Path(folder), name, *more)
            if start(extension, chosen.seconds / 2, chosen.seed):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
