"""The middle of event streams, lent to a thread without Python (`kernels.wire`, pump.c).

An event that comes alone costs its wake-up, and most of that is an interpreter that finds cold
caches. So once a stream in clear has begun, its two sockets are lent to the pump, which passes on
what is ordinary: whole chunks of data, to a client that takes them at once. Everything else ends
the loan and goes on here as if there had been none: the bytes that were not passed on, an end, a
slow client, a deadline, a drain. What passed is observed some kilobytes at a time.

Without the extension nothing is lent: then each event passes through the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernels import wire
from proxy.answer import Chunked, UntilClose
from proxy.dispatch import Dispatch
from proxy.exchange import End

if TYPE_CHECKING:
    import asyncio

READS_BEFORE = 1
"""Reads of an answer until it is lent: what comes at once, or is over soon, is not worth it."""
WAKE_BYTES = 16 << 10
"""Passed bytes after which they are looked at."""
STREAMS_MAX = 1 << 16
NONE = -1
# Why a loan has ended (pump.c); 0: it has not.
UNREAD, ENDED, UNSENT, LOST, BROKEN = 1, 2, 3, 4, 5


class Borrowed(Protocol):
    """Who lent a stream."""

    def passed_on(self) -> None:
        """Look at the loan: bytes have passed, or it has ended."""


def _epoll_of(loop: asyncio.AbstractEventLoop) -> int:
    """Return the descriptor that libuv waits on, -1 for another loop.

    libuv stops watching a descriptor that is not read when that next becomes readable, which costs
    a wake-up for nothing; it begins again by adding it, so that it may be taken out before.
    """
    ask = getattr(loop, "_get_backend_id", None)
    return -1 if ask is None else int(ask())


class Lender:
    """The pump of one process, and who lent it what. Lives until `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lent: dict[int, Borrowed] = {}
        self.lent_total = 0
        self.refused_total = 0  # by `limits.lent_streams`
        self.pump = wire.pump(STREAMS_MAX, WAKE_BYTES, _epoll_of(loop))
        self._loop = loop
        if self.pump is not None:
            loop.add_reader(self.pump.fileno(), self._told)

    def lend(
        self, lender: Borrowed, source: int, client: int, *, chunked: tuple[bool, bool]
    ) -> int:
        """Lend a stream from one descriptor to another; return its ticket, NONE if that fails.

        `chunked`: how it comes, and how it goes on.
        """
        if self.pump is None:
            return NONE
        try:
            ticket: int = self.pump.lend(source, client, *chunked)
        except OSError:  # no descriptors left: the loop has those it needs
            return NONE
        if ticket != NONE:
            self.lent[ticket] = lender
            self.lent_total += 1
        return ticket

    def take_back(self, ticket: int) -> tuple[bytes, int, bytes, int]:
        """End a loan; return (passed since the last look, why it ended, rest, last passed ns)."""
        del self.lent[ticket]
        assert self.pump is not None
        taken: tuple[bytes, int, bytes, int] = self.pump.take_back(ticket)
        return taken

    def _told(self) -> None:
        assert self.pump is not None
        for ticket in self.pump.told():
            lender = self.lent.get(ticket)
            if lender is not None:
                lender.passed_on()

    def close(self) -> None:
        """End the thread."""
        if self.pump is not None:
            self._loop.remove_reader(self.pump.fileno())
            self.pump.close()
            self.pump = None


class Lending(Dispatch):
    """The layer that lends an answer which has begun, and takes it back."""

    _reads = 0
    _ticket_lent = NONE
    _lent_ns = 0

    def lend(self) -> None:
        """Lend the stream, if it is one that can be; called after each read of the upstream."""
        self._reads += 1
        if self._reads < READS_BEFORE or not self.first_byte_ns:
            return
        answer, connection, lender = self.answer, self._connection, self.context.lender
        if (
            connection is None
            or lender is None
            or connection.lessee is not self  # what comes is opened first
            or self.sealer is not None
            or self.changes_length
            or self._stream is None
            or not (isinstance(answer, (Chunked, UntilClose)))
        ):
            self._reads = -(1 << 30)  # never: none of this changes
            return
        limit = self.context.settings.limits.lent_streams
        if len(lender.lent) >= limit:
            lender.refused_total += limit > 0
            self._reads = -(1 << 30)
            return
        client = self.downstream.lendable()
        source = connection.lendable()
        if client < 0 or source < 0:
            self._reads = 0  # not now
            return
        chunked = connection.chunked, not answer.ends_by_close
        connection.pause()
        ticket = lender.lend(self, source, client, chunked=chunked)
        if ticket == NONE:
            self._reads = -(1 << 30)
            connection.resume()
            return
        self._ticket_lent = ticket
        self._lent_ns = self.context.clock.mono_ns()

    @property
    def is_lent(self) -> bool:
        """Say whether bytes pass without us."""
        return self._ticket_lent != NONE

    def passed_on(self) -> None:
        """See `Borrowed`."""
        lender = self.context.lender
        assert lender is not None and lender.pump is not None  # noqa: PT018 - one fact
        seen, why = lender.pump.look(self._ticket_lent)
        self._saw(seen)
        if why:
            self._resume()

    def settle(self) -> None:
        """Take the stream back for good: what passed counts, the rest is nobody's."""
        self._take_back()

    def _take_back(self) -> tuple[int, bytes]:
        lender = self.context.lender
        assert lender is not None
        ticket, self._ticket_lent = self._ticket_lent, NONE
        seen, why, rest, last_ns = lender.take_back(ticket)
        self._saw(seen)
        if why == UNSENT:
            self.downstream.write(rest)
            rest = b""
        times = self.context.times
        if not self.downstream.write_paused:
            self.downstream.deadline_ns = max(last_ns, self._lent_ns) + times.stream_idle_ns
        return why, rest

    def _resume(self) -> None:
        """Go on in the loop, with what was not passed on."""
        connection = self._connection
        assert connection is not None
        why, rest = self._take_back()
        self._reads = 0
        if why == LOST:
            self._close(End.UPSTREAM_RESET)
        elif why == BROKEN:
            connection.broken()
        else:
            connection.go_on(rest, reading=not self.downstream.write_paused)

    def _saw(self, seen: bytes) -> None:
        if seen:
            self.answered_bytes += len(seen)
            self.observe_data(seen)

    def is_passing(self, now_ns: int) -> bool:
        """Say whether bytes have passed lately, and then set the deadline after the last."""
        lender = self.context.lender
        assert lender is not None and lender.pump is not None  # noqa: PT018 - one fact
        last_ns = max(lender.pump.last_ns(self._ticket_lent), self._lent_ns)
        due_ns = last_ns + self.context.times.stream_idle_ns
        if due_ns <= now_ns:
            return False
        self.downstream.deadline_ns = due_ns
        return True
