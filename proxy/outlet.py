"""The writing half of a client connection: answers, and how it goes on or ends after one.

Closing is where answers are lost: unread bytes turn FIN into RST, so what the client still sends is
read and dropped for a while; an answer that only the connection's end delimits is cut by RST.

Bounds: written bytes by the transport's high-water mark, at which the relay pauses the upstream;
what is dropped, by `limits.discard_bytes` and `timeouts.discard_s`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from proxy.answer import own_answer
from proxy.sockets import descriptor, untaken
from proxy.sockets import reset as reset_transport

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from proxy.context import Context
    from proxy.errors import RequestError
    from proxy.http.chunked import ChunkReader
    from proxy.relay import Relay

DoorName = Literal["app", "sealed"]
# What is still read of a body whose envelope was refused (docs/envelope.md, "Order on receipt").
ENVELOPE_DRAIN_BYTES = 64 << 10
NEVER_NS = 1 << 62


class State(IntEnum):
    """What the connection waits for."""

    IDLE = 0  # a request
    HEAD = 1  # the rest of a head
    BODY = 2  # the rest of a body
    ANSWER = 3  # the answer
    DISCARD = 4  # the rest of a body nobody wants (RFC 9112 section 9.6: then FIN, not RST)
    CLOSED = 5


class Outlet:
    """One client connection: what it is in, and the layer that writes."""

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
        "_untaken",
        "deadline_ns",
        "door",
        "gateway",
        "peer",
        "write_paused",
    )

    def __init__(self, context: Context, door: DoorName) -> None:
        self._context = context
        self.door: DoorName = door
        self.peer = ""
        self.gateway = False  # its X-Tenant-Id is believed
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
        self._untaken = 0  # what the client had left of its last answer when last looked at

    def _pause_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        """Read on, unless what was read before has to be worked off first."""
        if self._buffer and len(self._buffer) > self._context.settings.limits.head_bytes:
            return
        transport = self._transport
        if transport is not None and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()

    def _pipelined(self) -> None:
        """Take the next request from the buffer."""

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

    def lendable(self) -> int:
        """Return the descriptor if nothing waits to be written, -1 otherwise."""
        transport = self._transport
        if transport is None or self.write_paused or transport.get_write_buffer_size():
            return -1
        return descriptor(transport)

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
        if not keep:
            self._leave(transport)
            return
        self._state = State.IDLE
        if self.write_paused:
            # It asks without reading its answers: the next request waits until it has read.
            self._pause_reading()
            self._await_reader(transport)
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
        transport = self._transport
        if transport is not None:
            transport.close()
            if transport.get_write_buffer_size():
                # A client that never reads would keep the flush, and its place, for ever.
                self._await_reader(transport)

    def _await_reader(self, transport: asyncio.Transport) -> None:
        """Give a client that has an answer left to read its time; see `on_deadline`."""
        context = self._context
        self._untaken = untaken(transport)
        self.deadline_ns = context.clock.mono_ns() + context.times.client_stall_ns
