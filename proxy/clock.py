"""Clocks as a protocol: pure code is handed a `now`, shells own the source.

`SystemClock` follows the envelope's clock rule: wall time is the wall clock at start plus
monotonic time with suspend included (CLOCK_BOOTTIME); forward steps of the wall clock are taken,
backward ones are not (docs/envelope.md, "Clock").
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a shell asks for the time."""

    def wall_ms(self) -> int:
        """Unix time, milliseconds; never decreases within a process."""
        ...

    def wall_ns(self) -> int:
        """Unix time, nanoseconds; as `wall_ms`."""
        ...

    def sealing_ms(self) -> int:
        """Unix time, milliseconds, as the system has it now: a corrected clock counts at once."""
        ...

    def mono_ns(self) -> int:
        """Monotonic time, nanoseconds; its zero means nothing."""
        ...


class SystemClock:
    """The operating system's clocks."""

    __slots__ = ("_offset_ns",)

    # The very function, without a frame of ours around it: the data path asks often.
    mono_ns = staticmethod(time.monotonic_ns)

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_ns(self) -> int:
        """Unix time in nanoseconds that never steps back in this process."""
        # The wall clock first: a pause between the two readings must not pass for a step of it.
        wall = time.time_ns()
        boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        offset = self._offset_ns
        if wall > boot + offset:
            # Set, not added to: two threads that see one step at once must take it once.
            self._offset_ns = wall - boot
            return wall
        return boot + offset

    def wall_ms(self) -> int:
        """Unix time in milliseconds that never steps back in this process."""
        return self.wall_ns() // 1_000_000

    def sealing_ms(self) -> int:
        """Unix time in milliseconds as the system has it, for what others will judge."""
        return time.time_ns() // 1_000_000

    def behind_ms(self) -> int:
        """Return how far the wall clock lies behind this one, in milliseconds (0 if not)."""
        return max(0, (self.wall_ns() - time.time_ns()) // 1_000_000)


class ManualClock:
    """A clock that moves only when told to; for tests."""

    __slots__ = ("_mono_ns", "_wall_ns")

    def __init__(self, wall_ms: int = 1_767_225_600_000, mono_ns: int = 0) -> None:
        self._wall_ns = wall_ms * 1_000_000
        self._mono_ns = mono_ns

    def wall_ns(self) -> int:
        """Return the wall time that was set."""
        return self._wall_ns

    def wall_ms(self) -> int:
        """Return the wall time that was set."""
        return self._wall_ns // 1_000_000

    def sealing_ms(self) -> int:
        """Return the wall time that was set."""
        return self._wall_ns // 1_000_000

    def mono_ns(self) -> int:
        """Return the monotonic time that was set."""
        return self._mono_ns

    def advance_ms(self, ms: int) -> None:
        """Move both clocks forward."""
        self._wall_ns += ms * 1_000_000
        self._mono_ns += ms * 1_000_000
