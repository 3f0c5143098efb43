"""A request that waits until its `open` record is on disk, and is then sent on (`audit.sync`).

Only classes with `audit.sync.* = "request"` come here. A wait ends exactly once: the record is
durable, it cannot be (`failed`), `audit.sync.wait_s` is over (`late`), or the request has ended
meanwhile (`left`), which sends nothing on. What `failed` and `late` mean is policy's
(`audit.on_failure`), not decided here.

Bounds: one wait for each request in flight; what is not durable is bounded by the chain (`room`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from proxy.audit.setup import AuditError, AuditUnavailableError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.audit.writer import AuditWriter
    from proxy.context import Context
    from proxy.qos.classes import QosClass

Result = Literal["durable", "failed", "late", "left"]

log = logging.getLogger(__name__)


class Opening:
    """See the module. On the data loop."""

    __slots__ = ("_begun_ns", "_context", "_ended", "_future", "_qos", "_timer", "_told")

    def __init__(self, context: Context, qos: QosClass, told: Callable[[bool], None]) -> None:
        """`told` is called once, with whether the record is durable; never when it was left."""
        self._context = context
        self._qos: QosClass = qos
        self._told = told
        self._ended = False
        self._future: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begun_ns = context.clock.mono_ns()
        context.counters.opening += 1

    def begin(self, audit: AuditWriter, trace_id: str, tenant: str, traceparent: bytes) -> None:
        """Append the record and wait; where it cannot be written `told` is called before return."""
        context = self._context
        members = {
            "trace_id": trace_id,
            "tenant": tenant,
            "qos": self._qos,
            "traceparent": traceparent.decode("latin-1"),
        }
        try:
            future = audit.when_durable(audit.append("open", members))
        except AuditUnavailableError:
            self._end("failed")
            return
        except AuditError as problem:
            audit.stats.failures += 1
            log.error("an open record that could not be chained: %s", problem)  # noqa: TRY400
            self._end("failed")
            return
        self._future = future
        self._timer = context.loop.call_later(context.settings.audit.sync.wait_s, self._late)
        future.add_done_callback(self._written)

    def leave(self) -> None:
        """End the wait: its request has ended."""
        if not self._ended:
            self._end("left")

    def _written(self, future: asyncio.Future[None]) -> None:
        durable = not future.cancelled() and future.exception() is None
        if not self._ended:
            self._end("durable" if durable else "failed")

    def _late(self) -> None:
        if not self._ended:
            self._end("late")

    def _end(self, result: Result) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._future is not None:
            self._future.cancel()
        context, qos = self._context, self._qos
        counters = context.counters
        counters.opening -= 1
        counters.opens[qos, result] += 1
        counters.open_wait[qos].add(context.clock.mono_ns() - self._begun_ns)
        if result != "left":
            self._told(result == "durable")
