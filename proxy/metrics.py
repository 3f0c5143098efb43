"""What the sidecar counts: plain integers, rendered at scrape time.

The data path only adds to ints and list cells, so a request never pays for labels; `scrape` turns
them into Prometheus families when somebody asks. Metric names are API.
"""

from __future__ import annotations

import typing
from bisect import bisect_left

from proxy.errors import Outcome

if typing.TYPE_CHECKING:
    from proxy.qos.classes import QosClass

# Seconds. 200 and 220 ms (drift), 500 and 800 ms (P0's promise) are bounds so that tests of them
# are exact counts.
BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.22,
    0.35,
    0.5,
    0.8,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
_BOUNDS_NS = tuple(int(b * 1e9) for b in BOUNDS_S)
DOORS = ("app", "sealed")
OUTCOMES: tuple[Outcome, ...] = typing.get_args(Outcome)


class Histogram:
    """Counts by upper bound; values in nanoseconds."""

    __slots__ = ("cells", "sum_ns")

    def __init__(self) -> None:
        self.cells = [0] * (len(_BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, value_ns: int) -> None:
        """Count one value."""
        self.cells[bisect_left(_BOUNDS_NS, value_ns)] += 1
        self.sum_ns += value_ns

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts as Prometheus wants them."""
        total, rows = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.cells, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


def built() -> str:
    """Return how the data path runs here: `compiled`, or `interpreted` without a compiler."""
    return "interpreted" if __file__.endswith(".py") else "compiled"


class Counters:
    """What the data path counts. Written by the loop's thread only, read by any.

    But for `admin_turned_out`, which is the admin door's.
    """

    def __init__(self) -> None:
        classes: tuple[QosClass, ...] = ("P0", "P1", "P2")
        self.started: dict[QosClass, int] = dict.fromkeys(classes, 0)
        self.rate_limited = {(qos, whose): 0 for qos in classes for whose in ("class", "tenant")}
        self.rule_matches: list[int] = []  # by the rule's place in the settings
        self.outcomes = {(q, o): 0 for q in classes for o in OUTCOMES}
        self.duration = {qos: Histogram() for qos in classes}
        self.first_byte = {qos: Histogram() for qos in classes}
        self.opening = 0  # requests that wait for their `open` record now
        self.opens = {(q, r): 0 for q in classes for r in ("durable", "failed", "late", "left")}
        self.open_wait = {qos: Histogram() for qos in classes}
        self.refused_heads = dict.fromkeys(DOORS, 0)
        self.connections_refused = 0
        self.admin_turned_out = 0  # connections to the admin door that made room for newer ones
        self.envelopes_opened = 0
        self.envelope_failures: dict[str, int] = {}
        self.requests_sealed: dict[str, int] = {}  # attempts, by pool
        self.answer_failures: dict[tuple[str, str], int] = {}  # by pool and outcome class
        self.alarms = 0
        self.retries = 0
        self.tunnels = 0
        self.tunnels_open = 0
        self.limit_hits: dict[str, int] = dict.fromkeys(LIMITS, 0)
        self.request_bytes = 0
        self.answer_bytes = 0
        self.loop_lag_ns = 0
        self.reloads = {"ok": 0, "failed": 0}
        self.loaded_wall_s = 0.0
        self.tls_handshakes: dict[str, int] = {}
        self.tls_pending = 0
        self.tls_certificate_ends_s = 0.0


LIMITS = (
    "limits.head_bytes",
    "limits.body_bytes",
    "limits.sealing_bytes",
    "limits.discard_bytes",
    "envelope.unverified_bytes",
    "envelope.signature_queue",
    "timeouts.head_s",
    "timeouts.body_idle_s",
    "timeouts.first_byte_s",
    "timeouts.stream_idle_s",
    "timeouts.client_stall_s",
    "timeouts.request_total_s",
    "timeouts.tunnel_idle_s",
    "timeouts.keepalive_s",
    "timeouts.discard_s",
    "timeouts.drain_s",
    "tls.handshakes",
    "tls.handshake_s",
)
