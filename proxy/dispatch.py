"""Sending a request on: an endpoint of its pool, a connection to it, and again where that is safe.

The layer between taking a request (`Reception`; `Outbound`, where it is sealed on the way out) and
its answer (`Relay`): it asks the pool for an
endpoint, leases a connection, writes the request, and when that fails before an answer does what
the table in `retry` says. What an endpoint did is reported back to the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.errors import RequestError
from proxy.exchange import End, Progress
from proxy.outbound import Outbound
from proxy.retry import Attempt

if TYPE_CHECKING:
    from proxy.http.http1 import ResponseHead
    from proxy.lanes import Lane
    from proxy.qos.pools import Endpoint
    from proxy.upstream import UpstreamConnection

WAITING = Progress.WAITING
NONE_TRIED: frozenset[str] = frozenset()


class Dispatch(Outbound):
    """The layer that sends a request on. `_payload` is all of it, or its head and first bytes."""

    _payload = b""
    _endpoint: Endpoint | None = None
    _again = False  # it is being sent for the second time
    _probe = False  # it tries an endpoint that is not healthy
    _fault = False  # how it ended was the endpoint's fault
    # Lines, framing and body that the head was made of, where another pool may need another head.
    _parts: tuple[bytes, bytes, bytes] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._tried = NONE_TRIED

    # -- what `Relay` does with an answer, or with none

    def may_switch(self, head: ResponseHead) -> bool:
        """See `Lessee`."""
        raise AssertionError(head.status)

    def upstream_switches(
        self, connection: UpstreamConnection, head: ResponseHead, early: bytes
    ) -> None:
        """See `Lessee`."""

    def _close(self, end: End) -> None:
        """End the exchange as the table says."""

    # -- a connection, and the request on it

    def _lease(self) -> None:
        """Take an endpoint, and a connection to it that is idle or made now."""
        route, now_ns = self.lane.route, self.context.clock.mono_ns()
        if not self.place_ns:
            self.place_ns = now_ns
        endpoint = route.state.pick(now_ns, self._tried)
        if endpoint is None or endpoint.state:
            endpoint = self._second_look(endpoint, now_ns)
            if endpoint is None:
                return
        self._endpoint = endpoint
        endpoint.outstanding += self.cost
        connection = None if self._again else route.upstreams.idle(endpoint)
        if connection is None:
            route.upstreams.connect(endpoint, self)
            if not self.dispatch_ns:
                self._bound_wait(now_ns)
        else:
            connection.lessee = self
            self._send(connection, now_ns)

    def _second_look(self, endpoint: Endpoint | None, now_ns: int) -> Endpoint | None:
        """Return an endpoint that is not healthy if it is to be used; None: all is done here."""
        lane = self.lane
        if endpoint is not None and lane.route.state.probe(endpoint, now_ns):
            self._probe = True
            return endpoint
        overflow = lane.overflow
        if overflow is not None and self._spill(overflow):
            self._move(overflow)
            if not self.closed:
                self._lease()
            return None
        if endpoint is None:
            self._close(End.NO_UPSTREAM)
        return endpoint

    def _move(self, lane: Lane) -> None:
        """Let another pool serve it: its Host, its Authorization, its name in the answer."""
        self.lane = lane
        if self._parts is None:
            return  # no head was made yet
        lines, framing, body = self._parts
        if self.changes_length and not lane.route.settings.token_ids:
            asked, body = body, self.unask()
            length = b"Content-Length: %d\r\n"
            framing = framing.replace(length % len(asked), length % len(body))
        if not lane.seals:
            self._payload = self._head(lines, framing) + body
            return
        try:
            self.prepare_to_seal(body)
        except RequestError as problem:
            self.refuse(problem, keep=True)

    def upstream_ready(self, connection: UpstreamConnection) -> None:
        """See `Lessee`."""
        if self.closed:
            connection.give_back()
        else:
            self._send(connection, self.context.clock.mono_ns())

    def _send(self, connection: UpstreamConnection, now_ns: int) -> None:
        """Write the request, or what there is of it, to a leased connection."""
        self._connection = connection
        self.dispatch_ns = now_ns
        self.progress = WAITING
        if self._to_seal is not None or connection.endpoint.sealed:
            self.send_sealed(connection, now_ns)
            return
        if self._streaming:
            pieces, self._pieces = self._pieces, []
            connection.write(b"".join((self._payload, *pieces)))
            if not self._body_whole:
                if not connection.write_paused:
                    self.downstream.hold_body(hold=False)
                return
        else:
            transport = connection.transport
            assert transport is not None, "leased after it was lost"
            transport.write(self._payload)
            if transport.is_closing():  # the peer had reset it: nothing was taken
                connection.write_failed = True
        connection.request_whole = True
        self.downstream.deadline_ns = now_ns + self.context.times.first_byte_ns

    def _request_sent(self) -> None:
        context, connection = self.context, self._connection
        if connection is not None:
            connection.request_whole = True
        self.downstream.deadline_ns = context.clock.mono_ns() + context.times.first_byte_ns

    def upstream_writable(self, *, writable: bool) -> None:
        """See `Lessee`."""
        self.downstream.hold_body(hold=not writable)

    # -- how an attempt failed

    def upstream_refused(self, endpoint: Endpoint) -> None:
        """See `Lessee`: another endpoint may take it; nothing was sent."""
        route = self.lane.route
        route.state.refuse(endpoint, self.context.clock.mono_ns(), probe=self._probe)
        self._probe = False
        self._leave()
        if self.closed:
            return
        self._tried |= {endpoint.url}
        self._lease()
        if self._endpoint is not None:
            route.retries.made["refused"] += 1

    def upstream_lost(self, end: End, *, answered: bool, unwritten: bool) -> None:
        """See `Lessee`."""
        connection, self._connection = self._connection, None
        reused = connection is not None and connection.reused
        if end is End.UPSTREAM_RESET:
            attempt = Attempt(
                answered=answered,
                reused=reused,
                again=self._again,
                held=not self._streaming,
                unwritten=unwritten,
            )
            route = self.lane.route
            reason = route.retries.decide(
                attempt,
                repeatable=route.settings.repeatable,
                started=self.context.counters.started[route.qos],
            )
            if reason is not None:
                self.context.counters.retries += 1
                self._again = True
                self._leave()
                self._lease()
                return
        # An idle connection may end at any time: that says nothing about its server.
        self._fault = answered or not reused or end is not End.UPSTREAM_RESET
        self._close(end)

    def no_envelope(self, problem: RequestError, *, fault: bool) -> None:
        """See `Outbound`."""
        self._fault = self._fault or fault
        if self.progress > WAITING:
            self._close(End.UPSTREAM_ENVELOPE)
        else:
            self.refuse(problem, keep=True)

    # -- what the pool is told

    def _leave(self) -> None:
        """Give the endpoint's load back; nothing is known of how it does."""
        endpoint = self._endpoint
        if endpoint is None:
            return
        self._endpoint = None
        endpoint.outstanding -= self.cost
        if self._probe:
            self._probe = False
            self.lane.route.state.forgo(endpoint)

    def _report(self, endpoint: Endpoint, *, answered: bool) -> None:
        """Tell the pool how the endpoint did; `answered`: with a whole answer."""
        state, now_ns = self.lane.route.state, self.end_ns
        if self._fault:
            state.fail(endpoint, now_ns, probe=self._probe)
        elif answered:
            latency_ns = self.first_byte_ns - self.dispatch_ns if self.first_byte_ns else 0
            state.answer(endpoint, now_ns, latency_ns, probe=self._probe)
        elif self._probe:
            state.forgo(endpoint)
        self._probe = False

    def _passed(self) -> None:
        """Note that the endpoint has answered the request that tries it, before its answer ends."""
        self._probe = False
        if self._endpoint is not None:
            self.lane.route.state.answer(self._endpoint, self.context.clock.mono_ns(), probe=True)
