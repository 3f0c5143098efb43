"""How much a chain keeps in memory, and what is said of the records there was no room for.

Pure. At most `PENDING_RECORDS` and `PENDING_BYTES` wait for the disk; beyond either records are
lost, until half of it is free again: then one `lost` record says how many, since when, and why.
"""

from __future__ import annotations

from typing import Any

import msgspec

PENDING_RECORDS = 8192
PENDING_BYTES = 16 << 20
_LOST_OUTCOMES = 16


class Losses(msgspec.Struct):
    """What was dropped since the last `lost` record."""

    count: int = 0
    from_ns: int = 0
    to_ns: int = 0
    reason: str = ""
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, outcome: str, now_ns: int) -> None:
        """Count one record."""
        self.count += 1
        self.from_ns = self.from_ns or now_ns
        self.to_ns = now_ns
        if outcome not in self.outcomes and len(self.outcomes) >= _LOST_OUTCOMES:
            outcome = "other"
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def members(self) -> dict[str, Any]:
        """Return the members of the `lost` record."""
        return {
            "from": str(self.from_ns),
            "to": str(self.to_ns),
            "count": self.count,
            "reason": self.reason,
            "outcomes": self.outcomes,
        }


class Room:
    """See the module. `losing`: what comes now is lost."""

    __slots__ = ("_losses", "_reason", "calm", "losing")

    def __init__(self) -> None:
        self.losing = False
        self.calm = True  # not losing, and nothing to tell
        self._losses = Losses()
        self._reason = ""

    def has(self, count: int, size: int) -> bool:
        """Say whether another record may wait behind `count`, of `size` bytes together."""
        if self.losing:
            self.losing = count > PENDING_RECORDS // 2 or size > PENDING_BYTES // 2
        else:
            self.losing = count >= PENDING_RECORDS or size >= PENDING_BYTES
        self.calm = not self.losing and not self._losses.count
        return not self.losing

    @property
    def lost(self) -> bool:
        """Whether records were lost that no record tells of yet."""
        return self._losses.count > 0

    def lose(self, outcome: str, now_ns: int) -> None:
        """Count a record for which there is no room."""
        self.calm = False
        self._losses.add(outcome, now_ns)
        self.blame("queue_full")

    def blame(self, reason: str) -> None:
        """Take why records are, or will be, lost; the first reason is told."""
        self._reason = self._reason or reason

    def good(self) -> None:
        """The disk works: what was lost keeps its reason, what was not needs none."""
        if not self._losses.count:
            self._reason = ""

    def tell(self) -> dict[str, Any]:
        """Return the members of a `lost` record, and begin anew."""
        losses = self._losses
        losses.reason = self._reason
        self._losses, self._reason = Losses(), ""
        return losses.members()
