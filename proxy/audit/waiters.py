"""Who waits until a record is durable. On the loop; bounded by the requests in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.audit.setup import AuditUnavailableError

if TYPE_CHECKING:
    import asyncio


class Waiters:
    """Futures by ticket."""

    __slots__ = ("_loop", "_rows")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rows: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def none(self) -> bool:
        """Say whether nobody waits."""
        return not self._rows

    def durable(self, ticket: int) -> asyncio.Future[None]:
        """Return what is done when the record is durable, or has `AuditUnavailableError`."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._rows.append((ticket, future))
        return future

    def wake(self, durable_ticket: int, *, failed: bool) -> None:
        """Wake whoever has what they wait for; where the disk failed, all."""
        if not self._rows:
            return
        waiting = []
        for ticket, future in self._rows:
            if future.done():
                continue
            if ticket <= durable_ticket:
                future.set_result(None)
            elif failed:
                future.set_exception(AuditUnavailableError("the audit chain cannot be written now"))
            else:
                waiting.append((ticket, future))
        self._rows = waiting
