"""Run the sidecar and sample where its main thread spends CPU time, without slowing every call.

    python -m perf.sample --config FILE        then load it, then Ctrl-C: the shares are printed

The kernel's profiling timer interrupts it each 2 ms of CPU time (ITIMER_PROF); a handler notes the
stack. Time in C (system calls, hashing) counts for the Python line that called it.
"""

from __future__ import annotations

import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

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
        """Return both tables as shares of all samples."""
        parts = []
        for title, counts in (("innermost line", self.lines), ("on the stack", self.functions)):
            parts.append(f"{title} ({self.total} samples)")
            parts += [f"{n / self.total:6.1%}  {name}" for name, n in counts.most_common(ROWS)]
        return "\n".join(parts)


def main() -> None:
    """Sample until the sidecar ends."""
    samples = Samples()
    signal.signal(signal.SIGPROF, samples.take)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    sys.argv[0] = "proxy"
    try:
        runpy.run_module("proxy", run_name="__main__")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(samples.show() + "\n")


if __name__ == "__main__":
    main()
