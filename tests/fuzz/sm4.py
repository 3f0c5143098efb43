"""Fuzz kernels.sm4 beside `cryptography`, every tier that this CPU has.

    .venv/bin/python -m tests.fuzz.sm4                 60 s, a new seed
    .venv/bin/python -m tests.fuzz.sm4 --seconds 600 --seed 7

Builds the extension twice with gcc into a temporary directory: under AddressSanitizer and
UndefinedBehaviorSanitizer, two thirds of the time, and optimized as shipped, where it also looks
for memory that calls keep. Buffers lie against pages that may not be touched (fences.py). Cases
depend on seed and tier alone, so a run with the same seed finds the same again.
Needs gcc with libasan. Exit codes: 0 nothing found, 1 something was.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fuzz import builds

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels" / "sm4"
MODULE = "kernels.sm4._sm4"
SHARES = {"sanitized": (builds.SANITIZED, 2 / 3), "shipped": (builds.SHIPPED, 1 / 3)}
LEAK_EVERY, LEAK_REPEATS, BYTES_MIN = 200, (40, 400), 16
COLLECT_EVERY = 1000


class Allocated(ctypes.Structure):
    """glibc's struct mallinfo2; `uordblks` is what is in use."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


def heap() -> Callable[[], int]:
    """Return what tells the bytes that malloc has given out; always 0 where it cannot."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return lambda: 0
    ask.restype = Allocated
    return lambda: int(ask().uordblks)


def keeps_nothing(case: Callable[[], None], in_use: Callable[[], int]) -> None:
    """Run the same case again and again: what it keeps each time piles up.

    What only fills Python's free lists does not go on: so a second, longer look decides.
    """
    case()
    kept: tuple[int, ...] = ()
    for repeats in LEAK_REPEATS:
        gc.collect()
        before = sys.getallocatedblocks(), in_use() // BYTES_MIN, -sys.getrefcount(None)
        for _ in range(repeats):
            case()
        gc.collect()
        after = sys.getallocatedblocks(), in_use() // BYTES_MIN, -sys.getrefcount(None)
        kept = tuple(b - a for a, b in zip(before, after, strict=True))
        if max(kept) < repeats // 2:
            return
    raise AssertionError(f"{repeats} times: kept {kept[0]} objects, {kept[1]} times {BYTES_MIN} "
                         f"bytes of malloc, lost None {kept[2]} times")  # fmt: skip


def fuzz(extension: str, seconds: float, seed: int) -> int:
    """Try cases on each tier until its time is over."""
    builds.load(MODULE, extension)
    from kernels import sm4
    from tests.fuzz import sm4_calls, sm4_streams

    name = Path(extension).stem.partition(".")[0]
    properties: list[Any] = [*sm4_calls.PROPERTIES, *sm4_streams.PROPERTIES]
    in_use = heap()
    gc.disable()  # what it frees amid a case would look like a lost reference
    for tier in sm4.TIERS:
        bench = sm4_calls.Bench(tier)
        deadline = time.monotonic() + seconds / len(sm4.TIERS)
        number = 0
        while time.monotonic() < deadline:
            case_seed = f"{seed} {tier} {number}"
            rng = random.Random(case_seed)
            case = rng.choice(properties)
            try:
                if name == "shipped" and number % LEAK_EVERY == 0:
                    keeps_nothing(partial(repeated, case, bench, case_seed), in_use)
                else:
                    case(bench, rng)
            except BaseException:
                print(f"{name}: seed {seed}, tier {tier}, case {number}, {case.__name__}")
                raise
            number += 1
            if number % COLLECT_EVERY == 0:
                gc.collect()
        print(f"{name}: {tier}: {number} cases, all right", flush=True)
    return 0


def repeated(case: Callable[[Any, random.Random], None], bench: Any, case_seed: str) -> None:
    """Run a case from its beginning."""
    rng = random.Random(case_seed)
    rng.random()
    case(bench, rng)


def main() -> int:
    """Build and run both, or be one of the runs."""
    chosen = builds.arguments(__doc__).parse_args()
    if chosen.extension:
        return fuzz(chosen.extension, chosen.seconds, chosen.seed)
    print(f"seed {chosen.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, (flags, share) in SHARES.items():
            extension = builds.build(SOURCES, Path(folder) / name, *flags)
            words = ["tests.fuzz.sm4", "--seed", str(chosen.seed)]
            words += ["--seconds", str(chosen.seconds * share), "--extension", str(extension)]
            if builds.start(ROOT, words, sanitized=name == "sanitized"):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
