"""The newest memory report as metrics: read at the scrape, nothing is sampled for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.memory.topology import Device, Topology
    from agent.node import Node

_PREFIX = "tongguan_agent_memory"


class MemoryCollector(Collector):
    """Gives nothing before the first sample."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """Return the families."""
        watch = self._node.memory
        if watch is None:
            return
        failures = CounterMetricFamily(f"{_PREFIX}_sample_failures", "Samples that failed.")
        failures.add_metric((), watch.failures)
        yield failures
        if watch.latest is not None:
            yield from _families(watch.latest)


def _families(report: Topology) -> Iterator[Metric]:
    devices = GaugeMetricFamily(
        f"{_PREFIX}_device_bytes",
        "By device and account: the driver's, torch's.",
        labels=("device", "uuid", "account"),
    )
    for device in report.devices:
        for account, value in _accounts(device):
            devices.add_metric((device.id, device.uuid or "", account), value)
    yield devices
    pools = GaugeMetricFamily(
        f"{_PREFIX}_kv_pool_bytes", "KV pool by state of its blocks.", labels=("pool", "state")
    )
    for pool in report.kv_pools:
        for state in ("held", "cached", "free", "touched"):
            blocks = getattr(pool, f"{state}_blocks")
            pools.add_metric((pool.name, state), blocks * pool.block_bytes)
    yield pools
    links = GaugeMetricFamily(
        f"{_PREFIX}_p2p", "1: the GPUs reach each other's memory.", labels=("src", "dst", "kind")
    )
    for link in report.links:
        links.add_metric((link.source, link.target, link.kind), 1 if link.p2p == "ok" else 0)
    yield links
    host = report.host
    for name, text, value in (
        ("limit_bytes", "What this process may have: cgroup or machine.", host.limit_bytes),
        ("headroom_bytes", "What could still be taken.", host.headroom_bytes),
        ("process_bytes", "Resident memory of this process.", host.process.rss_bytes),
    ):
        yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value)
    if host.stalled_share is not None:
        text = "Share of the last 10 s in which some task waited for memory."
        yield GaugeMetricFamily(f"{_PREFIX}_stalled_ratio", text, host.stalled_share)
    if host.cgroup and host.cgroup.oom_kills is not None:
        kills = CounterMetricFamily(f"{_PREFIX}_oom_kills", "Kills in this cgroup.")
        kills.add_metric((), host.cgroup.oom_kills)
        yield kills


def _accounts(device: Device) -> Iterator[tuple[str, float]]:
    driver, torch = device.driver, device.allocator
    yield "driver_total", driver.total_bytes
    yield "driver_used", driver.used_bytes
    yield "driver_free", driver.free_bytes
    if torch is not None:
        for account in ("allocated", "active", "reserved", "inactive_split"):
            value = getattr(torch, f"{account}_bytes")
            if value is not None:
                yield account, value
