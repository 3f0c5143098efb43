"""What holds for all tests: they look at the code that is there."""

from __future__ import annotations

import signal
import sysconfig
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parents[1]
# What takes longest goes first, so that at the end no worker waits long for another.
LONGEST = (
    "tests/blackbox/test_sidecar",
    "tests/packaging/",
    "tests/model/",
    "tests/fuzz/test_sm4",
    "tests/unit/kernels/test_sm4_mutants",
    "tests/blackbox/",
)


def pytest_sessionstart() -> None:
    """Refuse to test a compiled data path that is older than its source.

    A shell's background jobs ignore SIGINT, and what they start does too: tests send it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in project["tool"]["tongguan"]["compiled"]:
        source = ROOT / name
        built = source.with_name(source.stem + suffix)
        if built.exists() and built.stat().st_mtime < source.stat().st_mtime:
            pytest.exit(f"{name} was edited after it was compiled; run: make setup-dev", 3)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Give a file to one worker, and all files that time a sidecar to one and the same."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return LONGEST[0] if nodeid.startswith(LONGEST[0]) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest first, for a worker."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in LONGEST])
