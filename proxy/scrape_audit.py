"""Metrics of requests that wait for the disk before they are sent on (`audit.sync`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from proxy.metrics import Counters


def opening_families(counters: Counters) -> Iterator[Metric]:
    """Yield the families of one sidecar's waits for `open` records."""
    yield GaugeMetricFamily(
        "tongguan_proxy_audit_opening",
        "Requests that wait for their open record to be on disk.",
        value=counters.opening,
    )
    ends = CounterMetricFamily(
        "tongguan_proxy_audit_open",
        "Such waits by how they ended: durable, failed, late, left.",
        labels=["qos", "result"],
    )
    for (qos, result), count in counters.opens.items():
        ends.add_metric([qos, result], count)
    yield ends
    waited = HistogramMetricFamily(
        "tongguan_proxy_audit_open_seconds", "How long they waited.", labels=["qos"]
    )
    for qos, histogram in counters.open_wait.items():
        waited.add_metric([qos], histogram.buckets(), histogram.sum_ns / 1e9)
    yield waited
