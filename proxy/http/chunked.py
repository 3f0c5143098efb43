"""Chunked transfer coding (RFC 9112 section 7.1): counted, never searched for its end.

`ChunkReader` takes the bytes of one body as they come and gives the payload as slices. Extensions
and trailer fields are read strictly and dropped: a class in a trailer is no class. Its framing
takes CR LF only; a bare LF, a bad or too large size, or anything between the end of a chunk's data
and its CR LF is an error as soon as it is seen, not when the line is whole.

Invariants: what is held between feeds is at most one incomplete line (`LINE_BYTES`); `pieces` are
slices of the last feed alone; after `done` nothing more is consumed.
"""

from __future__ import annotations

import re

from kernels import wire

LAST_CHUNK = b"0\r\n\r\n"
LINE_BYTES = 4096
"""Bound of one chunk-size line with its extensions, and of one trailer line."""
TRAILER_BYTES = 16 << 10
"""Bound of a trailer section in all."""

# Fifteen digits: below 2^60, so no reader downstream can overflow 64 bits.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_SIZE_BEGIN = re.compile(rb"(?:[0-9A-Fa-f]{1,15}(?:[ \t]+|[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r?)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")
_TRAILER_BEGIN = re.compile(
    rb"\r|(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?::[\t\x20-\x7e\x80-\xff]*\r?)?)?"
)

_IN_SIZE, _IN_DATA, _IN_TRAILER, _ENDED = range(4)


class ChunkError(Exception):
    """The framing is broken: the message says where; nothing after this point can be trusted."""


class ChunkReader:
    """Reads one chunked body.

    `pieces`: payload of the last `feed`, in order, none empty. `done`: the last chunk and its
    trailer section have been read.
    """

    __slots__ = ("_held", "_left", "_state", "_trailer", "done", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.done = False
        self._state = _IN_SIZE
        self._held = b""
        # In data: bytes until the end of the chunk, its CR LF included.
        self._left = 0
        self._trailer = 0

    @property
    def between_chunks(self) -> bool:
        """Say whether a chunk's size line comes next, from its first byte."""
        return self._state == _IN_SIZE and not self._held

    def feed(self, data: bytes) -> int:
        """Take the next bytes; return how many belong to the body (fewer than given when done).

        Raises ChunkError; the reader is of no use after that.
        """
        pieces: list[bytes] = []
        self.pieces = pieces
        size = len(data)
        held = len(self._held)
        if held:
            data = self._held + data
            size += held
            self._held = b""
        pos = 0
        if self._state == _IN_SIZE:
            pos = whole_chunks(data, pieces)
            if pos == size:
                return size - held
            if size - pos == len(LAST_CHUNK) and data.endswith(LAST_CHUNK):
                self._state = _ENDED
                self.done = True
                return size - held
        while pos < size:
            if self._state == _IN_SIZE:
                line = _SIZE.match(data, pos, pos + LINE_BYTES)
                if line is None:
                    self._hold(data, pos, _SIZE_BEGIN, "chunk size")
                    break
                pos = line.end()
                length = int(line[1], 16)
                if not length:
                    self._state = _IN_TRAILER
                    continue
                end = pos + length
                # The usual case: the chunk is here as a whole.
                if data[end : end + 2] == b"\r\n":
                    pieces.append(data[pos:end])
                    pos = end + 2
                    continue
                self._left = length + 2
                self._state = _IN_DATA
            elif self._state == _IN_DATA:
                pos = self._data(data, pos)
            elif self._state == _IN_TRAILER:
                after = self._trailer_line(data, pos)
                if after < 0:
                    break
                pos = after
            else:
                break
        else:
            return size - held
        return (pos if self.done else size) - held

    def _data(self, data: bytes, pos: int) -> int:
        """Take what is here of a chunk that is not here as a whole; return the new position."""
        left, here = self._left, len(data) - pos
        if here < left - 2:
            self.pieces.append(data[pos:] if pos else data)  # the buffer itself, no copy
            self._left = left - here
            return len(data)
        if left > 2:
            end = pos + left - 2
            self.pieces.append(data[pos:end])
            pos = end
            left = 2
        ending = data[pos : pos + left]
        if not b"\r\n"[2 - left :].startswith(ending):
            raise ChunkError("chunk data is not followed by CR LF")
        self._left = left - len(ending)
        if not self._left:
            self._state = _IN_SIZE
        return pos + len(ending)

    def _trailer_line(self, data: bytes, pos: int) -> int:
        """Read one trailer line; return the position after it, -1 when it is incomplete."""
        if data.startswith(b"\r\n", pos):
            self._state = _ENDED
            self.done = True
            return pos + 2
        line = _TRAILER.match(data, pos, pos + LINE_BYTES)
        if line is None:
            self._hold(data, pos, _TRAILER_BEGIN, "trailer")
            return -1
        self._trailer += line.end() - pos
        if self._trailer > TRAILER_BYTES:
            raise ChunkError(f"trailer section is larger than {TRAILER_BYTES} bytes")
        return line.end()

    def _hold(self, data: bytes, pos: int, begin: re.Pattern[bytes], what: str) -> None:
        """Keep an incomplete line, if it can still become a good one."""
        if len(data) - pos >= LINE_BYTES:
            raise ChunkError(f"{what} line is bad, or longer than {LINE_BYTES} bytes")
        if begin.fullmatch(data, pos) is None:
            raise ChunkError(f"{what} line is bad")
        self._held = data[pos:]


def whole_chunks_pure(data: bytes, pieces: list[bytes]) -> int:  # noqa: ARG001 - the twin in C
    """Append the payload of the chunks that `data` begins with; return where they end.

    Taking none is as right: what is left, `feed` reads itself.
    """
    return 0


whole_chunks = wire.chunks(whole_chunks_pure)


def frame(payload: bytes) -> bytes:
    """Return `payload` as one chunk; nothing for an empty one, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
