"""The gates of one sidecar, made from its settings and kept over a reload.

Pools that share an endpoint, at first hand or through another pool, share a gate. A reload keeps
each class's tier, with who is in flight and who waits there, and makes a gate anew only where other
pools share endpoints than before, or where its endpoints are others: what was learnt about those
says nothing of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.qos.adaptive import AdaptiveLimit
from proxy.qos.admission import Gate, Terms, Tier
from proxy.qos.classes import CLASSES, POOL_OF
from proxy.qos.limits import AgentLimits
from proxy.qos.ratelimit import TokenBucket
from proxy.turnstile import Turnstile

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from proxy.clock import Clock
    from proxy.config import Settings
    from proxy.metrics import Counters
    from proxy.qos.classes import PoolName, QosClass
    from proxy.qos.pools import PoolState


class Gates:
    """See the module. Owned by the data loop."""

    def __init__(
        self,
        settings: Settings,
        pools: Mapping[PoolName, PoolState],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._counters = counters
        self.agent = AgentLimits()
        self.tiers = {qos: Tier(qos, pools[POOL_OF[qos]], Terms()) for qos in CLASSES}
        self.buckets: dict[str, TokenBucket] = {}  # of tenants that have a rate
        self.turnstiles: dict[QosClass, Turnstile] = {}
        self.gates: list[Gate] = []
        self._marks: list[str] = []  # what tells the gates from others
        self._row = settings.qos.adaptive
        self.renew(settings)

    def renew(self, settings: Settings) -> None:
        """Take settings, the first or others."""
        for tier in self.tiers.values():
            tier.renew(*self._terms(settings, tier))
        rows = settings.tenants.items()
        self.buckets = {
            name: self._bucket(self.buckets.get(name), row.rate, row.burst)
            for name, row in rows
            if row.rate
        }
        matches = self._counters.rule_matches
        matches.extend([0] * (len(settings.qos.rules) - len(matches)))
        groups = self._groups()
        marks = [_mark(tiers) for tiers in groups]
        if marks == self._marks and settings.qos.adaptive == self._row:
            for gate in self.gates:
                if gate.adaptive is not None:
                    gate.adaptive.most = _most(gate.tiers)
                gate.refresh()
        else:
            self._row, self._marks = settings.qos.adaptive, marks
            self._regroup(groups)
        for turnstile in self.turnstiles.values():
            turnstile.schedule()

    def _terms(self, settings: Settings, tier: Tier) -> tuple[Terms, int, TokenBucket | None]:
        qos = settings.qos
        if tier.qos == "P0":
            return Terms(), qos.p0.inflight, None
        row = qos.p1 if tier.qos == "P1" else qos.p2
        terms = Terms(
            queue_max=row.queue,
            wait_ns=int(row.deadline_s * 1e9),
            weight=row.weight,
            early_shed=row.early_shed,
        )
        bucket = self._bucket(tier.bucket, row.rate, row.burst) if row.rate else None
        return terms, tier.pool.inflight_max, bucket

    def _bucket(self, old: TokenBucket | None, rate: float, burst: int) -> TokenBucket:
        made = TokenBucket(rate, burst, self._clock.mono_ns())
        same = old is not None and (old.rate, old.burst) == (made.rate, made.burst)
        return old if old is not None and same else made

    def _groups(self) -> list[list[Tier]]:
        groups: list[tuple[set[str], list[Tier]]] = []
        for tier in self.tiers.values():
            urls = {endpoint.url for endpoint in tier.pool.endpoints}
            near = [group for group in groups if group[0] & urls]
            groups = [group for group in groups if not group[0] & urls]
            tiers = [one for group in near for one in group[1]]
            groups.append((urls.union(*(group[0] for group in near)), [*tiers, tier]))
        return [sorted(tiers, key=_importance) for _, tiers in groups]

    def _regroup(self, groups: list[list[Tier]]) -> None:
        for turnstile in self.turnstiles.values():
            turnstile.gate = Gate("", [], None)  # a turn that is due finds nobody there
        row = self._row
        self.gates = []
        for tiers in groups:
            adaptive = AdaptiveLimit(
                initial=row.initial,
                least=row.least,
                most=_most(tiers),
                tolerance=row.tolerance,
                headroom=row.headroom,
            )
            name = "+".join(tier.pool.name for tier in tiers)
            gate = Gate(name, tiers, adaptive if row.enabled else None)
            turnstile = Turnstile(gate, self._loop, self._clock, self._counters.started)
            self.turnstiles.update((tier.qos, turnstile) for tier in tiers)
            self.gates.append(gate)

    def second(self) -> None:
        """Once a second: let the budgets' windows go on."""
        started = self._counters.started
        for qos, tier in self.tiers.items():
            tier.budget.roll(started[qos], tier.shed)


def _importance(tier: Tier) -> str:
    return tier.qos


def _most(tiers: list[Tier]) -> int:
    return sum(tier.pool.inflight_max for tier in tiers)


def _mark(tiers: list[Tier]) -> str:
    urls = sorted({endpoint.url for tier in tiers for endpoint in tier.pool.endpoints})
    return " ".join((*(tier.pool.name for tier in tiers), *urls))
