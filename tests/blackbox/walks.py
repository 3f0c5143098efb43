"""Sections of the documents run as they are typed, on ports of a test's own."""

import re
import subprocess
import sys
from pathlib import Path

from tests.blackbox.harness import Upstream
from tests.blackbox.node import environment, free_base

ROOT = Path(__file__).resolve().parents[2]


def commands(page, section):
    """Return the one block of commands in a section of docs/."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    within = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", within, re.DOTALL)
    return block


def walk(folder, text, engine, wait_s=110):
    """Run commands; return (what was said, the requests that came to the engine).

    `engine`: the script of the server that they take for the model's, on port 8000.
    """
    tools = folder / "bin"
    tools.mkdir()
    for name, module in (("tongguan", "-m proxy.cli"), ("python", "")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        script.chmod(0o755)
    base = free_base()
    with Upstream() as upstream:
        upstream.answering(engine)
        ports = {"14080": base + 80, "14081": base + 81, "14090": base + 90}
        ports["8000"] = upstream.url.rsplit(":", 1)[1]
        for port, other in ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
        mine = {
            "TONGGUAN_DOORS_APP": f"127.0.0.1:{base + 80}",
            "TONGGUAN_DOORS_SEALED": f"127.0.0.1:{base + 81}",
            "TONGGUAN_DOORS_ADMIN": f"127.0.0.1:{base + 90}",
            "TONGGUAN_ENVELOPE_FENCE_S": "0",  # not to wait ten seconds
            "PYTHONPATH": str(ROOT),
            "PATH": f"{tools}:/usr/bin:/bin",
        }
        done = subprocess.run(
            ["bash", "-e", "-c", f"trap 'kill $SIDECAR 2>&- || :' EXIT; {text}"],
            cwd=folder,
            env=environment(**mine),
            capture_output=True,
            text=True,
            check=False,
            timeout=wait_s,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return said, upstream.seen
