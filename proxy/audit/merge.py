"""One list of the records of many chains, by (wall time, origin, seq).

No order is claimed that nobody knows: each row carries how far its chain's clock may be off
(`clock_bound_ms`, of the genesis, or of the last checkpoint that says so; -1: unknown). Two records
of different origins whose times lie nearer to each other than their bounds together may have come
in either order; within one origin seq is the order.

Streams: of each chain one line is in memory, and its file open only while its time is on.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.audit.layout import chain_dirs, open_regular, segments
from proxy.audit.reader import Line, parse_line, stored_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Row(NamedTuple):
    """One record's place in the list."""

    wall_ns: int
    origin: str
    seq: int
    kind: str
    clock_bound_ms: int
    trace_id: str | None

    def public(self) -> dict[str, Any]:
        """Return the JSON form; times as in the log."""
        row: dict[str, Any] = {
            "wall_ns": str(self.wall_ns),
            "origin": self.origin,
            "seq": self.seq,
            "kind": self.kind,
            "clock_bound_ms": self.clock_bound_ms,
        }
        return row if self.trace_id is None else row | {"trace_id": self.trace_id}


def _rows(chain: Path) -> Iterator[Row]:
    """Yield a chain's records; passes over what is none, raises OSError."""
    bound_ms = -1
    for _, path in segments(chain):
        with open_regular(path) as file:
            for _, raw in stored_lines(file):
                line = parse_line(raw)
                if not isinstance(line, Line) or line.record["v"] != 1:
                    continue
                record = line.record
                if record["kind"] in ("genesis", "checkpoint"):
                    stated = record.get("clock_bound_ms")
                    bound_ms = stated if type(stated) is int else bound_ms
                trace_id = record.get("trace_id")
                yield Row(
                    int(record["wall_ns"]),
                    record["origin"],
                    record["seq"],
                    record["kind"],
                    bound_ms,
                    trace_id if type(trace_id) is str else None,
                )


def merged(directory: Path) -> Iterator[Row]:
    """Yield the records of all chains of a directory, or of one chain, in order; raises OSError."""
    chains = [directory] if segments(directory) else chain_dirs(directory)
    begun: list[tuple[int, Path]] = []
    for chain in chains:
        first = next(_rows(chain), None)
        if first is not None:
            begun.append((first.wall_ns, chain))
    begun.sort(reverse=True)
    heap: list[tuple[Row, int, Iterator[Row]]] = []
    while begun or heap:
        while begun and (not heap or begun[-1][0] <= heap[0][0].wall_ns):
            rows = _rows(begun.pop()[1])
            row = next(rows, None)
            if row is not None:
                heapq.heappush(heap, (row, len(begun), rows))
        if not heap:
            continue
        row, number, rows = heap[0]
        yield row
        following = next(rows, None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following, number, rows))
