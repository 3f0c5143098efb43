"""Records between `append` and the disk: chained, kept until durable, chained again if need be.

No clock, no disk: times come in, bytes go out (`take`), the disk's word comes back (`settle`,
`chain_again`). It owns the order of a chain and where a segment ends. Bounds are the caller's: it
asks for `len` and `bytes`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from proxy.audit import room
from proxy.audit.chain import LINE_BYTES, Chain, Head
from proxy.audit.entries import Entries
from proxy.audit.items import HELD_BYTES, Item, Piece, Run, Segment, held_bytes, parts_of, times_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.audit.disk import Part, Sealed
    from proxy.audit.ids import TokenIds
    from proxy.audit.request import RequestText

# Room for a checkpoint, and `segment_end` or `closed`, at the end of a segment.
_END_ROOM = 4096
NEVER = 1 << 62
# Of a request's text that is chained together with others.
_PLAIN_BYTES = 32 << 10
_RUN = 256
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
        self._entries = Entries(origin, mode, auditor_public)
        self._full_bytes = segment_bytes - _END_ROOM
        self._segment = Segment(0)
        self._pieces: deque[Piece] = deque()
        self._chained = 0  # records in them
        self._taken = 0  # of the pieces: handed over before the batch that they are of
        self._fresh = Run(0)  # requests that have their place, and no line yet
        self._fresh_bytes = 0  # their lines have no more
        self._held: deque[Piece] = deque()
        self._held_records = 0
        self.refused = 0  # records that were given a ticket, and that no line holds
        self._hold_at = NEVER
        self._ended = False
        self._ticket = -1

    def __len__(self) -> int:
        return self._chained + self._fresh.count + self._held_records

    def has_room_for(self, records: int) -> bool:
        """Say whether so many may wait besides, where none had to be dropped of late (`room`)."""
        count = len(self) + records
        return count <= room.PENDING_RECORDS and self.bytes < room.PENDING_BYTES

    @property
    def next_seq(self) -> int:
        """The seq of the record that is chained next."""
        return self._chain.seq + self._fresh.count

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
        if ids is None and text.bytes_most <= self._plain_bytes():
            return self._add_plain([text], wall_ns, mono_ns)[0]
        return self._add(Item(0, "request", _NONE, text, ids, wall_ns, mono_ns))

    def add_requests(
        self,
        texts: list[RequestText],
        ids: list[Sequence[int] | None],
        wall_ns: int,
        mono_ns: int,
    ) -> list[int]:
        """As `add_request` for each; one that no line holds is refused: counted, its ticket -1."""
        tickets: list[int] = []
        plain: list[RequestText] = []
        most = self._plain_bytes()
        for number, text in enumerate(texts):
            its_ids = ids[number]
            if its_ids is None and text.bytes_most <= most:
                plain.append(text)
                if len(plain) < _RUN:
                    continue
            if plain:
                tickets += self._add_plain(plain, wall_ns, mono_ns)
                plain = []
            if its_ids is None and text.bytes_most <= most:
                continue
            try:
                tickets.append(self.add_request(text, its_ids, wall_ns, mono_ns))
            except ValueError:
                self.refused += 1
                tickets.append(-1)
        if plain:
            tickets += self._add_plain(plain, wall_ns, mono_ns)
        return tickets

    def _plain_bytes(self) -> int:
        """Return how long a text may be that surely makes a line."""
        return min(_PLAIN_BYTES, LINE_BYTES - self._chain.around_bytes)

    def _add_plain(self, texts: list[RequestText], wall_ns: int, mono_ns: int) -> list[int]:
        """Add requests without ids and of no great length, at most `_RUN`; returns their tickets.

        They are chained later, together with others; one by one where the segment may end.
        """
        count, seq = len(texts), self.next_seq
        if self._held or seq >= self._hold_at:
            ticket = self._hold_plain(texts, wall_ns, mono_ns)
        elif seq + count > self._hold_at:
            before = self._hold_at - seq
            first = self._add_plain(texts[:before], wall_ns, mono_ns)
            return first + self._add_plain(texts[before:], wall_ns, mono_ns)
        else:
            most = sum([text.bytes_most for text in texts]) + count * self._chain.around_bytes
            if self._segment.size + self._fresh_bytes + most > self._full_bytes:
                return [
                    self._add(Item(0, "request", _NONE, text, None, wall_ns, mono_ns))
                    for text in texts
                ]
            ticket = max(seq, self._ticket + 1)
            if self._fresh.count and self._fresh.ticket + self._fresh.count != ticket:
                self._chain_fresh()
            if not self._fresh.count:
                self._fresh.ticket = ticket
            self._fresh.add(texts, wall_ns, mono_ns)
            self._fresh_bytes += most
        self.bytes += HELD_BYTES * count
        self._ticket = ticket + count - 1
        if self._fresh.count >= _RUN:
            self._chain_fresh()
        return list(range(ticket, ticket + count))

    def _hold_plain(self, texts: list[RequestText], wall_ns: int, mono_ns: int) -> int:
        """Put requests behind what is held; returns the first one's ticket."""
        self._chain_fresh()
        ticket = max(self._chain.seq, self._ticket + 1)
        last = self._held[-1] if self._held else None
        if (
            isinstance(last, Run)
            and last.ticket + last.count == ticket
            and last.count + len(texts) <= _RUN
        ):
            last.add(texts, wall_ns, mono_ns)
        else:
            run = Run(ticket)
            run.add(texts, wall_ns, mono_ns)
            self._held.append(run)
        self._held_records += len(texts)
        return ticket

    def _chain_fresh(self) -> None:
        """Give each fresh record its line, in one go.

        Most of the time that takes goes by without the GIL, so the thread at the disk is not kept
        waiting by a loop that is busy.
        """
        if self._fresh.count:
            fresh, self._fresh, self._fresh_bytes = self._fresh, Run(0), 0
            self._place_held(fresh)

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

    @property
    def over(self) -> bool:
        """Whether `closed` was chained, and everything that was is durable."""
        return self._ended and not self._pieces

    def end(self) -> None:
        """Erase the keys: nothing is chained any more."""
        self._chain.erase()

    @property
    def key_id(self) -> str:
        """The key that the next record is written under."""
        return self._chain.key_id

    def _add(self, item: Item) -> int:
        self._chain_fresh()
        item.seq = self._chain.seq
        if self._held or self._chain.seq >= self._hold_at:
            self._held.append(item)
            self._held_records += 1
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
            wall_ns, mono_ns = times_of(self._held[0])
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
        self._hold_at = hold_at
        while self._held and most > 0 and self._chain.seq < hold_at:
            piece, room = self._held[0], min(most, hold_at - self._chain.seq)
            if isinstance(piece, Run) and piece.count > room:
                piece = piece.cut(room)
            else:
                self._held.popleft()
            most -= piece.count
            self._held_records -= piece.count
            self._place_held(piece)

    def _place_held(self, piece: Piece) -> None:
        """Chain what had no line so far."""
        self.bytes -= held_bytes(piece)
        if isinstance(piece, Run):
            self._place_run(piece)
        else:
            assert isinstance(piece, Item)
            self._place_if_it_fits(piece)

    def _place_if_it_fits(self, item: Item) -> None:
        try:
            self._place(item)
        except ValueError:
            self.refused += 1

    def _place_run(self, run: Run) -> None:
        """Chain a run in one go, or one by one where it does not fit into the segment."""
        chain = self._chain
        before = chain.seq, chain.prev
        rows = [text.pieces for text in run.texts]
        try:
            run.line, run.leaves = chain.request_run(run.walls, run.monos, rows)
        except ValueError:  # one of them makes no line
            run.line = b""
        if run.line and self._segment.size + len(run.line) <= self._full_bytes:
            run.seq = before[0]
            self._keep(run)
            return
        chain.back_to(Head(before[0], before[1], chain.head.turn))
        for item in run.items():
            self._place_if_it_fits(item)

    def settle(self, records: int) -> None:
        """Forget the first `records`: they are durable, and so the keys before theirs are gone.

        They end where a segment does, or what was taken.
        """
        piece = None
        self._taken = 0
        turn = self.durable.turn
        while records > 0:
            piece = self._pieces.popleft()
            records -= piece.count
            self._chained -= piece.count
            self.bytes -= len(piece.line) + len(piece.entry)
            self.durable_ticket = max(self.durable_ticket, piece.ticket + piece.count - 1)
            turn += isinstance(piece, Item) and piece.kind == "rotate"
        assert records == 0
        if piece is not None:
            self.durable = Head(piece.seq + piece.count, piece.line[-65:-1].decode(), turn)
            self._chain.forget_before(turn)

    def take(self) -> list[Part]:
        """Hand all over that has not been, up to `settle`: one part a segment."""
        self._chain_fresh()
        pieces = list(self._pieces)[self._taken :]
        self._taken = len(self._pieces)
        return parts_of(pieces)

    def chain_again(self, sealed: Sealed) -> None:
        """Chain what is not durable into a new segment, behind the durable head.

        A checkpoint states its place, which is another now: it is left out.
        """
        self._chain_fresh()
        old = [piece for piece in self._pieces if not _stays(piece)]
        first = self._pieces[0]  # in the segment that failed
        wall_ns, mono_ns = times_of(old[0] if old else first)
        self._pieces.clear()
        self._chained = 0
        self.bytes = sum([held_bytes(piece) for piece in self._held])
        self._chain.back_to(self.durable)
        if self._ended and not old:
            return  # `closed` is durable, and what was to follow it was its checkpoint
        if self.durable.seq == 0:
            self._segment = Segment(0)  # not even genesis: nothing to follow
        elif sealed.size == 0:
            # The segment had nothing durable: its successor takes its name and its predecessor.
            assert first.segment is not None
            assert first.segment.file is sealed.segment
            self._begin_segment(*first.segment.before, wall_ns, mono_ns)
        else:
            more = {"sealed": {"size": sealed.size, "intact": sealed.intact}}
            self._begin_segment(sealed.segment.name, more, wall_ns, mono_ns)
        for piece in old:
            if isinstance(piece, Run):
                self._place_run(piece)
            else:
                assert isinstance(piece, Item)
                self._place_if_it_fits(piece)  # its seq may have a digit more now

    def _place(self, item: Item) -> None:
        """Chain an item into the current segment, or into a new one if that is full."""
        chain = self._chain
        before = chain.head
        self._link(item)
        segment = self._segment
        limit = self._full_bytes
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
                chain = self._chain
                text, entry = self._entries.with_ids(
                    text, item.ids, self._segment, chain.seq, chain.ids_root
                )
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

    def _keep(self, piece: Piece) -> None:
        segment = piece.segment = self._segment
        segment.records += piece.count
        segment.size += len(piece.line)
        if piece.entry:
            segment.ids_digest.update(piece.entry)
            segment.ids_size += len(piece.entry)
        self._pieces.append(piece)
        self._chained += piece.count
        self.bytes += len(piece.line) + len(piece.entry)

    def _roll(self, item: Item) -> None:
        """End the segment and begin the next, at the time of the item that did not fit."""
        wall_ns, mono_ns = item.wall_ns, item.mono_ns
        self._place_new("segment_end", {}, wall_ns, mono_ns)
        self._begin_segment(self._segment.file.name, {}, wall_ns, mono_ns)

    def _begin_segment(
        self, prev_file: str, more: dict[str, Any], wall_ns: int, mono_ns: int
    ) -> None:
        self._segment = Segment(self._chain.seq)
        self._segment.before = prev_file, more
        members = {"prev_file": prev_file, **more}
        self._place_new("segment_start", members, wall_ns, mono_ns)

    def _place_new(self, kind: str, members: dict[str, Any], wall_ns: int, mono_ns: int) -> None:
        self._place(Item(-1, kind, members, None, None, wall_ns, mono_ns))


def _stays(piece: Piece) -> bool:
    return isinstance(piece, Item) and piece.kind in _STAYING_KINDS
