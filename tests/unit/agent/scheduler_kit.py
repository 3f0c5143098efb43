"""A scheduler, a model that says token 7 for ever, and the books checked at each step."""

import itertools
from collections import Counter

from agent.engine.blocks import BlockPool, tenant_root
from agent.engine.scheduler import Scheduler, Seq

SIZE = 4


class Bench:
    """A scheduler and a model that says token 7 for ever."""

    def __init__(self, blocks=32, slots=4, prefill=64, busy=8, caching=False, reserved=0):
        self.pool = BlockPool(blocks, SIZE, b"root", caching=caching)
        self.scheduler = Scheduler(
            self.pool,
            max_sequences=slots,
            prefill_tokens=prefill,
            prefill_tokens_busy=busy,
            reserved=reserved,
        )
        self.arrivals = itertools.count()
        self.steps = 0
        self.computed_tokens = 0
        self.first_token_at = {}
        self.living = []

    def add(self, prompt, new=8, rank=1, tenant=""):
        tokens = list(prompt)
        seq = Seq(rank, next(self.arrivals), tokens, len(tokens), len(tokens) + new, tenant)
        seq.root = tenant_root(self.pool.root, tenant)
        self.scheduler.add(seq)
        self.living.append(seq)
        return seq

    def remove(self, seq):
        self.scheduler.remove(seq)
        if seq in self.living:
            self.living.remove(seq)

    def step(self):
        """Run a step; return {arrival: (start, count)}."""
        work = self.scheduler.plan()
        self.steps += 1
        for piece in work:
            assert len(piece.seq.table) * SIZE >= piece.start + piece.count
            assert piece.start == piece.seq.computed
            assert piece.count >= 1
            self.scheduler.computed(piece)
            self.computed_tokens += piece.count
            if piece.samples:
                piece.seq.tokens.append(7)
                self.first_token_at.setdefault(piece.seq.arrival, self.steps)
                if len(piece.seq.tokens) == piece.seq.tokens_max:
                    self.remove(piece.seq)
        self.check()
        return {piece.seq.arrival: (piece.start, piece.count) for piece in work}

    def check(self):
        """The pool's counts are the tables' and nobody computes beyond what it holds."""
        held = Counter(block for seq in self.living for block in seq.table)
        assert held == Counter(self.pool._held)
        assert len(self.scheduler.running) <= self.scheduler._max_sequences
        for seq in self.living:
            assert seq.computed <= len(seq.table) * SIZE
            assert len(seq.digests) <= len(seq.table)
        assert len({*map(id, self.scheduler.running)}) == len(self.scheduler.running)

    def drain(self, most=5_000):
        """Step until nothing is left; return how many steps."""
        began = self.steps
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            assert self.steps - began < most, "the load never drained"
        return self.steps - began
