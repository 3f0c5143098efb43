"""One line on the terminal that says how far a long run is. It writes to stderr and nowhere else.

Nothing is shown for what takes less than a second, nor where stderr is no terminal.
"""

from __future__ import annotations

import sys
import time

_FIRST_S = 1.0
_EVERY_S = 0.2
_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(count_bytes: float) -> str:
    """Return a size as people read it, in powers of 1000."""
    unit = 0
    while count_bytes >= 1000 and unit < len(_UNITS) - 1:
        count_bytes /= 1000
        unit += 1
    return f"{count_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{count_bytes:.1f} {_UNITS[unit]}"


def line(done_bytes: int, total_bytes: int | None, elapsed_s: float) -> str:
    """Return the line after `elapsed_s` seconds."""
    rate = done_bytes / elapsed_s if elapsed_s > 0 else 0.0
    text = f"{size_text(done_bytes)}, {size_text(rate)}/s"
    if total_bytes:
        share = min(1.0, done_bytes / total_bytes)
        text = f"{share:4.0%}  {text}"
        if rate:
            left_s = max(0, round((total_bytes - done_bytes) / rate))
            text += f", {left_s // 60}:{left_s % 60:02d} left"
    return text


class Progress:
    """Shows `line` at most five times a second."""

    def __init__(self, total_bytes: int | None, *, quiet: bool) -> None:
        self._total = total_bytes
        self._on = not quiet and sys.stderr.isatty()
        self._start_s = time.monotonic()
        self._due_s = self._start_s + _FIRST_S
        self._shown = False

    def at(self, done_bytes: int) -> None:
        """Note how many input bytes are done."""
        if not self._on:
            return
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _EVERY_S
        self._shown = True
        text = line(done_bytes, self._total, now_s - self._start_s)
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    def end(self) -> None:
        """Take the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
