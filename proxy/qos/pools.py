"""A pool's endpoints: who is least loaded, who is resting, is there room.

Least outstanding requests first; an endpoint that refused a connection rests for a moment and is
tried again; the last one is never given up (docs/sidecar.md, "Pools"). Pure: `now_ns` is an
argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

REST_NS = 1_000_000_000  # how long an endpoint that refused a connection is avoided


@dataclass(slots=True)
class Endpoint:
    """One upstream address: (host, port), or the path of a unix socket."""

    url: str
    address: tuple[str, int] | str
    outstanding: int = 0
    rest_until_ns: int = 0


@dataclass(slots=True)
class PoolState:
    """Counts of one pool; `inflight_max` bounds the requests it holds."""

    name: str
    endpoints: list[Endpoint]
    inflight_max: int
    inflight: int = 0
    refused: int = 0
    _single: Endpoint | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._single = self.endpoints[0] if len(self.endpoints) == 1 else None

    def renew(self, endpoints: list[Endpoint], inflight_max: int) -> None:
        """Take other settings; places taken stay taken, an endpoint that stays keeps its state."""
        known = {endpoint.url: endpoint for endpoint in self.endpoints}
        self.endpoints = [known.get(endpoint.url, endpoint) for endpoint in endpoints]
        self.inflight_max = inflight_max
        self.__post_init__()

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

    def pick(self, now_ns: int, tried: frozenset[str] = frozenset()) -> Endpoint | None:
        """Return the endpoint to use next, not one of `tried`; None when all were tried."""
        if self._single is not None:
            return None if tried else self._single
        left = [e for e in self.endpoints if e.url not in tried]
        if not left:
            return None
        awake = [e for e in left if e.rest_until_ns <= now_ns]
        return min(awake or left, key=_load)

    def refuse(self, endpoint: Endpoint, now_ns: int) -> None:
        """Note that `endpoint` refused a connection."""
        endpoint.rest_until_ns = now_ns + REST_NS


def _load(endpoint: Endpoint) -> int:
    return endpoint.outstanding
