"""Records between `append` and the disk: chained, kept until durable, chained again if need be.

No clock, no disk: times come in, bytes go out (`take`), the disk's word comes back (`settle`,
`chain_again`). It owns the order of a chain, where a segment ends, and token ids; randomness for a
fresh segment key is the operating system's. Bounds are the caller's: it asks for `len` and `bytes`.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from proxy.audit import ids as token_ids
from proxy.audit import room
from proxy.audit.chain import LINE_BYTES, Chain, Head
from proxy.audit.items import HELD_BYTES, Item, Segment, held_bytes, parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.audit.disk import Part, Sealed
    from proxy.audit.ids import TokenIds
    from proxy.audit.request import RequestText

# Room for a checkpoint, and `segment_end` or `closed`, at the end of a segment.
_END_ROOM = 4096
NEVER = 1 << 62
# As UTF-8, and with what the chain adds, they are far from the longest line.
_FRESH_CHARACTERS = 8192
_RUN = 64
_RUN_MOST = 1024
_NONE: dict[str, Any] = {}
_SEGMENT_KINDS = ("segment_end", "segment_start")
# They never begin a segment: a checkpoint states the seq that it is at.
_STAYING_KINDS = ("checkpoint", *_SEGMENT_KINDS)


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
        self._segment = Segment(0)
        self._before: tuple[str, dict[str, Any]] = "", {}
        self._items: deque[Item] = deque()
        self._fresh: list[Item] = []  # requests that have their place, and no line yet
        self._held: list[Item] = []
        self._taken = 0  # of the items: handed over before the batch that they are of
        self.refused = 0  # records that were given a ticket, and that no line holds
        self._hold_at = NEVER
        self._ended = False
        self._ticket = -1

    def __len__(self) -> int:
        return len(self._items) + len(self._fresh) + len(self._held)

    def has_room_for(self, records: int) -> bool:
        """Say whether so many may wait besides, where none had to be dropped of late (`room`)."""
        count = len(self) + records
        return count <= room.PENDING_RECORDS and self.bytes < room.PENDING_BYTES

    @property
    def next_seq(self) -> int:
        """The seq of the record that is chained next."""
        return self._chain.seq + len(self._fresh)

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
        return self._add(Item(0, kind, members, None, None, wall_ns, mono_ns))

    def add_request(
        self, text: RequestText, ids: Sequence[int] | None, wall_ns: int, mono_ns: int
    ) -> int:
        """As `add`, for a request's record."""
        item = Item(0, "request", _NONE, text, ids, wall_ns, mono_ns)
        fresh = self._fresh
        item.seq = self._chain.seq + len(fresh)
        full = self._segment.size + LINE_BYTES * (len(fresh) + 1) > self._roomy_bytes
        held = self._held or item.seq >= self._hold_at
        if full or held or ids is not None or text.characters() > _FRESH_CHARACTERS:
            return self._add(item)
        # As nearly all: no ids, nothing long, and room for the longest line there may be.
        fresh.append(item)
        self.bytes += HELD_BYTES
        self._ticket = item.ticket = max(item.seq, self._ticket + 1)
        if len(fresh) >= _RUN:
            self._chain_fresh()
        return item.ticket

    def add_requests(
        self,
        texts: list[RequestText],
        ids: list[Sequence[int] | None],
        wall_ns: int,
        mono_ns: int,
    ) -> list[int]:
        """As `add_request` for each; one that no line holds is refused: counted, its ticket -1."""
        tickets = []
        for number, text in enumerate(texts):
            try:
                tickets.append(self.add_request(text, ids[number], wall_ns, mono_ns))
            except ValueError:
                self.refused += 1
                tickets.append(-1)
        return tickets

    def _chain_fresh(self) -> None:
        """Give each fresh record its line, in one go.

        Most of the time that takes goes by without the GIL, so the thread at the disk is not kept
        waiting by a loop that is busy.
        """
        fresh, self._fresh = self._fresh, []
        while fresh:
            run = self._place_run(fresh)
            if run == 0:
                self._place_held(fresh[0])
                run = 1
            fresh = fresh[run:]

    def rotate(
        self, wall_ns: int, mono_ns: int, seed: tuple[str, bytes] | None = None
    ) -> int | None:
        """Chain a `rotate` to the next key, or to the first of another seed; returns its ticket.

        None: there is no next key.
        """
        self._chain_fresh()
        if not self._chain.prepare(seed):
            return None
        return self._add(Item(0, "rotate", _NONE, None, None, wall_ns, mono_ns))

    def end(self) -> None:
        """Erase the keys: nothing is chained any more."""
        self._chain.erase()

    @property
    def key_id(self) -> str:
        """The key that the next record is written under."""
        return self._chain.key_id

    def _add(self, item: Item) -> int:
        self._chain_fresh()
        if self._held or self._chain.seq >= self._hold_at:
            self._held.append(item)
            self.bytes += held_bytes(item)
        else:
            self._place(item)
        self._ticket = item.ticket = max(item.seq, self._ticket + 1)
        return item.ticket

    def hold(self, at: int | None = None) -> None:
        """Chain no record of this seq or later until `release`; None: none at all from here on.

        Held records wait in order, with their times. A checkpoint is of the records before it, all
        durable: while they are synced, what comes is held, and is chained behind it.
        """
        self._chain_fresh()
        self._hold_at = self._chain.seq if at is None else at

    def place_checkpoint(self, checkpoint: dict[str, Any], wall_ns: int, mono_ns: int) -> None:
        """Chain the checkpoint, before what is held."""
        self._chain_fresh()
        if self._held:
            # Times only grow in a chain.
            wall_ns, mono_ns = self._held[0].wall_ns, self._held[0].mono_ns
        self._place(Item(-1, "checkpoint", checkpoint, None, None, wall_ns, mono_ns))

    @property
    def can_release(self) -> bool:
        """Whether `release` has something to chain that it did not."""
        return bool(self._held) and self._chain.seq < self._hold_at

    def release(self, hold_at: int, most: int = NEVER) -> None:
        """Chain what was held, `most` records of it; hold again from `hold_at`.

        What is held still stays before what comes.
        """
        self._chain_fresh()
        held, self._held = self._held, []
        self._hold_at = hold_at
        at = 0
        end = min(most, len(held))
        while at < end and self._chain.seq < hold_at:
            run = self._place_run(held[at : min(end, at + hold_at - self._chain.seq)])
            if run == 0:
                self._place_held(held[at])
                run = 1
            at += run
        self._held = held[at:]

    def _place_held(self, item: Item) -> None:
        self.bytes -= held_bytes(item)
        try:
            self._place(item)
        except ValueError:
            self.refused += 1

    def _place_run(self, items: list[Item]) -> int:
        """Chain the first of these in one go; returns how many, 0: the first is for `_place`.

        For those as nearly all are, requests without ids, and where there is room for as many of
        the longest lines that there may be.
        """
        segment = self._segment
        most = min(_RUN_MOST, (self._roomy_bytes - segment.size) // LINE_BYTES)
        rows = []
        for item in items[: max(most, 0)]:
            if item.text is None or item.ids is not None:
                break
            rows.append(item.text.row(item.wall_ns, item.mono_ns))
        if not rows:
            return 0
        seq = self._chain.seq
        try:
            lines = self._chain.request_lines(rows)
        except ValueError:
            return 0
        for number, line in enumerate(lines):
            item = items[number]
            self.bytes -= HELD_BYTES
            item.seq = seq + number
            item.line = line
            self._keep(item)
        return len(lines)

    def settle(self, records: int) -> None:
        """Forget the first `records`: they are durable, and so the keys before theirs are gone."""
        item = None
        self._taken = 0
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
        """Hand all items over that have not been, up to `settle`: one part a segment."""
        self._chain_fresh()
        items = list(self._items)[self._taken :]
        self._taken = len(self._items)
        return parts_of(items)

    def chain_again(self, sealed: Sealed) -> None:
        """Chain what is not durable into a new segment, behind the durable head.

        A checkpoint states its place, which is another now: it is left out.
        """
        self._chain_fresh()
        old = [item for item in self._items if item.kind not in _STAYING_KINDS]
        first = old[0] if old else self._items[0]
        self._items.clear()
        self.bytes = sum(held_bytes(item) for item in self._held)
        self._chain.back_to(self.durable)
        if self.durable.seq == 0:
            self._segment = Segment(0)  # not even genesis: nothing to follow
        elif sealed.size == 0:
            # The segment had nothing durable: its successor takes its name and its predecessor.
            self._begin_segment(*self._before, first)
        else:
            more = {"sealed": {"size": sealed.size, "intact": sealed.intact}}
            self._begin_segment(sealed.segment.name, more, first)
        for item in old:
            self._place(item)

    def _place(self, item: Item) -> None:
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

    def _link(self, item: Item) -> None:
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

    def _keep(self, item: Item) -> None:
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

    def _open_ids(self, segment: Segment) -> None:
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

    def _roll(self, item: Item) -> None:
        """End the segment and begin the next, at the time of the item that did not fit."""
        self._place_new("segment_end", {}, item)
        self._begin_segment(self._segment.file.name, {}, item)

    def _begin_segment(self, prev_file: str, more: dict[str, Any], item: Item) -> None:
        self._before = prev_file, more
        self._segment = Segment(self._chain.seq)
        self._place_new("segment_start", {"prev_file": prev_file, **more}, item)

    def _place_new(self, kind: str, members: dict[str, Any], item: Item) -> None:
        self._place(Item(-1, kind, members, None, None, item.wall_ns, item.mono_ns))
