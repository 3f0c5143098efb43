"""What admission measures: how fast a queue drains, and how much of a class was shed.

Pure: times and counts are arguments.
"""

from __future__ import annotations

from collections import deque
from math import exp

_NS = 1_000_000_000
DRAIN_TAU_NS = 10 * _NS  # older departures count less
DRAIN_LEAST_NS = _NS // 20  # a rate of less than that is no rate
WINDOW_S = 60
REQUESTS_MIN = 200  # in the window, before a share of them means something


class DrainRate:
    """How many requests a second leave a queue for an upstream, while there is a queue.

    Times without a queue do not count: what leaves then is what comes, not what could.
    """

    __slots__ = ("_at_ns", "_count", "_held", "_time_ns")

    def __init__(self) -> None:
        self._count = 0.0  # departures, the older ones worth less
        self._time_ns = 0.0  # the time they took, likewise
        self._at_ns = 0
        self._held = False  # there is a queue

    def begin(self, now_ns: int) -> None:
        """Note that a queue has formed."""
        self._held = True
        self._at_ns = now_ns

    def end(self, now_ns: int) -> None:
        """Note that the queue is empty."""
        self._age(now_ns)
        self._held = False

    def departed(self, now_ns: int) -> None:
        """Count one that left for an upstream."""
        self._age(now_ns)
        self._count += 1.0

    def per_s(self, now_ns: int) -> float:
        """Return the rate; 0.0 while it is not known. Changes nothing: a scrape asks too."""
        left, passed_ns = self._aging(now_ns)
        time_ns = self._time_ns * left + passed_ns
        return 0.0 if time_ns < DRAIN_LEAST_NS else self._count * left * _NS / time_ns

    def _age(self, now_ns: int) -> None:
        left, passed_ns = self._aging(now_ns)
        self._at_ns = max(self._at_ns, now_ns)
        self._count *= left
        self._time_ns = self._time_ns * left + passed_ns

    def _aging(self, now_ns: int) -> tuple[float, float]:
        """Return what is left of the old, and how much time is new."""
        passed_ns = now_ns - self._at_ns
        if not self._held or passed_ns <= 0:
            return 1.0, 0.0
        left = exp(-passed_ns / DRAIN_TAU_NS)
        return left, DRAIN_TAU_NS * (1.0 - left)


class ShedBudget:
    """The share of a class that may be refused early, over the last 60 s."""

    __slots__ = ("_marks", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self._marks: deque[tuple[int, int]] = deque([(0, 0)], maxlen=WINDOW_S)

    def roll(self, came: int, shed: int) -> None:
        """Note both totals; called once a second."""
        self._marks.append((came, shed))

    def over(self, came: int, shed: int) -> bool:
        """Say whether the window's sheds, the last one with them, are more than the share."""
        came_before, shed_before = self._marks[0]
        return shed - shed_before > self.share * (came - came_before)

    def allows(self, came: int, shed: int) -> bool:
        """Say whether one more request may be refused early; both totals as they are now."""
        enough = came - self._marks[0][0] >= REQUESTS_MIN
        return enough and not self.over(came, shed + 1)
