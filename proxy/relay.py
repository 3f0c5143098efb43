"""One request between two connections: the shell around `exchange` and `answer`.

It takes the request from its client connection (in clear, or sealed and then opened), leases an
upstream connection of the class's pool, hands the answer back as it comes and closes the exchange
exactly once: place given back, counted, recorded. It decides nothing that a table can decide.

A body up to `limits.collect_bytes` is read whole before a connection is leased, so a slow upload
holds no upstream and a refused connection can be tried elsewhere; a larger one streams through.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from proxy.errors import ERRORS, RequestError
from proxy.exchange import Action, End, Progress, closing
from proxy.http.chunked import LAST_CHUNK, frame
from proxy.intake import SealedRefusalError
from proxy.lending import Lending
from proxy.reception import too_large
from proxy.replier import MESSAGES, Client
from proxy.tunnel import Tunnel

if TYPE_CHECKING:
    from proxy.context import Context
    from proxy.errors import Outcome
    from proxy.http.http1 import RequestHead, ResponseHead
    from proxy.upstream import UpstreamConnection


_ACCEPT_ENCODING = re.compile(rb"(?i)(?:(?<=\n)|^)accept-encoding:[^\r\n]*\r\n")
_NO_BODY_EXPECTED = frozenset((b"GET", b"HEAD", b"DELETE", b"OPTIONS"))


class Relay(Lending):
    """One request, from its head to its record: the layer that takes it and sends it on."""

    _upstream_chunked = False
    _upgrade = b""  # the protocols that the upstream was asked to switch to
    _unread = 0  # what a slow client had not taken when last looked at

    def __init__(
        self, context: Context, downstream: Client, head: RequestHead, now_ns: int
    ) -> None:
        super().__init__()
        self.context = context
        self.shared = context.observing
        self.downstream = downstream
        self.request = head
        self.door = downstream.door
        self.method = head.method
        self.target = head.target
        self.start_ns = now_ns
        self._pieces = []
        self._out = []

    # -- the request

    def body_data(self, data: bytes) -> None:
        """Take request body bytes. Raises RequestError."""
        context = self.context
        self.request_body_bytes += len(data)
        if self.request_body_bytes > context.body_bytes_max:
            raise too_large(context)
        if self._intake is not None:
            self._intake.feed(data, self)
        elif self._streaming:
            self.observe_piece(data)
            self._send_piece(data)
        else:
            self._pieces.append(data)
            if self._undecided is not None and not self._glimpse(self._pieces, whole=False):
                return
            if self.request_body_bytes > context.collect_bytes:
                self._stream_request()

    def body_end(self) -> None:
        """Note that the request is whole. Raises RequestError."""
        self._body_whole = True
        if self._streaming:
            self.observe_whole()
            self._send_piece(LAST_CHUNK if self._upstream_chunked else b"", framed=True)
            return
        intake = self._intake
        if intake is not None:
            opened = intake.finish(self)
            if opened is None:
                return  # see `envelope_ready`
            body = self._open_envelope(intake, opened)
            lines = intake.lines
        else:
            pieces = self._pieces
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            lines = self.request.lines
            if self._undecided is not None:
                self._glimpse(pieces, whole=True)
        self._pieces = []
        if body:
            body = self.observe_request(body, ask_ids=self.lane.route.settings.token_ids)
            framing = b"Content-Length: %d\r\n\r\n" % len(body)
            if self.changes_length:  # a compressed answer could not be cut
                lines = _ACCEPT_ENCODING.sub(b"", lines)
        elif self.method in _NO_BODY_EXPECTED:
            framing = b"\r\n"
        else:
            framing = b"Content-Length: 0\r\n\r\n"
        upgrade = self.request.upgrade
        if upgrade is not None and intake is None:
            self._upgrade = upgrade
            framing = b"Connection: upgrade\r\nUpgrade: %b\r\n%b" % (upgrade, framing)
        if self.lane.seals:
            self.prepare_to_seal(body)
        else:
            self._payload = self._head(lines, framing) + body
        if self.lane.overflow is not None:
            self._parts = lines, framing, body
        if self._enter(body):
            self._go_on()

    def envelope_ready(self) -> None:
        """See `Waiter`: the signature was verified, or the shared store has answered."""
        intake = self._intake
        if self.closed or intake is None:
            return
        try:
            if self._body_whole:
                self.body_end()
            elif intake.problem is not None:
                self.refuse(intake.problem, keep=False)
        except RequestError as problem:
            self.refuse(problem, keep=True)

    def _stream_request(self) -> None:
        """Send a large body through as it comes; it cannot be sent a second time."""
        request, lane = self.request, self.lane
        if lane.may_seal and self.hold_to_seal():
            return
        self._streaming = True
        if lane.seals:
            self.observe_begins(self._pieces)
            self.prepare_to_seal(b"")
            self.downstream.hold_body(hold=True)
            if self._enter(b""):
                self._go_on()
            return
        self._upstream_chunked = request.content_length is None
        self.observe_begins(self._pieces)
        if self._upstream_chunked:
            self._pieces = [frame(piece) for piece in self._pieces]
            framing = b"Transfer-Encoding: chunked\r\n\r\n"
        else:
            framing = b"Content-Length: %d\r\n\r\n" % (request.content_length or 0)
        self._payload = self._head(request.lines, framing)
        if lane.overflow is not None:
            self._parts = request.lines, framing, b""
        self.downstream.hold_body(hold=True)
        if self._enter(b""):
            self._go_on()

    def _send_piece(self, data: bytes, *, framed: bool = False) -> None:
        if self._to_seal is not None:
            self.send_sealed_piece(data)
            return
        if self._upstream_chunked and not framed:
            data = frame(data)
        if self._connection is None:
            self._pieces.append(data)
            return
        if data:
            self._connection.write(data)
        if self._body_whole:
            self._request_sent()

    # -- the answer

    def upstream_head(self, head: ResponseHead) -> None:
        """See `Lessee`."""
        status = self.status = head.status
        if 502 <= status <= 504:
            self._fault = True
        elif self._probe:
            self._passed()
        if self._intake is not None:
            self._intake.release()  # the upstream has taken the body
        self.observe_answer(head)
        self.answer_begins(head)

    def upstream_whole(self, head: ResponseHead, body: bytes) -> None:
        """See `Lessee`."""
        self._connection = None
        status = self.status = head.status
        if 502 <= status <= 504:
            self._fault = True
        self.observe_answer(head)
        if self.sealer is not None or self.event_stream or self.changes_length or head.bodiless:
            self.answer_begins(head)
            self.upstream_body(body)
            self.answer_ends()
        else:
            now_ns = self.first_byte_ns = self.context.clock.mono_ns()
            place = self._place
            if place is not None and place.gate.inflight > place.gate.watch:
                self._answer_began(place, now_ns)
            self.answered_bytes = len(body)
            self.answer_whole(head, self.observe_data(body))
        self._close(End.ANSWERED)

    def upstream_body(self, data: bytes) -> None:
        """See `Lessee`."""
        context = self.context
        now_ns = context.clock.mono_ns()
        if not self.first_byte_ns:
            self.first_byte_ns = now_ns
            place = self._place
            if place is not None and place.gate.inflight > place.gate.watch:
                self._answer_began(place, now_ns)
        downstream = self.downstream
        if not downstream.write_paused:
            downstream.deadline_ns = now_ns + context.times.stream_idle_ns
        self.answered_bytes += len(data)
        self.answer_data(self.observe_data(data))

    def upstream_pause(self) -> None:
        """See `Lessee`."""
        self.flush()
        if self.event_stream:
            self.lend()

    def upstream_end(self) -> None:
        """See `Lessee`: the answer is whole."""
        self._connection = None
        head = self.answer_head
        framed = head is None or head.chunked or head.content_length is not None
        if self.event_stream and not framed and not self.between_events:
            # Only its end delimits it, and that came inside an event.
            self._fault = True
            self._close(End.UPSTREAM_RESET)
            return
        self.answer_ends()
        self._close(End.ANSWERED)

    # -- a tunnel

    def may_switch(self, head: ResponseHead) -> bool:
        """See `Lessee`. To nothing but what was asked for (RFC 9110 section 7.8)."""
        asked = {name.strip(b" \t") for name in self._upgrade.lower().split(b",")}
        return head.upgrade is not None and head.upgrade.lower() in asked

    def upstream_switches(
        self, connection: UpstreamConnection, head: ResponseHead, early: bytes
    ) -> None:
        """See `Lessee`: from here on bytes pass both ways, and `tunnel_ended` is the end."""
        context, downstream = self.context, self.downstream
        self._connection = None
        self.status = head.status
        if self._probe:
            self._passed()
        self.first_byte_ns = context.clock.mono_ns()
        upstream = connection.hand_over(), connection.write_paused
        transport, from_client = downstream.hand_over()
        client = transport, downstream.write_paused
        tunnel = Tunnel(context, self, context.connections[self.door], client, upstream)
        tunnel.start(self.switch_head(head), from_client, early)

    def tunnel_ended(self, end: End, *, sent: int, received: int) -> None:
        """See `Tunnelled`."""
        self.tunnelled = sent, received
        self.request_body_bytes += sent
        self.answered_bytes += received
        if end is End.ANSWERED:
            self.progress = Progress.DONE
        verdict = closing(end, self.progress, event_stream=False, between_events=False)
        self._finish(verdict.outcome)

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
        if self._ticket is not None:
            self._run_out(self._ticket)
            return
        if not self.dispatch_ns and self._waited_too_long():
            return
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
        if self.is_lent and self.is_passing(context.clock.mono_ns()):
            return
        first = not self.first_byte_ns
        hits["timeouts.first_byte_s" if first else "timeouts.stream_idle_s"] += 1
        self._fault = True
        self._close(End.UPSTREAM_TIMEOUT)

    def check_total(self, now_ns: int) -> None:
        """Close when the request took longer than `timeouts.request_total_s` in all."""
        if self._intake is not None and not self._body_whole:
            try:
                self._intake.check_time()
            except RequestError as problem:
                self.refuse(problem, keep=False)
                return
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
        if self.is_lent:
            self.settle()
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
        code = verdict.code or "internal_error"  # actions that write have a code, by the table
        if verdict.action is Action.REPLY:
            self.status = ERRORS[code].status
        self._finish(verdict.outcome)
        if verdict.action is Action.REPLY:
            # Who drains comes back as another process, if at all.
            helps = code != "draining"
            self.reply(RequestError(code, MESSAGES[code], retry_helps=helps), keep=True)
        elif verdict.action is Action.EVENT:
            self.error_event(code)
            self.hand_back()
        elif verdict.action is Action.CUT:
            self.flush()
            stalled = end is End.CLIENT_STALLED
            downstream.cut(reset=stalled or self.ends_by_close)

    def _finish(self, outcome: Outcome) -> None:
        """Free what is held, count, record; runs once for each exchange."""
        self.finish()
        context = self.context
        connection = self._connection
        if connection is not None:
            self._connection = None
            connection.abandon()
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.outstanding -= self.cost
            self._endpoint = None
        if self._opening is not None:
            self._opening.leave()
            self._opening = None
        if self._intake is not None:
            self._intake.release()
        if self._to_seal is not None or self._sealing_held:
            self.give_back_sealing()
        now_ns = self.end_ns = context.clock.mono_ns()
        if endpoint is not None and (endpoint.watch or self._fault):
            self._report(endpoint, answered=outcome == "ok")
        counters = context.counters
        counters.request_bytes += self.request_body_bytes
        counters.answer_bytes += self.answered_bytes
        self._leave_place(now_ns)
        if self.trace_id:
            lane, start_ns = self.lane, self.start_ns
            self.qos, self.pool, self.asked = lane.qos, lane.route.name, lane.asked
            counters.outcomes[lane.qos, outcome] += 1
            lane.duration.add(now_ns - start_ns)
            if self.first_byte_ns:
                lane.first_byte.add(self.first_byte_ns - start_ns)
        recorder = context.recorder
        if recorder is not None and self.trace_id:
            recorder.add(self, outcome)
        else:
            # No audit; or refused before it was classed: counted as rejected, not recorded.
            if context.tracer is not None and self.trace_id:
                context.tracer.closed(self, outcome)
            self.release()
