"""An upgraded connection: bytes both ways until both sides have ended.

Made when an upstream switches protocols (RFC 9110 section 7.8). It takes both transports over from
the request's two connections and stands in the client connection's place for the tick and the
drain. It looks at no byte, so nothing of it is observed but how much went each way.

    open --both sides ended--> flushing --both closed--> gone       ended well
    open --a side was lost, silence, a reader that stalls, drain--> gone, both sides by RST

Bounds: what is written and not taken, by the transports' high-water marks, at which the other side
is read no further; time, by `timeouts.tunnel_idle_s` without a byte in either direction and
`timeouts.client_stall_s` for a client that does not read. It has no total time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from proxy.exchange import End
from proxy.sockets import reset, untaken

if TYPE_CHECKING:
    from proxy.context import Connection, Context


class Tunnelled(Protocol):
    """The request that became a tunnel."""

    def tunnel_ended(self, end: End, *, sent: int, received: int) -> None:
        """Note the end, once; bytes from the client, bytes from the upstream."""


class Side(asyncio.Protocol):
    """One of the two connections."""

    __slots__ = ("_tunnel", "bytes_read", "ended", "gone", "other", "transport", "write_paused")

    other: Side

    def __init__(self, tunnel: Tunnel, transport: asyncio.Transport, *, write_paused: bool) -> None:
        self._tunnel = tunnel
        self.transport = transport
        self.write_paused = write_paused
        self.bytes_read = 0
        self.ended = False  # it will send nothing more
        self.gone = False

    def hand_on(self, data: bytes) -> None:
        """Write what this side sent to the other one."""
        self.bytes_read += len(data)
        self.other.transport.write(data)

    def read_on(self, *, on: bool) -> None:
        """Read this side, or let it wait until the other one has taken what it has."""
        transport = self.transport
        if self.ended or transport.is_closing() or transport.is_reading() is on:
            return
        if on:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._tunnel.moved()
        self.hand_on(data)

    def eof_received(self) -> bool:
        """See asyncio. Half-close passes; over TLS there is none, so both ways end."""
        return self._tunnel.side_ended(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        del exc
        self.gone = True
        self._tunnel.side_gone(self)

    def pause_writing(self) -> None:
        """See asyncio: this side does not take its bytes; the other one has to wait."""
        self.write_paused = True
        self.other.read_on(on=False)
        self._tunnel.side_stalls(self)

    def resume_writing(self) -> None:
        """See asyncio."""
        self.write_paused = False
        self.other.read_on(on=True)
        self._tunnel.moved()


class Tunnel:
    """See the module. Ends exactly once, and leaves the door's set when both sides are gone."""

    __slots__ = (
        "_client",
        "_connections",
        "_context",
        "_exchange",
        "_over",
        "_untaken",
        "_upstream",
        "deadline_ns",
    )

    def __init__(
        self,
        context: Context,
        exchange: Tunnelled,
        connections: set[Connection],
        client: tuple[asyncio.Transport, bool],
        upstream: tuple[asyncio.Transport, bool],
    ) -> None:
        """Take the transports over; with each, whether its writing is paused."""
        self._context = context
        self._exchange = exchange
        self._connections = connections
        self._over = False
        self._untaken = 0
        self.deadline_ns = context.clock.mono_ns() + context.times.tunnel_idle_ns
        self._client = Side(self, client[0], write_paused=client[1])
        self._upstream = Side(self, upstream[0], write_paused=upstream[1])
        self._client.other = self._upstream
        self._upstream.other = self._client
        connections.add(self)
        context.counters.tunnels += 1
        context.counters.tunnels_open += 1

    def start(self, head: bytes, from_client: bytes, from_upstream: bytes) -> None:
        """Send the 101, then what came early on either side, and pass on bytes from now on."""
        client, upstream = self._client, self._upstream
        client.transport.set_protocol(client)
        upstream.transport.set_protocol(upstream)
        client.transport.write(head)
        if from_upstream:
            upstream.hand_on(from_upstream)
        if from_client:
            client.hand_on(from_client)
        # Either may have been paused for its request or its answer.
        client.read_on(on=not upstream.write_paused)
        upstream.read_on(on=not client.write_paused)

    # -- what the sides report

    def moved(self) -> None:
        """Note that bytes moved. While the client stalls only its reading counts."""
        if not self._over and not self._client.write_paused:
            context = self._context
            self.deadline_ns = context.clock.mono_ns() + context.times.tunnel_idle_ns

    def side_stalls(self, side: Side) -> None:
        """Give a client that does not read its time."""
        if side is self._client and not self._over:
            context = self._context
            self._untaken = untaken(side.transport)
            self.deadline_ns = context.clock.mono_ns() + context.times.client_stall_ns

    def side_ended(self, side: Side) -> bool:
        """Pass an end on; True keeps the other direction open."""
        side.ended = True
        other = side.other
        half = side.transport.can_write_eof() and other.transport.can_write_eof()
        if half and not other.ended:
            other.transport.write_eof()
            self.moved()
            return True
        self._end(End.ANSWERED)
        return False

    def side_gone(self, side: Side) -> None:
        """Note a connection's end: regular only after both sides ended."""
        self._end(End.CLIENT_GONE if side is self._client else End.UPSTREAM_RESET)
        if side.other.gone:
            self._connections.discard(self)

    # -- the tick and the drain (`proxy.context.Connection`)

    @property
    def busy(self) -> bool:
        """Say whether it is open: it is one request in flight."""
        return not self._over

    def on_deadline(self) -> None:
        """Act on silence, on a client that does not read, or on an end that is not taken."""
        context, client = self._context, self._client
        if self._over:
            for side in (client, self._upstream):
                side.transport.abort()
            return
        hits = context.counters.limit_hits
        if not client.write_paused:
            hits["timeouts.tunnel_idle_s"] += 1
            self._end(End.UPSTREAM_TIMEOUT)
            return
        left = untaken(client.transport)
        if left < self._untaken:  # slow, but it reads
            self._untaken = left
            self.deadline_ns = context.clock.mono_ns() + context.times.client_stall_ns
            return
        hits["timeouts.client_stall_s"] += 1
        self._end(End.CLIENT_STALLED)

    def check_total(self, now_ns: int) -> None:
        """Do nothing: a tunnel has no total time."""

    def expire(self) -> None:
        """End it: the drain grace is over."""
        self._end(End.DRAIN_EXPIRED)

    def _end(self, end: End) -> None:
        if self._over:
            return
        self._over = True
        context, client, upstream = self._context, self._client, self._upstream
        context.counters.tunnels_open -= 1
        self._exchange.tunnel_ended(end, sent=client.bytes_read, received=upstream.bytes_read)
        # What was written is flushed to a reader that takes it.
        self.deadline_ns = context.clock.mono_ns() + context.times.client_stall_ns
        for side in (client, upstream):
            if end is End.ANSWERED:
                side.transport.close()
            else:
                reset(side.transport)
