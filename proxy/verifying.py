"""Signatures are verified here, beside the loop: one thread, one bounded queue.

A verification takes 0.1 to 0.4 ms, which the loop does not have. The thread starts with the first
one. What it found is handed back on the loop. Everything but the verification itself runs on the
loop, so the counts need no lock.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.sm4.opener import SignatureCheck

# Ed25519 holds the interpreter while it works. Without a pause the next one would have it again
# before the loop has, and the loop wait for Python's switch interval, 5 ms.
PAUSE_S = 0.000_05

log = logging.getLogger(__name__)


class _Job(NamedTuple):
    check: SignatureCheck
    done: Callable[[bool], None]


class SignatureWorker:
    """Verifies at most `limit` signatures at a time, one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self._limit = limit
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.pending = 0
        self.verified = 0

    def submit(self, check: SignatureCheck, done: Callable[[bool], None]) -> bool:
        """Take a check; `done` gets its answer on the loop. False: full, nothing was taken."""
        if self.pending >= self._limit:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="signatures", daemon=True)
            self._thread.start()
        self.pending += 1
        self._jobs.put(_Job(check, done))
        return True

    def close(self) -> None:
        """Let the thread end when it has done what it has; the loop may close at once."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                valid = job.check.run()
            except Exception as problem:  # noqa: BLE001 - what is not verified is not valid
                log.critical("a signature could not be verified: %s", type(problem).__name__)
                valid = False
            try:
                self._loop.call_soon_threadsafe(self._hand_back, job.done, valid)
            except RuntimeError:  # the loop is closed
                return
            time.sleep(PAUSE_S)

    def _hand_back(self, done: Callable[[bool], None], valid: bool) -> None:  # noqa: FBT001
        self.pending -= 1
        self.verified += 1
        done(valid)
