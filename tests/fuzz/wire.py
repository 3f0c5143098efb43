"""Fuzz kernels.wire under AddressSanitizer and UndefinedBehaviorSanitizer beside its pure twins.

    .venv/bin/python -m tests.fuzz.wire                 60 s, a new seed
    .venv/bin/python -m tests.fuzz.wire --seconds 600 --seed 7

Builds the extension twice with gcc into a temporary directory, as shipped and without the
instructions that not every CPU has, and runs half of the time with each. What C takes must be what
the twin says, and no read may leave a buffer.
Needs gcc with libasan. Exit codes: 0 nothing found, 1 a difference or a sanitizer's report.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import builds

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels" / "wire"
MODULE = "kernels.wire._wire"


def fuzz(extension: str, seconds: float, seed: int) -> int:
    """Compare damaged traffic until the time is over."""
    builds.load(MODULE, extension)
    from tests.fuzz import chains, sse
    from tests.unit.kernels import wire_cases

    assert wire_cases.wire._wire.__file__ == extension
    rng = random.Random(seed)
    pairs = wire_cases.readers()
    deadline = time.monotonic() + seconds
    cases = taken = 0
    while time.monotonic() < deadline:
        for name, pair in pairs.items():
            for _ in range(50):
                data = wire_cases.damaged(rng, name)
                cases += 1
                taken += wire_cases.agrees(pair, *wire_cases.arguments(rng, name, data))
        for _ in range(50):  # streams: plain events are C's, all others and all pieces are not
            sse.check(rng)
            for check in chains.CHECKS:
                check(rng)
            cases += 1 + len(chains.CHECKS)
    print(f"{Path(extension).stem.partition('.')[0]}: {cases} cases, {taken} taken, all agree")
    return 0


def main() -> int:
    """Build and run both, or be one of the runs."""
    chosen = builds.arguments(__doc__).parse_args()
    if chosen.extension:
        return fuzz(chosen.extension, chosen.seconds, chosen.seed)
    print(f"seed {chosen.seed}", flush=True)
    words = ["tests.fuzz.wire", "--seconds", str(chosen.seconds / 2), "--seed", str(chosen.seed)]
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("shipped", ()), ("portable", ("-DWIRE_PORTABLE",))):
            extension = builds.build(SOURCES, Path(folder) / name, *builds.SANITIZED, *more)
            if builds.start(ROOT, [*words, "--extension", str(extension)], sanitized=True):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
