"""What all requests of one sidecar share: settings, pools, keys, counters, the audit writer.

Built once by `lifecycle`, read by every connection. The only place where a finished exchange turns
into counts and a record.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy import trace
from proxy.audit.trace_id import TraceIds, machine_from_node
from proxy.config import Settings, split_endpoint
from proxy.exchange import PHASE_NAMES
from proxy.http.http1 import HeadLimits
from proxy.metrics import Counters
from proxy.observe import Observing
from proxy.qos.classes import CLASSES, POOL_OF, classify
from proxy.qos.pools import Endpoint, PoolState
from proxy.sm4.receiver import Budget
from proxy.upstream import Upstreams

if TYPE_CHECKING:
    import asyncio

    from proxy.audit.writer import AuditWriter
    from proxy.clock import Clock
    from proxy.keys.provider import KeyProvider
    from proxy.observe import Observation
    from proxy.qos.classes import PoolName, QosClass, Verdict
    from proxy.recorder import Recorder
    from proxy.server import Downstream
    from proxy.sm4.receiver import Receiver

POOL_NAMES: tuple[PoolName, ...] = ("dedicated", "shared", "best_effort")
log = logging.getLogger(__name__)

ALARM_EVERY_NS = 60_000_000_000  # one line a minute for each reason and peer
ALARMS_MAX = 4096
TENANTS_MAX = 4096
REPLAY_QUIET_NS = 5_000_000_000  # a client's own retry is no attack


@dataclass(frozen=True, slots=True)
class Times:
    """The timeouts the data path compares, in nanoseconds."""

    head_ns: int
    body_idle_ns: int
    first_byte_ns: int
    stream_idle_ns: int
    client_stall_ns: int
    request_total_ns: int
    keepalive_ns: int
    discard_ns: int


@dataclass(slots=True)
class Route:
    """What a pool adds to a request's head; `authorization` is a whole field line, or empty."""

    host: bytes
    endpoint_host: bytes
    authorization: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Tenant:
    """What a request of one tenant needs to know, looked up once.

    `known` has the verdict of each plain header value, None the header's absence.
    """

    max_class: QosClass
    prompt_key: bytes | None
    known: dict[bytes | None, Verdict]
    request_fields: dict[QosClass, bytes]  # X-QoS-Class and X-Tenant-Id as sent upstream


class Context:
    """See the module."""

    def __init__(
        self, settings: Settings, clock: Clock, loop: asyncio.AbstractEventLoop, machine: str
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.loop = loop
        self.counters = Counters()
        self.times = Times(
            *(
                int(getattr(settings.timeouts, name.removesuffix("_ns") + "_s") * 1e9)
                for name in Times.__dataclass_fields__
            )
        )
        # A sealed body holds a share of the budget, so it has to come on faster.
        sealed_idle_ns = min(int(settings.envelope.progress_s * 1e9), self.times.body_idle_ns)
        self.body_idle_ns = {"app": self.times.body_idle_ns, "sealed": sealed_idle_ns}
        limits = settings.limits
        self.head_limits = HeadLimits(limits.head_bytes, limits.field_bytes, limits.fields)
        self.pool_settings = {name: getattr(settings.pools, name) for name in POOL_NAMES}
        self.pools: dict[PoolName, PoolState] = {}
        self.upstreams: dict[str, Upstreams] = {}
        self.routes: dict[PoolName, Route] = {}
        for name in POOL_NAMES:
            self._add_pool(name)
        self.connections: dict[str, set[Downstream]] = {"app": set(), "sealed": set()}
        self.trace_ids = TraceIds(machine_from_node(machine))
        self.keys: KeyProvider | None = None
        self.receiver: Receiver | None = None
        self.audit: AuditWriter | None = None
        self.recorder: Recorder | None = None
        self.budget = Budget(settings.envelope.unverified_bytes)
        self.observing = Observing(
            enabled=False,
            plain_hashes=settings.audit.prompt_hash_mode == "plain",
            held_bytes_max=settings.audit.observed_bytes,
            event_bytes=limits.event_bytes,
        )
        self.draining = False  # POST /drain: no new sealed requests
        self.closing = False  # shutting down: no new requests on any connection
        self.rejected: dict[str, int] = {}
        self._alarms: dict[tuple[str, str], tuple[int, int]] = {}
        # Span ids have to be unlike each other, not secret; seeded once by the system.
        self._bits = random.Random(random.SystemRandom().getrandbits(256)).getrandbits  # noqa: S311
        self._tenants: dict[str, Tenant] = {}
        self.inflight_bound: dict[QosClass, int] = {
            "P0": settings.qos.p0.inflight,
            "P1": settings.pools.shared.inflight,
            "P2": settings.pools.best_effort.inflight,
        }
        self.answer_fields = {
            qos: f"X-QoS-Class: {qos}\r\nX-QoS-Pool: {pool}\r\nX-Trace-Id: ".encode()
            for qos, pool in POOL_OF.items()
        }

    def _add_pool(self, name: PoolName) -> None:
        pool = self.pool_settings[name]
        endpoints = [Endpoint(url, split_endpoint(url)) for url in pool.endpoints]
        self.pools[name] = PoolState(name, endpoints, pool.inflight)
        self.upstreams[name] = Upstreams(
            self.loop,
            self.head_limits,
            connect_s=self.settings.timeouts.connect_s,
            keepalive_s=pool.keepalive_s,
            idle_max=pool.idle_connections,
        )
        first = endpoints[0].address
        host = "localhost" if isinstance(first, str) else f"{first[0]}:{first[1]}"
        self.routes[name] = Route(pool.host.encode(), host.encode())

    # -- facts a request asks for

    def tenant(self, name: str) -> Tenant:
        """Return what is known of a tenant; P0 is granted by name only."""
        found = self._tenants.get(name)
        if found is not None:
            return found
        qos = self.settings.qos
        row = self.settings.tenants.get(name)
        max_class: QosClass = "P1" if row is None else row.max_class
        values = (None, *(c.encode() for c in CLASSES), *(c.lower().encode() for c in CLASSES))
        made = Tenant(
            max_class=max_class,
            prompt_key=None if self.keys is None else self.keys.prompt_key(name),
            known={
                value: classify(
                    value,
                    repeated=False,
                    default=qos.default_class,
                    reject_unknown=False,
                    max_class=max_class,
                )
                for value in values
            },
            request_fields={
                c: f"X-QoS-Class: {c}\r\nX-Tenant-Id: {name}\r\n".encode() for c in CLASSES
            },
        )
        if len(self._tenants) < TENANTS_MAX:
            self._tenants[name] = made
        return made

    def traceparent(self, came: bytes | None) -> bytes:
        """Keep a valid traceparent, else make one."""
        return came if came is not None and trace.valid(came) else trace.make(self._bits(192))

    def audit_blocked(self) -> bool:
        """Say whether policy refuses requests because no record can be written."""
        audit = self.audit
        return (
            audit is not None and not audit.available and self.settings.audit.on_failure == "block"
        )

    def in_flight(self) -> int:
        """Return the requests in flight over all pools."""
        return sum(pool.inflight for pool in self.pools.values())

    # -- ends

    def record(self, exchange: Observation, outcome: str, now_ns: int) -> None:
        """Count a finished exchange and hand it to the recorder."""
        self.counters.finished(exchange, outcome, now_ns)
        if not exchange.trace_id:
            exchange.release()
            return  # refused before it was classed: counted as rejected, not recorded one by one
        if self.recorder is not None:
            phase = PHASE_NAMES[exchange.progress]
            self.recorder.add(exchange, outcome, phase, now_ns)
        else:
            exchange.release()

    def refused_head(self, door: str, code: str) -> None:
        """Count a request that was refused before anything of it was believed."""
        self.counters.refused_heads[door] += 1
        self.rejected[code] = self.rejected.get(code, 0) + 1

    def envelope_failed(self, peer: str, reason: str) -> None:
        """Count a failed envelope by reason; at most one log line a minute, reason and peer."""
        failures = self.counters.envelope_failures
        failures[reason] = failures.get(reason, 0) + 1
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        now_ns = self.clock.mono_ns()
        key = (reason, peer)
        last_ns, count = self._alarms.get(key, (-ALARM_EVERY_NS, 0))
        if reason == "replayed" and key not in self._alarms:
            # The first one may be a client's own retry: counted, silent for a moment.
            last_ns = now_ns - ALARM_EVERY_NS + REPLAY_QUIET_NS
        if now_ns - last_ns >= ALARM_EVERY_NS:
            self.counters.alarms += 1
            log.warning("envelopes refused: reason=%s peer=%s count=%d", reason, peer, count + 1)
            last_ns, count = now_ns, -1
        if len(self._alarms) >= ALARMS_MAX and key not in self._alarms:
            self._alarms.clear()
        self._alarms[key] = (last_ns, count + 1)

    def flush_rejected(self) -> None:
        """Append one `rejected` record for what was refused since the last one."""
        if self.rejected and self.audit is not None:
            second = self.clock.wall_ms() // 1000
            self.audit.append("rejected", {"second": second, "counts": self.rejected})
        self.rejected = {}
