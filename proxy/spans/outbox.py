"""The thread that makes spans and brings them to the collector.

A request costs the data loop one `put`: a bounded append. Whatever the collector does (is not
there, is slow, refuses) is this thread's to wait for; meanwhile the outbox fills, and beyond its
bound finished requests are dropped and counted. One warning a minute at most says so.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from proxy.spans.build import spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.spans.build import Span
    from proxy.spans.finished import Finished

BATCH = 64  # requests an export
EVERY_S = 1.0
WARN_EVERY_S = 60.0

log = logging.getLogger(__name__)


class Collector(Protocol):
    """Who takes spans."""

    def export(self, batch: Sequence[Span]) -> bool:
        """Bring spans over; False: they were not taken."""

    def shutdown(self) -> None:
        """End a wait between two tries; from any thread."""


class Outbox:
    """See the module. `put` and the counters are the data loop's; counts are read by any."""

    def __init__(self, collector: Collector, most: int) -> None:
        self.exported = 0
        self.dropped = {"full": 0, "refused": 0, "shutdown": 0}
        self._collector = collector
        self._most = most
        self._queue: deque[Finished] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._flying = 0  # requests whose export is under way
        self._warned_s = -WARN_EVERY_S
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def __len__(self) -> int:
        return len(self._queue)

    def start(self) -> None:
        """Begin to export."""
        self._thread.start()

    def put(self, done: Finished) -> None:
        """Take a finished request, if there is room."""
        queue = self._queue
        if len(queue) >= self._most:
            self.dropped["full"] += 1
            return
        queue.append(done)
        if len(queue) == BATCH:
            self._wake.set()

    def stop(self, flush_s: float) -> None:
        """Export what is left, for at most so long; blocks."""
        self._stopping = True
        self._wake.set()
        self._thread.join(flush_s)
        left = len(self._queue) + self._flying
        self._queue.clear()
        self._collector.shutdown()
        if left:
            self.dropped["shutdown"] += left
            log.warning("spans: %d requests' were not exported before the end", left)

    def _run(self) -> None:
        bits = random.Random(random.SystemRandom().getrandbits(256)).getrandbits  # noqa: S311 - span ids are no secret
        queue = self._queue
        while True:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            while queue:
                batch = [queue.popleft() for _ in range(min(len(queue), BATCH))]
                made = [span for done in batch for span in spans(done, bits)]
                self._flying = len(batch)
                taken = self._collector.export(made)
                self._flying = 0
                if taken:
                    self.exported += len(batch)
                else:
                    self.dropped["refused"] += len(batch)
                    self._warn()
            if self._stopping:
                return

    def _warn(self) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(
                "spans: the collector does not take them: dropped=%d", sum(self.dropped.values())
            )
