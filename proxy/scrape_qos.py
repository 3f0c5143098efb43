"""Admission as Prometheus families: queues, sheds, limits, buckets, rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from proxy.qos.admission import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from proxy.context import Context
    from proxy.qos.admission import Tier


def qos_families(context: Context) -> Iterator[Metric]:
    """Yield every family of admission."""
    yield from _sheds(context)
    yield from _queues(context)
    yield from _limits(context)
    rules = CounterMetricFamily(
        "tongguan_proxy_rule_matches",
        "Requests that a rule of qos.rules has classed, by its place.",
        labels=["rule"],
    )
    for number, count in enumerate(context.counters.rule_matches, 1):
        rules.add_metric([str(number)], count)
    yield rules


def _sheds(context: Context) -> Iterator[Metric]:
    tiers = context.gates.tiers
    full = CounterMetricFamily(
        "tongguan_proxy_queue_full", "Requests refused with queue_full.", labels=["qos"]
    )
    shed = CounterMetricFamily(
        "tongguan_proxy_shed",
        "Requests refused by admission; early: their deadline could not have been met.",
        labels=["qos", "reason"],
    )
    for qos, tier in tiers.items():
        full.add_metric([qos], tier.sheds["queue_full"])
        for reason in REASONS:
            shed.add_metric([qos, reason], tier.sheds[reason])
    yield full
    yield shed
    beyond = CounterMetricFamily(
        "tongguan_proxy_shed_beyond_budget",
        "Requests refused when the class had lost more than its share in 60 s.",
        labels=["qos"],
    )
    for qos, tier in tiers.items():
        beyond.add_metric([qos], tier.shed_beyond)
    yield beyond
    yield CounterMetricFamily(
        "tongguan_proxy_broken_promises",
        "P0 requests refused: their bound was reached.",
        value=tiers["P0"].shed,
    )
    limited = CounterMetricFamily(
        "tongguan_proxy_rate_limited",
        "Requests refused with rate_limited, by whose rate.",
        labels=["qos", "scope"],
    )
    for (qos, whose), count in context.counters.rate_limited.items():
        if qos != "P0":
            limited.add_metric([qos, whose], count)
    yield limited


def _queues(context: Context) -> Iterator[Metric]:
    lined = [tier for tier in context.gates.tiers.values() if tier.qos != "P0"]
    now_ns = context.clock.mono_ns()
    for name, text, value in (
        ("queue_depth", "Requests that wait.", _depth),
        ("queue_depth_limit", "Bound of the requests that wait.", _depth_limit),
    ):
        gauge = GaugeMetricFamily(f"tongguan_proxy_{name}", text, labels=["qos"])
        for tier in lined:
            gauge.add_metric([tier.qos], value(tier))
        yield gauge
    rate = GaugeMetricFamily(
        "tongguan_proxy_queue_drain_rate",
        "Requests a second that left the queue for an upstream, while there was a queue.",
        labels=["qos"],
    )
    for tier in lined:
        rate.add_metric([tier.qos], tier.drain.per_s(now_ns))
    yield rate
    left = CounterMetricFamily(
        "tongguan_proxy_queue_left", "Requests that ended while they waited.", labels=["qos"]
    )
    waited = HistogramMetricFamily(
        "tongguan_proxy_queue_wait_seconds",
        "Time in the queue, of requests that waited and left its head.",
        labels=["qos"],
    )
    for tier in lined:
        left.add_metric([tier.qos], tier.left)
        waited.add_metric([tier.qos], tier.waited.buckets(), tier.waited.sum_ns / 1e9)
    yield left
    yield waited


def _depth(tier: Tier) -> int:
    return tier.waiting


def _depth_limit(tier: Tier) -> int:
    return tier.terms.queue_max


def _limits(context: Context) -> Iterator[Metric]:
    limit = GaugeMetricFamily(
        "tongguan_proxy_inflight_limit",
        "Requests in flight that a class may have now.",
        labels=["qos"],
    )
    agents = GaugeMetricFamily(
        "tongguan_proxy_agent_limit",
        "The node agent's limit of a class, while it holds.",
        labels=["qos"],
    )
    tokens = GaugeMetricFamily(
        "tongguan_proxy_rate_tokens", "Tokens in the class's bucket.", labels=["qos"]
    )
    for qos, tier in context.gates.tiers.items():
        limit.add_metric([qos], min(tier.bound, tier.cap))
        if tier.external >= 0:
            agents.add_metric([qos], tier.external)
        if tier.bucket is not None:
            tokens.add_metric([qos], tier.bucket.tokens)
    yield limit
    yield agents
    yield tokens
    gauges = {
        "adaptive_limit": "Requests in flight that the pools' upstreams take, as measured.",
        "adaptive_rest_seconds": "Time to first byte at rest; 0 while unknown.",
        "adaptive_recent_seconds": "Time to first byte in the last window.",
    }
    families = {
        name: GaugeMetricFamily(f"tongguan_proxy_{name}", text, labels=["pools"])
        for name, text in gauges.items()
    }
    cuts = CounterMetricFamily(
        "tongguan_proxy_adaptive_cuts", "Times the measured limit fell.", labels=["pools"]
    )
    for gate in context.gates.gates:
        adaptive = gate.adaptive
        if adaptive is not None:
            families["adaptive_limit"].add_metric([gate.name], adaptive.limit)
            families["adaptive_rest_seconds"].add_metric([gate.name], adaptive.baseline_ns / 1e9)
            families["adaptive_recent_seconds"].add_metric([gate.name], adaptive.recent_ns / 1e9)
            cuts.add_metric([gate.name], adaptive.cuts)
    yield from families.values()
    yield cuts
    answers = CounterMetricFamily(
        "tongguan_proxy_agent_limits",
        "Questions for the node agent's limits, by what came of them.",
        labels=["outcome"],
    )
    asked = context.gates.agent
    for outcome in ("taken", "stale", "absent", "malformed"):
        answers.add_metric([outcome], getattr(asked, outcome))
    yield answers
