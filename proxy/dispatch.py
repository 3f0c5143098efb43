"""Sending a request on: an endpoint of its pool, a connection to it, and again where that is safe.

The layer between taking a request (`Reception`) and its answer (`Relay`): it leases a connection,
writes the request and decides, when that fails before an answer, whether it may be sent again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.exchange import End, Progress
from proxy.reception import Reception

if TYPE_CHECKING:
    from proxy.http.http1 import ResponseHead
    from proxy.qos.pools import Endpoint
    from proxy.upstream import UpstreamConnection

WAITING = Progress.WAITING
NONE_TRIED: frozenset[str] = frozenset()


class Dispatch(Reception):
    """The layer that sends a request on. `_payload` is all of it, or its head and first bytes."""

    _body_whole = False
    _streaming = False
    _payload = b""
    _pieces: list[bytes]  # of a body that waits: to be whole, or for a connection
    _endpoint: Endpoint | None = None
    _connection: UpstreamConnection | None = None
    _tried = NONE_TRIED
    _retried = False

    # -- what `Relay` does with an answer, or with none

    def upstream_head(self, head: ResponseHead) -> None:
        """See `Lessee`."""

    def may_switch(self, head: ResponseHead) -> bool:
        """See `Lessee`."""
        raise AssertionError(head.status)

    def upstream_switches(
        self, connection: UpstreamConnection, head: ResponseHead, early: bytes
    ) -> None:
        """See `Lessee`."""

    def upstream_whole(self, head: ResponseHead, body: bytes) -> None:
        """See `Lessee`."""

    def upstream_body(self, data: bytes) -> None:
        """See `Lessee`."""

    def upstream_pause(self) -> None:
        """See `Lessee`."""

    def upstream_end(self) -> None:
        """See `Lessee`."""

    def _close(self, end: End) -> None:
        """End the exchange as the table says."""

    # -- a connection, and the request on it

    def _lease(self) -> None:
        route, now_ns = self.lane.route, self.context.clock.mono_ns()
        endpoint = route.state.pick(now_ns, self._tried)
        if endpoint is None:
            self._close(End.NO_UPSTREAM)
            return
        self._endpoint = endpoint
        endpoint.outstanding += 1
        connection = route.upstreams.idle(endpoint)
        if connection is None:
            route.upstreams.connect(endpoint, self)
        else:
            connection.lessee = self
            self._send(connection, now_ns)

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
        if self._streaming:
            pieces, self._pieces = self._pieces, []
            connection.write(b"".join((self._payload, *pieces)))
            if not self._body_whole:
                if not connection.write_paused:
                    self.downstream.hold_body(hold=False)
                return
        else:
            connection.write(self._payload)
        connection.request_whole = True
        self.downstream.deadline_ns = now_ns + self.context.times.first_byte_ns

    def _request_sent(self) -> None:
        context, connection = self.context, self._connection
        if connection is not None:
            connection.request_whole = True
        self.downstream.deadline_ns = context.clock.mono_ns() + context.times.first_byte_ns

    def _return_endpoint(self) -> None:
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.outstanding -= 1
            self._endpoint = None

    def upstream_refused(self, endpoint: Endpoint) -> None:
        """See `Lessee`: another endpoint may take it; nothing was sent."""
        self.lane.route.state.refuse(endpoint, self.context.clock.mono_ns())
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
        if (
            end is End.UPSTREAM_RESET
            and not answered
            and not self._retried
            and not self._streaming
            and connection is not None
            and connection.reused
            and self.lane.route.settings.repeatable
        ):
            self._retried = True
            self.context.counters.retries += 1
            self._return_endpoint()
            self._lease()
            return
        self._close(end)
