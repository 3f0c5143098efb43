"""What all requests of one sidecar share: settings, pools, keys, counters, the audit writer.

Built by `lifecycle`, read by every connection; what one request finds out about another goes
through here. A reload makes another one of the new settings (`renewed`), which takes over all that
outlives them: a request keeps the context it began with, the next one takes the current one.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final, Protocol

from proxy import trace
from proxy.alarms import Alarms, LatelyTaken
from proxy.audit.trace_id import TraceIds, machine_from_node
from proxy.config import Settings, split_endpoint
from proxy.connector import Upstreams
from proxy.gates import Gates
from proxy.gateways import network
from proxy.http.http1 import HeadLimits
from proxy.lanes import Route, Tenant, tenant_lanes
from proxy.metrics import Counters
from proxy.observe import Observing
from proxy.qos.classes import CLASSES, POOL_OF
from proxy.qos.pools import Ejection, Endpoint, PoolState, State
from proxy.qos.rules import rules_of
from proxy.sealing import all_keys, let_seal
from proxy.sm4.budget import Budget, Held
from proxy.sm4.keyring import Keyring
from proxy.verifying import SignatureWorker

if TYPE_CHECKING:
    import asyncio

    from proxy.audit.retention import Retention
    from proxy.audit.writer import AuditWriter
    from proxy.clock import Clock
    from proxy.config import Pool, Timeouts
    from proxy.keys.provider import KeySet
    from proxy.lending import Lender
    from proxy.qos.classes import PoolName, QosClass
    from proxy.recorder import Recorder
    from proxy.reload import Loaded
    from proxy.sharing import SharedReplay
    from proxy.sm4.receiver import Receiver
    from proxy.spans.tracer import Tracer

POOL_NAMES: tuple[PoolName, ...] = ("dedicated", "shared", "best_effort")
CLASS_OF: dict[PoolName, QosClass] = {pool: qos for qos, pool in POOL_OF.items()}
log = logging.getLogger(__name__)

TENANTS_MAX = 4096


class Times:
    """The timeouts the data path compares, in nanoseconds."""

    __slots__ = (
        "body_idle_ns",
        "client_stall_ns",
        "discard_ns",
        "first_byte_ns",
        "head_ns",
        "keepalive_ns",
        "request_total_ns",
        "stream_idle_ns",
        "tunnel_idle_ns",
    )

    def __init__(self, row: Timeouts) -> None:
        self.head_ns: Final = int(row.head_s * 1e9)
        self.body_idle_ns: Final = int(row.body_idle_s * 1e9)
        self.first_byte_ns: Final = int(row.first_byte_s * 1e9)
        self.stream_idle_ns: Final = int(row.stream_idle_s * 1e9)
        self.client_stall_ns: Final = int(row.client_stall_s * 1e9)
        self.request_total_ns: Final = int(row.request_total_s * 1e9)
        self.keepalive_ns: Final = int(row.keepalive_s * 1e9)
        self.discard_ns: Final = int(row.discard_s * 1e9)
        self.tunnel_idle_ns: Final = int(row.tunnel_idle_s * 1e9)


class Connection(Protocol):
    """A client connection, as the tick and the drain see it."""

    deadline_ns: int

    @property
    def busy(self) -> bool:
        """Say whether a request is in flight."""

    def on_deadline(self) -> None:
        """Act on a deadline that has passed."""

    def check_total(self, now_ns: int) -> None:
        """End a request that has taken longer than any may."""

    def expire(self) -> None:
        """End what still runs: the drain grace is over."""


class Current:
    """Where every context finds the newest one."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context


class Context:
    """See the module."""

    def __init__(
        self, settings: Settings, clock: Clock, loop: asyncio.AbstractEventLoop, machine: str
    ) -> None:
        self.current = Current(self)
        self.settings = settings
        self.machine = machine
        self.clock = clock
        self.loop = loop
        self.counters = Counters()
        self.times = Times(settings.timeouts)
        # A sealed body holds a share of the budget, so it has to come on faster.
        sealed_idle_ns = min(int(settings.envelope.progress_s * 1e9), self.times.body_idle_ns)
        self.body_idle_ns = {"app": self.times.body_idle_ns, "sealed": sealed_idle_ns}
        limits = settings.limits
        self.head_limits = HeadLimits(limits.head_bytes, limits.field_bytes, limits.fields)
        self.routes: dict[PoolName, Route] = {name: self._route(name) for name in POOL_NAMES}
        pools = {name: route.state for name, route in self.routes.items()}
        self.gates = Gates(settings, pools, loop, clock, self.counters)
        self.turnstiles = self.gates.turnstiles
        self.connections: dict[str, set[Connection]] = {"app": set(), "sealed": set()}
        self.trace_ids = TraceIds(machine_from_node(machine))
        self.keys: KeySet | None = None
        self.receiver: Receiver | None = None
        self.audit: AuditWriter | None = None
        self.recorder: Recorder | None = None
        self.retention: Retention | None = None
        self.lender: Lender | None = None
        self.tracer: Tracer | None = None
        self.sampled_below = 0
        self.budget = Budget(settings.envelope.unverified_bytes)
        self.signatures = SignatureWorker(loop, settings.envelope.signature_queue)
        self.shared_replay: SharedReplay | None = None
        self.sealing = Held(limits.sealing_bytes)
        self.sealing_ring = Keyring(())
        self.observing = Observing(
            enabled=False,
            plain_hashes=settings.audit.prompt_hash_mode == "plain",
            held_bytes_max=settings.audit.observed_bytes,
            event_bytes=limits.event_bytes,
        )
        self.draining = False  # POST /drain: no new sealed requests
        self.closing = False  # shutting down: no new requests on any connection
        self.rejected: dict[str, int] = {}
        self.alarms = Alarms()
        self.lately_taken = LatelyTaken()
        # Span ids have to be unlike each other, not secret; seeded once by the system.
        self.blocks_on_audit = settings.audit.on_failure == "block"
        self.own_tenant = settings.identity.tenant
        self.gateways = tuple(network(text) for text in settings.identity.gateways)
        self.body_bytes_max = limits.body_bytes
        self.collect_bytes = limits.collect_bytes
        self._tenants: dict[str, Tenant] = {}
        # Wall time less monotonic time, refreshed by the tick: good to a clock step for labels.
        self.wall_offset_ns = clock.wall_ns() - clock.mono_ns()

    def renewed(self, loaded: Loaded) -> Context:
        """Return the context of other settings and make it the current one.

        They differ only in what may change while running. Raises KeyringError, and then
        nothing has changed.
        """
        settings, keys = loaded.settings, loaded.keys
        made = Context(settings, self.clock, self.loop, self.machine)
        sealing = self.sealing_ring.plan(all_keys(loaded.sealing))
        receiver = self.receiver
        if receiver is not None and keys is not None:
            if loaded.plan is None:
                receiver.keyring.replace(keys.envelope_keys())
            else:
                receiver.keyring.take(loaded.plan)
            keys.forget_envelope_keys()
            receiver.max_body_bytes = settings.limits.body_bytes
        made.keys = keys
        made._take_over(self, loaded)
        made.sealing_ring.take(sealing)
        let_seal(made.sealing_ring, made.routes.values(), loaded.sealing)
        self.current.context = made
        return made

    def _take_over(self, before: Context, loaded: Loaded) -> None:
        """Go on with all that outlives settings: from here on nothing can fail."""
        self.current = before.current
        self.counters = before.counters
        self.connections = before.connections
        self.trace_ids = before.trace_ids
        self.receiver = before.receiver
        self.audit = before.audit
        self.recorder = before.recorder
        self.retention = before.retention
        self.lender = before.lender
        self.tracer = before.tracer
        self.sampled_below = before.sampled_below
        self.budget = before.budget
        self.signatures = before.signatures
        self.shared_replay = before.shared_replay
        self.sealing = before.sealing
        self.sealing.limit_bytes = self.settings.limits.sealing_bytes
        self.sealing_ring = before.sealing_ring
        self.observing = before.observing
        self.observing.event_bytes = self.settings.limits.event_bytes
        self.draining = before.draining
        self.closing = before.closing
        self.rejected = before.rejected
        self.alarms = before.alarms
        self.lately_taken = before.lately_taken
        for name, route in self.routes.items():
            old, pool = before.routes[name], route.settings
            route.authorization = loaded.authorization.get(name, b"")
            old.state.renew(route.state.endpoints, pool.inflight, route.state.rules)
            old.retries.renew(pool.retry_percent)
            old.upstreams.renew(
                self.head_limits,
                pool.endpoints,
                connect_s=self.settings.timeouts.connect_s,
                keepalive_s=pool.keepalive_s,
                idle_max=pool.idle_connections,
                tls=loaded.trust.get(name),
            )
            route.state, route.upstreams, route.retries = old.state, old.upstreams, old.retries
        self.gates, self.turnstiles = before.gates, before.turnstiles
        self.gates.renew(self.settings)

    def _route(self, name: PoolName) -> Route:
        pool: Pool = getattr(self.settings.pools, name)
        endpoints = [
            Endpoint(url, split_endpoint(url), tls=url.startswith("https:"))
            for url in pool.endpoints
        ]
        first = endpoints[0].address
        host = "localhost" if isinstance(first, str) else f"{first[0]}:{first[1]}"
        rules = Ejection(
            errors=pool.eject_errors,
            slow_factor=pool.eject_slow_factor,
            first_ns=int(pool.eject_s * 1e9),
            most_ns=int(pool.eject_max_s * 1e9),
        )
        return Route(
            name=name,
            qos=CLASS_OF[name],
            settings=pool,
            state=PoolState(name, endpoints, pool.inflight, rules),
            upstreams=Upstreams(
                self.loop,
                self.head_limits,
                pool.endpoints,
                connect_s=self.settings.timeouts.connect_s,
                keepalive_s=pool.keepalive_s,
                idle_max=pool.idle_connections,
            ),
            endpoint_host=host.encode(),
        )

    def judge_pools(self, now_ns: int) -> None:
        """Once a second: leave slow endpoints alone, renew budgets, open P0's connections."""
        self.gates.second()
        for route in self.routes.values():
            route.state.judge(now_ns)
            route.retries.tick(self.counters.started[route.qos])
        settings, route = self.settings, self.routes["dedicated"]
        # Where P0 is granted to somebody: else nothing but other classes' pools is asked.
        if any(tenant.max_class == "P0" for tenant in settings.tenants.values()):
            for endpoint in route.state.endpoints:
                if endpoint.state is State.HEALTHY:
                    route.upstreams.keep_open(endpoint, settings.qos.p0.preopen)

    # -- facts a request asks for

    def tenant(self, name: str) -> Tenant:
        """Return what is known of a tenant; P0 is granted by name only."""
        found = self._tenants.get(name)
        if found is not None:
            return found
        row = self.settings.tenants.get(name)
        counters = self.counters
        made = tenant_lanes(
            name,
            max_class="P1" if row is None else row.max_class,
            prompt_key=None if self.keys is None else self.keys.prompt_key(name),
            qos=self.settings.qos,
            routes=self.routes,
            tiers=self.gates.tiers,
            histograms={c: (counters.duration[c], counters.first_byte[c]) for c in CLASSES},
            rules=rules_of(self.settings.qos.rules, name, "" if row is None else row.sla),
            bucket=self.gates.buckets.get(name),
            opens=self.settings.audit.sync.opens,
        )
        # Whoever has a row is kept however many names gateways come up with.
        if row is not None or len(self._tenants) < TENANTS_MAX:
            self._tenants[name] = made
        return made

    def traceparent(self, came: bytes | None) -> bytes:
        """Keep a valid traceparent, else make one."""
        if came is not None and trace.valid(came):
            return came
        return trace.make(int.from_bytes(os.urandom(24)), self.sampled_below)

    def audit_blocked(self) -> bool:
        """Say whether policy refuses requests because no record can be written."""
        audit = self.audit
        return (
            audit is not None and not audit.available and self.settings.audit.on_failure == "block"
        )

    def in_flight(self) -> int:
        """Return the requests in flight over all pools."""
        return sum(route.state.inflight for route in self.routes.values())

    def gauges(self) -> tuple[int, int]:
        """Return (requests in flight, requests begun), for the chain's heartbeats."""
        return self.in_flight(), sum(self.counters.started.values())

    # -- ends

    def refused_head(self, door: str, code: str) -> None:
        """Count a request that was refused before anything of it was believed."""
        self.counters.refused_heads[door] += 1
        if code == "headers_too_large":
            self.counters.limit_hits["limits.head_bytes"] += 1
        self.rejected[code] = self.rejected.get(code, 0) + 1

    def envelope_failed(self, peer: str, reason: str, envelope: bytes = b"") -> None:
        """Count a failed envelope by reason; log it where `alarms` says so.

        `envelope`: kid and N, where they were read.
        """
        failures = self.counters.envelope_failures
        failures[reason] = failures.get(reason, 0) + 1
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        now_ns = self.clock.mono_ns()
        if reason == "replayed" and self.lately_taken.is_own_copy(envelope, peer, now_ns):
            return
        due = self.alarms.note(reason, peer, now_ns)
        if due is not None:
            self.counters.alarms += 1
            log.warning("envelopes refused: reason=%s peer=%s count=%d", reason, *due)

    def clock_is_behind(self, behind_ms: int) -> None:
        """Raise the alarm, once a minute at most: the wall clock lies far behind ours."""
        due = self.alarms.note("clock_behind", "", self.clock.mono_ns())
        if due is not None:
            self.counters.alarms += 1
            log.critical("the wall clock is %d ms behind: not ready", behind_ms)

    def flush_rejected(self) -> None:
        """Append one `rejected` record for what was refused since the last one."""
        if self.rejected and self.audit is not None:
            second = self.clock.wall_ms() // 1000
            self.audit.append("rejected", {"second": second, "counts": dict(self.rejected)})
        self.rejected.clear()
