"""When a checkpoint is due, and how far a chain may go without one. On the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.audit.pending import NEVER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

# Records that may wait behind a checkpoint's worth of them before it is signed: the verifier takes
# up to `checkpoint_records` + 256 unsigned ones at a chain's end.
_UNSIGNED_SLACK = 192


class Due:
    """After so many records, and so many seconds after one that is not signed.

    `now`: at the next flush; `under_way`: what was flushed last is being signed; `seq`: of the last
    checkpoint, -1 where there is none. A chain that nobody signs (`signed`) has none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        records: int,
        seconds: float,
        call: Callable[[], None],
        *,
        signed: bool,
    ) -> None:
        """`call` is called when one is due by time."""
        self._loop = loop
        self._records = records
        self._seconds = seconds
        self._call = call
        self._signed = signed
        self.now = False
        self.under_way = False
        self.seq = -1
        self.timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Let one be due now."""
        self.now = self._signed

    def begins(self, next_seq: int) -> bool:
        """Say whether what is flushed up to this seq is to be signed."""
        unsigned = next_seq - self.seq - 1
        if self.now or (self._signed and unsigned >= self._records):
            self.now, self.under_way = False, True
            return True
        if unsigned:
            self.watch()
        return False

    def placed(self, seq: int) -> None:
        """Take where the last one is."""
        self.seq = seq
        self.cancel()

    def watch(self) -> None:
        """Let one be due after a while."""
        if self._signed and self.timer is None:
            self.timer = self._loop.call_later(self._seconds, self._in_time)

    def cancel(self) -> None:
        """Wait for none."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def end(self) -> int:
        """Return the first seq that must wait for a checkpoint."""
        return self.seq + 1 + self._records + _UNSIGNED_SLACK if self._signed else NEVER

    def _in_time(self) -> None:
        self.timer = None
        self.ask()
        self._call()
