"""Secrets in memory, as far as Python lets anybody keep one: pages of their own, wiped by hand.

A `Secret` lies in one anonymous page that is locked (mlock), left out of core dumps and empty in a
forked child, each where the kernel allows it. `erase` overwrites it. What this cannot do: every use
hands out a `bytes` object, whose memory is freed but not wiped (docs/audit.md, "MAC and keys").
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# prctl(2), madvise(2): values of the kernel's own headers that Python has no names for.
_PR_SET_DUMPABLE = 4
_MADV_DONTDUMP = 16
_MADV_WIPEONFORK = 18
SECRET_BYTES_MAX = mmap.PAGESIZE


@cache
def _function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, or None where it has none of that name."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    return found


def no_core_dumps() -> None:
    """Let no core dump of this process be written, nor others of this user read its memory.

    Best effort; called before the first key is read, and by who forks, for its children inherit
    the limit but not always the flag.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = _function("prctl")
    if prctl is not None:
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


class Secret:
    """Some bytes that can be erased; `locked` says whether they stay out of swap."""

    __slots__ = ("_page", "_size", "locked")

    def __init__(self, data: bytes) -> None:
        """Take a copy; the caller's own is the caller's to let go of."""
        assert 0 < len(data) <= SECRET_BYTES_MAX
        self._page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._size = len(data)
        self.locked = self._call("mlock")
        for advice in (_MADV_DONTDUMP, _MADV_WIPEONFORK):
            with contextlib.suppress(OSError):  # an older kernel, or another one
                self._page.madvise(advice)
        self._page[: len(data)] = data

    def value(self) -> bytes:
        """Return the bytes; none once they are erased."""
        return self._page[: self._size]

    def erase(self) -> None:
        """Overwrite the bytes; there are none from here on."""
        self._page[:] = bytes(len(self._page))
        self._size = 0
        if self.locked:
            self._call("munlock")
            self.locked = False

    def _call(self, name: str) -> bool:
        function = _function(name)
        if function is None:
            return False
        # Held for the length of the call only: a page that is pointed at cannot be closed.
        start = ctypes.c_char.from_buffer(self._page)
        size = ctypes.c_size_t(len(self._page))
        return function(ctypes.c_void_p(ctypes.addressof(start)), size) == 0
