"""Compile the kernels: for a host by g++, for GPUs by nvcc or NVRTC; cache by what went in.

`python -m kernels.build --out DIR` writes a cubin for each architecture, PTX for younger ones, and
`manifest.json` with the digest of the sources and of each file: what a loader needs, and all it
needs, on a machine without a compiler. Everything a compiler reads is in `cuda/`, and the digest
covers it together with the flags and the compiler's version.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES: Final = Path(__file__).resolve().parent / "cuda"
MODULE: Final = "module.cu"
ARCHES: Final = ("sm_80", "sm_86", "sm_89", "sm_90")
# The oldest architecture whose PTX we ship: a driver compiles it for anything younger.
PTX_ARCH: Final = "compute_80"
MANIFEST: Final = "manifest.json"
HOST_FLAGS: Final = (
    "-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-DTONGGUAN_HOST", "-x", "c++",
    # A product and a sum are two roundings unless the source says fma, as on a device's FP16.
    "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unknown-pragmas",
)  # fmt: skip
NVCC_FLAGS: Final = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v")
SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


class BuildError(Exception):
    """A compiler is missing or refused the source; the message holds its words."""


def sources() -> dict[str, str]:
    """Return every file a compiler reads, by name."""
    paths = sorted((*SOURCES.glob("*.cu"), *SOURCES.glob("*.h")))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def digest(*more: str, folder: Path = SOURCES) -> str:
    """Return a hash over the sources and whatever else decides what comes out."""
    sha = hashlib.sha256()
    for path in sorted((*folder.glob("*.cu"), *folder.glob("*.h"))):
        sha.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    for word in more:
        sha.update(word.encode() + b"\0")
    return sha.hexdigest()


def cache_folder() -> Path:
    """Return where built kernels are kept: XDG_CACHE_HOME or ~/.cache, under tongguan/kernels."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tongguan" / "kernels"


def host(folder: Path | None = None, *, flags: Sequence[str] = (), source: Path = SOURCES) -> Path:
    """Return the kernels as a shared object for this CPU, built unless the cache has it."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++: the kernels cannot be built for a host")
    into = cache_folder() if folder is None else folder
    words = (*HOST_FLAGS, *flags)
    name = digest(compiler, _version(compiler), *words, folder=source)
    path = into / f"host-{name[:24]}.so"
    if not path.is_file():
        _compile([compiler, *words], source / MODULE, path)
    return path


def nvcc(arch: str, into: Path) -> tuple[Path, str]:
    """Compile for one architecture (sm_XX: cubin, compute_XX: PTX); return file and report."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise BuildError("no nvcc: cubins cannot be built here")
    kind = "cubin" if arch.startswith("sm_") else "ptx"
    path = into / f"{arch}.{kind}"
    return path, _compile(
        [compiler, *NVCC_FLAGS, f"-arch={arch}", f"-{kind}"], SOURCES / MODULE, path
    )


def ship(into: Path) -> dict[str, Any]:
    """Build for every architecture; return the manifest that was written beside the files."""
    files: dict[str, Any] = {}
    for arch in (*ARCHES, PTX_ARCH):
        path, words = nvcc(arch, into)
        files[path.name] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "kernels": resources(words),
        }
    manifest = {"sources": digest(), "compiler": _version("nvcc").splitlines()[-2], "files": files}
    text = json.dumps(manifest, indent=1) + "\n"
    (into / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def resources(words: str) -> dict[str, dict[str, int]]:
    """Return registers and spilled bytes of each kernel out of ptxas' report."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in words.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry.group(1)
        elif spill := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found.setdefault(name, {})["spill_bytes"] = sum(map(int, spill.groups()))
        elif used := re.search(r"Used (\d+) registers", line):
            found.setdefault(name, {})["registers"] = int(used.group(1))
    return found


def _version(compiler: str) -> str:
    done = subprocess.run(  # noqa: S603 - found on PATH by its name
        [compiler, "--version"], check=True, capture_output=True, text=True
    )
    return done.stdout


def _compile(words: Sequence[str], source: Path, path: Path) -> str:
    """Run a compiler; the result appears whole or not at all, also beside another process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = subprocess.run(  # noqa: S603 - a compiler and our own source
            [*words, "-o", str(made), str(source)], check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise BuildError(f"{Path(words[0]).name} refused {source.name}:\n{done.stderr[-4000:]}")
        made.replace(path)
    return done.stderr + done.stdout


def main() -> int:
    """Run `python -m kernels.build`. Exit codes: 0 built, 1 a kernel spills, 2 no compiler."""
    parser = argparse.ArgumentParser(prog="kernels.build", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/kernels"))
    options = parser.parse_args()
    try:
        manifest = ship(options.out)
    except BuildError as problem:
        sys.stderr.write(f"kernels.build: {problem}\n")
        return 2
    spilled = 0
    for name, file in manifest["files"].items():
        for kernel, used in file["kernels"].items():
            spilled += used["spill_bytes"]
            sys.stdout.write(
                f"{name:16} {kernel:24} {used['registers']:4} registers, "
                f"{used['spill_bytes']} bytes spilled\n"
            )
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
