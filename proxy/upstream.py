"""One upstream connection: what arrives on it, taken apart, and how much of a request it took.

A connection is leased to one relay at a time and hands it what arrives, already framed: head, body
bytes, end, or how it was lost. It decides nothing about the request. Bytes that come when nobody
has leased the connection poison it: it is dropped (RFC 9112 section 9.3 gives them no meaning).

What it says of a lost request's bytes has to be provable, since a request is sent again on it: the
transport writes at once and pauses the writer as long as the kernel has not taken all it was given,
so `write_paused` means "not fully written". A write that fails closes the transport. Over TLS a
record may wait below, so there a request that was not paused counts as written.

Bounds: buffered bytes by the head limit; the body is never buffered here, a paused relay pauses the
socket.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Protocol, cast

from proxy.exchange import End
from proxy.http.chunked import ChunkError, ChunkReader
from proxy.http.http1 import HeadError, HeadLimits, ResponseHead, parse_response
from proxy.sockets import descriptor

if TYPE_CHECKING:
    import asyncio

    from proxy.connector import Upstreams
    from proxy.qos.pools import Endpoint


class Lessee(Protocol):
    """Who holds a connection: told what the upstream sends."""

    method: bytes

    def upstream_ready(self, connection: UpstreamConnection) -> None:
        """Take the leased connection; the request may be written now."""

    def upstream_refused(self, endpoint: Endpoint) -> None:
        """Note that no connection could be made."""

    def upstream_head(self, head: ResponseHead) -> None:
        """Take the answer's head."""

    def may_switch(self, head: ResponseHead) -> bool:
        """Say whether a 101 was asked for, and to this protocol."""
        ...

    def upstream_switches(
        self, connection: UpstreamConnection, head: ResponseHead, early: bytes
    ) -> None:
        """Take the connection over: it is a tunnel now, of which `early` has come."""

    def upstream_whole(self, head: ResponseHead, body: bytes) -> None:
        """Take a whole answer; the connection is no longer leased."""

    def upstream_body(self, data: bytes) -> None:
        """Take body bytes, without transfer framing."""

    def upstream_pause(self) -> None:
        """Note that nothing more has come for now: what is held for one write goes out."""

    def upstream_end(self) -> None:
        """Note that the answer is whole; the connection is no longer leased."""

    def upstream_lost(self, end: End, *, answered: bool, unwritten: bool) -> None:
        """Note that the connection died.

        `answered`: a byte of the answer had come; `unwritten`: the kernel has not taken all of the
        request.
        """

    def upstream_writable(self, *, writable: bool) -> None:
        """Pause or go on with the request body."""


class UpstreamConnection:
    """One connection to one endpoint."""

    __slots__ = (
        "_buffer",
        "_chunks",
        "_head",
        "_left",
        "_limits",
        "_poll",
        "_whole_end",
        "answered",
        "endpoint",
        "idle_since_ns",
        "lessee",
        "owner",
        "request_whole",
        "reused",
        "transport",
        "write_failed",
        "write_paused",
    )

    def __init__(self, owner: Upstreams, endpoint: Endpoint, limits: HeadLimits) -> None:
        self.owner = owner
        self.endpoint = endpoint
        self.transport: asyncio.Transport | None = None
        self.reused = False
        self.write_paused = False  # the kernel has not taken all that was written
        self.write_failed = False  # set by the lessee: the write of a whole request failed
        self.request_whole = False  # set by the lessee with the last byte it writes
        self.idle_since_ns = 0
        self._limits = limits
        self.lessee: Lessee | None = None
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._chunks: ChunkReader | None = None
        self._left = 0  # body bytes to come; -1: until the connection ends
        self.answered = False
        self._whole_end = not endpoint.tls  # RFC 9112 section 9.8: over TLS its end is announced
        self._poll: select.poll | None = None

    # -- leasing

    def quiet(self) -> bool:
        """Say whether nothing has come on an idle connection: neither bytes nor its end.

        The loop tells too, but only when it turns; what is in the kernel now has not been told.
        """
        transport = self.transport
        if transport is None:
            return False
        poll = self._poll
        if poll is None:
            poll = self._poll = select.poll()
            poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def write(self, data: bytes) -> None:
        """Send request bytes."""
        assert self.transport is not None
        self.transport.write(data)

    def give_back(self) -> None:
        """End a lease that sent nothing."""
        self.lessee = None
        self.owner.put_back(self)

    @property
    def chunked(self) -> bool:
        """Say whether the answer's body comes in chunks."""
        return self._chunks is not None

    def lendable(self) -> int:
        """Return the descriptor if whole chunks, or a body without length, come next; else -1."""
        transport, chunks = self.transport, self._chunks
        if transport is None or self.endpoint.tls or not self.request_whole:
            return -1
        middle = self._left < 0 if chunks is None else chunks.between_chunks
        if not middle or not transport.is_reading():
            return -1
        return descriptor(transport)

    def go_on(self, data: bytes, *, reading: bool) -> None:
        """Read on after a loan; `data` was read and not passed on."""
        if reading:
            self.resume()
        if data:
            self.data_received(data)

    def broken(self) -> None:
        """Take that it failed, as whoever it was lent to has read: here it would seem to end."""
        self._fail(End.UPSTREAM_RESET)

    def hand_over(self) -> asyncio.Transport:
        """Give the transport away, to be a tunnel's; this object has ended."""
        transport = self.transport
        assert transport is not None
        self.owner.forget(self)
        self.lessee = self.transport = None
        transport.set_write_buffer_limits()  # nothing has to be proved of a tunnel's bytes
        return transport

    def abandon(self) -> None:
        """Cancel the request: the upstream must see it at once, so no lingering flush."""
        self.lessee = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        """Stop reading: the client is slow."""
        if self.transport is not None and self.transport.is_reading():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        transport = self.transport
        if transport is not None and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        transport = cast("asyncio.Transport", transport)  # uvloop's are none by inheritance
        self.transport = transport
        # See the module: pausing is what proves. The TLS transport pauses at its mark, not above.
        transport.set_write_buffer_limits(high=1 if self.endpoint.tls else 0, low=0)

    def data_received(self, data: bytes) -> None:
        """See asyncio. The first matching state takes the bytes."""
        lessee = self.lessee
        if lessee is None:
            self.owner.late_closes += 1
            self._drop()
            return
        self.answered = True
        try:
            if self._head is not None:
                self._body(lessee, data)
            else:
                self._buffer = data = self._buffer + data if self._buffer else data
                self._heads(lessee, data)
        except (HeadError, ChunkError):
            self._fail(End.UPSTREAM_PROTOCOL)
        else:
            if self.lessee is lessee:
                lessee.upstream_pause()

    def _heads(self, lessee: Lessee, data: bytes) -> None:
        start = 0
        while True:
            head = parse_response(data, self._limits, lessee.method, start)
            if head is None:
                self._buffer = data[start:]
                return
            start += head.size
            if head.status >= 200:
                break
            if head.status == 101:
                if not lessee.may_switch(head):
                    raise HeadError("invalid_request", "101 without a request for it")
                self._buffer = b""
                lessee.upstream_switches(self, head, data[start:])
                return
        self._buffer = b""
        if not self.reused and b"keep-alive" in head.fields:
            self.owner.announced(self.endpoint, head.fields[b"keep-alive"])
        rest = len(data) - start
        length = 0 if head.bodiless else head.content_length
        if (
            rest
            and rest == length
            and head.keep_alive
            and self.request_whole
            and not self.write_paused
        ):
            # A whole answer in one read, as most are that do not stream.
            self.lessee = None
            self.owner.put_back(self)
            lessee.upstream_whole(head, data[start:])
            return
        self._head = head
        if head.bodiless:
            self._left, self._chunks = 0, None
        elif head.chunked:
            self._chunks = ChunkReader()
        else:
            self._chunks = None
            self._left = -1 if head.content_length is None else head.content_length
        lessee.upstream_head(head)
        if self.lessee is not lessee:
            return  # it gave up while taking the head
        if self._chunks is None and self._left == 0:
            self._end(lessee, clean=not rest)
        elif rest:
            self._body(lessee, data[start:])

    def _body(self, lessee: Lessee, data: bytes) -> None:
        chunks = self._chunks
        if chunks is not None:
            used = chunks.feed(data)
            pieces = chunks.pieces
            if pieces:
                lessee.upstream_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            if chunks.done and self.lessee is lessee:
                self._end(lessee, clean=used == len(data))
            return
        if self._left < 0:
            lessee.upstream_body(data)
            return
        size = len(data)
        if size > self._left:
            data = data[: self._left]
        self._left -= len(data)
        lessee.upstream_body(data)
        if self._left == 0 and self.lessee is lessee:
            self._end(lessee, clean=size == len(data))

    def _end(self, lessee: Lessee, *, clean: bool) -> None:
        head = self._head
        assert head is not None
        self.lessee = None
        self._head = None
        # An answer may come before its request is whole: what follows would then be read as a
        # request by the upstream, so such a connection is never used again.
        if clean and head.keep_alive and self.request_whole and not self.write_paused:
            self.owner.put_back(self)
        else:
            if not clean:
                self.owner.late_closes += 1
            self._drop()
        lessee.upstream_end()

    def _fail(self, end: End) -> None:
        lessee, self.lessee = self.lessee, None
        self._drop()
        if lessee is not None:
            lessee.upstream_lost(end, answered=self.answered, unwritten=False)

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def eof_received(self) -> bool:
        """See asyncio: the transport closes, connection_lost follows."""
        self._whole_end = True
        if self.write_paused:
            self._drop()  # else the rest would be written first, to nobody
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio. An end is regular only where the head left it to the connection."""
        self.transport = None
        self._poll = None
        self.owner.forget(self)
        lessee, self.lessee = self.lessee, None
        if lessee is None:
            return
        whole = exc is None and self._whole_end
        if whole and self._head is not None and self._chunks is None and self._left < 0:
            lessee.upstream_end()
            return
        # RFC 9112 section 8: a head or body that stops early is incomplete, never a short success.
        unwritten = self.write_failed or self.write_paused
        lessee.upstream_lost(End.UPSTREAM_RESET, answered=self.answered, unwritten=unwritten)

    def pause_writing(self) -> None:
        """See asyncio."""
        self.write_paused = True
        if self.lessee is not None:
            self.lessee.upstream_writable(writable=False)

    def resume_writing(self) -> None:
        """See asyncio."""
        self.write_paused = False
        if self.lessee is not None:
            self.lessee.upstream_writable(writable=True)
