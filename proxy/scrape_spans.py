"""The metrics of tracing; none without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from proxy.spans.tracer import Tracer


def span_families(tracer: Tracer | None) -> Iterator[Metric]:
    """Yield every family of tracing."""
    if tracer is None:
        return
    outbox = tracer.outbox
    kept = CounterMetricFamily(
        "tongguan_proxy_traces_kept", "Requests chosen to be exported.", labels=["why"]
    )
    for why, count in tracer.kept.items():
        kept.add_metric([why], count)
    yield kept
    yield CounterMetricFamily(
        "tongguan_proxy_traces_exported",
        "Requests whose spans the collector took.",
        value=outbox.exported,
    )
    dropped = CounterMetricFamily(
        "tongguan_proxy_traces_dropped", "Requests whose spans were dropped.", labels=["reason"]
    )
    for reason, count in outbox.dropped.items():
        dropped.add_metric([reason], count)
    yield dropped
    yield GaugeMetricFamily(
        "tongguan_proxy_traces_pending", "Requests that wait to be exported.", value=tracer.pending
    )
