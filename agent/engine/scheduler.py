"""Which sequences compute which tokens in the next step: continuous batching, pure.

Each step holds one token of every decoding sequence and a bounded piece of prompts still being
read (prefill), so a long prompt never stalls the others. Order everywhere is (class, arrival).

    waiting --admit--> running (prefill -> decode) --finish--> gone
       ^                  |
       +---- preempt -----+     when KV blocks run out; what it computed is recomputed

Why it cannot deadlock: a sequence is only taken if it fits in the pool alone, and when blocks are
short the *worst* running sequence is preempted, so the best one always goes on. Invariants: a
running sequence's table covers its computed tokens; a waiting one holds no block.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.engine.blocks import chain_digest
from agent.engine.types import QOS_CLASSES

if TYPE_CHECKING:
    from agent.engine.blocks import BlockPool


@dataclass(eq=False, slots=True)
class Seq:
    """One request's tokens and where their keys and values are.

    `tokens` = prompt and what was generated; the first `computed` of them are in the KV cache.
    """

    rank: int
    arrival: int
    tokens: list[int]
    prompt_tokens: int
    tokens_max: int
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

    `prefill_tokens` bounds prompt tokens per step when nothing decodes; `prefill_tokens_busy` when
    something does.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        prefill_tokens: int,
        prefill_tokens_busy: int,
    ) -> None:
        self.pool = pool
        self.running: list[Seq] = []
        self._waiting: tuple[deque[Seq], ...] = tuple(deque() for _ in QOS_CLASSES)
        self._max_sequences = max_sequences
        self._prefill_tokens = prefill_tokens
        self._prefill_tokens_busy = prefill_tokens_busy
        self.preemptions = 0
        self.prefix_queried = 0
        self.prefix_hit = 0

    @property
    def waiting(self) -> int:
        """Sequences not running."""
        return sum(len(queue) for queue in self._waiting)

    def by_class(self) -> dict[str, tuple[int, int]]:
        """Return how many run and how many wait, by class."""
        running = [0] * len(QOS_CLASSES)
        for seq in self.running:
            running[seq.rank] += 1
        return {
            name: (running[rank], len(self._waiting[rank])) for rank, name in enumerate(QOS_CLASSES)
        }

    def add(self, seq: Seq) -> None:
        """Queue a sequence; the caller bounds the queue and has checked that it fits alone."""
        assert self.pool.blocks_for(seq.tokens_max) <= self.pool.total
        self._waiting[seq.rank].append(seq)

    def remove(self, seq: Seq) -> None:
        """Forget a sequence and free what it holds; no effect if it is not here."""
        if seq in self.running:
            self.running.remove(seq)
            self._free(seq)
        elif seq in self._waiting[seq.rank]:
            self._waiting[seq.rank].remove(seq)

    def plan(self) -> list[Work]:
        """Return the next step's work: decodes first, then prefill; empty if nothing can run."""
        self._grow()
        self._admit()
        running = sorted(self.running, key=lambda s: s.order)
        work = [Work(seq, seq.computed, 1, samples=True) for seq in running if seq.pending == 1]
        budget = self._prefill_tokens_busy if work else self._prefill_tokens
        for seq in running:
            if seq.pending > 1 and budget > 0:
                count = min(seq.pending, budget)
                budget -= count
                work.append(Work(seq, seq.computed, count, samples=count == seq.pending))
        return work

    def computed(self, work: Work) -> None:
        """Record that a piece of work is in the cache, and publish blocks it filled."""
        seq, size = work.seq, self.pool.block_size
        seq.computed = work.start + work.count
        for index in range(len(seq.digests), seq.computed // size):
            parent = seq.digests[-1] if seq.digests else self.pool.root
            seq.digests.append(chain_digest(parent, seq.tokens[index * size : (index + 1) * size]))
            self.pool.publish(seq.table[index], seq.digests[-1])

    def _grow(self) -> None:
        """Give each decoding sequence room for one token; preempt from the worst end if short."""
        for seq in sorted(self.running, key=lambda s: s.order):
            while seq in self.running and len(seq.table) < self.pool.blocks_for(len(seq.tokens)):
                block = self.pool.take(1)
                if block is None:
                    self._preempt(max(self.running, key=lambda s: s.order))
                else:
                    seq.table += block

    def _admit(self) -> None:
        while len(self.running) < self._max_sequences:
            queue = next((q for q in self._waiting if q), None)
            if queue is None or not self._start(queue[0]):
                return
            queue.popleft()

    def _start(self, seq: Seq) -> bool:
        """Hold blocks for all of a waiting sequence's tokens; False if it must go on waiting."""
        matched, digests = self.pool.match(seq.tokens)
        need = self.pool.blocks_for(len(seq.tokens)) - len(matched)
        worse = sorted((o for o in self.running if o.rank > seq.rank), key=lambda s: s.order)
        if not self._fits(need, matched, sum(len(other.table) for other in worse)):
            return False
        while not self._fits(need, matched, 0):
            if not worse:
                return False
            self._preempt(worse.pop())
        self.pool.hold(matched)
        fresh = self.pool.take(need)
        assert fresh is not None
        seq.table = matched + fresh
        seq.digests = digests
        seq.computed = len(matched) * self.pool.block_size
        if not seq.admitted:
            seq.cached_tokens = seq.computed
            self.prefix_queried += len(seq.tokens)
            self.prefix_hit += seq.computed
        seq.admitted = True
        self.running.append(seq)
        return True

    def _fits(self, need: int, matched: list[int], reclaimed: int) -> bool:
        # One spare block for each running sequence, or the newcomer would be preempted at once;
        # alone it needs none.
        free = self.pool.available - self.pool.idle_among(matched) + reclaimed
        return need + len(self.running) <= free

    def _preempt(self, seq: Seq) -> None:
        self.running.remove(seq)
        self._free(seq)
        seq.preemptions += 1
        self.preemptions += 1
        # The front: it arrived before all that wait in its class and were never admitted. Several
        # victims go in worst first, so the best of them ends up in front.
        self._waiting[seq.rank].appendleft(seq)

    def _free(self, seq: Seq) -> None:
        self.pool.release(seq.table)
        seq.table = []
        seq.digests = []
        seq.computed = 0
