"""When a checkpoint or a heartbeat is due, and how far a chain may go without. On the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.audit.pending import NEVER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.audit.setup import ChainConfig

# Records that may wait behind a checkpoint's worth of them before it is signed: the verifier takes
# up to `checkpoint_records` + 256 unsigned ones at a chain's end.
_UNSIGNED_SLACK = 192


class Due:
    """After so many records, and so many seconds after one that is not signed.

    `now`: at the next flush; `under_way`: what was flushed last is being signed; `seq`: of the last
    checkpoint, -1 where there is none. A chain that nobody signs has none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: ChainConfig,
        call: Callable[[], None],
    ) -> None:
        """`call` is called when one is due by time."""
        self._loop = loop
        self._records = config.checkpoint_records
        self._seconds = config.checkpoint_s
        self._signed = bool(config.signers)
        self._call = call
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


class Heartbeat:
    """Every so many seconds without a record, by the monotonic clock."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        every_s: float,
        quiet_s: Callable[[], float],
        beat: Callable[[], None],
    ) -> None:
        """`quiet_s` says how long there was no record, `beat` is called when that is too long."""
        self._loop = loop
        self._every_s = every_s
        self._quiet_s = quiet_s
        self._beat = beat
        self._timer: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Look, and come again when one may be due."""
        quiet_s = self._quiet_s()
        if quiet_s >= self._every_s:
            self._beat()
            quiet_s = 0.0
        self._timer = self._loop.call_later(max(0.01, self._every_s - quiet_s), self.check)

    def cancel(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
