"""Memory between two pages that no access survives, and buffers of every other kind.

A sanitizer sees what the compiler has instrumented; vector loads under a mask are not. Here the
processor looks: one byte before or behind a fenced buffer is a fault.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

PAGE = mmap.PAGESIZE
CANARY = 64
PROT_NONE = 0


class Arena:
    """Room for one buffer, which may lie at its beginning, at its end or in between."""

    def __init__(self, room_bytes: int) -> None:
        pages = -(-room_bytes // PAGE) + 2
        self._mapped = mmap.mmap(-1, pages * PAGE)
        first = ctypes.c_char.from_buffer(self._mapped)
        address = ctypes.addressof(first)
        del first
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for at in (0, (pages - 1) * PAGE):
            if protect(ctypes.c_void_p(address + at), PAGE, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.size = (pages - 2) * PAGE
        self.room = memoryview(self._mapped)[PAGE:-PAGE]
        self.room[:] = os.urandom(self.size)

    def place(self, rng: random.Random, size: int) -> int:
        """Return where a buffer of that size begins: half of them touch a fence."""
        last = self.size - size
        return rng.choice((0, last, rng.randrange(last + 1), rng.randrange(last + 1)))

    def around(self, at: int, size: int) -> bytes:
        """Return what lies near a buffer, to be the same afterwards."""
        before, behind = self.room[max(0, at - CANARY) : at], self.room[at + size :][:CANARY]
        return b"".join((before, behind))


def _exact(data: bytes) -> array[int]:
    """Return an array whose memory ends with its last byte, which a bytearray's does not."""
    exact = array("B", b"\0") * len(data)
    memoryview(exact)[:] = data
    return exact


def _words(data: bytes) -> object:
    return memoryview(array("I", data)) if len(data) % 4 == 0 else memoryview(data)


def _rows(data: bytes) -> object:
    """Return a two-dimensional view where the length allows it."""
    if len(data) % 4 or not data:
        return memoryview(data)
    return memoryview(data).cast("B", (len(data) // 4, 4))


class OwnBytes(bytes):
    """Not exactly bytes, so taken by way of the buffer protocol."""

    __slots__ = ()


KINDS: tuple[Callable[[bytes], object], ...] = (
    bytes,
    bytes,
    bytearray,
    memoryview,
    OwnBytes,
    _exact,
    _words,
    _rows,
    lambda data: memoryview(bytearray(data)),
    lambda data: memoryview(b"-" + data + b"-")[1:-1],
    lambda data: (ctypes.c_ubyte * len(data)).from_buffer_copy(data),
)


def no_buffers() -> list[tuple[object, type[Exception]]]:
    """Return what is no contiguous buffer, each with the error that says so."""
    released = memoryview(bytearray(12))
    released.release()
    return [
        (None, TypeError), ("n" * 12, TypeError), (12, TypeError), (1.5, TypeError),
        ([0] * 12, TypeError), ({}, TypeError), (object(), TypeError), (bytes, TypeError),
        (memoryview(bytes(24))[::2], BufferError), (memoryview(bytes(12))[::-1], BufferError),
        (released, ValueError),
    ]  # fmt: skip
