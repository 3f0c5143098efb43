"""May a request be sent a second time: a table over how its first attempt ended, and a budget.

Rules (docs/sidecar.md, "Retries"), the first that fits:

    connection refused                              -> another endpoint
    a byte of the answer had come                   -> no: answered
    the connection was made for this request        -> no: fresh
    it has been sent a second time before           -> no: once
    its body streamed through and is gone           -> no: streamed
    fully written, and the pool is not repeatable   -> no: unprovable
    more than the budget                            -> no: budget
    else                                            -> again, on a new connection

A server may close an idle connection at any time (RFC 9112 section 9.5), so a reused one that ends
without an answer says nothing about the server. "Not fully written" is what the kernel did not
accept: the server cannot have had a whole request then. What it accepted counts as processed,
unless the pool says that its requests may be repeated (RFC 9110 section 9.2.2). Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

WINDOW_S = 60
FREE = 10  # resends in a window that need no traffic: a budget of little traffic is not nothing

Denial = Literal["answered", "fresh", "once", "streamed", "unprovable", "budget"]
Reason = Literal["unwritten", "repeatable", "refused"]
REASONS: tuple[Reason, ...] = ("unwritten", "repeatable", "refused")
# Those that a setting or a larger budget would change are counted.
COUNTED: tuple[Denial, ...] = ("once", "streamed", "unprovable", "budget")


class Attempt:
    """How an attempt on a connection ended.

    `unwritten`: provably not all of the request was handed to the kernel; `held`: all of it is
    still here; `again`: it was the second attempt.
    """

    __slots__ = ("again", "answered", "held", "reused", "unwritten")

    def __init__(
        self, *, answered: bool, reused: bool, again: bool, held: bool, unwritten: bool
    ) -> None:
        self.answered: Final = answered
        self.reused: Final = reused
        self.again: Final = again
        self.held: Final = held
        self.unwritten: Final = unwritten


def denial(attempt: Attempt, *, repeatable: bool) -> Denial | None:
    """Return why it may not be sent once more; None: it may, within the budget."""
    if attempt.answered:
        return "answered"
    if not attempt.reused:
        return "fresh"
    if attempt.again:
        return "once"
    if not attempt.held:
        return "streamed"
    if not attempt.unwritten and not repeatable:
        return "unprovable"
    return None


class Retries:
    """Second attempts of one pool: a share of its requests over the last minute, and counts."""

    __slots__ = ("_marks", "_share", "_used", "denied", "made")

    def __init__(self, percent: float) -> None:
        self._share = percent / 100
        self._used = 0
        self._marks: deque[tuple[int, int]] = deque([(0, 0)], maxlen=WINDOW_S)
        self.made: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.denied: dict[Denial, int] = dict.fromkeys(COUNTED, 0)

    def renew(self, percent: float) -> None:
        """Take another share."""
        self._share = percent / 100

    def tick(self, started: int) -> None:
        """Note, once a second, how many requests of the pool there have been."""
        self._marks.append((started, self._used))

    def decide(self, attempt: Attempt, *, repeatable: bool, started: int) -> Reason | None:
        """Return why it is sent once more, which is counted against the budget; None: it is not.

        `started`: requests of the pool so far.
        """
        why = denial(attempt, repeatable=repeatable)
        if why is None and not self._take(started):
            why = "budget"
        if why is not None:
            if why in self.denied:
                self.denied[why] += 1
            return None
        reason: Reason = "unwritten" if attempt.unwritten else "repeatable"
        self.made[reason] += 1
        return reason

    def _take(self, started: int) -> bool:
        before, used = self._marks[0]
        allowed = max(FREE, (started - before) * self._share)
        if not self._share or self._used - used >= allowed:
            return False
        self._used += 1
        return True
