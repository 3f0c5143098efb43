"""Counts over a log: what was asked, how it ended, when nobody wrote. Checks nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from proxy.audit.layout import chain_dirs, open_regular, segments
from proxy.audit.reader import stored_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOUR_NS = 3_600 * 10**9
# Names that a key holder made up do not grow the tables without end.
NAMES_MAX = 1000
HOURS_MAX = 24 * 400


def records_of(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield every line that is a JSON object, oldest chain first; raises OSError."""
    chains = [directory] if segments(directory) else chain_dirs(directory)
    for chain in chains:
        for _, path in segments(chain):
            with open_regular(path) as file:
                for _, raw in stored_lines(file):
                    try:
                        record = orjson.loads(raw.partition(b"\t")[0])
                    except ValueError:
                        continue
                    if type(record) is dict:
                        yield record


@dataclass(slots=True)
class Stats:
    """Counts. Times are Unix nanoseconds; 0: none seen."""

    records: int = 0
    first_ns: int = 0
    last_ns: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    tenants: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    alarms: Counter[str] = field(default_factory=Counter)
    key_ids: Counter[str] = field(default_factory=Counter)
    hours: Counter[int] = field(default_factory=Counter)

    def add(self, record: dict[str, Any]) -> None:
        """Take a record; what is not of its type is passed over."""
        self.records += 1
        kind = record.get("kind")
        _count(self.kinds, kind)
        _count(self.key_ids, record.get("key_id"))
        wall = record.get("wall_ns")
        if isinstance(wall, str) and wall.isdecimal() and len(wall) <= 20:
            wall_ns = int(wall)
            self.first_ns = min(self.first_ns or wall_ns, wall_ns)
            self.last_ns = max(self.last_ns, wall_ns)
            hour = wall_ns // HOUR_NS
            if hour in self.hours or len(self.hours) < HOURS_MAX:
                self.hours[hour] += 1
        if kind == "request":
            self._request(record)
        elif kind == "lost":
            self.lost += _int(record.get("count"))
        elif kind == "rejected":
            _add_all(self.rejected, record.get("counts"))
        elif kind == "alarm":
            _count(self.alarms, record.get("what"))

    def _request(self, record: dict[str, Any]) -> None:
        for table, name in (
            (self.classes, "qos"),
            (self.outcomes, "outcome"),
            (self.tenants, "tenant"),
            (self.models, "served_model"),
        ):
            _count(table, record.get(name))
        _count(self.statuses, str(record.get("status")))
        _add_all(self.tokens, record.get("usage"))

    def silent_hours(self) -> list[int]:
        """Return the hours between first and last in which nothing was written, at most 1 000."""
        if not self.hours:
            return []
        low, high = min(self.hours), max(self.hours)
        return [hour for hour in range(low, min(high, low + HOURS_MAX)) if hour not in self.hours][
            :NAMES_MAX
        ]

    def public(self) -> dict[str, Any]:
        """Return the JSON form."""
        tables = ("kinds", "classes", "outcomes", "statuses", "tenants", "models", "tokens",
                  "rejected", "alarms", "key_ids")  # fmt: skip
        return {
            "records": self.records,
            "first_ns": str(self.first_ns),
            "last_ns": str(self.last_ns),
            "lost": self.lost,
            **{name: dict(getattr(self, name).most_common()) for name in tables},
            "hours_with_records": len(self.hours),
            "hours_without": len(self.silent_hours()),
        }


def stats_of(directory: Path) -> Stats:
    """Return the counts of a directory; raises OSError."""
    stats = Stats()
    for record in records_of(directory):
        stats.add(record)
    return stats


def _int(value: object) -> int:
    return value if type(value) is int else 0


def _count(table: Counter[str], name: object, by: int = 1) -> None:
    if isinstance(name, str):
        table[name if name in table or len(table) < NAMES_MAX else "other"] += by


def _add_all(table: Counter[str], counts: object) -> None:
    if isinstance(counts, dict):
        for name, count in counts.items():
            _count(table, name, _int(count))
