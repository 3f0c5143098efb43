"""Timing calls against each other: interleaved rounds of CPU time, and Welch's t of two classes.

CPU time of this thread, so that neighbours on the machine cost little; what each round says is a
ratio to the base of the same round, and the median of these ratios is the result.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROUND_NS = 1_500_000
CALLS_MIN, CALLS_MAX = 3, 20_000


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant's result: median us a call, median ratio to the base of the same round."""

    us: float
    ratio: float


def calls_a_round(call: Callable[[], object]) -> int:
    """Return how many calls fill a round."""
    call()
    start = time.thread_time_ns()
    for _ in repeat(None, CALLS_MIN):
        call()
    each_ns = max(1, (time.thread_time_ns() - start) // CALLS_MIN)
    return min(CALLS_MAX, max(CALLS_MIN, ROUND_NS // each_ns))


def timed_ns(call: Callable[[], object], calls: int) -> float:
    """Return CPU ns of one call."""
    loop = repeat(None, calls)
    start = time.thread_time_ns()
    for _ in loop:
        call()
    return (time.thread_time_ns() - start) / calls


def interleaved(
    contestants: Mapping[str, Callable[[], object]], base: str, rounds: int
) -> dict[str, Row]:
    """Time each contestant once a round; return rows by name."""
    calls = {name: calls_a_round(call) for name, call in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            times[name].append(timed_ns(call, calls[name]))
    return summary(times, base)


def summary(times: Mapping[str, Sequence[float]], base: str) -> dict[str, Row]:
    """Return rows of times in ns, one a round."""
    return {
        name: Row(
            statistics.median(own) / 1e3,
            statistics.median(a / b for a, b in zip(own, times[base], strict=True)),
        )
        for name, own in times.items()
    }


def midmean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest fifth: steadier than a median."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def standard_error(values: Sequence[float], groups: int = 20) -> float | None:
    """Return a midmean's standard error, from interleaved groups; None for too few values."""
    if len(values) < 2 * groups:
        return None
    means = [midmean(values[first::groups]) for first in range(groups)]
    return statistics.stdev(means) / math.sqrt(groups)


def welch_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Welch's t of two samples without the slowest tenth of both together (interrupts)."""
    together = sorted([*first, *second])
    limit = together[len(together) * 9 // 10 - 1]
    kept = [[spent for spent in sample if spent <= limit] for sample in (first, second)]
    if min(map(len, kept)) < 2:  # all of one are slower than nearly all of the other
        return math.inf
    means = [statistics.fmean(sample) for sample in kept]
    spread = math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in kept))
    if not spread:
        return 0.0 if means[0] == means[1] else math.inf
    return (means[0] - means[1]) / spread
