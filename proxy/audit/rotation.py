"""When a chain goes on to its next key: after so many records, after so long, or when asked.

Pure: it says when; `AuditWriter.rotate` does it. Whoever takes a process's memory has the key of
its epoch, and cannot alter what was written in earlier ones.
"""

from __future__ import annotations


class Rotation:
    """One chain's rotations; 0 of either: not for that reason."""

    def __init__(self, every_records: int, every_s: int, now_ns: int) -> None:
        self._every_records = every_records
        self._every_ns = every_s * 10**9
        self._since_seq = 0
        self._since_ns = now_ns
        self.count = 0
        self.exhausted = False
        self._asked = False

    def ask(self) -> None:
        """Let one be due as soon as it can be written."""
        self._asked = True

    def exhaust(self) -> None:
        """Take that there is no next key."""
        self.exhausted, self._asked = True, False

    def due(self, seq: int, now_ns: int) -> bool:
        """Say whether the next record, of this seq, should be a `rotate`."""
        if self._asked or self.exhausted:
            return self._asked
        if self._every_records and seq - self._since_seq >= self._every_records:
            return True
        return bool(self._every_ns) and now_ns - self._since_ns >= self._every_ns

    def done(self, seq: int, now_ns: int) -> None:
        """Take a rotation, at this seq."""
        self._since_seq, self._since_ns = seq, now_ns
        self._asked = False
        self.count += 1
