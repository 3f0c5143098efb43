"""Trace ids: `<ms since epoch>-<machine, 5 digits>-<sequence, 4 digits>`, ordered in time.

Pure. A label for people and logs, not the key of a record. The ms part never decreases; the
sequence wraps at 10 000, and a wrap within one ms moves the ms on, so that text order is issue
order and no id comes twice from one process.
"""

from __future__ import annotations

import hashlib

MACHINES = 100_000
SEQUENCES = 10_000


def machine_from_node(name: str) -> int:
    """Return the machine number of a node without a lease: two nodes may share one."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % MACHINES


class TraceIds:
    """The source of one process's trace ids.

    `machine` is 0 to 99 999; the sequence begins at `start`: processes on one node that have no
    lease draw it at random to meet less often. With a lease it stays within a block of its own
    (`move`).
    """

    __slots__ = ("_end", "_first", "_machine", "_ms", "_prefix", "_prefix_ms", "_sequence")

    def __init__(self, machine: int, start: int = 0) -> None:
        if not 0 <= machine < MACHINES or not 0 <= start < SEQUENCES:
            raise ValueError("machine or sequence out of range")
        self._machine = f"-{machine:05d}-"
        self._ms = 0
        self._prefix, self._prefix_ms = "", -1  # of the ids of this ms
        self._sequence = start
        self._first, self._end = 0, SEQUENCES

    def move(self, machine: int, first: int, count: int) -> None:
        """Go on under another machine, within the sequences from `first` on; raises ValueError."""
        if not 0 <= machine < MACHINES or first < 0 or count < 1 or first + count > SEQUENCES:
            raise ValueError("machine or sequences out of range")
        self._machine = f"-{machine:05d}-"
        self._first, self._end = first, first + count
        self._sequence = first
        self._prefix_ms = -1
        self._ms += 1  # in a ms of its own: text order stays issue order

    def next(self, now_ms: int) -> str:
        """Return a new id; `now_ms` is Unix time."""
        self._ms = max(self._ms, now_ms)
        if self._prefix_ms != self._ms:
            self._prefix, self._prefix_ms = f"{self._ms}{self._machine}", self._ms
        text = self._prefix + str(SEQUENCES + self._sequence)[1:]  # four digits
        self._sequence += 1
        if self._sequence == self._end:
            self._sequence = self._first
            self._ms += 1
        return text
