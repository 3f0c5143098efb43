"""What a result was measured on: enough to judge it, nothing that names a host, user or path."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def cpu_model(cpuinfo: str) -> str:
    """Return the processor's name out of /proc/cpuinfo's text."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Hardware", "CPU implementer"}:
            return value.strip()
    return "unknown"


def commit() -> str:
    """Return the short commit, with `+` when tracked files differ; "unknown" without git.

    Kept results do not count: writing them changes nothing that was measured.
    """
    try:
        run = [
            subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
            for words in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!perf/results"],
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run[0].stdout.strip() + ("+" if run[1].stdout.strip() else "")


def facts() -> dict[str, Any]:
    """Return the machine, the interpreter and the commit."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_model(cpuinfo),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def sidecar() -> dict[str, str]:
    """Return whether the sidecar of this interpreter reads in C and how its data path runs."""
    from kernels.wire import AVAILABLE

    spec = importlib.util.find_spec("proxy.exchange")
    origin = (spec.origin if spec else None) or ""
    return {
        "readers": "c" if AVAILABLE else "pure",
        "data_path": "interpreted" if origin.endswith(".py") else "compiled",
    }
