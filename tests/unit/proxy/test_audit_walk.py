"""The first check of docs/audit.md, as a newcomer types it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.proxy.test_audit_bundle import SIGNER, _write

ROOT = Path(__file__).resolve().parents[3]
PYTHON = shutil.which("python3", path="/bin:/usr/bin")


def commands():
    text = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    section = text.partition("## A first check\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return block


@pytest.mark.skipif(not PYTHON, reason="capability: a python3 where `env -i` looks")
def test_the_first_check_runs_as_it_is_written(tmp_path):
    asyncio.run(_write(tmp_path / "audit", 0))
    (tmp_path / "public-keys.txt").write_text(SIGNER.key.line() + "\n")
    path = f"{Path(sys.executable).parent}:/bin:/usr/bin"
    done = subprocess.run(
        ["sh", "-e", "-c", commands()],
        cwd=tmp_path,
        env={"PATH": path, "HOME": os.environ.get("HOME", "/"), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.startswith("audit ok_public\n")
    assert "record 17 of local/default/pod/uid/0 is in the log" in done.stdout
    assert '"verdict": "ok_public"' in done.stdout
