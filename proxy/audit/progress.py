"""How far a long check is, on a terminal: share, rate, time left."""

from __future__ import annotations

import time
from typing import IO

_EVERY_S = 0.2
_BAR = 24


class Progress:
    """One line that is written over; `add` is cheap and may be called for every line read."""

    def __init__(self, out: IO[str], total: int) -> None:
        self._out = out
        self._total = max(1, total)
        self._done = 0
        self._begin_s = self._shown_s = time.monotonic()

    def add(self, size: int) -> None:
        """Take `size` bytes more as done."""
        self._done += size
        now_s = time.monotonic()
        if now_s - self._shown_s >= _EVERY_S:
            self._shown_s = now_s
            self._out.write("\r\x1b[K" + self.text(now_s - self._begin_s))
            self._out.flush()

    def text(self, elapsed_s: float) -> str:
        """Return the line."""
        share = min(1.0, self._done / self._total)
        rate = self._done / max(0.001, elapsed_s)
        left_s = int((self._total - self._done) / rate) if rate and share < 1 else 0
        bar = "#" * int(_BAR * share)
        left = f"{left_s // 60}:{left_s % 60:02d} left"
        return f"verifying [{bar:<{_BAR}}] {share:4.0%}  {rate / 1e6:.0f} MB/s  {left}"

    def end(self) -> None:
        """Take the line away."""
        self._out.write("\r\x1b[K")
        self._out.flush()
