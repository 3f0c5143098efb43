"""What holds for all tests: they look at the code that is there."""

from __future__ import annotations

import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_sessionstart() -> None:
    """Refuse to test a compiled data path that is older than its source."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in project["tool"]["tongguan"]["compiled"]:
        source = ROOT / name
        built = source.with_name(source.stem + suffix)
        if built.exists() and built.stat().st_mtime < source.stat().st_mtime:
            pytest.exit(f"{name} was edited after it was compiled; run: make setup-dev", 3)
