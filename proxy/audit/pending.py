"""Records between `append` and the disk: chained, kept until durable, chained again if need be.

No clock, no disk: times come in, bytes go out (`take`), the disk's word comes back (`settle`,
`chain_again`). It owns the order of a chain, where a segment ends, and token ids; randomness for a
fresh segment key is the operating system's. Bounds are the caller's: it asks for `len` and `bytes`.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.audit import ids as token_ids
from proxy.audit.chain import LINE_BYTES, Chain, Head
from proxy.audit.disk import Part, Sealed, SegmentFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.audit.ids import SegmentIds, TokenIds
    from proxy.audit.request import RequestText

# Room for a checkpoint, and `segment_end` or `closed`, at the end of a segment.
_END_ROOM = 4096
# What a held record counts for until it has its line, and each of its token ids.
_HELD_BYTES = 2048
_ID_BYTES = 4
NEVER = 1 << 62
_NONE: dict[str, Any] = {}
_SEGMENT_KINDS = ("segment_end", "segment_start")
# They never begin a segment: a checkpoint states the seq that it is at.
_STAYING_KINDS = ("checkpoint", *_SEGMENT_KINDS)


@dataclass(slots=True)
class _Item:
    """A record that is not durable yet, with what it takes to chain it again."""

    ticket: int
    kind: str
    members: dict[str, Any]
    text: RequestText | None  # in place of members
    ids: Sequence[int] | None
    wall_ns: int
    mono_ns: int
    seq: int = 0
    line: bytes = b""
    entry: bytes = b""
    segment: _Segment | None = None


class _Segment:
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


class Pending:
    """The records of a chain that are not durable yet, in order."""

    def __init__(
        self,
        chain: Chain,
        *,
        origin: str,
        mode: TokenIds,
        auditor_public: bytes | None,
        segment_bytes: int,
    ) -> None:
        """Begin with segment 0, at whose start `chain` stands."""
        self.bytes = 0
        self.durable = Head()
        self.durable_ticket = -1
        self._chain = chain
        self._origin = origin
        self._mode = mode
        self._auditor_public = auditor_public
        self._segment_bytes = segment_bytes
        self._roomy_bytes = segment_bytes - _END_ROOM - LINE_BYTES
        self._segment = _Segment(0)
        self._before: tuple[str, dict[str, Any]] = "", {}
        self._items: deque[_Item] = deque()
        self._held: list[_Item] = []
        self._hold_at = NEVER
        self._ended = False
        self._ticket = -1

    def __len__(self) -> int:
        return len(self._items) + len(self._held)

    @property
    def next_seq(self) -> int:
        """The seq of the record that is chained next."""
        return self._chain.seq

    @property
    def last_ticket(self) -> int:
        """What `add` returned last."""
        return self._ticket

    def add(
        self,
        kind: str,
        members: dict[str, Any],
        wall_ns: int,
        mono_ns: int,
    ) -> int:
        """Chain a record whose members fit; returns its ticket.

        A ticket is the seq, but where chaining again moved earlier records: tickets only grow.
        Raises ValueError, with the chain where it was, for a record that no line holds.
        """
        return self._add(_Item(0, kind, members, None, None, wall_ns, mono_ns))

    def add_request(
        self, text: RequestText, ids: Sequence[int] | None, wall_ns: int, mono_ns: int
    ) -> int:
        """As `add`, for a request's record."""
        item = _Item(0, "request", _NONE, text, ids, wall_ns, mono_ns)
        segment, chain = self._segment, self._chain
        if ids is not None or chain.seq >= self._hold_at or segment.size >= self._roomy_bytes:
            return self._add(item)
        # As nearly all: no ids, and room for the longest line there may be.
        item.seq = chain.seq
        line = item.line = chain.request_line(text, wall_ns, mono_ns)
        item.segment = segment
        segment.records += 1
        segment.size += len(line)
        self._items.append(item)
        self.bytes += len(line)
        self._ticket = item.ticket = max(item.seq, self._ticket + 1)
        return item.ticket

    def rotate(
        self, wall_ns: int, mono_ns: int, seed: tuple[str, bytes] | None = None
    ) -> int | None:
        """Chain a `rotate` to the next key, or to the first of another seed; returns its ticket.

        None: there is no next key.
        """
        if not self._chain.prepare(seed):
            return None
        return self._add(_Item(0, "rotate", _NONE, None, None, wall_ns, mono_ns))

    def end(self) -> None:
        """Erase the keys: nothing is chained any more."""
        self._chain.erase()

    @property
    def key_id(self) -> str:
        """The key that the next record is written under."""
        return self._chain.key_id

    def _add(self, item: _Item) -> int:
        if self._chain.seq >= self._hold_at:
            self._held.append(item)
            self.bytes += _held_bytes(item)
        else:
            self._place(item)
        self._ticket = item.ticket = max(item.seq, self._ticket + 1)
        return item.ticket

    def hold(self, at: int | None = None) -> None:
        """Chain no record of this seq or later until `release`; None: none at all from here on.

        Held records wait in order, with their times. A checkpoint is of the records before it, all
        durable: while they are synced, what comes is held, and is chained behind it.
        """
        self._hold_at = self._chain.seq if at is None else at

    def release(
        self, hold_at: int, checkpoint: dict[str, Any] | None, wall_ns: int, mono_ns: int
    ) -> int:
        """Chain the checkpoint, if there is one, then what was held; hold again from `hold_at`.

        Returns how many held records no line holds; they are dropped.
        """
        held, self._held = self._held, []
        refused = 0
        if checkpoint is not None:
            if held:
                wall_ns, mono_ns = held[0].wall_ns, held[0].mono_ns  # times only grow in a chain
            self._place(_Item(-1, "checkpoint", checkpoint, None, None, wall_ns, mono_ns))
        self._hold_at = hold_at
        for number, item in enumerate(held):
            if self._chain.seq >= hold_at:
                self._held = held[number:]
                break
            self.bytes -= _held_bytes(item)
            try:
                self._place(item)
            except ValueError:
                refused += 1
        return refused

    def settle(self, records: int) -> None:
        """Forget the first `records`: they are durable, and so the keys before theirs are gone."""
        item = None
        turn = self.durable.turn
        for _ in range(records):
            item = self._items.popleft()
            self.bytes -= len(item.line) + len(item.entry)
            self.durable_ticket = max(self.durable_ticket, item.ticket)
            turn += item.kind == "rotate"
        if item is not None:
            self.durable = Head(item.seq + 1, item.line[-65:-1].decode(), turn)
            self._chain.forget_before(turn)

    def take(self) -> list[Part]:
        """Hand all items over: one part a segment."""
        parts: list[Part] = []
        run: list[_Item] = []
        for item in self._items:
            if run and run[-1].segment is not item.segment:
                parts.append(_part(run))
                run = []
            run.append(item)
        if run:
            parts.append(_part(run))
        return parts

    def chain_again(self, sealed: Sealed) -> None:
        """Chain what is not durable into a new segment, behind the durable head.

        A checkpoint states its place, which is another now: it is left out.
        """
        old = [item for item in self._items if item.kind not in _STAYING_KINDS]
        first = old[0] if old else self._items[0]
        self._items.clear()
        self.bytes = sum(_held_bytes(item) for item in self._held)
        self._chain.back_to(self.durable)
        if self.durable.seq == 0:
            self._segment = _Segment(0)  # not even genesis: nothing to follow
        elif sealed.size == 0:
            # The segment had nothing durable: its successor takes its name and its predecessor.
            self._begin_segment(*self._before, first)
        else:
            more = {"sealed": {"size": sealed.size, "intact": sealed.intact}}
            self._begin_segment(sealed.segment.name, more, first)
        for item in old:
            self._place(item)

    def _place(self, item: _Item) -> None:
        """Chain an item into the current segment, or into a new one if that is full."""
        chain = self._chain
        before = chain.head
        self._link(item)
        segment = self._segment
        limit = self._segment_bytes - _END_ROOM
        full = segment.size + len(item.line) > limit or segment.ids_size > limit
        self._ended = self._ended or item.kind == "closed"
        if full and segment.records > 1 and not (self._ended or item.kind in _STAYING_KINDS):
            chain.back_to(before)
            self._roll(item)
            self._link(item)
        self._keep(item)

    def _link(self, item: _Item) -> None:
        members, entry, text = item.members, b"", item.text
        if text is not None:
            if item.ids is not None:
                text, entry = self._with_ids(text, item.ids)
            item.seq = self._chain.seq
            item.line = self._chain.request_line(text, item.wall_ns, item.mono_ns)
            item.entry = entry
            return
        if item.kind == "rotate":
            item.seq = self._chain.seq
            item.line = self._chain.rotate_line(item.wall_ns, item.mono_ns)
            return
        if item.kind in ("segment_end", "closed"):
            digest = self._segment.ids_digest.hexdigest()
            members = {**members, "ids_sha256": digest}
        item.seq = self._chain.seq
        item.line = self._chain.line(item.kind, members, item.wall_ns, item.mono_ns)
        item.entry = entry

    def _keep(self, item: _Item) -> None:
        segment = item.segment = self._segment
        segment.records += 1
        segment.size += len(item.line)
        if item.entry:
            segment.ids_digest.update(item.entry)
            segment.ids_size += len(item.entry)
        self._items.append(item)
        self.bytes += len(item.line) + len(item.entry)

    def _with_ids(self, text: RequestText, ids: Sequence[int]) -> tuple[RequestText, bytes]:
        mode, count = self._mode, len(ids)
        if mode == "off":
            return text, b""
        try:
            packed = token_ids.pack(ids[: token_ids.IDS_LIMIT])
        except ValueError:
            return text.with_ids(count), b""
        segment, seq = self._segment, self._chain.seq
        if segment.ids is None or segment.ids_root != self._ids_root():
            self._open_ids(segment)
        assert segment.ids is not None
        if mode == "sealed":
            commit, entry = segment.ids.seal(seq, packed)
            at = segment.ids_size or len(segment.ids_head)
            return text.with_ids(count, commit, at), (
                entry if segment.ids_size else segment.ids_head + entry
            )
        commit = token_ids.commitment(segment.ids.data_key(seq), packed)
        plain = ids[: token_ids.PLAIN_LIMIT] if mode == "plain" else None
        return text.with_ids(count, commit, ids=plain), b""

    def _ids_root(self) -> bytes:
        """Return what a segment's ids key comes from, b"" where that is drawn at random."""
        return b"" if self._mode == "sealed" else self._chain.ids_root

    def _open_ids(self, segment: _Segment) -> None:
        first, root = segment.file.first_seq, self._ids_root()
        if self._mode == "sealed":
            assert self._auditor_public is not None
            key = os.urandom(token_ids.KEY_BYTES)
            segment.ids_head = token_ids.make_head(
                self._auditor_public, self._origin, first, key, os.urandom(32)
            )
        else:
            key = token_ids.commit_key(root, first)
        segment.ids_root = root
        segment.ids = token_ids.SegmentIds(key)

    def _roll(self, item: _Item) -> None:
        """End the segment and begin the next, at the time of the item that did not fit."""
        self._place_new("segment_end", {}, item)
        self._begin_segment(self._segment.file.name, {}, item)

    def _begin_segment(self, prev_file: str, more: dict[str, Any], item: _Item) -> None:
        self._before = prev_file, more
        self._segment = _Segment(self._chain.seq)
        self._place_new("segment_start", {"prev_file": prev_file, **more}, item)

    def _place_new(self, kind: str, members: dict[str, Any], item: _Item) -> None:
        self._place(_Item(-1, kind, members, None, None, item.wall_ns, item.mono_ns))


def _held_bytes(item: _Item) -> int:
    return _HELD_BYTES + (_ID_BYTES * len(item.ids) if item.ids is not None else 0)


def _part(run: list[_Item]) -> Part:
    segment = run[0].segment
    assert segment is not None
    return Part(
        segment.file,
        b"".join([item.line for item in run]),
        b"".join([item.entry for item in run]),
        len(run),
    )
