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


class Item:
    """A record that is not durable yet, with what it takes to chain it again.

    `text` is in place of members.
    """

    __slots__ = (
        "entry",
        "ids",
        "kind",
        "line",
        "members",
        "mono_ns",
        "segment",
        "seq",
        "text",
        "ticket",
        "wall_ns",
    )

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
        self.ticket = ticket
        self.kind = kind
        self.members = members
        self.text = text
        self.ids = ids
        self.wall_ns = wall_ns
        self.mono_ns = mono_ns
        self.seq = 0
        self.line = b""
        self.entry = b""
        self.segment: Segment | None = None


class Segment:
    """The writer's view of the segment it fills."""

    __slots__ = ("file", "ids", "ids_digest", "ids_head", "ids_root", "ids_size", "records", "size")

    def __init__(self, first_seq: int) -> None:
        self.file = SegmentFile(first_seq)
        self.records = 0
        self.size = 0
        self.ids: SegmentIds | None = None
        self.ids_digest = hashlib.sha256()
        self.ids_size = 0
        self.ids_head = b""
        self.ids_root = b""


def held_bytes(item: Item) -> int:
    """Return what an item counts for that has no line yet."""
    return HELD_BYTES + (_ID_BYTES * len(item.ids) if item.ids is not None else 0)


def parts_of(items: list[Item]) -> list[Part]:
    """Return what is to be written of items that have their lines: one part a segment."""
    parts: list[Part] = []
    run: list[Item] = []
    for item in items:
        if run and run[-1].segment is not item.segment:
            parts.append(_part(run))
            run = []
        run.append(item)
    if run:
        parts.append(_part(run))
    return parts


def _part(run: list[Item]) -> Part:
    segment = run[0].segment
    assert segment is not None
    return Part(
        segment.file,
        b"".join([item.line for item in run]),
        b"".join([item.entry for item in run]),
        len(run),
    )
