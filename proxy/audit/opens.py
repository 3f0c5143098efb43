"""Requests that a chain says were begun (`open`) and of whose end it has no `request` record yet.

Pure; bounded. It is no finding: a process that is killed leaves some, and its successor cannot know
how they ended. But who reads a log wants to be told which they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from proxy.audit.findings import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

# More than requests are ever in flight; of what is beyond it only the number is kept.
KEPT = 8192

# In canonical JSON a quote inside a string has a backslash before it: this is the member's name.
_TRACE_ID = re.compile(rb',"trace_id":"([^"\\]*)"')


class Opens:
    """See the module; by trace id."""

    __slots__ = ("_rows", "omitted")

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, Place]] = {}
        self.omitted = 0

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __len__(self) -> int:
        return len(self._rows) + self.omitted

    def __iter__(self) -> Iterator[tuple[str, int, Place]]:
        for trace_id, (seq, place) in self._rows.items():
            yield trace_id, seq, place

    def take(self, record: dict[str, Any], seq: int, place: Place) -> None:
        """Take an `open` or a `request`."""
        trace_id = record["trace_id"]
        if record["kind"] == "request":
            self._rows.pop(trace_id, None)
        elif len(self._rows) < KEPT:
            self._rows[trace_id] = seq, place
        else:
            self.omitted += 1

    def take_requests(self, data: bytes, start: int, stop: int) -> None:
        """Take stored lines that are all of kind `request`, and canonical."""
        for found in _TRACE_ID.finditer(data, start, stop):
            self._rows.pop(found[1].decode("utf-8", "replace"), None)

    def state(self) -> list[Any]:
        """Return it as JSON can hold it."""
        return [self.omitted, [[trace_id, seq, list(place)] for trace_id, seq, place in self]]

    def restore(self, state: list[Any]) -> None:
        """Go on where `state` was made."""
        self.omitted, rows = state
        self._rows = {trace_id: (seq, Place(*place)) for trace_id, seq, place in rows}
