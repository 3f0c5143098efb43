"""The other engines' newest reports as metrics, under names of ours: one for all kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.node import Node

_PREFIX = "tongguan_agent_upstream"
_LABELS = ("upstream", "kind")


class UpstreamCollector(Collector):
    """Gives nothing where no upstream is set."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """Return the families."""
        watch = self._node.upstreams
        if watch is None:
            return
        up = GaugeMetricFamily(f"{_PREFIX}_up", "1 while the engine is healthy.", labels=_LABELS)
        gauges = {
            name: GaugeMetricFamily(f"{_PREFIX}_{metric}", text, labels=_LABELS)
            for name, metric, text in (
                ("running", "requests_running", "Requests the engine runs."),
                ("waiting", "requests_waiting", "Requests that wait in the engine."),
                ("kv_share", "kv_usage_ratio", "Share of its KV cache in use, 0 to 1."),
                ("prefix_share", "prefix_hit_ratio", "Share of prompt tokens found, 0 to 1."),
            )
        }
        for name, report in watch.reports.items():
            labels = (name, report.load.kind if report.load else "unknown")
            up.add_metric(labels, 1 if report.healthy else 0)
            for field, gauge in gauges.items():
                value = getattr(report.load, field) if report.load else None
                if value is not None:
                    gauge.add_metric(labels, value)
        yield up
        yield from gauges.values()
