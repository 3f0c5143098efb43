"""How long requests of each class waited lately: for the page and the node's summary.

The last `KEPT` observations of each class and kind, so memory is fixed; Prometheus has the whole
history. Observed on the engine's thread, read on the admin door's.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from agent.engine.types import QOS_CLASSES

KEPT: Final = 512


class Latencies:
    """Times to first token and between tokens, seconds, by class."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ttft = {name: deque[float](maxlen=KEPT) for name in QOS_CLASSES}
        self._inter = {name: deque[float](maxlen=KEPT) for name in QOS_CLASSES}
        self._requests = dict.fromkeys(QOS_CLASSES, 0)

    def request(self, qos_class: str) -> None:
        """Count a request given to the engine."""
        with self._lock:
            self._requests[qos_class] += 1

    def first_token(self, qos_class: str, seconds: float) -> None:
        """Take a time to first token."""
        with self._lock:
            self._ttft[qos_class].append(seconds)

    def next_token(self, qos_class: str, seconds: float) -> None:
        """Take a time between two tokens."""
        with self._lock:
            self._inter[qos_class].append(seconds)

    def table(self) -> dict[str, dict[str, float | int | None]]:
        """Return counts, median and 99th percentile of each class, milliseconds; None: none yet."""
        with self._lock:
            requests = dict(self._requests)
            kept = {name: (list(self._ttft[name]), list(self._inter[name])) for name in QOS_CLASSES}
        return {
            name: {
                "requests_total": requests[name],
                "ttft_p50_ms": quantile_ms(first, 0.5),
                "ttft_p99_ms": quantile_ms(first, 0.99),
                "inter_token_p50_ms": quantile_ms(inter, 0.5),
                "inter_token_p99_ms": quantile_ms(inter, 0.99),
            }
            for name, (first, inter) in kept.items()
        }


def quantile_ms(seconds: list[float], share: float) -> float | None:
    """Return the nearest-rank quantile in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 3)
