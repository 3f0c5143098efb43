"""What the fuzzers share: an extension built from its sources, and a run of one in a new process.

Not libFuzzer: the project asks for gcc alone, and what these extensions branch on is lengths, types
and, in `wire`, grammar; the fuzzers draw those on purpose.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SANITIZED = (
    "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)  # fmt: skip
SHIPPED = ("-O2", "-fvisibility=hidden")  # as in pyproject.toml
ALWAYS = ("-Wall", "-Wextra", "-Werror", "-fPIC")


def objects(sources: Path, folder: Path, *flags: str, only: str = "*.c") -> None:
    """Compile a folder's C files, two at a time, into another one."""
    command = ["gcc", *flags, *ALWAYS, f"-isystem{sysconfig.get_path('include')}", "-c"]

    def compiled(source: Path) -> None:
        target = folder / f"{source.stem}.o"
        subprocess.run([*command, str(source), "-o", str(target)], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, sorted(sources.glob(only))))


def link(folder: Path, target: Path, *flags: str) -> Path:
    """Make a folder's objects one extension; returns it."""
    target = target.with_name(f"{target.name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    parts = sorted(map(str, folder.glob("*.o")))
    subprocess.run(["gcc", *flags, "-shared", *parts, "-o", str(target)], check=True)
    return target


def build(sources: Path, target: Path, *flags: str) -> Path:
    """Compile a folder's C files into one extension; returns it."""
    folder = target.with_suffix(".objects")
    folder.mkdir()
    objects(sources, folder, *flags)
    return link(folder, target, *flags)


def load(module: str, extension: str) -> None:
    """Let later imports of `module` find this extension."""
    spec = importlib.util.spec_from_file_location(module, extension)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])


def start(root: Path, words: list[str], *, sanitized: bool) -> int:
    """Run `python -m WORDS`, with the sanitizers loaded before Python; its exit code."""
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONFAULTHANDLER": "1"}
    if sanitized:
        library = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
        ).stdout.strip()
        environment |= {
            "LD_PRELOAD": os.path.realpath(library),
            # Python frees little at its end; every object has a block of its own, so that a read
            # behind its end is seen.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "PYTHONMALLOC": "malloc",
        }
        del environment["PYTHONFAULTHANDLER"]  # the sanitizer's report says more
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, check=False, env=environment, cwd=root).returncode


def arguments(document: str | None) -> argparse.ArgumentParser:
    """Return a parser of what every fuzzer takes."""
    parser = argparse.ArgumentParser(description=(document or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of all runs together (60)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--extension", help=argparse.SUPPRESS)
    return parser
