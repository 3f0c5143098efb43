"""Start a sidecar and sample where its main thread spends CPU time, without slowing every call.

    python -m perf.sample --config FILE        then load it, then Ctrl-C: one report is printed

It runs the sidecar itself, in this process: it does not attach to one that runs already. The
kernel's profiling timer interrupts it each 2 ms of CPU time (ITIMER_PROF); a handler notes the
stack. Time in C (system calls, hashing) counts for the Python line that called it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.run import main as sidecar

if TYPE_CHECKING:
    from types import FrameType

EVERY_S = 0.002
ROWS = 30
ROOT = f"{Path(__file__).resolve().parents[1]}/"


class Samples:
    """Counts of the innermost line, and of every function on the stack."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.total = 0

    def take(self, _signal: int, frame: FrameType | None) -> None:
        """Note one stack; a signal handler."""
        self.total += 1
        on_stack = set()
        innermost = True
        while frame is not None:
            code = frame.f_code
            name = f"{code.co_filename.removeprefix(ROOT)}:{code.co_name}"
            if innermost:
                self.lines[f"{name}:{frame.f_lineno}"] += 1
                innermost = False
            on_stack.add(name)
            frame = frame.f_back
        self.functions.update(on_stack)

    def show(self) -> str:
        """Return the report: shares of all samples, by line and by function."""
        parts = [f"{self.total} samples, one each {EVERY_S * 1000:g} ms of CPU time"]
        for title, counts in (("innermost line", self.lines), ("on the stack", self.functions)):
            parts += ["", title]
            parts += [f"{n / self.total:6.1%}  {name}" for name, n in counts.most_common(ROWS)]
        return "\n".join(parts)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="python -m perf.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="PATH", help="the sidecar's tongguan.toml, or its directory"
    )
    return parser.parse_args()


def main() -> int:
    """Sample until the sidecar ends; return its exit code."""
    path = arguments().config
    samples = Samples()
    signal.signal(signal.SIGPROF, samples.take)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    try:
        return sidecar(["--config", path] if path else [])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if samples.total:
            sys.stdout.write(samples.show() + "\n")


if __name__ == "__main__":
    sys.exit(main())
