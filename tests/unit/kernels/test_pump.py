"""The pump (kernels/wire/pump.c): what it passes on, and what it gives back instead."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import wire
from proxy.http.chunked import ChunkReader, frame
from proxy.lending import ENDED, NONE, UNREAD, UNSENT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    not wire.AVAILABLE, reason="kernels.wire is not built: no C compiler"
)
WAIT_S = 5.0
SEEN_BYTES_MAX = 64 << 10


def anonymous_kib() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return next(int(row.split()[1]) for row in rollup.splitlines() if row.startswith("Anonymous:"))


def test_room_for_streams_costs_nothing_before_one_is_lent() -> None:
    # What malloc gives out anew is not clean, and it goes up to what was freed before.
    dirty = [bytearray(b"x" * (1 << 19)) for _ in range(16)]
    keep = [bytearray(b"x" * 4096) for _ in range(64)]
    del dirty
    before = anonymous_kib()
    pumps = [wire.pump(1 << 16, 1, -1) for _ in range(4)]
    assert anonymous_kib() - before < 128
    for pump in pumps:
        pump.close()
    assert keep


class Loan:
    """A pump between two socket pairs: `source` is written to, `client` is read from."""

    def __init__(self, pump: Any, *, chunked: tuple[bool, bool] = (True, True)) -> None:
        self.pump = pump
        self.source, self._from = socket.socketpair()
        self._to, self.client = socket.socketpair()
        self.client.settimeout(WAIT_S)
        self.ticket = pump.lend(self._from, self._to, *chunked)

    def fill(self) -> None:
        """Let the client's side take nothing more."""
        self._to.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._to.send(bytes(1 << 16))

    def told(self) -> bool:
        """Wait until the pump tells of this loan."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if select.select([self.pump], [], [], 0.1)[0] and self.ticket in self.pump.told():
                return True
        return False

    def received(self, size: int) -> bytes:
        """Return `size` bytes that the client got."""
        got = b""
        while len(got) < size and (data := self.client.recv(size - len(got))):
            got += data
        return got

    def close(self) -> None:
        """Close all four ends."""
        for end in (self.source, self._from, self._to, self.client):
            end.close()


def plain(chunks: bytes) -> bytes:
    """Return the payload of whole chunks, and of what has come of the last."""
    reader = ChunkReader()
    reader.feed(chunks)
    return b"".join(reader.pieces)


@pytest.fixture
def pump() -> Iterator[Any]:
    """One pump, ended after the test."""
    made = wire.pump(8, 4096)
    yield made
    made.close()


def test_passes_chunks_on_and_keeps_what_passed(pump: Any) -> None:
    """One chunk for each read, whatever chunks it held; the payload is there for the observer."""
    loan = Loan(pump)
    loan.source.send(frame(b"data: 1\n\n") + frame(b"data: 2\n\n"))
    expected = frame(b"data: 1\n\ndata: 2\n\n")
    assert loan.received(len(expected)) == expected
    assert pump.look(loan.ticket) == (b"data: 1\n\ndata: 2\n\n", 0)
    before_ns = time.monotonic_ns()
    loan.source.send(frame(b"data: 3\n\n"))
    assert loan.received(14) == frame(b"data: 3\n\n")
    seen, why, rest, last_ns = pump.take_back(loan.ticket)
    assert (seen, why, rest) == (b"data: 3\n\n", 0, b"")
    assert before_ns <= last_ns <= time.monotonic_ns()
    loan.close()


@pytest.mark.parametrize("chunked", [(False, True), (True, False), (False, False)])
def test_other_framings(pump: Any, chunked: tuple[bool, bool]) -> None:
    """A body that the connection's end delimits, on either side."""
    loan = Loan(pump, chunked=chunked)
    loan.source.send(frame(b"data: 1\n\n") if chunked[0] else b"data: 1\n\n")
    expected = frame(b"data: 1\n\n") if chunked[1] else b"data: 1\n\n"
    assert loan.received(len(expected)) == expected
    assert pump.take_back(loan.ticket)[:3] == (b"data: 1\n\n", 0, b"")
    loan.close()


@pytest.mark.parametrize(
    "unusual",
    [
        b"0\r\n\r\n",
        frame(b"data: 9\n\n") + b"0\r\n\r\n",
        b"9\r\ndata:",
        b"9;x=y\r\ndata: 9\n\n\r\n",
        b"zz\r\n",
        b"9\r\ndata: 9\n\nXX",
        b"5\n12345\n",
        b"00000000000000009\r\ndata: 9\n\n\r\n",
    ],
)
def test_gives_back_all_else_as_it_came(pump: Any, unusual: bytes) -> None:
    """The last chunk, cuts, extensions, errors: nothing of such a read is passed on."""
    loan = Loan(pump)
    loan.source.send(unusual)
    assert loan.told()
    assert pump.take_back(loan.ticket)[:3] == (b"", UNREAD, unusual)
    loan.client.setblocking(False)
    with pytest.raises(BlockingIOError):
        loan.client.recv(1)
    loan.close()


def test_an_end_is_the_callers(pump: Any) -> None:
    """The pump does not take the end away: who reads next finds it."""
    loan = Loan(pump)
    loan.source.close()
    assert loan.told()
    assert pump.take_back(loan.ticket)[:3] == (b"", ENDED, b"")
    assert loan._from.recv(1) == b""
    loan.close()


def test_a_slow_client_ends_the_loan(pump: Any) -> None:
    """What it did not take comes back framed; nothing is lost or sent twice."""
    loan = Loan(pump)
    loan.fill()
    loan.source.send(frame(b"data: 1\n\n"))
    assert loan.told()
    seen, why, rest, _ = pump.take_back(loan.ticket)
    assert (seen, why, rest) == (b"data: 1\n\n", UNSENT, frame(b"data: 1\n\n"))
    loan.close()


def test_a_client_that_left_ends_the_loan(pump: Any) -> None:
    """Without a signal: a broken pipe is the caller's to meet."""
    loan = Loan(pump)
    loan.client.close()
    loan.source.send(frame(b"data: 1\n\n"))
    assert loan.told()
    assert pump.take_back(loan.ticket)[1] == UNSENT
    loan.close()


def test_tells_when_enough_has_passed(pump: Any) -> None:
    """At `wake_bytes`, and goes on."""
    loan = Loan(pump)
    piece = b"x" * 4096
    loan.source.send(frame(piece))
    assert loan.told()
    assert pump.look(loan.ticket) == (piece, 0)
    loan.source.send(frame(b"y"))
    loan.received(len(frame(piece)) + 6)
    assert pump.take_back(loan.ticket)[0] == b"y"
    loan.close()


def test_what_nobody_looks_at_is_bounded(pump: Any) -> None:
    """When the observer is that far behind, the loan ends: reading is the caller's pace again."""
    loan = Loan(pump)
    piece = b"x" * 30_000
    for _ in range(2):
        loan.source.send(frame(piece))
        loan.received(len(frame(piece)))
        assert loan.told()
    loan.source.send(frame(piece))
    assert loan.told()
    seen, why, rest, _ = pump.take_back(loan.ticket)
    assert len(seen) == 60_000 < SEEN_BYTES_MAX
    assert why == UNREAD
    assert frame(piece).startswith(rest)
    loan.close()


def test_bounds_how_many_are_lent() -> None:
    """One above is refused without an error; what is taken back makes room."""
    pump = wire.pump(2, 4096)
    assert pump is not None
    loans = [Loan(pump) for _ in range(3)]
    assert [loan.ticket != NONE for loan in loans] == [True, True, False]
    pump.take_back(loans[0].ticket)
    again = Loan(pump)
    assert again.ticket not in {NONE, loans[0].ticket}
    with pytest.raises(ValueError, match="no such stream"):
        pump.look(loans[0].ticket)
    for loan in (*loans, again):
        loan.close()
    pump.close()


def test_descriptors_may_be_closed_while_lent(pump: Any) -> None:
    """The pump has its own: another connection that gets the number is not written to."""
    loan = Loan(pump)
    other, end = socket.socketpair()
    number = loan._to.fileno()
    loan._to.close()
    os.dup2(other.fileno(), number)
    loan.source.send(frame(b"data: 1\n\n"))
    assert loan.received(14) == frame(b"data: 1\n\n")
    for stranger in (other, end):
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
        stranger.close()
    os.close(number)
    pump.take_back(loan.ticket)
    loan.close()


def test_taking_back_in_the_middle_of_it_loses_nothing(pump: Any) -> None:
    """Again and again while bytes pass: each is passed on, or given back, once and in order."""
    sent = b"".join(frame(b"%06d" % number) for number in range(10_000))
    loan = Loan(pump)
    pump.take_back(loan.ticket)
    arrived: list[bytes] = []
    sender = threading.Thread(target=loan.source.sendall, args=(sent,))
    reader = threading.Thread(target=lambda: arrived.append(loan.received(1 << 24)))
    sender.start()
    reader.start()
    seen = b""
    while len(seen) < len(plain(sent)):
        ticket = pump.lend(loan._from, loan._to, True, True)
        time.sleep(1e-5)  # or the thread never has its turn
        part, why, rest, _ = pump.take_back(ticket)
        seen += part
        if why == UNREAD:
            while len(rest) % len(frame(bytes(6))):  # a chunk came in part: the caller reads on
                rest += loan._from.recv(1)
            seen += plain(rest)
        loan._to.sendall(rest)
    sender.join()
    loan._to.shutdown(socket.SHUT_WR)
    reader.join()
    assert seen == plain(sent) == plain(arrived[0])
    loan.close()


def test_the_loop_is_not_woken_for_what_is_lent() -> None:
    """Its epoll forgets the source; it may add it again."""
    with select.epoll() as loop:
        pump = wire.pump(8, 4096, loop.fileno())
        assert pump is not None
        loan = Loan(pump)
        pump.take_back(loan.ticket)
        loop.register(loan._from, select.EPOLLIN)
        ticket = pump.lend(loan._from, loan._to, True, True)
        loan.source.send(frame(b"data: 1\n\n"))
        assert loan.received(14) == frame(b"data: 1\n\n")
        loan.source.send(b"0\r\n\r\n")
        assert select.select([pump], [], [], WAIT_S)[0]
        assert pump.told() == [ticket]
        assert loop.poll(0) == []
        loop.register(loan._from, select.EPOLLIN)
        pump.take_back(ticket)
        loan.close()
        pump.close()


def test_leaves_no_descriptor_behind() -> None:
    """Neither of a loan that was taken back, nor of one that was not."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    pump = wire.pump(8, 4096)
    assert pump is not None
    loans = [Loan(pump) for _ in range(4)]
    pump.take_back(loans[0].ticket)
    pump.close()
    for loan in loans:
        loan.close()
    del pump, loan, loans
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("bad", [(0, 1), (65537, 1), (1, 0), (1, 65537)])
def test_refuses_bounds_out_of_range(bad: tuple[int, int]) -> None:
    """Said at once."""
    with pytest.raises(ValueError, match="streams_max"):
        wire.pump(*bad)


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 2600), max_size=6),
)
def test_any_segmentation_gives_the_same_bytes(pieces: list[bytes], cuts: list[int]) -> None:
    """What passed and what the twin reads of the rest is the body; the client has no more."""
    body = b"".join(map(frame, pieces)) + b"0\r\n\r\n"
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    pump = wire.pump(8, 1)
    assert pump is not None
    loan = Loan(pump)
    observed, sent = b"", 0
    for start, stop in itertools.pairwise(places):
        loan.source.send(body[start:stop])
        sent = stop
        assert loan.told()
        seen, why = pump.look(loan.ticket)
        observed += seen
        if why:
            break
    seen, why, rest, _ = pump.take_back(loan.ticket)
    assert not seen
    assert why == UNREAD
    passed = loan.client.recv(1 << 16) if observed else b""
    twin = ChunkReader()
    twin.feed(passed)
    assert b"".join(twin.pieces) == observed
    reader = ChunkReader()
    reader.feed(rest + body[sent:])
    assert reader.done
    assert observed + b"".join(reader.pieces) == b"".join(pieces)
    loan.close()
    pump.close()
