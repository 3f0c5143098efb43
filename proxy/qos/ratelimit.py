"""A token bucket: so many requests a second, so many at once.

Pure: `now_ns` is an argument and may not go back. The bucket is full at first, each request takes
one token, and what is missing comes back at the rate.
"""

from __future__ import annotations

_NS = 1_000_000_000


class TokenBucket:
    """`rate`: requests a second, above 0; `burst`: how many at once, 0 for a second's worth."""

    __slots__ = ("_at_ns", "_ns_each", "burst", "rate", "refused", "tokens")

    def __init__(self, rate: float, burst: int, now_ns: int) -> None:
        self.rate = rate
        self.burst = max(1, burst or int(rate))
        self.tokens = float(self.burst)
        self.refused = 0
        self._ns_each = _NS / rate
        self._at_ns = now_ns

    def take(self, now_ns: int) -> bool:
        """Take one token; False (and counted) when there is none."""
        self.fill(now_ns)
        if self.tokens < 1.0:
            self.refused += 1
            return False
        self.tokens -= 1.0
        return True

    def give_back(self) -> None:
        """Put back a token that was taken for a request another limit refused."""
        self.tokens = min(float(self.burst), self.tokens + 1.0)

    def fill(self, now_ns: int) -> None:
        """Add what has come back since it was last looked at."""
        if now_ns > self._at_ns:
            back = (now_ns - self._at_ns) / self._ns_each
            self.tokens = min(float(self.burst), self.tokens + back)
            self._at_ns = now_ns

    def wait_s(self, now_ns: int) -> int:
        """Return after how many whole seconds a token will be there, at least 1."""
        self.fill(now_ns)
        wait_ns = (1.0 - self.tokens) * self._ns_each
        return max(1, -int(-wait_ns // _NS))
