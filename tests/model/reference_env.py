"""The environment transformers lives in: its own, borrowing nothing of ours but torch's files.

Our top-level package `kernels` would be taken for another project's of that name, so transformers
never shares an environment with us. Torch alone is 700 MB: it is linked, not installed again.
"""

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

TRANSFORMERS = "5.24.0"
# What torch imports; everything else comes with transformers.
TORCH_NEEDS = ("sympy", "networkx", "jinja2", "fsspec", "typing-extensions", "filelock", "numpy")


class UnavailableError(Exception):
    """The environment cannot be made here; the message says why."""


def python_of(folder: Path) -> Path:
    """Return the environment's interpreter, making the environment where it is not whole."""
    python = folder / "bin" / "python"
    done = folder / f"transformers-{TRANSFORMERS}-torch-{version('torch')}"
    if done.exists():
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pins = [f"{name}=={version(name)}" for name in TORCH_NEEDS]
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip.append("--no-compile")  # most of it is never imported
    _run([*pip, f"transformers=={TRANSFORMERS}", *pins])
    ours = Path(sysconfig.get_path("platlib"))
    theirs = next((folder / "lib").glob("python3.*/site-packages"))
    for found in [ours / "torch", ours / "torchgen", *ours.glob("torch-*.dist-info")]:
        (theirs / found.name).symlink_to(found)
    done.touch()
    return python


def clean_environment() -> dict[str, str]:
    """Return the environment variables for a child that must not see this project."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "PIP_INDEX_URL", "PIP_CONFIG_FILE")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"HF_HUB_OFFLINE": "1"}


def _run(command: list[str]) -> None:
    child = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["no message"]
        raise UnavailableError(f"{' '.join(command[:4])} …: {lines[-1]}")
