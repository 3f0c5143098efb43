"""The data loop's end of tracing: decides at the end of a request, hands on what is kept.

A kept request whose record is on its way to the disk waits for that, so that its spans tell how
long it took. Nothing here blocks, and nothing is imported of OpenTelemetry.

Bounds: `tracing.queue` requests that wait for the disk, as many that wait for the collector; what
finds no room is dropped, and counted (`Outbox`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from proxy.spans.finished import Finished, finished
from proxy.spans.sampling import WHYS, bound_of, why_kept

if TYPE_CHECKING:
    from proxy.clock import Clock
    from proxy.config import Tracing
    from proxy.observe import Observation
    from proxy.spans.outbox import Outbox

NO_RECORD = -2  # beside `audit.writer.LOST`: no chain is written


class Tracer:
    """See the module. Owned by the data loop."""

    def __init__(self, settings: Tracing, clock: Clock, outbox: Outbox) -> None:
        self.bound = bound_of(settings.ratio)
        self.outbox = outbox
        self.kept = dict.fromkeys(WHYS, 0)
        self._late_ns = settings.p0_late_ms * 1_000_000
        self._most = settings.queue
        self._clock = clock
        self._waiting: deque[tuple[int, Finished]] = deque()

    def closed(self, exchange: Observation, outcome: str, ticket: int = NO_RECORD) -> None:
        """Take a finished request, before what it holds is given back.

        `ticket`: what the audit writer returned for its record, LOST, or `NO_RECORD`.
        """
        why = why_kept(
            traceparent=exchange.traceparent,
            outcome=outcome,
            status=exchange.status,
            qos=exchange.qos,
            first_byte_ns=(exchange.first_byte_ns or exchange.end_ns) - exchange.start_ns,
            late_ns=self._late_ns,
            bound=self.bound,
        )
        if why is None:
            return
        self.kept[why] += 1
        offset_ns = self._offset_ns()
        done = finished(exchange, outcome, why, offset_ns)
        if ticket == NO_RECORD:
            self.outbox.put(done)
            return
        done.recorded_ns = self._clock.wall_ns()
        done.lost = ticket < 0
        if done.lost:
            self.outbox.put(done)
            return
        self._waiting.append((ticket, done))
        if len(self._waiting) > self._most:  # the disk does not take them
            self._give_up()

    def durable(self, ticket: int) -> None:
        """Hand on all whose record is on disk: up to this ticket."""
        waiting = self._waiting
        if not waiting or waiting[0][0] > ticket:
            return
        now_ns = self._clock.wall_ns()
        while waiting and waiting[0][0] <= ticket:
            done = waiting.popleft()[1]
            done.durable_ns = now_ns
            self.outbox.put(done)

    @property
    def pending(self) -> int:
        """How many wait, for the disk or for the collector."""
        return len(self._waiting) + len(self.outbox)

    def close(self) -> None:
        """Hand on what still waits: its records did not get to the disk."""
        while self._waiting:
            self._give_up()

    def _offset_ns(self) -> int:
        return self._clock.wall_ns() - self._clock.mono_ns()

    def _give_up(self) -> None:
        done = self._waiting.popleft()[1]
        done.lost = True
        self.outbox.put(done)
