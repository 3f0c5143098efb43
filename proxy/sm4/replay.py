"""Which envelopes were here before: `(kid, N)` for as long as their time could be accepted.

Two generations of two windows each. An entry lives at least two windows, at most four; an
envelope's time is accepted for one window and a few seconds, so what has been forgotten is stale.
A full cache refuses, it never forgets early. Limits: entries of one kid, entries in all.

The owner calls the time check and `insert` with one `now_ms` and nothing in between: on one loop
that is the one lock of the specification.
"""

from __future__ import annotations

from typing import Literal

Verdict = Literal["ok", "replayed", "cache_full", "busy", "store_lost"]


class ReplayCache:
    """Nonces seen, per kid. Not thread-safe: one loop owns it."""

    __slots__ = (
        "_count",
        "_current",
        "_generation_ms",
        "_limit",
        "_limit_per_kid",
        "_previous",
        "_turned_ms",
        "full_refusals",
    )

    def __init__(
        self, *, window_ms: int = 60_000, limit_per_kid: int = 1 << 18, limit: int = 1 << 20
    ) -> None:
        self._generation_ms = 2 * window_ms
        self._limit_per_kid = limit_per_kid
        self._limit = limit
        self._current: dict[bytes, set[bytes]] = {}
        self._previous: dict[bytes, set[bytes]] = {}
        self._count = 0
        self._turned_ms: int | None = None
        self.full_refusals = 0

    def _turn(self, now_ms: int) -> None:
        if self._turned_ms is None:
            self._turned_ms = now_ms
        age = now_ms - self._turned_ms
        if age < self._generation_ms:
            return
        generations = age // self._generation_ms
        self._previous = self._current if generations == 1 else {}
        self._current = {}
        self._count = sum(len(nonces) for nonces in self._previous.values())
        self._turned_ms += generations * self._generation_ms

    def seen(self, kid: bytes, nonce: bytes, now_ms: int) -> bool:
        """Say whether `(kid, nonce)` is in the cache."""
        self._turn(now_ms)
        return nonce in self._current.get(kid, ()) or nonce in self._previous.get(kid, ())

    def insert(self, kid: bytes, nonce: bytes, now_ms: int) -> Verdict:
        """Put `(kid, nonce)` in, or say why not; what was there stays there."""
        self._turn(now_ms)
        nonces = self._current.get(kid)
        if nonces is None:
            nonces = self._current[kid] = set()
        older = self._previous.get(kid, ())
        if nonce in nonces or nonce in older:
            return "replayed"
        if self._count >= self._limit or len(nonces) + len(older) >= self._limit_per_kid:
            self.full_refusals += 1
            return "cache_full"
        nonces.add(nonce)
        self._count += 1
        return "ok"

    def entries_of(self, kid: bytes) -> int:
        """Return how many entries one kid holds, as of the last call."""
        return len(self._current.get(kid, ())) + len(self._previous.get(kid, ()))

    @property
    def entries(self) -> int:
        """How many entries there are, as of the last call; at most `limit`."""
        return self._count

    @property
    def limit(self) -> int:
        """How many there may be in all."""
        return self._limit
