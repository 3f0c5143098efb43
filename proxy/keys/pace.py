"""Work in a thread beside the data loop: let it in before it has waited for long.

A thread that computes keeps the interpreter's lock until another one has waited for 5 ms, which is
the whole stall that a reload may cause. So who reads many keys calls `breathe` after each few: once
it has worked for `SLICE_S` it sleeps for a moment, and whoever waits goes first. On the main thread
nobody is waiting yet (that is the start, or a command), so there it does nothing.
"""

from __future__ import annotations

import gc
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SLICE_S = 0.0005
REST_S = 0.0001

_since = threading.local()


def breathe() -> None:
    """Rest if this thread has worked for a slice, and is not the main one."""
    if _on_main_thread():
        return
    now_s = time.monotonic()
    if now_s - getattr(_since, "value", 0.0) >= SLICE_S:
        time.sleep(REST_S)
        _since.value = time.monotonic()


@contextmanager
def uncollected() -> Iterator[None]:
    """Make many objects without looking for cycles in between, on the main thread.

    Keys refer to nothing that refers to them; to look at all of them again and again is a third of
    the time that loading takes.
    """
    if not _on_main_thread() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
