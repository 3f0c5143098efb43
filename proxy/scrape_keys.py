"""Metrics of the keys. A kid is no secret; so many are named, of all there is a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from proxy.keys.provider import NEVER_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from proxy.keys.watch import KeyWatch

KIDS_NAMED_MAX = 32


def key_families(watch: KeyWatch, now_ms: int) -> Iterator[Metric]:
    """Yield the families of one sidecar's keys."""
    provider = watch.provider
    state = provider.state()
    available = GaugeMetricFamily(
        "tongguan_proxy_keys_provider_available",
        "1 while keys can be had from where they are kept.",
        labels=["provider"],
    )
    available.add_metric([provider.kind], int(state.ok))
    yield available
    yield GaugeMetricFamily(
        "tongguan_proxy_keys_degraded_seconds",
        "How long they cannot be had by now; 0: they can.",
        value=0 if state.ok else max(0, now_ms - state.since_ms) / 1000,
    )
    if state.lease_until_ms != NEVER_MS:
        yield GaugeMetricFamily(
            "tongguan_proxy_keys_lease_seconds",
            "How long keys may be used if nothing more is heard of the service.",
            value=max(0, state.lease_until_ms - now_ms) / 1000,
        )
    yield GaugeMetricFamily(
        "tongguan_proxy_keys_expiring",
        "Keys that end within keys.expiry_alarm_s with nothing to follow them.",
        value=watch.expiring,
    )
    yield CounterMetricFamily(
        "tongguan_proxy_keys_expiry_alarms", "Alarms raised for those.", value=watch.alarms
    )
    yield GaugeMetricFamily(
        "tongguan_proxy_keys_revoked", "Kids that are named as revoked.", value=watch.revoked
    )
    ring = watch.ring
    if ring is None:
        return
    yield GaugeMetricFamily("tongguan_proxy_keys_known", "Envelope keys held.", value=len(ring))
    live = GaugeMetricFamily(
        "tongguan_proxy_keys_kid_live",
        "Kids an envelope made now would be opened with, some of them.",
        labels=["kid"],
    )
    ends = GaugeMetricFamily(
        "tongguan_proxy_keys_kid_end_timestamp_seconds", "When each of these ends.", labels=["kid"]
    )
    for key in ring.live_keys(now_ms, KIDS_NAMED_MAX):
        live.add_metric([key.kid.hex()], 1)
        ends.add_metric([key.kid.hex()], key.not_after_ms / 1000)
    yield live
    yield ends
