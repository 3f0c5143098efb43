"""Every metric name and label of the sidecar; plain integers on the way, rendered at scrape time.

The data path only adds to ints and list cells. `Collector` turns them into Prometheus families when
somebody asks, so a request never pays for labels. Metric names are API.
"""

from __future__ import annotations

import typing
from bisect import bisect_left
from typing import TYPE_CHECKING

from proxy.errors import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from proxy.context import Context

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


class Counters:
    """What the data path counts. Written by the loop's thread only, read by any."""

    def __init__(self) -> None:
        classes = ("P0", "P1", "P2")
        self.started = dict.fromkeys(classes, 0)
        self.queue_full = dict.fromkeys(classes, 0)
        self.outcomes = {(q, o): 0 for q in classes for o in OUTCOMES}
        self.duration = {qos: Histogram() for qos in classes}
        self.first_byte = {qos: Histogram() for qos in classes}
        self.refused_heads = dict.fromkeys(DOORS, 0)
        self.connections_refused = 0
        self.envelopes_opened = 0
        self.envelope_failures: dict[str, int] = {}
        self.alarms = 0
        self.retries = 0
        self.limit_hits: dict[str, int] = dict.fromkeys(LIMITS, 0)
        self.request_bytes = 0
        self.answer_bytes = 0
        self.loop_lag_ns = 0


LIMITS = (
    "limits.body_bytes",
    "envelope.unverified_bytes",
    "timeouts.head_s",
    "timeouts.body_idle_s",
    "timeouts.first_byte_s",
    "timeouts.stream_idle_s",
    "timeouts.client_stall_s",
    "timeouts.request_total_s",
)


class Collector:
    """Renders a context's counters; registered once, asked at each scrape."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._requests()
        yield from self._pools()
        yield from self._channel()
        yield from self._audit()

    def _requests(self) -> Iterator[Metric]:
        from prometheus_client.core import (  # noqa: PLC0415 - only a scrape pays for it
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        counters = self._context.counters
        started = CounterMetricFamily(
            "tongguan_proxy_requests_started", "Requests that were classed.", labels=["qos"]
        )
        for qos, count in counters.started.items():
            started.add_metric([qos], count)
        yield started
        finished = CounterMetricFamily(
            "tongguan_proxy_requests", "Finished requests.", labels=["qos", "outcome"]
        )
        for (qos, outcome), count in list(counters.outcomes.items()):
            finished.add_metric([qos, outcome], count)
        yield finished
        for name, text, table in (
            ("duration", "Head received to end of answer.", counters.duration),
            ("first_byte", "Head received to first body byte from upstream.", counters.first_byte),
        ):
            family = HistogramMetricFamily(
                f"tongguan_proxy_request_{name}_seconds", text, labels=["qos"]
            )
            for qos, histogram in table.items():
                family.add_metric([qos], histogram.buckets(), histogram.sum_ns / 1e9)
            yield family
        refused = CounterMetricFamily(
            "tongguan_proxy_refused_heads", "Heads refused or too late.", labels=["door"]
        )
        for door, count in counters.refused_heads.items():
            refused.add_metric([door], count)
        yield refused
        hits = CounterMetricFamily(
            "tongguan_proxy_limit_hits", "Times a limit was hit.", labels=["limit"]
        )
        for limit, count in list(counters.limit_hits.items()):
            hits.add_metric([limit], count)
        hits.add_metric(["doors.connections"], counters.connections_refused)
        yield hits
        for name, text, value in (
            ("request_body_bytes", "Request body bytes received.", counters.request_bytes),
            ("answer_body_bytes", "Answer body bytes from upstream.", counters.answer_bytes),
            ("retries", "Requests sent a second time.", counters.retries),
            ("alarms", "Alarm lines logged.", counters.alarms),
        ):
            yield CounterMetricFamily(f"tongguan_proxy_{name}", text, value=value)
        open_connections = GaugeMetricFamily(
            "tongguan_proxy_connections", "Open client connections.", labels=["door"]
        )
        for door, connections in self._context.connections.items():
            open_connections.add_metric([door], len(connections))
        yield open_connections
        yield GaugeMetricFamily(
            "tongguan_proxy_loop_lag_seconds",
            "How late the data loop's last tick was.",
            value=counters.loop_lag_ns / 1e9,
        )

    def _pools(self) -> Iterator[Metric]:
        from prometheus_client.core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        context = self._context
        gauges = {
            "inflight": "Requests in flight.",
            "inflight_limit": "Bound of the requests in flight.",
            "idle_connections": "Idle upstream connections.",
        }
        totals = {
            "refused": "Requests refused because the pool was full.",
            "connects": "Connections opened.",
            "connect_failures": "Connections that could not be opened.",
            "late_bytes": "Connections dropped because bytes came outside an answer.",
        }
        rows = {}
        for name, route in context.routes.items():
            pool, upstreams = route.state, route.upstreams
            rows[name] = {
                "inflight": pool.inflight,
                "inflight_limit": pool.inflight_max,
                "idle_connections": upstreams.idle_count(),
                "refused": pool.refused,
                "connects": upstreams.connects,
                "connect_failures": upstreams.connect_failures,
                "late_bytes": upstreams.late_bytes,
            }
        for kind, names in ((GaugeMetricFamily, gauges), (CounterMetricFamily, totals)):
            for noun, text in names.items():
                family = kind(f"tongguan_proxy_pool_{noun}", text, labels=["pool"])
                for name, row in rows.items():
                    family.add_metric([name], row[noun])
                yield family

    def _channel(self) -> Iterator[Metric]:
        from prometheus_client.core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
            InfoMetricFamily,
        )

        from proxy.sm4.cipher import TIER  # noqa: PLC0415

        context = self._context
        counters = context.counters
        failures = CounterMetricFamily(
            "tongguan_proxy_envelope_failures",
            "Envelopes refused, by outcome class.",
            labels=["reason"],
        )
        for reason, count in list(counters.envelope_failures.items()):
            failures.add_metric([reason], count)
        yield failures
        yield CounterMetricFamily(
            "tongguan_proxy_envelopes_opened",
            "Envelopes opened.",
            value=counters.envelopes_opened,
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_unverified_bytes",
            "Sealed bytes held before verification.",
            value=context.budget.held_bytes,
        )
        yield InfoMetricFamily("tongguan_proxy_sm4", "Cipher tier.", value={"tier": TIER})
        if context.receiver is not None:
            replay, ring = context.receiver.replay, context.receiver.keyring
            yield GaugeMetricFamily(
                "tongguan_proxy_replay_entries", "Replay cache entries.", value=replay.entries
            )
            yield GaugeMetricFamily(
                "tongguan_proxy_replay_entries_limit", "Their bound.", value=replay.limit
            )
            live = len(ring.live_kids(context.clock.wall_ms()))
            yield GaugeMetricFamily("tongguan_proxy_live_kids", "Key ids in time.", value=live)

    def _audit(self) -> Iterator[Metric]:
        from prometheus_client.core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        audit = self._context.audit
        yield GaugeMetricFamily(
            "tongguan_proxy_audit_available",
            "1 while records can be written.",
            value=int(audit is not None and audit.available),
        )
        if audit is None:
            return
        stats = audit.stats
        for name, text in (
            ("records", "Records appended."),
            ("bytes", "Bytes appended."),
            ("syncs", "Group syncs."),
            ("lost", "Records lost and declared."),
            ("failures", "Failed writes and syncs."),
        ):
            value = getattr(stats, name)
            yield CounterMetricFamily(f"tongguan_proxy_audit_{name}", text, value=value)
        yield GaugeMetricFamily(
            "tongguan_proxy_audit_pending", "Records not yet durable.", value=stats.pending
        )
