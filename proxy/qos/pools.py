"""A pool's endpoints: who is least loaded, who is left alone for a while, is there room.

Least outstanding cost first. An endpoint that fails `errors` times in a row, or is far slower than
the others, is ejected for a while and then gets one request at a time until one succeeds:

    healthy    -> errors in a row, or slow    -> ejected; suspect if no other one is healthy
    suspect    -> an answer                   -> healthy
               -> another one is healthy      -> ejected
    ejected    -> its time is over, a request -> half-open
    half-open  -> the request is answered     -> healthy
               -> it fails                    -> ejected, twice as long
               -> neither: its client left    -> half-open, the next request tries

The last one is never given up, so a pool without a healthy endpoint has exactly one suspect. Pure:
`now_ns` is an argument. Bounds: what is kept is a few numbers for each endpoint.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

REST_NS = 1_000_000_000  # how long an endpoint that refused a connection is avoided
WEIGHT = 0.1  # of the newest latency in the average
SAMPLES_MIN = 20  # before an average says something
SLOW_NS = 50_000_000  # what is slow by less than this harms nobody
DOUBLINGS_MAX = 16


class State(IntEnum):
    """Whether an endpoint is used; anything but 0 needs a second look."""

    HEALTHY = 0
    SUSPECT = 1
    HALF_OPEN = 2
    EJECTED = 3


STATE_NAMES = {
    State.HEALTHY: "healthy",
    State.SUSPECT: "suspect",
    State.HALF_OPEN: "half_open",
    State.EJECTED: "ejected",
}
HEALTHY, SUSPECT, HALF_OPEN, EJECTED = State


class Ejection:
    """When an endpoint is left alone, and for how long at first and at most.

    `errors` in a row; an average latency of `slow_factor` times the others' median. 0: never.
    """

    __slots__ = ("errors", "first_ns", "most_ns", "slow_factor")

    def __init__(
        self,
        *,
        errors: int = 5,
        slow_factor: float = 5.0,
        first_ns: int = 10_000_000_000,
        most_ns: int = 300_000_000_000,
    ) -> None:
        self.errors: Final = errors
        self.slow_factor: Final = slow_factor
        self.first_ns: Final = first_ns
        self.most_ns: Final = most_ns


class Endpoint:
    """One upstream address: (host, port), or the path of a unix socket.

    `outstanding`: cost of the requests it holds. `watch`: its answers have to be reported, since
    it is one of several or has failed. `sealed`: it is sent nothing but envelopes.
    """

    __slots__ = (
        "address",
        "doublings",
        "errors",
        "first_byte_ns",
        "healed_ns",
        "outstanding",
        "probing",
        "rest_until_ns",
        "samples",
        "sealed",
        "state",
        "tls",
        "until_ns",
        "url",
        "watch",
    )

    def __init__(self, url: str, address: tuple[str, int] | str, *, tls: bool = False) -> None:
        self.url = url
        self.address = address
        self.tls = tls
        self.sealed = False
        self.outstanding = 0
        self.watch = False
        self.state: State = HEALTHY
        self.errors = 0  # in a row
        self.rest_until_ns = 0
        self.until_ns = 0  # ejected until then
        self.doublings = 0
        self.healed_ns = 0
        self.probing = False  # a request that tries it is out
        self.first_byte_ns = 0.0  # moving average
        self.samples = 0


class PoolState:
    """Counts of one pool; `inflight_max` bounds the requests it holds."""

    __slots__ = (
        "_next",
        "_single",
        "ejections",
        "endpoints",
        "inflight",
        "inflight_max",
        "name",
        "overflows",
        "probes",
        "refused",
        "rules",
    )

    def __init__(
        self,
        name: str,
        endpoints: list[Endpoint],
        inflight_max: int,
        rules: Ejection | None = None,
    ) -> None:
        self.name = name
        self.endpoints = endpoints
        self.inflight_max = inflight_max
        self.rules = rules or Ejection()
        self.inflight = 0
        self.refused = 0
        self.overflows = 0  # requests that another pool took
        self.ejections = {"errors": 0, "slow": 0}
        self.probes = {"passed": 0, "failed": 0}
        self._single: Endpoint | None = None
        self._next = 0
        self._arrange()

    def renew(self, endpoints: list[Endpoint], inflight_max: int, rules: Ejection) -> None:
        """Take other settings; places taken stay taken, an endpoint that stays keeps its state."""
        known = {endpoint.url: endpoint for endpoint in self.endpoints}
        self.endpoints = [known.get(endpoint.url, endpoint) for endpoint in endpoints]
        self.inflight_max = inflight_max
        self.rules = rules
        self._arrange()

    def _arrange(self) -> None:
        count = len(self.endpoints)
        self._single = self.endpoints[0] if count == 1 else None
        self._next = 0
        for endpoint in self.endpoints:
            endpoint.watch = count > 1 or endpoint.errors > 0 or endpoint.state is not HEALTHY
        if all(endpoint.state >= HALF_OPEN for endpoint in self.endpoints):
            self.endpoints[0].state = SUSPECT  # those that were healthy are gone

    # -- places

    def admit(self, bound: int) -> bool:
        """Take one place; False (and counted) when `bound` or the pool's own limit is reached."""
        if self.inflight >= bound or self.inflight >= self.inflight_max:
            self.refused += 1
            return False
        self.inflight += 1
        return True

    def release(self) -> None:
        """Give the place back."""
        assert self.inflight > 0, "a place was given back twice"
        self.inflight -= 1

    # -- which endpoint

    def pick(self, now_ns: int, tried: frozenset[str] = frozenset()) -> Endpoint | None:
        """Return the endpoint to use next, not one of `tried`; None when all were tried."""
        single = self._single
        if single is not None:
            return None if tried and single.url in tried else single
        best: Endpoint | None = None
        best_rank = best_load = best_at = 0
        count = len(self.endpoints)
        for step in range(count):
            at = (self._next + step) % count
            endpoint = self.endpoints[at]
            if endpoint.url in tried:
                continue
            if endpoint.state >= HALF_OPEN:
                if endpoint.until_ns <= now_ns and not endpoint.probing:
                    return endpoint
                rank = 2
            else:
                rank = 1 if endpoint.rest_until_ns > now_ns else 0
            load = endpoint.outstanding
            if best is None or rank < best_rank or (rank == best_rank and load < best_load):
                best, best_rank, best_load, best_at = endpoint, rank, load, at
        if best is not None:
            self._next = (best_at + 1) % count  # equals take turns
        return best

    def probe(self, endpoint: Endpoint, now_ns: int) -> bool:
        """Say whether this request is the one that tries an endpoint that is not healthy.

        It has to be reported with `probe`, or with `forgo` if it says nothing.
        """
        if endpoint.until_ns > now_ns or endpoint.probing:
            return False
        if endpoint.state is EJECTED:
            endpoint.state = HALF_OPEN
        endpoint.probing = True
        return True

    def forgo(self, endpoint: Endpoint) -> None:
        """Note that the request that tried `endpoint` ended for another reason."""
        endpoint.probing = False

    # -- how its requests end

    def refuse(self, endpoint: Endpoint, now_ns: int, *, probe: bool = False) -> None:
        """Note that `endpoint` refused a connection."""
        endpoint.rest_until_ns = now_ns + REST_NS
        self.fail(endpoint, now_ns, probe=probe)

    def fail(self, endpoint: Endpoint, now_ns: int, *, probe: bool = False) -> None:
        """Note that a request to `endpoint` failed, and that it was the endpoint's fault."""
        endpoint.watch = True
        endpoint.errors += 1
        if probe:
            endpoint.probing = False
            self.probes["failed"] += 1
            self._eject(endpoint, now_ns)
        elif endpoint.state >= HALF_OPEN:
            pass  # sent before it was ejected: nothing new
        elif 0 < self.rules.errors <= endpoint.errors and self._eject(endpoint, now_ns):
            self.ejections["errors"] += 1

    def answer(
        self, endpoint: Endpoint, now_ns: int, latency_ns: int = 0, *, probe: bool = False
    ) -> None:
        """Note that `endpoint` answered, with its first byte after `latency_ns` (0: unknown)."""
        if probe:
            endpoint.probing = False
            self.probes["passed"] += 1
        if probe or endpoint.state is SUSPECT:
            self._heal(endpoint, now_ns)
        if endpoint.state is HEALTHY:
            endpoint.errors = 0
            endpoint.watch = self._single is None
        if latency_ns:
            endpoint.samples += 1
            weight = max(WEIGHT, 1 / endpoint.samples)
            endpoint.first_byte_ns += weight * (latency_ns - endpoint.first_byte_ns)

    def judge(self, now_ns: int) -> None:
        """Eject what is far slower than the others; called once a second."""
        if self._single is not None or not self.rules.slow_factor:
            return
        for endpoint in self.endpoints:
            if not _telling(endpoint):
                continue
            others = [e.first_byte_ns for e in self.endpoints if e is not endpoint and _telling(e)]
            if not others:
                return
            usual = sorted(others)[len(others) // 2]
            limit = max(usual * self.rules.slow_factor, usual + SLOW_NS)
            if endpoint.first_byte_ns > limit and self._eject(endpoint, now_ns):
                self.ejections["slow"] += 1

    def _eject(self, endpoint: Endpoint, now_ns: int) -> bool:
        """Leave it alone for a while; False: it is the last one, a suspect that is still used."""
        if endpoint.state is SUSPECT and now_ns < endpoint.until_ns:
            return False
        if endpoint.state is HEALTHY and now_ns - endpoint.healed_ns > self._wait_ns(endpoint):
            endpoint.doublings = 0  # it was well for longer than it had been away
        endpoint.doublings = min(endpoint.doublings + 1, DOUBLINGS_MAX)
        endpoint.until_ns = now_ns + self._wait_ns(endpoint)
        others = any(e.state is HEALTHY for e in self.endpoints if e is not endpoint)
        if endpoint.state < HALF_OPEN and not others:
            endpoint.state = SUSPECT
            return False
        endpoint.state = EJECTED
        return True

    def _wait_ns(self, endpoint: Endpoint) -> int:
        """Return how long its last ejection was; each in a row is twice as long."""
        if not endpoint.doublings:
            return 0
        return min(self.rules.first_ns << (endpoint.doublings - 1), self.rules.most_ns)

    def _heal(self, endpoint: Endpoint, now_ns: int) -> None:
        endpoint.state = HEALTHY
        endpoint.healed_ns = now_ns
        endpoint.samples = 0
        endpoint.first_byte_ns = 0.0
        for other in self.endpoints:
            if other.state is SUSPECT:
                # It was used for want of another one; now it has to prove itself too.
                other.state = EJECTED
                self.ejections["errors"] += 1


def _telling(endpoint: Endpoint) -> bool:
    return endpoint.state is HEALTHY and endpoint.samples >= SAMPLES_MIN
