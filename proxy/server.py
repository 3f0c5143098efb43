"""The doors: client connections and their requests, one after the other.

A connection reads a head, hands it to a `Relay`, feeds it the body and waits until the relay says
that the answer is whole; pipelined requests wait in the buffer. What the client is owed on each
error is the relay's or the error table's business; this file only knows how to read and to write.

Bounds: connections per door; buffered bytes by the head limit; written bytes by the transport's
high-water mark, at which the relay pauses the upstream. One timer serves all connections: every
state has a deadline, checked by `tick`.
"""

from __future__ import annotations

import logging
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, cast

from proxy.answer import own_answer
from proxy.errors import RequestError
from proxy.http.chunked import ChunkError, ChunkReader
from proxy.http.http1 import HeadError, RequestHead, parse_request
from proxy.relay import Relay
from proxy.sockets import peer_left, untaken
from proxy.sockets import reset as reset_transport

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from proxy.context import Context

DoorName = Literal["app", "sealed"]
WRITE_HIGH_BYTES = 64 << 10
# What is still read of a body whose envelope was refused (docs/envelope.md, "Order on receipt").
ENVELOPE_DRAIN_BYTES = 64 << 10
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NEVER_NS = 1 << 62

log = logging.getLogger(__name__)


class State(IntEnum):
    """What the connection waits for."""

    IDLE = 0  # a request
    HEAD = 1  # the rest of a head
    BODY = 2  # the rest of a body
    ANSWER = 3  # the answer
    DISCARD = 4  # the rest of a body nobody wants (RFC 9112 section 9.6: then FIN, not RST)
    CLOSED = 5


class Downstream:
    """One client connection on one door."""

    __slots__ = (
        "_buffer",
        "_chunks",
        "_close_after",
        "_context",
        "_discarded",
        "_discards",
        "_expecting",
        "_held",
        "_left",
        "_relay",
        "_state",
        "_transport",
        "deadline_ns",
        "door",
        "peer",
        "write_paused",
    )

    def __init__(self, context: Context, door: DoorName) -> None:
        self._context = context
        self.door: DoorName = door
        self.peer = ""
        self.deadline_ns = NEVER_NS
        self.write_paused = False
        self._transport: asyncio.Transport | None = None
        self._state = State.IDLE
        self._buffer = b""
        self._relay: Relay | None = None
        self._chunks: ChunkReader | None = None
        self._left = 0
        self._discarded = 0
        self._discards = 0  # in bytes, while leaving
        self._expecting = False
        self._held = False
        self._close_after = False

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
        self._held = False
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
        self.deadline_ns = NEVER_NS
        self._resume_reading()  # a large body may have paused it; a client that leaves must be seen
        try:
            if body:
                relay.body_data(body)
            relay.body_end()
        except RequestError as problem:
            relay.refuse(problem, keep=True)

    def _pause_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()

    # -- what a relay asks for

    def hold_body(self, *, hold: bool) -> None:
        """Stop or go on reading the request's body: the upstream is slow."""
        if self._state is State.BODY:
            self._held = hold
            context = self._context
            if hold:
                # The wait is for the upstream now: to connect, or to take what it has been sent.
                self._pause_reading()
                self.deadline_ns = context.clock.mono_ns() + context.times.first_byte_ns
            else:
                self._resume_reading()
                self.deadline_ns = context.clock.mono_ns() + context.body_idle_ns[self.door]

    def write(self, data: bytes) -> None:
        """Send answer bytes."""
        if self._transport is not None:
            self._transport.write(data)

    def write_all(self, parts: Iterable[bytes]) -> None:
        """Send answer bytes in one call."""
        if self._transport is not None:
            self._transport.writelines(parts)

    def unread(self) -> int:
        """Return the answer bytes that the client has not taken: ours and the kernel's."""
        return 0 if self._transport is None else untaken(self._transport)

    def hand_over(self) -> tuple[asyncio.Transport, bytes]:
        """Give the transport away, to be a tunnel's, and the bytes that came after the request."""
        transport, early = self._transport, self._buffer
        assert transport is not None, "a client that left has no request"
        self._transport = self._relay = None
        self._state = State.CLOSED
        self._buffer = b""
        self._context.connections[self.door].discard(self)
        return transport, early

    def must_close(self) -> bool:
        """Say whether the connection closes after this answer; what was said once holds."""
        if self._state is State.BODY or self._context.closing:
            self._close_after = True
        return self._close_after

    def reply(
        self, problem: RequestError, *, keep: bool, extra: bytes = b"", bodiless: bool = False
    ) -> None:
        """Send a whole answer of our own in clear and end the exchange."""
        close = not keep or self.must_close()
        if close and problem.kind.code.startswith(
            "envelope_"
        ):  # nobody known sent it: little more is read
            self._discards = ENVELOPE_DRAIN_BYTES
        self.write(own_answer(problem, extra=extra, close=close, bodiless=bodiless))
        self.answer_done(keep=not close)

    def answer_done(self, *, keep: bool) -> None:
        """Go on to the next request, or close: politely, reading on while the client sends."""
        self._relay = None
        transport = self._transport
        if transport is None:
            return
        context = self._context
        if not keep:
            self._leave(transport)
            return
        self._state = State.IDLE
        if self.write_paused:
            # It asks without reading its answers: the next request waits until it has read.
            self._pause_reading()
            self.deadline_ns = context.clock.mono_ns() + context.times.client_stall_ns
            return
        self._go_on()

    def _go_on(self) -> None:
        context = self._context
        self.deadline_ns = context.clock.mono_ns() + context.times.keepalive_ns
        self._resume_reading()
        if self._buffer:
            # Not from here: answers that need no upstream would nest a frame for each request.
            context.loop.call_soon(self._pipelined)

    def _leave(self, transport: asyncio.Transport) -> None:
        """Close after an answer. Unread bytes would turn FIN into RST and lose the answer."""
        context = self._context
        in_body = self._state is State.BODY
        limit = context.settings.limits.discard_bytes
        self._discards = min(self._discards, limit) if self._discards else limit
        too_much = self._chunks is None and self._left > self._discards
        if self._state is State.ANSWER or (in_body and (self._expecting or too_much)):
            self._close()
            return
        self._state = State.DISCARD
        self._buffer = b""
        self._discarded = 0
        self.deadline_ns = context.clock.mono_ns() + context.times.discard_ns
        self._resume_reading()
        if not in_body and transport.can_write_eof():
            transport.write_eof()  # a head that was refused: nothing more is expected

    def _pipelined(self) -> None:
        if self._state is State.IDLE and self._buffer and not self.write_paused:
            self._next_request()

    def cut(self, *, reset: bool) -> None:
        """End the connection at once: the client must not take what it has for a whole answer.

        `reset`: the answer is delimited by the connection's end, so only RST tells.
        """
        self._relay = None
        self._state = State.CLOSED
        if self._transport is None:
            return
        if reset:
            # Closing alone would send FIN, which is that answer's regular end.
            reset_transport(self._transport)
        else:
            self._close()  # what was written is flushed, no regular end follows it

    def _close(self) -> None:
        self._state = State.CLOSED
        if self._transport is not None:
            # A client that never reads would keep the flush, and its place, for ever.
            context = self._context
            self.deadline_ns = context.clock.mono_ns() + context.times.client_stall_ns
            self._transport.close()

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
            hits = self._context.counters.limit_hits
            if state is State.DISCARD:
                hits["timeouts.discard_s"] += 1
            elif state is State.IDLE and not self.write_paused:
                hits["timeouts.keepalive_s"] += 1
                self._close()
                return
            else:
                hits["timeouts.client_stall_s"] += 1
            self._transport.abort()

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
