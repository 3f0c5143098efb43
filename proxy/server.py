"""The doors: client connections and their requests, one after the other.

A connection reads a head, hands it to a `Relay`, feeds it the body and waits until the relay says
that the answer is whole; pipelined requests wait in the buffer. What the client is owed on each
error is the relay's or the error table's business; this file only knows how to read, `outlet` how
to write.

Bounds: connections per door; buffered bytes by the head limit. One timer serves all connections:
every state has a deadline, checked by `tick`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from proxy.errors import RequestError
from proxy.gateways import is_gateway
from proxy.http.chunked import ChunkError, ChunkReader
from proxy.http.http1 import HeadError, RequestHead, parse_request
from proxy.outlet import NEVER_NS, Outlet, State
from proxy.relay import Relay
from proxy.sockets import peer_left, reset, untaken

if TYPE_CHECKING:
    import asyncio

WRITE_HIGH_BYTES = 64 << 10
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger(__name__)


class Downstream(Outlet):
    """One client connection on one door: the layer that reads."""

    __slots__ = ()

    # -- connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        transport = cast("asyncio.Transport", transport)  # uvloop's are none by inheritance
        context = self._context
        self._transport = transport
        connections = context.connections[self.door]
        if len(connections) >= context.settings.doors.connections:
            context.counters.connections_refused += 1
            self._state = State.CLOSED
            transport.abort()
            return
        connections.add(self)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else "unix"
        if context.gateways and self.door == "app" and isinstance(peer, tuple):
            self.gateway = is_gateway(context.gateways, self.peer)
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self.deadline_ns = context.clock.mono_ns() + context.times.keepalive_ns

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio: the client is gone, whatever the reason."""
        del exc
        self._state = State.CLOSED
        self._transport = None
        self._context.connections[self.door].discard(self)
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.client_gone()

    def eof_received(self) -> bool:
        """See asyncio. A half-closed client is gone (docs/sidecar.md, "HTTP/1.1")."""
        if self._transport is not None and self._relay is not None:
            self._transport.abort()
        return False

    # -- reading

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        state = self._state
        if state is State.BODY:
            self._body(data)
        elif state is State.DISCARD:
            self._discarded += len(data)
            if self._chunks is None and self._discarded >= self._left > 0:
                self._close()
            elif self._discarded > self._discards:
                self._context.counters.limit_hits["limits.discard_bytes"] += 1
                self._close()
        elif state is State.ANSWER:
            self._buffer += data
            if len(self._buffer) > self._context.settings.limits.head_bytes:
                self._pause_reading()
        elif state is not State.CLOSED:
            self._buffer = self._buffer + data if self._buffer else data
            self._next_request()

    def _next_request(self) -> None:
        context = self._context = self._context.current.context  # there may be newer settings
        data = self._buffer
        now_ns = context.clock.mono_ns()
        try:
            head = parse_request(data, context.head_limits)
        except HeadError as problem:
            self._buffer = b""
            context.refused_head(self.door, problem.code)
            self.reply(RequestError(problem.code, str(problem)), keep=False)
            return
        if head is None:
            if self._state is State.IDLE and data:
                self._state = State.HEAD
                self.deadline_ns = now_ns + context.times.head_ns
            return
        self._buffer = b""
        self._begin(head, data, now_ns)

    def _begin(self, head: RequestHead, data: bytes, now_ns: int) -> None:
        context = self._context
        self._close_after = not head.keep_alive
        relay = self._relay = Relay(context, self, head, now_ns)
        self._chunks = ChunkReader() if head.chunked else None
        self._left = head.content_length or 0
        self._state = State.BODY
        self._held = self._expecting = False
        self.deadline_ns = now_ns + context.body_idle_ns[self.door]
        rest = len(data) - head.size
        try:
            relay.open()
        except RequestError as problem:
            # Nothing was promised to a client that waits for 100: it sends no body.
            unread = self._chunks is not None or self._left > rest
            if unread:
                self._left -= rest
            else:
                self._state = State.ANSWER
                self._buffer = data[head.size + self._left :]
            self._expecting = head.expect
            draining = problem.kind.code == "draining"
            relay.refuse(problem, keep=not unread and not draining)
            return
        if head.expect and not rest and self._transport is not None:
            self._transport.write(CONTINUE)
        if self._chunks is None and rest == self._left:
            self._request_whole(relay, data[head.size :])  # all at once, as most requests come
        elif rest:
            self._body(data[head.size :])

    def _body(self, data: bytes) -> None:
        relay = self._relay
        assert relay is not None
        context = self._context
        try:
            if self._chunks is not None:
                used = self._chunks.feed(data)
                pieces = self._chunks.pieces
                if pieces:
                    relay.body_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))
                done = self._chunks.done
            else:
                used = min(self._left, len(data))
                self._left -= used
                if used:
                    relay.body_data(data if used == len(data) else data[:used])
                done = self._left == 0
            if self._relay is not relay:
                return  # it ended while it took the body
            if not done and self._held:
                return
            if not done:
                self.deadline_ns = context.clock.mono_ns() + context.body_idle_ns[self.door]
                self._resume_reading()  # it may have been behind much that was pipelined
                return
            if used < len(data):
                self._buffer = data[used:]
            self._request_whole(relay)
        except ChunkError as broken:
            relay.refuse(RequestError("invalid_request", str(broken)), keep=False)
        except RequestError as problem:
            relay.refuse(problem, keep=False)

    def _request_whole(self, relay: Relay, body: bytes = b"") -> None:
        self._state = State.ANSWER
        if not self._held:  # else it has the deadline of its wait, which goes on
            self.deadline_ns = NEVER_NS
        self._resume_reading()  # a large body may have paused it; a client that leaves must be seen
        try:
            if body:
                relay.body_data(body)
            relay.body_end()
        except RequestError as problem:
            relay.refuse(problem, keep=True)

    # -- from here to the next request, or to a tunnel

    def _pipelined(self) -> None:
        if self._state is State.IDLE and self._buffer and not self.write_paused:
            self._next_request()

    def hand_over(self) -> tuple[asyncio.Transport, bytes]:
        """Give the transport away, to be a tunnel's, and the bytes that came after the request."""
        transport, early = self._transport, self._buffer
        assert transport is not None, "a client that left has no request"
        self._transport = self._relay = None
        self._state = State.CLOSED
        self._buffer = b""
        self._context.connections[self.door].discard(self)
        return transport, early

    # -- time and drain

    def on_deadline(self) -> None:
        """Act on a deadline that has passed."""
        self.deadline_ns = NEVER_NS
        state = self._state
        relay = self._relay
        if relay is not None and (state is State.ANSWER or (state is State.BODY and self._held)):
            relay.on_deadline()
        elif relay is not None and state is State.BODY:
            self._context.counters.limit_hits["timeouts.body_idle_s"] += 1
            message = "the request body made no progress (timeouts.body_idle_s)"
            relay.refuse(RequestError("request_timeout", message), keep=False)
        elif state is State.HEAD:
            self._context.counters.limit_hits["timeouts.head_s"] += 1
            self._context.refused_head(self.door, "request_timeout")
            message = "the request head was not complete in time (timeouts.head_s)"
            self.reply(RequestError("request_timeout", message), keep=False)
        elif self._transport is not None:
            self._linger(self._transport, state)

    def _linger(self, transport: asyncio.Transport, state: State) -> None:
        """Act on a deadline between two requests, or after the last one."""
        context = self._context
        hits = context.counters.limit_hits
        if state is State.DISCARD:
            hits["timeouts.discard_s"] += 1
            self._close()
        elif state is State.IDLE and not self.write_paused:
            hits["timeouts.keepalive_s"] += 1
            self._close()
        elif untaken(transport) < self._untaken:  # slow, but it reads
            self._await_reader(transport)
        else:
            hits["timeouts.client_stall_s"] += 1
            reset(transport)  # FIN would be the regular end of what only the end delimits

    def check_total(self, now_ns: int) -> None:
        """End a request that has taken longer than any may, or whose client left unseen."""
        relay, transport = self._relay, self._transport
        if relay is None or transport is None:
            return
        # While it is not read nothing tells of its end.
        if not transport.is_reading() and peer_left(transport):
            transport.abort()
        else:
            relay.check_total(now_ns)

    def expire(self) -> None:
        """End of the drain grace: a correct error ending for what still runs."""
        if self._relay is not None:
            self._relay.expire()
        else:
            self._close()

    @property
    def busy(self) -> bool:
        """Say whether a request is in flight."""
        return self._relay is not None

    # -- back-pressure

    def pause_writing(self) -> None:
        """See asyncio: the client does not read; the upstream has to wait."""
        self.write_paused = True
        if self._relay is not None:
            self._relay.client_writable(writable=False)

    def resume_writing(self) -> None:
        """See asyncio."""
        self.write_paused = False
        if self._relay is not None:
            self._relay.client_writable(writable=True)
        elif self._state is State.IDLE:
            self._go_on()
