"""Which sequences compute which tokens in the next step: continuous batching by class, pure.

Each step holds one token of every decoding sequence and a bounded piece of prompts still being
read (prefill), so a long prompt never stalls the others. Order everywhere is class first; within a
class `queue.py` is fair between tenants, and the prefill budget is shared between them too.

    waiting --admit--> running (prefill -> decode) --finish--> gone
       ^                  |
       +---- preempt -----+

Places: `reserved` of them are P0's alone; a better class takes a place from the worst running P2.
That costs P2 nothing but time: it keeps its blocks and goes on where it was. Blocks: when they are
short, the worst holder that does not run gives up its last ones, else the worst that runs is
preempted; only as many as are wanted, so only their tokens are computed again, and not even those
while the prefix cache still has them.

Why it cannot deadlock: a sequence is only taken if it fits in the pool alone, all who wait with
blocks are worse than the first who waits, and the best running one is never preempted for another.
Invariants: a running sequence's table covers its computed tokens; nobody who never ran holds one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.engine.blocks import chain_digest
from agent.engine.queue import ClassQueue
from agent.engine.types import QOS_CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.engine.blocks import BlockPool

_P0, _P2 = QOS_CLASSES.index("P0"), QOS_CLASSES.index("P2")


@dataclass(eq=False, slots=True)
class Seq:
    """One request's tokens and where their keys and values are.

    `tokens` = prompt and what was generated; the first `computed` of them are in the KV cache.
    `root`: parent digest of its first block, the pool's own where empty; prefixes are shared
    within one root only.
    """

    rank: int
    arrival: int
    tokens: list[int]
    prompt_tokens: int
    tokens_max: int
    tenant: str = ""
    root: bytes = b""
    computed: int = 0
    table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    admitted: bool = False
    preemptions: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: lower is served first."""
        return self.rank, self.arrival

    @property
    def pending(self) -> int:
        """Tokens not yet in the KV cache."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `count` tokens of `seq` from position `start`; `samples`: then pick the next one."""

    seq: Seq
    start: int
    count: int
    samples: bool


class Scheduler:
    """Waiting queues, running set and the block pool.

    `prefill_tokens` bounds the tokens of a step, `prefill_tokens_busy` those of prompts when
    something decodes. `reserved` places of `max_sequences` are for P0 alone.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        prefill_tokens: int,
        prefill_tokens_busy: int,
        reserved: int = 0,
    ) -> None:
        self.pool = pool
        self.running: list[Seq] = []
        self._queues = tuple(ClassQueue() for _ in QOS_CLASSES)
        self._max_sequences = max_sequences
        self._reserved = min(reserved, max_sequences - 1)
        self._prefill_tokens = prefill_tokens
        self._prefill_tokens_busy = prefill_tokens_busy
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.prefix_queried = 0
        self.prefix_hit = 0

    @property
    def waiting(self) -> int:
        """Sequences not running."""
        return sum(len(queue) for queue in self._queues)

    def by_class(self) -> dict[str, tuple[int, int]]:
        """Return how many run and how many wait, by class."""
        running = [0] * len(QOS_CLASSES)
        for seq in self.running:
            running[seq.rank] += 1
        return {
            name: (running[rank], len(self._queues[rank])) for rank, name in enumerate(QOS_CLASSES)
        }

    def add(self, seq: Seq) -> None:
        """Queue a sequence; the caller bounds the queue and has checked that it fits alone."""
        assert self.pool.blocks_for(seq.tokens_max) <= self.pool.total
        self._queues[seq.rank].push(seq)

    def remove(self, seq: Seq) -> None:
        """Forget a sequence and free what it holds; no effect if it is not here."""
        if seq in self.running:
            self.running.remove(seq)
        elif not self._queues[seq.rank].remove(seq):
            return
        self._give_up(seq, len(seq.table), ended=True)

    def plan(self) -> list[Work]:
        """Return the next step's work: decodes first, then prefill; empty if nothing can run."""
        self._grow()
        self._admit()
        running = sorted(self.running, key=lambda s: s.order)
        work = [Work(seq, seq.computed, 1, samples=True) for seq in running if seq.pending == 1]
        budget = self._prefill_tokens
        if work:
            budget = min(self._prefill_tokens_busy, budget - len(work))
        for rank in range(len(QOS_CLASSES)):
            reading = [seq for seq in running if seq.rank == rank and seq.pending > 1]
            for seq, count in share(budget, reading):
                budget -= count
                work.append(Work(seq, seq.computed, count, samples=count == seq.pending))
        return work

    def computed(self, work: Work) -> None:
        """Record that a piece of work is in the cache, and publish blocks it filled."""
        seq, size = work.seq, self.pool.block_size
        seq.computed = work.start + work.count
        for index in range(len(seq.digests), seq.computed // size):
            parent = seq.digests[-1] if seq.digests else seq.root or self.pool.root
            seq.digests.append(chain_digest(parent, seq.tokens[index * size : (index + 1) * size]))
            self.pool.publish(seq.table[index], seq.digests[-1])

    def _grow(self) -> None:
        """Give each decoding sequence room for one token; take it from the worst end if short."""
        for seq in sorted(self.running, key=lambda s: s.order):
            while seq in self.running and len(seq.table) < self.pool.blocks_for(len(seq.tokens)):
                block = self.pool.take(1)
                if block is not None:
                    seq.table += block
                    continue
                victim = max([*self.running, *self._holders()], key=lambda s: s.order)
                if victim in self.running:
                    self._preempt(victim)
                if victim is not seq:
                    self._give_up(victim, 1)

    def _holders(self) -> list[Seq]:
        """Those that wait and hold blocks."""
        return [seq for queue in self._queues for seq in queue.preempted if seq.table]

    def _admit(self) -> None:
        while True:
            queue = next((q for q in self._queues if q), None)
            seq = queue.head() if queue else None
            if queue is None or seq is None or not self._start(seq):
                return
            queue.pop()
            self.running.append(seq)

    def _start(self, seq: Seq) -> bool:
        """Hold blocks for all of a waiting sequence's tokens; False if it must go on waiting."""
        place = self._place(seq)
        if place is False:
            return False
        matched, digests = self.pool.match(seq.tokens, seq.root)
        found = matched[len(seq.table) :]
        need = self.pool.blocks_for(len(seq.tokens)) - len(seq.table) - len(found)
        holders = [other for other in self._holders() if other is not seq]
        worse = [other for other in self.running if other.rank > seq.rank]
        if not self._fits(need, found, 0):
            tables = [other.table for other in holders + worse]
            if not self._fits(need, found, self.pool.freed_by(tables, found)):
                return False
        if isinstance(place, Seq):
            worse.remove(place)
            holders.append(place)
            self._preempt(place)
        self.pool.hold(found)
        self._reclaim(need, holders, worse)
        fresh = self.pool.take(need)
        assert fresh is not None
        self._take_up(seq, found, digests, fresh)
        return True

    def _take_up(self, seq: Seq, found: list[int], digests: list[bytes], fresh: list[int]) -> None:
        """Complete a sequence's table; a prefix that was found needs no computing."""
        if found:
            seq.digests = digests[: len(seq.table) + len(found)]
            seq.computed = (len(seq.table) + len(found)) * self.pool.block_size
        seq.table = seq.table + found + fresh
        if not seq.admitted:
            seq.cached_tokens = seq.computed
            self.prefix_queried += len(seq.tokens)
            self.prefix_hit += seq.computed
        seq.admitted = True

    def _place(self, seq: Seq) -> Seq | bool:
        """Return True for a free place, a P2 to take one from, or False."""
        others = sum(1 for other in self.running if other.rank != _P0)
        full = len(self.running) >= self._max_sequences
        if seq.rank != _P0:
            full = full or others >= self._max_sequences - self._reserved
        if not full:
            return True
        victims = [other for other in self.running if other.rank == _P2]
        if seq.rank == _P2 or not victims:
            return False
        return max(victims, key=lambda s: s.order)

    def _fits(self, need: int, found: list[int], reclaimed: int) -> bool:
        # One spare block for each running sequence, or the newcomer would be preempted at once;
        # alone it needs none.
        free = self.pool.available - self.pool.idle_among(found) + reclaimed
        return need + len(self.running) <= free

    def _reclaim(self, need: int, holders: list[Seq], worse: list[Seq]) -> None:
        """Make `need` blocks and a spare each available: from who waits, then from who runs."""
        for victim in sorted(holders, key=lambda s: s.order, reverse=True):
            self._shrink(victim, need)
        for victim in sorted(worse, key=lambda s: s.order, reverse=True):
            if need + len(self.running) > self.pool.available:
                self._preempt(victim)
                self._shrink(victim, need)

    def _shrink(self, victim: Seq, need: int) -> None:
        # A block that somebody else holds too does not become available: look again.
        while victim.table and (short := need + len(self.running) - self.pool.available) > 0:
            self._give_up(victim, min(len(victim.table), short))

    def _preempt(self, seq: Seq) -> None:
        """Take a sequence's place; what it holds it keeps until somebody needs it."""
        self.running.remove(seq)
        seq.preemptions += 1
        self.preemptions += 1
        self._queues[seq.rank].put_back(seq)

    def _give_up(self, seq: Seq, count: int, *, ended: bool = False) -> None:
        """Release the last `count` blocks of a table; their tokens are to be computed again."""
        if not count:
            return
        kept = len(seq.table) - count
        self.pool.release(seq.table[kept:])
        del seq.table[kept:]
        del seq.digests[kept:]
        left = min(seq.computed, kept * self.pool.block_size)
        if not ended:
            self.recomputed_tokens += seq.computed - left
        seq.computed = left


def share(budget: int, reading: Iterable[Seq]) -> list[tuple[Seq, int]]:
    """Return how many prompt tokens each sequence of one class reads now, none of them zero.

    Tenants get equal parts, and what one does not need is the others'; within a tenant the first
    to arrive goes first.
    """
    tenants: dict[str, list[Seq]] = {}
    for seq in reading:
        tenants.setdefault(seq.tenant, []).append(seq)
    found: list[tuple[Seq, int]] = []
    wants = sorted(tenants.values(), key=lambda seqs: sum(seq.pending for seq in seqs))
    for index, seqs in enumerate(wants):
        part = -(-budget // (len(wants) - index))
        for seq in sorted(seqs, key=lambda s: s.order):
            count = min(seq.pending, part)
            if count > 0:
                found.append((seq, count))
                part -= count
                budget -= count
    return sorted(found, key=lambda entry: entry[0].order)
