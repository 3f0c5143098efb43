"""Retention: once an hour, take away what is older than it has to be.

Careful rather than punctual. A pass takes at most a day of log, so that a limit set too low, or a
clock that is wrong, costs little before somebody sees the alarm; and where the wall clock has run
ahead of the monotonic one by more than a day, nothing is taken until the sidecar is started again.
Blocking work is done off the loop; records are appended on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from proxy.audit.setup import AuditError, AuditUnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.audit.prune import Step
    from proxy.audit.writer import AuditWriter
    from proxy.clock import Clock

DAY_NS = 86_400 * 10**9
FIRST_S, EVERY_S = 60.0, 3600.0

log = logging.getLogger(__name__)


class Retention:
    """The passes of one process. All methods on the loop."""

    def __init__(self, writer: AuditWriter, directory: Path, days: int, clock: Clock) -> None:
        """Prepare; `days` of records are kept."""
        self._writer = writer
        self._directory = directory
        self._keep_ns = days * DAY_NS
        self._clock = clock
        self._offset_ns = clock.wall_ns() - clock.mono_ns()
        self._said = ""
        self._removed = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run a pass a minute from now, then one an hour."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End; a segment under way is finished or left."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        await asyncio.sleep(FIRST_S)
        while True:
            await self.once()
            await asyncio.sleep(EVERY_S)

    async def once(self) -> int:
        """Run one pass; returns how many segments went."""
        now_ns, removed, trouble = self._clock.wall_ns(), self._removed, ""
        if now_ns - self._clock.mono_ns() - self._offset_ns > DAY_NS:
            self._say("clock_jumped ahead by more than a day: retention waits for a restart")
            return 0
        before_ns = now_ns - self._keep_ns
        try:
            oldest_ns = await asyncio.to_thread(self._oldest_ns)
            if oldest_ns is None or oldest_ns >= before_ns:
                self._said = ""
                return 0
            if before_ns - oldest_ns > 2 * DAY_NS:
                days = (before_ns - oldest_ns) // DAY_NS
                trouble = f"retention_behind by {days} days: a day of log is removed an hour"
                self._say(trouble)
                before_ns = oldest_ns + DAY_NS
            await self._pass(before_ns)
        except (OSError, AuditError, AuditUnavailableError) as problem:
            trouble = f"retention_stopped: {problem}"
            self._say(trouble)
        self._said = self._said if trouble else ""
        return self._removed - removed

    def _oldest_ns(self) -> int | None:
        from proxy.audit.prune import oldest_ns  # noqa: PLC0415 - the verifier is not small

        return oldest_ns(self._directory)

    async def _pass(self, before_ns: int) -> None:
        from proxy.audit.prune import PruneRefusedError, steps, turn  # noqa: PLC0415

        writer = self._writer
        with turn(self._directory) as mine:
            found = steps(self._directory, writer.dir, before_ns) if mine else iter(())
            while True:
                try:
                    step: Step | None = await asyncio.to_thread(next, found, None)
                except PruneRefusedError as problem:
                    raise AuditError(str(problem)) from None
                if step is None:
                    return
                ticket = writer.append("pruned", step.kept.members(writer.origin))
                await writer.durable(ticket)
                writer.stats.pruned_bytes += await asyncio.to_thread(step.remove)
                writer.stats.pruned_records += step.records
                self._removed += 1
                log.info("audit: removed %s/%s", step.chain.name, step.segment.name)

    def _say(self, text: str) -> None:
        """Write an alarm record and a line in the log, once for each trouble."""
        kind = text[:12]  # the figures in it change
        if kind != self._said:
            self._said = kind
            log.error("audit: %s", text)
            self._writer.append("alarm", {"what": text})
