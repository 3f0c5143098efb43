"""From finished exchanges to audit records, some at a time.

A finished exchange waits here, at most `WAIT_S` or until `BATCH` of them have come; then hashes,
parsed usage and records are made in one go. The work is the same, but done in one tight loop it
costs half the CPU of doing it between two packets. One that comes alone does not wait: nothing
would share its wake-up. Order is the order of ends.

Bounds: `BATCH` exchanges; the bodies they hold count against `audit.observed_bytes`. A record that
the chain refuses is logged, counted as a failure, and does not take the others with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.audit.request import request_text
from proxy.exchange import PHASE_NAMES

if TYPE_CHECKING:
    import asyncio

    from proxy.audit.writer import AuditWriter
    from proxy.observe import Observation
    from proxy.spans.tracer import Tracer

WAIT_S = 0.004
BATCH = 64


class Recorder:
    """See the module. Owned by the data loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, audit: AuditWriter, tracer: Tracer | None = None
    ) -> None:
        self._loop = loop
        self._audit = audit
        self._tracer = tracer
        self._waiting: list[tuple[Observation, str]] = []
        self._timer: asyncio.Handle | None = None
        self._flushed_s = 0.0

    def add(self, exchange: Observation, outcome: str) -> None:
        """Take a finished exchange."""
        waiting = self._waiting
        waiting.append((exchange, outcome))
        if len(waiting) >= BATCH:
            self.flush()
        elif self._timer is None:
            loop = self._loop
            if loop.time() - self._flushed_s < WAIT_S:
                self._timer = loop.call_later(WAIT_S, self.flush)
            else:
                self._timer = loop.call_soon(self.flush)

    def flush(self) -> None:
        """Append a record for each exchange that waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flushed_s = self._loop.time()
        waiting, self._waiting = self._waiting, []
        texts, ids = [], []
        for exchange, outcome in waiting:
            exchange.complete()
            output_hash, output_len = exchange.output()
            since = exchange.since_start_us
            text = request_text(
                trace_id=exchange.trace_id,
                traceparent=exchange.traceparent.decode(),
                tenant=exchange.tenant,
                qos=exchange.qos,
                pool=exchange.pool,
                status=exchange.status,
                outcome=outcome,
                phase=PHASE_NAMES[exchange.progress],
                queue_us=since(exchange.dispatch_ns),
                first_byte_us=since(exchange.first_byte_ns),
                total_us=since(exchange.end_ns),
                qos_asked=exchange.asked or None,
                model=exchange.model,
                served_model=exchange.served_model,
                prompt_hash=exchange.prompt_hash,
                params_hash=exchange.params_hash,
                body_hash=exchange.body_hash,
                output_hash=output_hash,
                output_len=output_len,
                usage=exchange.usage(),
                tunnelled=exchange.tunnelled,
                envelope=exchange.envelope,
            )
            texts.append(text)
            ids.append(exchange.token_ids)
        tickets = self._audit.append_requests(texts, ids)
        tracer = self._tracer
        for number, (exchange, outcome) in enumerate(waiting):
            if tracer is not None:
                tracer.closed(exchange, outcome, tickets[number])
            exchange.release()
