"""When a failed envelope is worth a line in the log: once a minute for each reason and peer.

A client, or a gateway before it, may send one envelope twice by itself. So a copy from the peer
whose envelope was taken a moment ago is counted and no more; one from elsewhere, or later, is an
attack until somebody knows better. Pure: times are arguments.
"""

from __future__ import annotations

EVERY_NS = 60_000_000_000
ROWS_MAX = 4096
OTHERS = "others"
"""Stands for the peers that no row was left for."""
OWN_COPY_NS = 5_000_000_000
TAKEN_MAX = 1 << 16


class Alarms:
    """Who was told of what, and how often it happened since."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}

    def note(self, reason: str, peer: str, now_ns: int) -> tuple[str, int] | None:
        """Note a failure; return (peer, failures since the last line) when a line is due."""
        key = (reason, peer)
        row = self._rows.get(key)
        if row is None and len(self._rows) >= ROWS_MAX:
            self._rows = {k: v for k, v in self._rows.items() if now_ns - v[0] < EVERY_NS}
            if len(self._rows) >= ROWS_MAX:
                key = (reason, OTHERS)
                row = self._rows.get(key)
        if row is not None and now_ns - row[0] < EVERY_NS:
            self._rows[key] = row[0], row[1] + 1
            return None
        self._rows[key] = now_ns, 0
        return key[1], 1 if row is None else row[1] + 1


class LatelyTaken:
    """Which envelopes were taken in the last seconds, and from whom.

    Two generations; an entry is known for `OWN_COPY_NS`, forgotten after twice that. Beyond
    `TAKEN_MAX` in a generation nothing is noted: a copy of such an envelope is an alarm.
    """

    __slots__ = ("_current", "_previous", "_turned_ns")

    def __init__(self) -> None:
        self._current: dict[bytes, tuple[str, int]] = {}
        self._previous: dict[bytes, tuple[str, int]] = {}
        self._turned_ns = 0

    def add(self, envelope: bytes, peer: str, now_ns: int) -> None:
        """Note that this envelope (kid and N) of this peer was taken."""
        age_ns = now_ns - self._turned_ns
        if age_ns >= OWN_COPY_NS:
            self._previous = self._current if age_ns < 2 * OWN_COPY_NS else {}
            self._current = {}
            self._turned_ns = now_ns
        if len(self._current) < TAKEN_MAX:
            self._current[envelope] = peer, now_ns

    def is_own_copy(self, envelope: bytes, peer: str, now_ns: int) -> bool:
        """Say whether this peer's own envelope was taken a moment ago."""
        found = self._current.get(envelope) or self._previous.get(envelope)
        return found is not None and found[0] == peer and now_ns - found[1] <= OWN_COPY_NS
