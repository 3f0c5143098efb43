"""What the node agent predicts: limits by class, and for how long they are believed.

The answer of `GET /v1/limits` is `{class: {"limit": number, "age_ms": number}}`; a limit is the
requests of that class in flight and takes the place of the adaptive one. Classes that are not
there, and P0, which nothing limits, are left alone. Pure: text and times are arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.qos.admission import Gate, Tier

BELIEVED_NS = 2_000_000_000
LIMIT_MAX = 1 << 30


class LimitsError(ValueError):
    """The answer is not what it should be; the message says why."""


def read_limits(text: bytes) -> dict[str, tuple[int, int]]:
    """Return class -> (limit, age in ns). Raises LimitsError; what one class says spoils all."""
    try:
        table: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise LimitsError("not JSON") from None
    if not isinstance(table, dict):
        raise LimitsError("not an object")
    found: dict[str, tuple[int, int]] = {}
    for name in ("P0", "P1", "P2"):
        row = table.get(name)
        if row is None:
            continue
        if not isinstance(row, dict):
            raise LimitsError(f"{name} is not an object")
        limit, age_ms = _number(name, row, "limit"), _number(name, row, "age_ms")
        found[name] = min(LIMIT_MAX, int(limit)), min(LIMIT_MAX, int(age_ms)) * 1_000_000
    return found


def _number(name: str, row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise LimitsError(f"{name} has no number of at least 0 as limit or age_ms")
    return value


class AgentLimits:
    """The limits that hold, and what became of the questions. Owned by the data loop."""

    __slots__ = ("_until_ns", "absent", "malformed", "stale", "taken")

    def __init__(self) -> None:
        self._until_ns: dict[str, int] = {}
        self.taken = 0
        self.stale = 0
        self.absent = 0
        self.malformed = 0

    def take(self, text: bytes, tiers: Iterable[Tier], now_ns: int, shares: int = 1) -> list[Gate]:
        """Take an answer; return the gates that it changed.

        `shares`: workers that have the limit together.
        Raises LimitsError (counted), and nothing has changed then.
        """
        try:
            found = read_limits(text)
        except LimitsError:
            self.malformed += 1
            raise
        self.taken += 1
        changed: list[Gate] = []
        for tier in tiers:
            if tier.qos == "P0" or tier.qos not in found:
                continue
            limit, age_ns = found[tier.qos]
            limit //= shares
            if age_ns >= BELIEVED_NS:
                self.stale += 1
                continue
            self._until_ns[tier.qos] = now_ns + BELIEVED_NS - age_ns
            if tier.external != limit:
                tier.external = limit
                tier.gate.refresh()
                changed.append(tier.gate)
        return changed

    def next_ns(self) -> int:
        """Return when the next limit gets too old; 0: there is none."""
        return min(self._until_ns.values(), default=0)

    def expire(self, tiers: Iterable[Tier], now_ns: int) -> list[Gate]:
        """Let go of limits that are too old; return the gates that this changed."""
        changed: list[Gate] = []
        for tier in tiers:
            until_ns = self._until_ns.get(tier.qos)
            if until_ns is not None and now_ns >= until_ns:
                del self._until_ns[tier.qos]
                tier.external = -1
                tier.gate.refresh()
                changed.append(tier.gate)
        return changed
