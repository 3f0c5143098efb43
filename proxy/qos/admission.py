"""Who may go on to an upstream now, who waits, and who is told to come back later.

Pools that share an endpoint share a *gate*, since their requests compete for the same places. A
gate counts what is in flight through it, keeps a queue for P1 and one for P2, and picks from them
by deficit-weighted fair queueing: each class gets its weight's share of *cost* (estimated tokens),
P1 first where both may go, and neither starves. P0 never waits and is never limited by the gate;
it has its own bound.

    a request comes      a place is free, nobody waits     -> goes at once
                         P0 beyond its bound               -> queue_full
                         its queue is full                 -> queue_full
                         its deadline is past              -> queue_deadline
                         it cannot be served in time       -> queue_deadline, early, if the class's
                                                              budget has room for it
                         else                              -> waits
    a place gets free    the head of the fair choice       -> goes, or queue_deadline if late
    its client leaves    at whatever place it stands       -> leaves at once

Invariant: came = went + refused + left + waiting, for each class. Pure: `now_ns` is an argument.
Bounds: `queue_max` tickets a class; as many again of those that left and were not yet swept.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Literal, Protocol

from proxy.metrics import Histogram
from proxy.qos.measure import DrainRate, ShedBudget

if TYPE_CHECKING:
    from proxy.qos.adaptive import AdaptiveLimit
    from proxy.qos.classes import QosClass
    from proxy.qos.pools import PoolState
    from proxy.qos.ratelimit import TokenBucket

_NS = 1_000_000_000
NO_LIMIT = 1 << 60
COST_MAX = 1 << 40
RETRY_AFTER_MAX_S = 3600
RESERVE = 16  # of that many places one is kept from P2, so that P1 finds one
NEAR = 8  # within that part of the limit requests are sorted by class before they go
FLOOR = 8  # P1 and P2 keep that part of the limit, however much P0 takes
WATCH_ABOVE = 2  # in flight: below it there is nothing to learn about a limit
SWEEP = 32

ShedReason = Literal["queue_full", "queue_deadline", "early"]
REASONS: tuple[ShedReason, ...] = ("queue_full", "queue_deadline", "early")


class Waiter(Protocol):
    """A request that waits: told by the gate's shell when that ends."""

    def granted(self, now_ns: int) -> None:
        """Go on: a place has been taken for it."""

    def turned_away(self, refusal: Refusal) -> None:
        """End: it was refused."""


class Refusal:
    """Why a request is refused, when to come back, and whether that can help by then."""

    __slots__ = ("qos", "reason", "retry_after_s", "retry_helps")

    def __init__(
        self, reason: ShedReason, qos: QosClass, retry_after_s: int, *, retry_helps: bool
    ) -> None:
        self.reason: Final = reason
        self.qos: Final = qos
        self.retry_after_s: Final = retry_after_s
        self.retry_helps: Final = retry_helps


class Ticket:
    """A request's place in a queue."""

    __slots__ = ("cost", "deadline_ns", "gone", "since_ns", "tier", "waiter")

    def __init__(
        self, tier: Tier, waiter: Waiter, cost: int, since_ns: int, deadline_ns: int
    ) -> None:
        self.tier = tier
        self.waiter = waiter
        self.cost = cost
        self.since_ns = since_ns
        self.deadline_ns = deadline_ns
        self.gone = False


class Terms:
    """What settings say of one class: bounds, weight, deadline, budget."""

    __slots__ = ("early_shed", "queue_max", "wait_ns", "weight")

    def __init__(
        self, *, queue_max: int = 0, wait_ns: int = 0, weight: int = 1, early_shed: float = 0.0
    ) -> None:
        self.queue_max: Final = queue_max
        self.wait_ns: Final = wait_ns
        self.weight: Final = weight
        self.early_shed: Final = early_shed


class Tier:
    """One class at its gate. `bound`, `direct`, `full` and `checks` are what the hot path reads.

    `bound`: requests of this class in flight; `direct`: below so many in flight at the gate, and
    only then, a request goes at once.
    """

    __slots__ = (
        "bound",
        "bucket",
        "budget",
        "came",
        "cap",
        "checks",
        "deficit",
        "direct",
        "drain",
        "external",
        "full",
        "gate",
        "left",
        "most",
        "pool",
        "qos",
        "queue",
        "shed",
        "shed_beyond",
        "sheds",
        "terms",
        "waited",
        "waiting",
        "went_waiting",
    )

    def __init__(self, qos: QosClass, pool: PoolState, terms: Terms) -> None:
        self.qos: QosClass = qos
        self.pool = pool
        self.terms = terms
        self.bucket: TokenBucket | None = None
        self.gate: Gate  # set by the gate
        self.most = pool.inflight_max
        self.bound = self.most
        self.cap = NO_LIMIT  # in flight at the gate
        self.direct = NO_LIMIT
        self.full = False
        self.checks = False
        self.external = -1  # the agent's limit of this class in flight; -1: none
        self.queue: deque[Ticket] = deque()
        self.waiting = 0
        self.deficit = 0
        self.budget = ShedBudget(terms.early_shed)
        self.drain = DrainRate()
        self.waited = Histogram()
        self.sheds: dict[ShedReason, int] = dict.fromkeys(REASONS, 0)
        self.shed = 0
        self.shed_beyond = 0
        self.left = 0  # while they waited
        self.came = 0  # that did not go at once
        self.went_waiting = 0

    def renew(self, terms: Terms, most: int, bucket: TokenBucket | None) -> None:
        """Take other settings; `most`: requests in flight, if the pool holds as many."""
        self.terms = terms
        self.most = self.bound = min(most, self.pool.inflight_max)
        self.budget.share = terms.early_shed
        self.bucket = bucket
        self.look()

    def look(self) -> None:
        """Work out what the hot path reads of the queue and the bucket."""
        self.full = 0 < self.terms.queue_max <= self.waiting
        self.checks = self.full or self.bucket is not None

    def retry_after_s(self, now_ns: int) -> int:
        """Return when its queue, as it is, will have drained: whole seconds, at least 1."""
        if not self.waiting:
            return 1
        rate = self.drain.per_s(now_ns)
        wait_s = self.waiting / rate if rate else self.terms.wait_ns / _NS
        return max(1, min(RETRY_AFTER_MAX_S, -int(-wait_s // 1)))

    def sweep(self) -> None:
        """Take out the tickets that left: from the head always, from the middle in one go."""
        queue = self.queue
        while queue and queue[0].gone:
            queue.popleft()
        if len(queue) > 2 * self.waiting + SWEEP:
            self.queue = deque(ticket for ticket in queue if not ticket.gone)


class Gate:
    """Pools that share endpoints; see the module. `inflight` counts all classes."""

    __slots__ = ("adaptive", "inflight", "lined", "name", "tiers", "waiting", "watch")

    def __init__(self, name: str, tiers: list[Tier], adaptive: AdaptiveLimit | None) -> None:
        self.name = name
        self.tiers = tiers
        self.lined = [tier for tier in tiers if tier.qos != "P0"]  # P1 before P2
        self.adaptive = adaptive if self.lined else None
        self.watch = NO_LIMIT if self.adaptive is None else WATCH_ABOVE
        # Tiers that were at another gate bring what they have there.
        self.inflight = sum(tier.pool.inflight for tier in tiers)
        self.waiting = sum(tier.waiting for tier in tiers)
        for tier in tiers:
            tier.gate = self
        self.refresh()

    # -- limits

    def refresh(self) -> None:
        """Work out what each class may have, after a limit or a queue has changed."""
        limit = NO_LIMIT if self.adaptive is None else self.adaptive.limit
        for tier in self.lined:
            bound = tier.most
            tier.cap = limit
            if tier.external >= 0:
                # Never nothing: a class that may not send at all would starve.
                bound, tier.cap = min(bound, max(1, tier.external)), NO_LIMIT
            elif limit < NO_LIMIT and len(self.lined) > 1 and tier.qos == "P2":
                bound = min(bound, max(1, limit - max(1, limit // RESERVE)))
            tier.bound = bound
            tier.direct = 0 if self.waiting else tier.cap - tier.cap // NEAR

    def first_byte(self, sent_ns: int, now_ns: int) -> bool:
        """Take a time to first byte; True when the limit has changed."""
        adaptive = self.adaptive
        if adaptive is None or not adaptive.sample(sent_ns, now_ns, self.inflight):
            return False
        self.refresh()
        return True

    # -- coming, waiting, leaving

    def enter(
        self, tier: Tier, waiter: Waiter, cost: int, since_ns: int, now_ns: int, started: int
    ) -> Ticket | Refusal:
        """Take in a request that could not go at once: it waits, or it is refused.

        `since_ns`: when its head was accepted; `started`: requests of its class so far.
        """
        terms = tier.terms
        tier.came += 1
        if tier.qos == "P0" or tier.waiting >= terms.queue_max:
            return self.refuse(tier, "queue_full", now_ns, started)
        deadline_ns = since_ns + terms.wait_ns
        if now_ns >= deadline_ns:
            return self.refuse(tier, "queue_deadline", now_ns, started)
        rate = tier.drain.per_s(now_ns)
        if (
            rate
            and (tier.waiting + 1) / rate * _NS > deadline_ns - now_ns
            and tier.budget.allows(started, tier.shed)
        ):
            return self.refuse(tier, "early", now_ns, started)
        ticket = Ticket(tier, waiter, min(max(1, cost), COST_MAX), now_ns, deadline_ns)
        tier.queue.append(ticket)
        self._count(tier, 1, now_ns)
        return ticket

    def refuse(self, tier: Tier, reason: ShedReason, now_ns: int, started: int) -> Refusal:
        """Count one that is refused, and say when to come back."""
        tier.sheds[reason] += 1
        tier.shed += 1
        if reason != "early" and tier.budget.over(started, tier.shed):
            tier.shed_beyond += 1
        after_s = tier.retry_after_s(now_ns)
        helps = tier.qos == "P0" or after_s * _NS <= tier.terms.wait_ns
        return Refusal(reason, tier.qos, after_s, retry_helps=helps)

    def run_out(self, ticket: Ticket, now_ns: int, started: int) -> Refusal:
        """Take out a ticket whose deadline has passed."""
        self._take_out(ticket, now_ns)
        return self.refuse(ticket.tier, "queue_deadline", now_ns, started)

    def leave(self, ticket: Ticket, now_ns: int) -> None:
        """Take out a ticket whose client has left, or whose request ended otherwise."""
        self._take_out(ticket, now_ns)
        ticket.tier.left += 1

    def _take_out(self, ticket: Ticket, now_ns: int) -> None:
        assert not ticket.gone, "a ticket leaves once"
        ticket.gone = True
        self._count(ticket.tier, -1, now_ns)
        ticket.tier.sweep()

    def _count(self, tier: Tier, change: int, now_ns: int) -> None:
        tier.waiting += change
        self.waiting += change
        tier.look()
        if not tier.waiting:
            tier.drain.end(now_ns)
            tier.deficit = 0
        elif tier.waiting == 1 and change > 0:
            tier.drain.begin(now_ns)
        if self.waiting <= 1:
            self.refresh()

    # -- going

    def next(self, now_ns: int, *, p2: bool = True) -> Ticket | None:
        """Take a place for the next one that waits; None: nobody may go now.

        One that is past its deadline takes no place: end it with `late`. `p2`: P2 may go too.
        """
        tier = self._pick(p2=p2)
        if tier is None:
            return None
        ticket = tier.queue.popleft()
        ticket.gone = True
        tier.waited.add(now_ns - ticket.since_ns)
        if now_ns < ticket.deadline_ns:
            tier.deficit -= ticket.cost
            tier.went_waiting += 1
            tier.pool.inflight += 1
            self.inflight += 1
            tier.drain.departed(now_ns)
        tier.sweep()
        self._count(tier, -1, now_ns)
        return ticket

    def may_go(self) -> bool:
        """Say whether somebody waits who may go now."""
        return any(tier.waiting and self._open(tier) for tier in self.lined)

    def _open(self, tier: Tier) -> bool:
        if tier.pool.inflight >= tier.bound:
            return False
        if self.inflight < tier.cap:
            return True
        lined = 0
        for one in self.lined:
            lined += one.pool.inflight
        return lined < max(1, tier.cap // FLOOR)

    def _pick(self, *, p2: bool) -> Tier | None:
        """Choose by deficits: who needs the fewest rounds to afford its head; P1 if equal.

        The rounds are given at once, to all that may go, so this takes no longer for dear requests.
        """
        best: Tier | None = None
        fewest = 0
        for tier in self.lined:
            if not tier.waiting or (tier.qos == "P2" and not p2) or not self._open(tier):
                continue
            missing = tier.queue[0].cost - tier.deficit
            rounds = -(-missing // tier.terms.weight) if missing > 0 else 0
            if best is None or rounds < fewest:
                best, fewest = tier, rounds
        if best is not None and fewest:
            for tier in self.lined:
                if tier.waiting and (p2 or tier.qos != "P2") and self._open(tier):
                    tier.deficit += fewest * tier.terms.weight
        return best
