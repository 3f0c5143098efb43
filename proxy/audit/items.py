"""Records that are not durable yet, and the segment that they are to lie in. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from proxy.audit.disk import Part, SegmentFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.audit.ids import SegmentIds
    from proxy.audit.request import RequestText

# What a held record counts for until it has its line, and each of its token ids.
HELD_BYTES = 2048
_ID_BYTES = 4


class Piece:
    """Records that are not durable yet and lie in the file one behind another, in one segment.

    `ticket` and `seq` are the first one's. `line` is whole lines; `leaves`, where it is known, the
    leaf hash of each.
    """

    __slots__ = ("count", "entry", "leaves", "line", "segment", "seq", "ticket")

    def __init__(self, ticket: int, count: int) -> None:
        self.ticket = ticket
        self.count = count
        self.seq = 0
        self.line = b""
        self.leaves = b""
        self.entry = b""
        self.segment: Segment | None = None


class Item(Piece):
    """One record, with what it takes to chain it again; `text` is in place of members."""

    __slots__ = ("ids", "kind", "members", "mono_ns", "text", "wall_ns")

    def __init__(
        self,
        ticket: int,
        kind: str,
        members: dict[str, Any],
        text: RequestText | None,
        ids: Sequence[int] | None,
        wall_ns: int,
        mono_ns: int,
    ) -> None:
        super().__init__(ticket, 1)
        self.kind = kind
        self.members = members
        self.text = text
        self.ids = ids
        self.wall_ns = wall_ns
        self.mono_ns = mono_ns


class Run(Piece):
    """Requests without token ids, as nearly all are: chained in one go. Tickets rise by one."""

    __slots__ = ("monos", "texts", "walls")

    def __init__(self, ticket: int) -> None:
        super().__init__(ticket, 0)
        self.texts: list[RequestText] = []
        self.walls: list[int] = []
        self.monos: list[int] = []

    def add(self, texts: list[RequestText], wall_ns: int, mono_ns: int) -> None:
        """Take more, of the same times."""
        self.texts += texts
        self.walls += [wall_ns] * len(texts)
        self.monos += [mono_ns] * len(texts)
        self.count = len(self.texts)

    def cut(self, count: int) -> Run:
        """Give up the first so many, as a run of their own."""
        first = Run(self.ticket)
        first.texts, self.texts = self.texts[:count], self.texts[count:]
        first.walls, self.walls = self.walls[:count], self.walls[count:]
        first.monos, self.monos = self.monos[:count], self.monos[count:]
        first.count, self.count = count, self.count - count
        self.ticket += count
        return first

    def items(self) -> list[Item]:
        """Return the records one by one."""
        return [
            Item(self.ticket + at, "request", {}, text, None, self.walls[at], self.monos[at])
            for at, text in enumerate(self.texts)
        ]


class Segment:
    """The writer's view of the segment it fills."""

    __slots__ = (
        "before",
        "file",
        "ids",
        "ids_digest",
        "ids_head",
        "ids_root",
        "ids_size",
        "records",
        "size",
    )

    def __init__(self, first_seq: int) -> None:
        self.file = SegmentFile(first_seq)
        # The file before it, and what more its first record says of that.
        self.before: tuple[str, dict[str, Any]] = "", {}
        self.records = 0
        self.size = 0
        self.ids: SegmentIds | None = None
        self.ids_digest = hashlib.sha256()
        self.ids_size = 0
        self.ids_head = b""
        self.ids_root = b""


def times_of(piece: Piece) -> tuple[int, int]:
    """Return the first record's (wall_ns, mono_ns)."""
    if isinstance(piece, Run):
        return piece.walls[0], piece.monos[0]
    assert isinstance(piece, Item)
    return piece.wall_ns, piece.mono_ns


def held_bytes(piece: Piece) -> int:
    """Return what records count for that have no line yet."""
    ids = piece.ids if isinstance(piece, Item) else None
    return HELD_BYTES * piece.count + (_ID_BYTES * len(ids) if ids is not None else 0)


def parts_of(pieces: list[Piece]) -> list[Part]:
    """Return what is to be written of records that have their lines: one part a segment."""
    parts: list[Part] = []
    of_one: list[Piece] = []
    for piece in pieces:
        if of_one and of_one[-1].segment is not piece.segment:
            parts.append(_part(of_one))
            of_one = []
        of_one.append(piece)
    if of_one:
        parts.append(_part(of_one))
    return parts


def _part(pieces: list[Piece]) -> Part:
    segment = pieces[0].segment
    assert segment is not None
    return Part(
        segment.file,
        b"".join([piece.line for piece in pieces]),
        b"".join([piece.entry for piece in pieces]),
        sum([piece.count for piece in pieces]),
        _leaves_of(pieces),
    )


def _leaves_of(pieces: list[Piece]) -> list[tuple[bool, bytes]]:
    """Return what `Part.leaves` is."""
    made: list[tuple[bool, bytes]] = []
    alike: list[bytes] = []
    hashed = False
    for piece in pieces:
        known = piece.leaves != b""
        if known != hashed and alike:
            made.append((hashed, b"".join(alike)))
            alike = []
        hashed = known
        alike.append(piece.leaves if known else piece.line)
    made.append((hashed, b"".join(alike)))
    return made
