"""The writer of one chain: order on the event loop, bytes to disk on one sync thread.

`append` builds a record's line at once and never waits; lines gather until `flush_ms` or
`flush_records`, then go to the sync thread as whole batches, one batch at a time. A record stays in
memory until it is durable; how many may, and what becomes of the others, is `room`'s.

A checkpoint is signed in the sync thread, of all that is durable, in one go with the batch that
makes it due; what is appended meanwhile is held for as long as that sync takes and chained behind
it (`Pending.hold`), so a checkpoint at seq S states S records, every one of them durable.

When a write fails, the same bytes are tried again every `RETRY_S`. When a sync fails, the file is
sealed at its durable end and what was not durable is chained again into a new segment, so seq
numbers of those records move by one; what `append` returned stays good for `durable`.
One loop, one process: a forked child is refused at its first append.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import TYPE_CHECKING, Any, Self

from proxy.audit.canonical import fit
from proxy.audit.chain import Chain
from proxy.audit.checkpoint import Checkpointer
from proxy.audit.disk import Process
from proxy.audit.due import Due, Heartbeat
from proxy.audit.layout import chain_name
from proxy.audit.note import NoteError
from proxy.audit.pending import Pending
from proxy.audit.record import REQUIRED
from proxy.audit.room import Room
from proxy.audit.rotation import Rotation
from proxy.audit.setup import (
    LOST,
    AuditError,
    AuditStats,
    AuditUnavailableError,
    ChainConfig,
    genesis_members,
    looked_over,
    works,
)
from proxy.audit.syncer import Syncer
from proxy.audit.waiters import Waiters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from proxy.audit.checkpoint import Signed, Witness
    from proxy.audit.disk import Committed
    from proxy.audit.request import RequestText
    from proxy.clock import Clock

log = logging.getLogger(__name__)

RETRY_S = 0.5
CLOSE_S = 5.0

# A start is not refused for these: the chain comes up unavailable and heals.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
# Kinds with a call of their own.
_OWN_CALLS = ("request", "rotate")
# Behind a checkpoint what was held is written so much at a time, while more is chained.
_AHEAD_RECORDS = 256


class AuditWriter:
    """One chain, from its genesis to its `closed`. Made by `start`; all methods on the loop."""

    def __init__(
        self,
        config: ChainConfig,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        gauges: Callable[[], tuple[int, int]],
        chain_dir: Path,
    ) -> None:
        """Prepare; `start` does the rest."""
        self.stats = AuditStats()
        self.dir = chain_dir
        self._config = config.unseeded()
        self._clock = clock
        self._loop = loop
        self._gauges = gauges
        self._forks = Process.forks
        rows = config.origin, config.signers, config.witnesses
        tree = Checkpointer(*rows) if config.signers else None
        self._syncer = Syncer(chain_dir, tree, loop, self._done, config.escrow)
        self._pending = Pending(
            Chain(config.origin, config.seed_id, config.alg, config.seed),
            origin=config.origin,
            mode=config.token_ids,
            auditor_public=config.auditor_public,
            segment_bytes=config.segment_bytes,
        )
        self._syncing = False
        self._due = Due(loop, config, self._schedule)
        self._waiters = Waiters(loop)
        self.on_durable: Callable[[int], None] | None = None  # told the last durable one
        self._next_seed: tuple[str, bytes] | None = None
        self._rotation = Rotation(config.rotate_records, config.rotate_s, clock.mono_ns())
        self._timer: asyncio.Handle | None = None
        self._flushed_s = 0.0
        self._heartbeat = Heartbeat(loop, config.heartbeat_s, self._quiet_s, self._beat)
        self._last_ns = 0
        self._available = True
        self._room = Room()
        self._closing = False
        self._drained: asyncio.Future[None] | None = None

    @classmethod
    def start(
        cls,
        config: ChainConfig,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        gauges: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> Self:
        """Open a new chain under `config.dir`: genesis, and `recovered` for each unended chain.

        `gauges` gives (requests in flight, requests started in all). Blocks until the first records
        are durable. Raises `AuditError`; but a full or failing disk gives a writer that is not
        `available` and heals by itself.
        """
        found = looked_over(config)
        name = chain_name(clock.wall_ns(), os.urandom(4).hex())
        try:
            self = cls(config, clock, loop, gauges, config.dir / name)
        except NoteError as problem:
            raise AuditError(f"origin {config.origin!r}: {problem}") from None
        self._add("genesis", genesis_members(config, found))
        for origin, tail in found.undeclared:
            self._add("recovered", tail.members(origin))
        committed, _ = self._syncer.commit(self._pending.take(), sign=False)
        if committed.error is not None and committed.error.errno not in _PASSING:
            self._syncer.close()
            raise AuditError(f"audit directory {config.dir}: {committed.error}") from (
                committed.error
            )
        self._syncer.start()
        self._pending.hold(self._due.end())
        self._due.watch()
        self._done(committed, None)
        self._heartbeat.check()
        return self

    @property
    def available(self) -> bool:
        """Whether records reach the disk; under policy `block` no means 503."""
        return self._available and not self._room.losing and not self._closing

    @property
    def witnesses(self) -> tuple[Witness, ...]:
        """Who is asked to cosign; to be read."""
        return self._config.witnesses

    def watch(self) -> None:
        """Do what is due by time; to be called about once a second.

        An alarm record for what has gone wrong off the loop; the next key.
        """
        if self._closing:
            return
        for alarm in filter(None, [witness.alarm() for witness in self._config.witnesses]):
            self.append("alarm", {"what": alarm})
        if self._rotation.due(self._pending.next_seq, self._clock.mono_ns()):
            self.rotate()

    @property
    def origin(self) -> str:
        """The origin of the chain."""
        return self._config.origin

    def append(self, kind: str, members: dict[str, Any]) -> int:
        """Chain one record; returns its seq, or `LOST` when it had to be dropped.

        Never blocks. `members` must hold what `record.KINDS` demands and belongs to the writer from
        here on. Raises `AuditError` for a missing member, an unknown kind, one with a call of its
        own (`append_request`, `rotate`), a record that no line holds, or in a forked child.
        """
        required = REQUIRED.get(kind) if kind not in _OWN_CALLS else None
        if required is None or not required <= members.keys():
            raise AuditError(f"a record of kind {kind!r} lacks what it must hold")
        if not self._takes(str(members.get("outcome", "none"))):
            return LOST
        ticket = self._add(kind, fit(members))
        self._appended()
        return ticket

    def append_request(self, text: RequestText, ids: Sequence[int] | None = None) -> int:
        """As `append`, for a request; `ids` are its token ids."""
        if not self._takes(text.outcome):
            return LOST
        wall_ns, mono_ns = self._clock.wall_ns(), self._clock.mono_ns()
        try:
            ticket = self._pending.add_request(text, ids, wall_ns, mono_ns)
        except ValueError as problem:
            raise AuditError(str(problem)) from None
        self._last_ns = mono_ns
        self._appended()
        return ticket

    def append_requests(
        self, texts: list[RequestText], ids: list[Sequence[int] | None]
    ) -> list[int]:
        """As `append_request` for each, for half the cost; what no line holds is `LOST`, logged."""
        calm = self._room.calm and not self._closing and Process.forks == self._forks
        if calm and self._pending.has_room_for(len(texts)):
            wall_ns, mono_ns = self._clock.wall_ns(), self._clock.mono_ns()
            tickets = self._pending.add_requests(texts, ids, wall_ns, mono_ns)
            self._last_ns = mono_ns
            self._appended()
            self._count_refused()
            return tickets
        tickets = []
        for text, its_ids in zip(texts, ids, strict=True):
            try:
                tickets.append(self.append_request(text, its_ids))
            except AuditError:
                self._pending.refused += 1
                tickets.append(LOST)
        self._count_refused()
        return tickets

    def _count_refused(self) -> None:
        refused, self._pending.refused = self._pending.refused, 0
        if refused:
            log.error("audit records that could not be chained: %d", refused)
            self.stats.failures += refused

    def rotate(self) -> int:
        """Go on to the next key; returns the `rotate` record's seq. `LOST`: not now, or none."""
        ticket = self._rotate()
        if ticket != LOST:
            self._appended()
        return ticket

    def rotate_to(self, seed: tuple[str, bytes] | None) -> None:
        """Go on, when that can be written, to the first key of a seed (id, key); None: the next."""
        self._next_seed = seed or self._next_seed
        self._rotation.ask()
        self.watch()

    def _rotate(self) -> int:
        if not self.available or not self._takes("none"):
            return LOST
        wall_ns, mono_ns = self._clock.wall_ns(), self._clock.mono_ns()
        ticket = self._pending.rotate(wall_ns, mono_ns, self._next_seed)
        self._next_seed = None
        if ticket is None:
            self._rotation.exhaust()
            self._add("alarm", {"what": "key_epochs_used_up: start the sidecar again"})
            return LOST
        self._rotation.done(self._pending.next_seq, mono_ns)
        self.stats.rotations += 1
        self._last_ns = mono_ns
        return ticket

    @property
    def key_id(self) -> str:
        """The key that the next record is written under."""
        return self._pending.key_id

    def _takes(self, outcome: str) -> bool:
        """Say whether there is room for a record; one that finds none is counted as lost."""
        if Process.forks != self._forks:
            raise AuditError("this chain belongs to the parent process; start one of your own")
        if self._closing or not self._has_room():
            self.stats.lost += 1
            self._room.lose(outcome, self._clock.wall_ns())
            return False
        if self._room.lost:
            self._add("lost", self._room.tell())
        return True

    def _appended(self) -> None:
        self.stats.pending = count = len(self._pending)
        if self._syncing:
            self._syncer.collect()
        elif self._timer is None or count >= self._config.flush_records:
            self._schedule()

    async def durable(self, seq: int) -> None:
        """Return when the record is on disk.

        Raises `AuditUnavailableError` when it was lost, or the disk fails (it is tried again).
        """
        if not 0 <= seq <= self._pending.durable_ticket:
            await self.when_durable(seq)

    def when_durable(self, seq: int) -> asyncio.Future[None]:
        """As `durable`, of a record just appended, for who does not wait in a task; may cancel."""
        if seq == LOST or not self._available or self._drained is not None:
            raise AuditUnavailableError("the audit chain cannot be written now")
        self._syncer.collect()
        future = self._waiters.durable(seq)
        if seq <= self._pending.durable_ticket:
            self._waiters.wake(self._pending.durable_ticket, failed=False)
        return future

    async def close(self) -> None:
        """Write `closed`, sync, unlock. Raises `AuditUnavailableError` if it did not get there."""
        if self._closing:
            return
        if self._room.lost:
            self._add("lost", self._room.tell())
        self._closing = True
        self._heartbeat.cancel()
        self._add("closed", self._load())
        self._due.ask()
        self._drained = self._loop.create_future()
        self._syncer.collect()
        self._flush()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._drained
        except TimeoutError:
            raise AuditUnavailableError(
                f"{len(self._pending)} audit records could not be written before the end"
            ) from None
        finally:
            self._due.cancel()
            if self._timer is not None:
                self._timer.cancel()
            self._syncer.end()
            await self._loop.run_in_executor(None, self._syncer.join, CLOSE_S)
            self._pending.end()

    def _has_room(self) -> bool:
        return self._room.has(len(self._pending), self._pending.bytes)

    def _add(self, kind: str, members: dict[str, Any]) -> int:
        wall_ns, mono_ns = self._clock.wall_ns(), self._clock.mono_ns()
        try:
            ticket = self._pending.add(kind, members, wall_ns, mono_ns)
        except ValueError as problem:
            raise AuditError(str(problem)) from None
        self._last_ns = mono_ns
        self.stats.pending = len(self._pending)
        return ticket

    def _schedule(self) -> None:
        if self._syncing:
            self._syncer.collect()
            return  # what comes back from the disk starts the next flush
        if not self._available:
            return
        if self._due.now or len(self._pending) >= self._config.flush_records:
            self._flush()
        elif self._timer is None and self._pending:
            # A record that comes alone shares its sync with none: it need not wait for others.
            wait_s = self._flushed_s + self._config.flush_ms / 1000 - self._loop.time()
            later = self._loop.call_later
            self._timer = (
                later(wait_s, self._flush) if wait_s > 0 else self._loop.call_soon(self._flush)
            )

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._syncing or not (self._pending or self._due.now):
            return
        if self._rotation.due(self._pending.next_seq, self._last_ns):
            self._rotate()
        sign = self._due.begins(self._pending.next_seq)
        self._syncing = True
        self._flushed_s = self._loop.time()
        if sign:
            self._pending.hold()
        waited_for = sign or self._drained is not None or not self._waiters.none
        quiet = self._available and not waited_for and self.on_durable is None
        self._syncer.put(self._pending.take(), sign=sign, quiet=quiet)

    def _place_checkpoint(self, signed: Signed | None) -> None:
        """Chain the checkpoint that was asked for, then what was held behind it."""
        self._due.under_way = False
        if signed is None:
            self._due.ask()
        else:
            assert signed.size == self._pending.next_seq
            members = fit(signed.members(*self._gauges()))
            self._due.placed(signed.size)
            self.stats.checkpoint_seq = signed.size
            self.stats.checkpoints += 1
            self._last_ns = self._clock.mono_ns()
            self._pending.place_checkpoint(members, self._clock.wall_ns(), self._last_ns)
        # The disk begins on the first of what was held while the rest is chained.
        pending, end = self._pending, self._due.end()
        pending.release(end, _AHEAD_RECORDS)
        while self._available and pending.can_release:
            self._syncer.put_ahead(pending.take())
            pending.release(end, _AHEAD_RECORDS)
        pending.release(end)
        self._count_refused()

    def _done(self, committed: Committed, signed: Signed | None) -> None:
        """Take the result of a commit: move the durable head, then go on, retry or seal."""
        self._syncing = False
        stats = self.stats
        self._pending.settle(committed.records)
        stats.records += committed.records
        stats.bytes += committed.size
        stats.syncs += committed.syncs
        stats.sync_seconds_total += committed.seconds
        stats.head_seq = self._pending.durable.seq - 1
        self._available = works(committed.error, before=self._available)
        if committed.error is not None:
            stats.failures += 1
            self._room.blame(errno.errorcode.get(committed.error.errno or 0, "io_error"))
            if committed.sealed is not None:
                self._pending.chain_again(committed.sealed)
                # A checkpoint that was not durable is left out; the next stands right behind.
                self._due.ask()
                if self._pending.over and self._drained is not None:
                    self._due.now = self._due.under_way = False  # but it may end without one
                    self._drained.set_result(None)
        if self._due.under_way:
            self._place_checkpoint(signed)
        stats.pending = len(self._pending)
        self._waiters.wake(self._pending.durable_ticket, failed=not self._available)
        if self.on_durable is not None:
            self.on_durable(self._pending.durable_ticket)
        if not self._available:
            self._timer = self._loop.call_later(RETRY_S, self._flush)
            return
        self._room.good()
        if self._room.lost and not self._closing and self._has_room():
            self._add("lost", self._room.tell())
        if self._drained is None:
            self._schedule()
        elif self._pending or self._due.now:
            self._flush()
        elif not self._drained.done():
            self._drained.set_result(None)

    def _quiet_s(self) -> float:
        return (self._clock.mono_ns() - self._last_ns) / 1e9

    def _beat(self) -> None:
        if not self._closing and self._has_room():
            self.append("heartbeat", self._load())

    def _load(self) -> dict[str, Any]:
        in_flight, started = self._gauges()
        return {"in_flight": in_flight, "started_total": started}
