"""Put one-line faults into the sidecar's data path; each has to be caught by the test named for it.

    .venv/bin/python -m tests.mutants                 all of tests/mutants.toml, a few minutes
    .venv/bin/python -m tests.mutants relay chunks    those whose name or file has one of the words

Works on a copy of the tree in a temporary directory: tracked files and what git would take, and the
built extensions; a fault in C is compiled there. First every named test has to pass without a
fault, then each fault is put in alone and its test has to fail. A copy runs interpreted, whether or
not the tree it is made of is compiled.
Exit codes: 0 every fault is caught, 1 one is not (or its test is skipped on this machine), 2 it
could not run, or a test fails without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"
TESTS = Path("tests", "blackbox")
FAILED, PASSED = 1, 0  # pytest's exit codes
CAUGHT, SURVIVED, SKIPPED = "caught", "SURVIVED", "SKIPPED"
WAIT_S = 8  # for what a fault keeps from happening


class MutantError(Exception):
    """The list or the tree is not as it has to be; the message is one line."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in `file`, `old` becomes `new`; `case` is the test that must fail."""

    fault: str
    file: str
    old: str
    new: str
    case: str

    @property
    def test(self) -> tuple[str, str]:
        """Return the test's file, from the root, and its function."""
        name, _, function = self.case.partition("::")
        return str(TESTS / name), function.partition("[")[0]


def mutants(text: str) -> list[Mutant]:
    """Return the faults of a list."""
    return [Mutant(**row) for row in tomllib.loads(text)["mutant"]]


def changed(text: str, mutant: Mutant) -> str:
    """Return a file's text with the fault in. Raises MutantError when its place is not found."""
    count = text.count(mutant.old)
    if count != 1:
        raise MutantError(f"{mutant.file}: {mutant.fault}: found {count} times: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def verdict(code: int, said: str) -> str:
    """Return what a test's run says of the fault in it. Raises MutantError when it did not run.

    One that was skipped passed no more than it failed: this machine lacks what it needs.
    """
    if code not in (FAILED, PASSED):
        raise MutantError(f"pytest ended with {code}")
    if code == FAILED:
        return CAUGHT
    return SURVIVED if re.search(r"\b[1-9][0-9]* passed\b", said) else SKIPPED


class Copy:
    """A copy of the tree, faults put in and taken out one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.run(command, check=True, capture_output=True).stdout.decode()
        built = [str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/*/*.so")]
        for name in {*listed.split("\0"), *built} - {""}:
            if (ROOT / name).is_file():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)

    def run(self, cases: list[str]) -> int:
        """Run tests there; return pytest's exit code."""
        options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "--timeout", "100"]
        named = [str(TESTS / case) for case in cases]
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a file may change twice in one second
            "BLACKBOX_WAIT_S": str(WAIT_S),
        }
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *named],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                self.said, _ = process.communicate()
            finally:  # a fault may keep a sidecar, or its workers, from ending
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode

    def put_in(self, mutant: Mutant) -> None:
        """Put a fault in."""
        file = self.folder / mutant.file
        file.write_text(changed(file.read_text(encoding="utf-8"), mutant), encoding="utf-8")
        if file.suffix == ".c":
            self._compile(file.parent)
        else:
            compile(file.read_text(encoding="utf-8"), mutant.file, "exec")

    def take_out(self, mutant: Mutant) -> None:
        """Make the file as it was."""
        shutil.copy2(ROOT / mutant.file, self.folder / mutant.file)
        if mutant.file.endswith(".c"):
            for built in (ROOT / mutant.file).parent.glob("*.so"):
                shutil.copy2(built, self.folder / built.relative_to(ROOT))

    def _compile(self, sources: Path) -> None:
        target = next(sources.glob("*.so"), None)
        if target is None:
            raise MutantError(f"{sources.name} is not built: a fault in its C would not be seen")
        include = sysconfig.get_path("include")
        target.unlink()  # it may be mapped by a process that is ending
        command = ["gcc", "-O1", "-g0", "-fvisibility=hidden", "-shared", "-fPIC", f"-I{include}"]
        subprocess.run([*command, *map(str, sources.glob("*.c")), "-o", str(target)], check=True)


def run(words: list[str]) -> int:
    """Try the faults whose name or file has one of the words; all without any."""
    chosen = [
        mutant
        for mutant in mutants(LIST.read_text(encoding="utf-8"))
        if not words or any(word in f"{mutant.fault} {mutant.file}" for word in words)
    ]
    if not chosen:
        raise MutantError("no fault has such a name")
    left = []
    with tempfile.TemporaryDirectory(prefix="tongguan-mutants-") as folder:
        copy = Copy(Path(folder))
        if copy.run(sorted({mutant.case for mutant in chosen})) != PASSED:
            sys.stdout.write(copy.said[-4000:])
            raise MutantError("a test fails without any fault")
        print(f"{len({mutant.case for mutant in chosen})} tests pass without a fault", flush=True)
        for mutant in chosen:
            begun = time.monotonic()
            try:
                copy.put_in(mutant)
                code = copy.run([mutant.case])
            finally:
                copy.take_out(mutant)
            try:
                word = verdict(code, copy.said)
            except MutantError as problem:
                sys.stdout.write(copy.said[-2000:])
                raise MutantError(f"{mutant.fault}: {problem}") from None
            if word != CAUGHT:
                left.append(mutant)
            spent = time.monotonic() - begun
            print(f"{word:8} {spent:5.1f} s  {mutant.file}: {mutant.fault}", flush=True)
    print(f"{len(chosen) - len(left)} of {len(chosen)} faults caught")
    return 1 if left else 0


def main() -> int:
    """Parse and run; what goes wrong is one line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("words", nargs="*", help="only faults whose name or file has one of them")
    try:
        return run(parser.parse_args().words)
    except (MutantError, subprocess.CalledProcessError) as problem:
        sys.stderr.write(f"tests.mutants: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
