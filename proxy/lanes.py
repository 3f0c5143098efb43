"""What a request of one tenant and class needs, found with one look-up.

A lane joins class, pool, connections and the bytes that are the same for each of its requests; a
tenant has a lane for each header value. Lanes are made when a tenant is first seen and kept, so the
hot path compares nothing and formats little. Pure, but for the counters it points to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.config import Pool, Qos, UpperPool
from proxy.qos.classes import CLASSES, PoolName, QosClass, UnknownClassError, Verdict, classify
from proxy.retry import Retries

if TYPE_CHECKING:
    from proxy.connector import Upstreams
    from proxy.metrics import Histogram
    from proxy.qos.admission import Tier
    from proxy.qos.pools import PoolState
    from proxy.qos.ratelimit import TokenBucket
    from proxy.qos.rules import Rule
    from proxy.sm4.caller import Recipient

# Who takes what a pool has no place or no healthy endpoint for, if its `overflow` is set.
OVERFLOW: dict[PoolName, PoolName] = {"dedicated": "shared", "shared": "best_effort"}


class Route:
    """One pool: its places, its connections, and what it adds to a request's head.

    `qos`: the class it is for. `host` replaces the client's, if set; `endpoint_host` is for
    requests that came without one; `authorization` is a whole field line, or empty; `recipients`
    has those of its endpoints, by URL, that are sealed to.
    """

    __slots__ = (
        "authorization",
        "endpoint_host",
        "name",
        "qos",
        "recipients",
        "retries",
        "settings",
        "state",
        "upstreams",
    )

    def __init__(
        self,
        name: PoolName,
        qos: QosClass,
        settings: Pool,
        state: PoolState,
        upstreams: Upstreams,
        endpoint_host: bytes,
    ) -> None:
        self.name = name
        self.qos = qos
        self.settings = settings
        self.state = state
        self.upstreams = upstreams
        self.retries = Retries(settings.retry_percent)
        self.endpoint_host = endpoint_host
        self.authorization = b""
        self.recipients: dict[str, Recipient] = {}

    @property
    def seals(self) -> bool:
        """Say whether its requests are sealed on the way out."""
        return bool(self.settings.seal.keys)

    @property
    def host(self) -> bytes:
        """The Host that this pool demands; empty: the client's."""
        return self.settings.host.encode()


class Lane:
    """One tenant's requests of one effective class, `wanted` being the one that was asked for.

    `tier`: where it takes its place, its class's or that of the pool it overflows to. `overflow`:
    the same request in the pool that takes what this one cannot.
    """

    __slots__ = (
        "answer_fields",
        "asked",
        "bucket",
        "duration",
        "first_byte",
        "host",
        "may_seal",
        "opens",
        "overflow",
        "qos",
        "request_fields",
        "route",
        "seals",
        "tier",
        "weighs",
    )

    def __init__(
        self,
        tenant: str,
        verdict: Verdict,
        wanted: str,
        route: Route,
        tier: Tier,
        histograms: tuple[Histogram, Histogram],
        bucket: TokenBucket | None,
        overflow: Lane | None,
    ) -> None:
        qos = verdict.qos
        fields = f"X-QoS-Class: {qos}\r\nX-Tenant-Id: {tenant}\r\n".encode()
        answer = f"X-QoS-Class: {qos}\r\nX-QoS-Pool: {route.name}\r\nX-Trace-Id: "
        self.qos: QosClass = qos
        self.asked = wanted if verdict.capped else ""  # the class that the tenant's cap lowered
        self.route = route
        self.tier = tier
        self.bucket = None if qos == "P0" else bucket  # the tenant's, for all its other classes
        # The pool has several endpoints, so what a request costs says which.
        self.weighs = len(route.state.endpoints) > 1
        self.host = route.host
        self.request_fields = fields + route.authorization
        self.answer_fields = answer.encode()
        self.duration, self.first_byte = histograms
        self.overflow = overflow
        self.seals = route.seals  # sealed on the way out
        # That, or where it overflows to it is.
        self.may_seal = route.seals or (overflow is not None and overflow.seals)
        self.opens = False  # it is sent on once its `open` record is on disk


class Tenant:
    """One tenant: `known` has the lane of each plain header value, and of None, its absence.

    Where `rules` have to see the body first, None is not known.
    """

    __slots__ = ("default", "known", "max_class", "name", "prompt_key", "rules")

    def __init__(
        self,
        name: str,
        max_class: QosClass,
        prompt_key: bytes | None,
        known: dict[bytes | None, Lane],
        default: Lane,
        rules: tuple[Rule, ...],
    ) -> None:
        self.name = name
        self.max_class: QosClass = max_class
        self.prompt_key = prompt_key
        self.known = known
        self.default = default
        self.rules = rules

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
    overflow = None
    upper = route.settings
    if taken_by is None and isinstance(upper, UpperPool) and upper.overflow:  # one step, no further
        other = OVERFLOW[pool]
        overflow = _lane(tenant, verdict, wanted, routes, tiers, histograms, bucket, other)
    tier, both = tiers[route.qos], histograms[verdict.qos]
    return Lane(tenant, verdict, wanted, route, tier, both, bucket, overflow)
