"""Verification ahead of the verifier: segments are read by other processes, several at a time.

A process cannot know what stands before its segment, so it takes the segment's first line at its
word and notes how far the plain case carries from there: `Run`s, each with the state it began in.
The verifier, which goes through the lines in order, uses a run only where its own state is exactly
that one, and does the lines itself everywhere else. So the findings are those of one process.

Bounds: two segments a process are under way or waiting; a run is a few kilobytes.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, NamedTuple, Self

from proxy.audit.layout import open_regular
from proxy.audit.plain import Before, Taken, take
from proxy.audit.reader import Fault, Lines, parse_line
from proxy.audit.tree import Range

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proxy.audit.epochs import MacKeys
    from proxy.audit.reader import Line

# A smaller segment is not worth a process's while.
_WORTH_BYTES = 1 << 20
_AHEAD = 2


class Run(NamedTuple):
    """Plain lines from `start` to `taken.end`, behind the state `before`.

    `taken.leaves` is empty: `sizes` and `hashes` are the nodes of their tree, which begins at
    `before.seq`.
    """

    start: int
    before: Before
    mac_checked: bool
    taken: Taken
    sizes: list[int]
    hashes: list[bytes]

    def nodes(self) -> Range:
        """Return the leaves as a range."""
        made = Range(self.before.seq)
        made.end = self.before.seq + self.taken.records
        made.sizes, made.hashes = self.sizes, self.hashes
        return made


class Segment(NamedTuple):
    """A segment to be read; `quiet_ns` as in `plain.Before`."""

    path: Path
    quiet_ns: int


class _Reading:
    """One segment on its way through `runs_of`."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._first: tuple[int, Before, bool] | None = None
        self._nodes = Range()
        self._ids = 0, 0
        self._first_mono_ns = 0
        self._records = 0
        self._last: Taken | None = None

    def add(self, start: int, before: Before, taken: Taken, *, mac_checked: bool) -> None:
        """Take what one block gave."""
        if self._first is None:
            self._first = start, before, mac_checked
            self._nodes, self._ids, self._records = Range(before.seq), (0, 0), 0
            self._first_mono_ns = taken.first_mono_ns
        self._nodes.extend_packed(taken.leaves)
        self._records += taken.records
        if taken.ids_end > self._ids[0]:
            self._ids = taken.ids_end, taken.ids_seq
        self._last = taken

    def end(self, offset: int) -> None:
        """The run, if there is one, ends at this place of the file."""
        if self._first is None or self._last is None:
            return
        start, before, mac_checked = self._first
        whole = self._last._replace(
            end=offset,
            records=self._records,
            first_mono_ns=self._first_mono_ns,
            ids_end=self._ids[0],
            ids_seq=self._ids[1],
            leaves=b"",
        )
        nodes = self._nodes
        self.runs.append(Run(start, before, mac_checked, whole, nodes.sizes, nodes.hashes))
        self._first = None


def runs_of(segment: Segment, keys: MacKeys | None) -> list[Run]:
    """Return the runs of a segment; raises OSError."""
    reading, before = _Reading(), None
    with open_regular(segment.path) as file:
        lines = Lines(file)
        while True:
            data, start, stop = lines.block()
            if before is not None and start < stop:
                mac = None if keys is None else keys.hmac(before.key_id, before.origin)
                offset = lines.offset
                taken = take(data, start, stop, mac, before)
                lines.took(taken.end)
                if taken.records:
                    reading.add(offset, before, taken, mac_checked=mac is not None)
                    before = _behind(before, taken)
                if start < taken.end == stop:
                    continue
            reading.end(lines.offset)
            found = lines.line()
            if found is None:
                return reading.runs
            line = parse_line(found[1])
            before = None if isinstance(line, Fault) else _behind_line(line, segment.quiet_ns)


def _behind(before: Before, taken: Taken) -> Before:
    return before._replace(
        prev=taken.prev.decode(),
        seq=before.seq + taken.records,
        wall_ns=taken.wall_ns,
        mono_ns=taken.mono_ns,
    )


def _behind_line(line: Line, quiet_ns: int) -> Before | None:
    record = line.record
    if record["v"] != 1:
        return None
    key_id = record["new_key_id"] if record["kind"] == "rotate" else record["key_id"]
    wall_ns, mono_ns = int(record["wall_ns"]), int(record["mono_ns"])
    if max(wall_ns, mono_ns) >= 1 << 63:
        return None
    return Before(record["origin"], key_id, line.mac, record["seq"] + 1, wall_ns, mono_ns, quiet_ns)


_keys: MacKeys | None = None


def _begin(keys: MacKeys | None) -> None:
    global _keys  # noqa: PLW0603 - a process's own, set once, when it is made
    _keys = keys


def _read(segment: Segment) -> list[Run]:
    try:
        return runs_of(segment, _keys)
    except OSError:
        return []  # the verifier says what cannot be read


class Ahead:
    """The processes, and what they have found."""

    def __init__(self, jobs: int, keys: MacKeys | None, segments: Iterator[Segment]) -> None:
        """Begin; `segments` come in the order in which they are asked for."""
        self._segments = segments
        self._waiting: deque[tuple[Path, Future[list[Run]]]] = deque()
        self._room = _AHEAD * jobs
        # Forked, so that the keys are neither pickled nor written to a pipe.
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(jobs, context, _begin, (keys,))

    def __enter__(self) -> Self:
        self._fill()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def runs(self, path: Path) -> dict[int, Run]:
        """Return the runs of a segment by where they begin; none where it was not read."""
        if not any(path == waiting for waiting, _ in self._waiting):
            return {}
        while True:
            first, future = self._waiting.popleft()
            if first == path:
                break
        try:
            found = future.result()
        except BrokenProcessPool:
            found = []
        self._fill()
        return {run.start: run for run in found}

    def _fill(self) -> None:
        while len(self._waiting) < self._room:
            segment = next(self._segments, None)
            if segment is None:
                return
            try:
                worth = segment.path.stat().st_size >= _WORTH_BYTES
            except OSError:
                worth = False
            if worth:
                try:
                    self._waiting.append((segment.path, self._pool.submit(_read, segment)))
                except BrokenProcessPool:
                    return
