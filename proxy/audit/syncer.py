"""The thread of a chain that may wait for the disk: it writes, syncs, and signs what is durable.

Batches come in order and are done one at a time; each is answered on the loop, or, where nobody
waits for the answer, when the loop next comes by. Before `start` the same is done on the caller's
thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from proxy.audit.disk import Disk

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from pathlib import Path

    from proxy.audit.checkpoint import Checkpointer, Signed
    from proxy.audit.disk import Committed, Part

# What the witness has at the end: less than the writer waits for this thread.
FAREWELL_S = 2.0

COLLECT_S = 0.1
# Parts, and whether to sign; None: only to be written ahead.
_Job = tuple[list["Part"], bool | None]


class Syncer:
    """See the module."""

    def __init__(
        self,
        chain_dir: Path,
        tree: Checkpointer | None,
        loop: asyncio.AbstractEventLoop,
        done: Callable[[Committed, Signed | None], None],
        escrow: str = "",
    ) -> None:
        self._disk = Disk(chain_dir, escrow, None if tree is None else tree.expect)
        self._ahead: list[Part] = []
        self._tree = tree
        self._loop = loop
        self._done = done
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the two below
        self._kept: tuple[Committed, Signed | None] | None = None
        self._wanted = False
        self._quiet = False  # the answer of the batch that is being synced is to be collected
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="audit-sync", daemon=True)

    def commit(self, parts: list[Part], *, sign: bool) -> tuple[Committed, Signed | None]:
        """Write, sync, and sign what is durable then."""
        committed = self._disk.commit(parts)
        parts, self._ahead = self._ahead + parts, []
        if self._tree is None:
            return committed, None
        self._tree.add(parts, committed.records)
        return committed, self._tree.sign() if sign and committed.error is None else None

    def close(self) -> None:
        """Let go of the files of a thread that was never started."""
        self._disk.close()

    def start(self) -> None:
        """Begin to take batches."""
        self._thread.start()

    def put(self, parts: list[Part], *, sign: bool, quiet: bool = False) -> None:
        """Have a batch committed; `done` is told on the loop.

        `quiet`: what went well may be kept for `collect`, since to wake the loop costs more than to
        write a record.
        """
        self._wanted = not quiet
        self._quiet = quiet
        if quiet:  # whoever comes by is first, where there are some a second
            self._timer = self._loop.call_later(COLLECT_S, self.collect)
        self._jobs.put((parts, sign))

    def collect(self) -> None:
        """Have `done` told of a quiet batch: now, or, where there is no answer yet, by itself."""
        if not self._quiet:
            return
        self._listen()
        with self._lock:
            kept, self._kept = self._kept, None
            self._wanted = kept is None
        if kept is not None:
            self._done(*kept)

    def _listen(self) -> None:
        self._quiet = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, committed: Committed, signed: Signed | None) -> None:
        self._listen()
        self._done(committed, signed)

    def put_ahead(self, parts: list[Part]) -> None:
        """Have parts written before the batch that is put next, which answers for them too."""
        self._jobs.put((parts, None))

    def end(self) -> None:
        """End behind what was put: close the files, show the witness the whole log."""
        self._jobs.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread: it may be inside a write that hangs."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            parts, sign = job
            if sign is None:
                self._ahead += parts
                self._disk.ahead(parts)
                continue
            committed, signed = self.commit(parts, sign=sign)
            del parts, job
            with self._lock:
                if not self._wanted and committed.error is None:
                    self._kept = committed, signed
                    continue
            with contextlib.suppress(RuntimeError):  # the loop is gone
                self._loop.call_soon_threadsafe(self._tell, committed, signed)
        self._disk.close()
        if self._tree is not None:
            self._tree.farewell(FAREWELL_S)
