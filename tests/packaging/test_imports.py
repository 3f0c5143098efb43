"""What a running sidecar carries: its modules, asked in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "httpx", "starlette", "uvicorn", "mitmproxy", "agent", "click")


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["proxy.server", "proxy.upstream", "proxy.admin", "proxy.lifecycle", "proxy.__main__"]
)
def test_sidecar_module_loads_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import {module}") & set(HEAVY) == set()


def test_heavy_modules_would_be_seen() -> None:
    assert "click" in loaded_after("import click")
