"""What a request of one tenant and class needs, found with one look-up.

A lane joins class, pool, connections and the bytes that are the same for each of its requests; a
tenant has a lane for each header value. Lanes are made when a tenant is first seen and kept, so the
hot path compares nothing and formats little. Pure, but for the counters it points to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.config import Pool, Qos, UpperPool
from proxy.connector import Upstreams
from proxy.metrics import Histogram
from proxy.qos.admission import Tier
from proxy.qos.classes import CLASSES, PoolName, QosClass, UnknownClassError, Verdict, classify
from proxy.qos.pools import PoolState
from proxy.qos.ratelimit import TokenBucket
from proxy.qos.rules import Rule
from proxy.retry import Retries
from proxy.sm4.caller import Recipient

# Who takes what a pool has no place or no healthy endpoint for, if its `overflow` is set.
OVERFLOW: dict[PoolName, PoolName] = {"dedicated": "shared", "shared": "best_effort"}


@dataclass(slots=True)
class Route:
    """One pool: its places, its connections, and what it adds to a request's head.

    `qos`: the class it is for. `host` replaces the client's, if set; `endpoint_host` is for
    requests that came without one; `authorization` is a whole field line, or empty; `recipients`
    has those of its endpoints, by URL, that are sealed to.
    """

    name: PoolName
    qos: QosClass
    settings: Pool
    state: PoolState
    upstreams: Upstreams
    retries: Retries
    endpoint_host: bytes
    authorization: bytes = field(default=b"", repr=False)
    recipients: dict[str, Recipient] = field(default_factory=dict)

    @property
    def seals(self) -> bool:
        """Say whether its requests are sealed on the way out."""
        return bool(self.settings.seal.keys)

    @property
    def host(self) -> bytes:
        """The Host that this pool demands; empty: the client's."""
        return self.settings.host.encode()


@dataclass(slots=True)
class Lane:
    """One tenant's requests of one effective class."""

    qos: QosClass
    asked: str  # the class that the tenant's cap lowered, else empty
    route: Route
    tier: Tier  # where it takes its place: its class's, or that of the pool it overflows to
    bucket: TokenBucket | None  # the tenant's, for all its classes but P0
    weighs: bool  # the pool has several endpoints, so what a request costs says which
    host: bytes
    request_fields: bytes  # X-QoS-Class and X-Tenant-Id upstream, Authorization if the pool has one
    answer_fields: bytes  # X-QoS-Class, X-QoS-Pool, and the name of X-Trace-Id
    duration: Histogram
    first_byte: Histogram
    overflow: Lane | None = None  # the same request in the pool that takes what this one cannot
    seals: bool = False  # sealed on the way out
    may_seal: bool = False  # that, or where it overflows to it is
    opens: bool = False  # it is sent on once its `open` record is on disk


@dataclass(slots=True)
class Tenant:
    """One tenant: `known` has the lane of each plain header value, and of None, its absence.

    Where `rules` have to see the body first, None is not known.
    """

    name: str
    max_class: QosClass
    prompt_key: bytes | None = field(repr=False)
    known: dict[bytes | None, Lane]
    default: Lane
    rules: tuple[Rule, ...] = ()

    def lane(self, asked: bytes | None, *, repeated: bool, qos: Qos) -> Lane | None:
        """Return the lane of any value, plain or not; None: `rules` have to see the body first.

        Raises UnknownClassError.
        """
        classify(
            asked,
            repeated=repeated,
            default=qos.default_class,
            reject_unknown=qos.on_unknown == "reject",
            max_class=self.max_class,
        )
        # What is unknown and not refused is as if nothing had been asked.
        return self.known.get(None if repeated or asked not in self.known else asked)


def tenant_lanes(
    name: str,
    *,
    max_class: QosClass,
    prompt_key: bytes | None,
    qos: Qos,
    routes: dict[PoolName, Route],
    tiers: dict[QosClass, Tier],
    histograms: dict[QosClass, tuple[Histogram, Histogram]],
    rules: tuple[Rule, ...] = (),
    bucket: TokenBucket | None = None,
    opens: tuple[str, ...] = (),
) -> Tenant:
    """Return a tenant with all its lanes; a cap below P0 makes lanes for lowered classes too.

    `opens`: the classes whose requests wait for their `open` record.
    """
    lanes: dict[tuple[QosClass, str], Lane] = {}
    known: dict[bytes | None, Lane] = {}
    for asked in (None, *(c.encode() for c in CLASSES), *(c.lower().encode() for c in CLASSES)):
        try:
            verdict = classify(
                asked,
                repeated=False,
                default=qos.default_class,
                reject_unknown=True,
                max_class=max_class,
            )
        except UnknownClassError:  # none of the above is unknown
            raise AssertionError(asked) from None
        wanted = qos.default_class if asked is None else asked.decode().upper()
        # Two classes lowered to the same one are two lanes: the record names the one asked for.
        key = verdict.qos, wanted if verdict.capped else ""
        if key not in lanes:
            lanes[key] = _lane(name, verdict, wanted, routes, tiers, histograms, bucket)
        known[asked] = lanes[key]
    for lane in lanes.values():
        lane.opens = lane.qos in opens
        if lane.overflow is not None:
            lane.overflow.opens = lane.opens
    default = known[None]
    if rules and rules[0].plain:
        known[None] = known[rules[0].qos.encode()]
    elif rules:
        del known[None]
    return Tenant(name, max_class, prompt_key, known, default, rules)


def _lane(
    tenant: str,
    verdict: Verdict,
    wanted: str,
    routes: dict[PoolName, Route],
    tiers: dict[QosClass, Tier],
    histograms: dict[QosClass, tuple[Histogram, Histogram]],
    bucket: TokenBucket | None,
    taken_by: PoolName | None = None,
) -> Lane:
    pool = taken_by or verdict.pool
    route = routes[pool]
    duration, first_byte = histograms[verdict.qos]
    fields = f"X-QoS-Class: {verdict.qos}\r\nX-Tenant-Id: {tenant}\r\n".encode()
    answer = f"X-QoS-Class: {verdict.qos}\r\nX-QoS-Pool: {pool}\r\nX-Trace-Id: "
    overflow = None
    upper = route.settings
    if taken_by is None and isinstance(upper, UpperPool) and upper.overflow:  # one step, no further
        other = OVERFLOW[pool]
        overflow = _lane(tenant, verdict, wanted, routes, tiers, histograms, bucket, other)
    return Lane(
        qos=verdict.qos,
        asked=wanted if verdict.capped else "",
        route=route,
        tier=tiers[route.qos],
        bucket=None if verdict.qos == "P0" else bucket,
        weighs=len(route.state.endpoints) > 1,
        host=route.host,
        request_fields=fields + route.authorization,
        answer_fields=answer.encode(),
        duration=duration,
        first_byte=first_byte,
        overflow=overflow,
        seals=route.seals,
        may_seal=route.seals or (overflow is not None and overflow.seals),
    )
