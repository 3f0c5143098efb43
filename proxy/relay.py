"""One request between two connections: the shell around `exchange` and `answer`.

It takes the request from its client connection (in clear, or sealed and then opened), leases an
upstream connection of the class's pool, hands the answer back as it comes and closes the exchange
exactly once: place given back, counted, recorded. It decides nothing that a table can decide.

A body up to `limits.collect_bytes` is read whole before a connection is leased, so a slow upload
holds no upstream and a refused connection can be tried elsewhere; a larger one streams through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.errors import ERRORS, RequestError
from proxy.exchange import Action, End, Progress, closing
from proxy.http.chunked import LAST_CHUNK, frame
from proxy.intake import SealedIntake, SealedRefusalError, request_head
from proxy.qos.classes import UnknownClassError, classify
from proxy.replier import MESSAGES, Replier

if TYPE_CHECKING:
    from proxy.context import Context, Tenant
    from proxy.http.http1 import RequestHead, ResponseHead
    from proxy.qos.pools import Endpoint, PoolState
    from proxy.server import Downstream
    from proxy.upstream import UpstreamConnection


NONE_TRIED: frozenset[str] = frozenset()


class Relay(Replier):
    """One request, from its head to its record: the layer that takes it and sends it on."""

    _intake: SealedIntake | None = None
    _body_bytes = 0
    _body_whole = False
    _streaming = False
    _upstream_chunked = False
    _payload = b""
    _tenant: Tenant
    _place: PoolState | None = None
    _endpoint: Endpoint | None = None
    _connection: UpstreamConnection | None = None
    _tried = NONE_TRIED
    _retried = False
    _unread = 0  # what a slow client had not taken when last looked at

    def __init__(
        self, context: Context, downstream: Downstream, head: RequestHead, now_ns: int
    ) -> None:
        self.context = context
        self.shared = context.observing
        self.downstream = downstream
        self.request = head
        self.door = downstream.door
        self.method = head.method
        self.target = head.target
        self.start_ns = now_ns
        self._pieces: list[bytes] = []
        self._out = []

    # -- the request

    def open(self) -> None:
        """Take the head: class and place, or the envelope's outer form. Raises RequestError."""
        context, head = self.context, self.request
        limit = context.settings.limits.body_bytes
        sealed = self.downstream.door == "sealed"
        if sealed:
            if context.draining:
                raise RequestError("draining", "this sidecar takes no new sealed requests")
            self._intake = SealedIntake(context, self.downstream.peer, head)
        if head.content_length is not None and head.content_length > limit:
            raise _too_large(context, limit)
        if not sealed:
            self.tenant = context.settings.identity.tenant
            qos = head.fields.get(b"x-qos-class")
            self._admit(qos, repeated=b"x-qos-class" in head.repeated)

    def _admit(self, asked: bytes | None, *, repeated: bool) -> None:
        context = self.context
        self.trace_id = context.trace_ids.next(context.clock.wall_ms())
        self.traceparent = context.traceparent(self.request.fields.get(b"traceparent"))
        tenant = self._tenant = context.tenant(self.tenant)
        verdict = tenant.known.get(asked)
        if verdict is None or repeated:
            settings = context.settings.qos
            try:
                verdict = classify(
                    asked,
                    repeated=repeated,
                    default=settings.default_class,
                    reject_unknown=settings.on_unknown == "reject",
                    max_class=tenant.max_class,
                )
            except UnknownClassError as problem:
                raise RequestError("invalid_request", str(problem), param="X-QoS-Class") from None
        qos = self.qos = verdict.qos
        self.pool = verdict.pool
        if verdict.capped:
            self.asked = "P0" if asked is None else asked.decode("latin-1").upper()
        self.use_key(tenant.prompt_key)
        context.counters.started[qos] += 1
        if context.audit_blocked():
            raise RequestError("audit_unavailable", "no audit record can be written")
        pool = context.pools[verdict.pool]
        if not pool.admit(context.inflight_bound[qos]):
            context.counters.queue_full[qos] += 1
            raise RequestError("queue_full", f"pool {verdict.pool} has no place left")
        self._place = pool

    def body_data(self, data: bytes) -> None:
        """Take request body bytes. Raises RequestError."""
        self._body_bytes += len(data)
        limit = self.context.settings.limits.body_bytes
        if self._body_bytes > limit:
            raise _too_large(self.context, limit)
        if self._intake is not None:
            self._intake.feed(data)
            return
        if self._streaming:
            self.observe_piece(data)
            self._send_piece(data)
            return
        self._pieces.append(data)
        if self._body_bytes > self.context.settings.limits.collect_bytes:
            self._stream_request()

    def body_end(self) -> None:
        """Note that the request is whole. Raises RequestError."""
        self._body_whole = True
        self.request_body_bytes = self._body_bytes
        if self._streaming:
            self.observe_whole()
            self._send_piece(LAST_CHUNK if self._upstream_chunked else b"", framed=True)
            return
        if self._intake is not None:
            body, fields = self._open_envelope(self._intake)
            kind = self._intake.content_type
        else:
            pieces = self._pieces
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            fields = self.request.fields
            kind = fields.get(b"content-type", b"")
        self._pieces = []
        context, intake, tenant = self.context, self._intake, self._tenant
        assert tenant is not None
        pool = context.pool_settings[self.pool]
        body = self.observe_request(body, kind, ask_ids=pool.token_ids)
        lines = self.request.lines if intake is None else intake.lines
        head = request_head(context, self, tenant, fields, lines)
        has_body = body or self.method not in {b"GET", b"HEAD", b"DELETE", b"OPTIONS"}
        length = b"Content-Length: %d\r\n\r\n" % len(body) if has_body else b"\r\n"
        self._payload = head + length + body
        self._lease()

    def _open_envelope(self, intake: SealedIntake) -> tuple[bytes, dict[bytes, bytes]]:
        """Open it; from here on every answer is sealed."""
        opened = intake.finish()
        self.sealer = opened.sealer
        self.tenant = opened.tenant
        self.method = opened.method.encode()
        self.target = opened.target.encode()
        if opened.method in {"CONNECT", "TRACE"}:
            raise RequestError("method_not_allowed", f"{opened.method} is not forwarded")
        self.envelope = intake.facts(opened)
        self._admit(opened.qos.strip(" ").encode() or None, repeated=False)
        intake.release()
        return opened.body, self.request.fields

    def _stream_request(self) -> None:
        """Send a large body through as it comes; it cannot be sent a second time."""
        request = self.request
        self._streaming = True
        self._upstream_chunked = request.content_length is None
        kind = request.fields.get(b"content-type", b"")
        self.observe_begins(self._pieces, kind)
        tenant = self._tenant
        assert tenant is not None
        head = request_head(self.context, self, tenant, request.fields, request.lines)
        if self._upstream_chunked:
            self._pieces = [frame(piece) for piece in self._pieces]
            self._payload = head + b"Transfer-Encoding: chunked\r\n\r\n"
        else:
            length = request.content_length or 0
            self._payload = head + b"Content-Length: %d\r\n\r\n" % length
        self.downstream.hold_body(hold=True)
        self._lease()

    def _send_piece(self, data: bytes, *, framed: bool = False) -> None:
        if self._upstream_chunked and not framed:
            data = frame(data)
        if self._connection is None:
            self._pieces.append(data)
            return
        if data:
            self._connection.write(data)
        if self._body_whole:
            self._request_sent()

    # -- the upstream

    def _lease(self) -> None:
        pool = self._place
        assert pool is not None
        endpoint = pool.pick(self.context.clock.mono_ns(), self._tried)
        if endpoint is None:
            self._close(End.NO_UPSTREAM)
            return
        self._endpoint = endpoint
        endpoint.outstanding += 1
        self.context.upstreams[pool.name].lease(endpoint, self)

    def _return_endpoint(self) -> None:
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.outstanding -= 1
            self._endpoint = None

    def upstream_ready(self, connection: UpstreamConnection) -> None:
        """See `Lessee`."""
        if self.closed:
            connection.give_back()
            return
        self._connection = connection
        self.dispatch_ns = self.context.clock.mono_ns()
        self.progress = Progress.WAITING
        if not self._streaming:
            connection.write(self._payload)
            self._request_sent()
            return
        pieces, self._pieces = self._pieces, []
        connection.write(b"".join((self._payload, *pieces)))
        if self._body_whole:
            self._request_sent()
        elif not connection.unsent():
            self.downstream.hold_body(hold=False)

    def _request_sent(self) -> None:
        context, connection = self.context, self._connection
        if connection is not None:
            connection.request_whole = True
        self.downstream.deadline_ns = context.clock.mono_ns() + context.times.first_byte_ns

    def upstream_refused(self, endpoint: Endpoint) -> None:
        """See `Lessee`: another endpoint may take it; nothing was sent."""
        context = self.context
        pool = self._place
        if pool is not None:
            pool.refuse(endpoint, context.clock.mono_ns())
        self._return_endpoint()
        if not self.closed:
            self._tried |= {endpoint.url}
            self._lease()

    def upstream_writable(self, *, writable: bool) -> None:
        """See `Lessee`."""
        self.downstream.hold_body(hold=not writable)

    def upstream_lost(self, end: End, *, answered: bool) -> None:
        """See `Lessee`. Sent again only if provably nothing was processed."""
        connection, self._connection = self._connection, None
        pool = self.context.pool_settings[self.pool]
        if (
            end is End.UPSTREAM_RESET
            and not answered
            and not self._retried
            and not self._streaming
            and connection is not None
            and connection.reused
            and pool.repeatable
        ):
            self._retried = True
            self.context.counters.retries += 1
            self._return_endpoint()
            self._lease()
            return
        self._close(end)

    def upstream_head(self, head: ResponseHead) -> None:
        """See `Lessee`."""
        self.status = head.status
        self.observe_answer(head)
        self.answer_begins(head)

    def upstream_body(self, data: bytes) -> None:
        """See `Lessee`."""
        context = self.context
        now_ns = context.clock.mono_ns()
        if not self.first_byte_ns:
            self.first_byte_ns = now_ns
        downstream = self.downstream
        if not downstream.write_paused:
            downstream.deadline_ns = now_ns + context.times.stream_idle_ns
        self.answered_bytes += len(data)
        self.answer_data(self.observe_data(data))

    def upstream_pause(self) -> None:
        """See `Lessee`."""
        self.flush()

    def upstream_end(self) -> None:
        """See `Lessee`: the answer is whole."""
        self._connection = None
        self.answer_ends()
        self._close(End.ANSWERED)

    # -- the client

    def client_gone(self) -> None:
        """The client left: the upstream is cancelled at once, also before its first byte."""
        self._close(End.CLIENT_GONE)

    def client_writable(self, *, writable: bool) -> None:
        """Pause or go on with the upstream: the client reads slowly."""
        now_ns, times = self.context.clock.mono_ns(), self.context.times
        connection = self._connection
        if writable:
            self.downstream.deadline_ns = now_ns + times.stream_idle_ns
            if connection is not None:
                connection.resume()
        else:
            self.downstream.deadline_ns = now_ns + times.client_stall_ns
            self._unread = self.downstream.unread()
            if connection is not None:
                connection.pause()

    def on_deadline(self) -> None:
        """A wait took too long: the client's, or the upstream's."""
        context, downstream = self.context, self.downstream
        hits = context.counters.limit_hits
        if downstream.write_paused:
            unread = downstream.unread()
            if unread < self._unread:  # slow, but it reads
                self._unread = unread
                downstream.deadline_ns = context.clock.mono_ns() + context.times.client_stall_ns
                return
            hits["timeouts.client_stall_s"] += 1
            self._close(End.CLIENT_STALLED)
            return
        first = not self.first_byte_ns
        hits["timeouts.first_byte_s" if first else "timeouts.stream_idle_s"] += 1
        self._close(End.UPSTREAM_TIMEOUT)

    def check_total(self, now_ns: int) -> None:
        """Close when the request took longer than `timeouts.request_total_s` in all."""
        if now_ns - self.start_ns >= self.context.times.request_total_ns:
            self.context.counters.limit_hits["timeouts.request_total_s"] += 1
            self._close(End.UPSTREAM_TIMEOUT)

    def expire(self) -> None:
        """The drain grace is over."""
        self._close(End.DRAIN_EXPIRED)

    # -- the end

    def refuse(self, problem: RequestError, *, keep: bool) -> None:
        """End with an answer of our own, decided before the upstream answered."""
        if self.closed:
            return
        if isinstance(problem, SealedRefusalError):
            self.sealer = problem.sealer
        if self.progress >= Progress.BEGUN:
            # The upstream answered early and the rest of the request went wrong.
            self._close(End.REQUEST_FAILED)
            return
        self.status = problem.kind.status
        self._finish(problem.kind.outcome)
        self.reply(problem, keep=keep)

    def _close(self, end: End) -> None:
        """End the exchange as the table says; a second end of the same request is ignored."""
        downstream = self.downstream
        if self.closed:
            return
        if end is End.ANSWERED:
            self.progress = Progress.DONE
            self._finish("ok")
            self.hand_back()
            return
        verdict = closing(
            end,
            self.progress,
            event_stream=self.event_stream,
            between_events=self.between_events,
        )
        code = verdict.code or ""
        if verdict.action is Action.REPLY:
            self.status = ERRORS[code].status
        self._finish(verdict.outcome)
        if verdict.action is Action.REPLY:
            self.reply(RequestError(code, MESSAGES[code]), keep=True)
        elif verdict.action is Action.EVENT:
            self.error_event(code)
            self.hand_back()
        elif verdict.action is Action.CUT:
            self.flush()
            stalled = end is End.CLIENT_STALLED
            downstream.cut(reset=stalled or self.ends_by_close)

    def _finish(self, outcome: str) -> None:
        """Free what is held, count, record; runs once for each self."""
        context = self.context
        self.finish()
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None
        self._return_endpoint()
        if self._place is not None:
            self._place.release()
            self._place = None
        if self._intake is not None:
            self._intake.release()
        now_ns = context.clock.mono_ns()
        context.record(self, outcome, now_ns)


def _too_large(context: Context, limit: int) -> RequestError:
    context.counters.limit_hits["limits.body_bytes"] += 1
    return RequestError(
        "payload_too_large", f"the request body is larger than {limit} bytes (limits.body_bytes)"
    )
