"""Every metric of the agent.

What vLLM has is named as vLLM names it (`vllm:…`, label `model_name`), so that dashboards,
autoscalers and routers made for vLLM read this engine as they are; what is ours alone is
`tongguan_agent_…`. docs/agent.md has the table. Engine counters are read from `Engine.stats()` at
the scrape; nothing is counted twice.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.engine.types import QOS_CLASSES
from agent.latency import Latencies
from agent.memory.metrics import MemoryCollector
from agent.upstream_metrics import UpstreamCollector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.node import Node

# vLLM's bounds and the promises of the classes: 200, 220, 500 and 800 ms.
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.22, 0.25, 0.5, 0.75, 0.8, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_STEP_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.22, 0.3, 0.4, 0.5, 0.75, 0.8, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.2, 0.22, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

# The engine's word for an end and vLLM's.
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}

LIMITS = (
    "connections",
    "body_bytes",
    "bodies_bytes",
    "queue",
    "pending_tokens",
    "head_s",
    "body_idle_s",
    "client_stall_s",
    "memory_reserve_bytes",
)


class Metrics:
    """The registry and what the API counts itself."""

    def __init__(self, node: Node) -> None:
        self.registry = CollectorRegistry()
        self.latencies = Latencies()
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineCollector(node))
        self.registry.register(MemoryCollector(node))
        self.registry.register(UpstreamCollector(node))
        model = ("model_name",)
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request's head to its first token.",
            model,
            buckets=_TTFT_S,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "vllm:inter_token_latency_seconds",
            "From one token of a request to the next.",
            model,
            buckets=_STEP_S,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the request's head to its end, whatever the end.",
            model,
            buckets=_REQUEST_S,
            registry=self.registry,
        )
        self.requests = Counter(
            "tongguan_agent_requests",
            "Requests given to the engine, by effective class.",
            ("qos_class",),
            registry=self.registry,
        )
        self.errors = Counter(
            "tongguan_agent_errors",
            "Error answers and error events, by code.",
            ("code",),
            registry=self.registry,
        )
        self.abandoned = Counter(
            "tongguan_agent_abandoned",
            "Requests ended before their end, by why: gone, stalled, behind, draining.",
            ("why",),
            registry=self.registry,
        )
        self.limits = Counter(
            "tongguan_agent_limit_hits",
            "How often a limit was hit, by the setting's name.",
            ("setting",),
            registry=self.registry,
        )
        self.connections = Gauge(
            "tongguan_agent_connections", "Open connections to the API.", registry=self.registry
        )
        for name in QOS_CLASSES:
            self.requests.labels(name)
        for name in ("gone", "stalled", "behind", "draining"):
            self.abandoned.labels(name)
        for name in LIMITS:
            self.limits.labels(name)
        self.witness_cosigned = Counter(
            "tongguan_agent_witness_cosigned",
            "Checkpoints of audit logs cosigned.",
            registry=self.registry,
        )
        self.witness_refused = Counter(
            "tongguan_agent_witness_refused",
            "Checkpoints refused, by status; fork: two histories of one log.",
            ("reason",),
            registry=self.registry,
        )
        self.witness_origins = Gauge(
            "tongguan_agent_witness_origins", "Audit logs known.", registry=self.registry
        )
        self.chain_seeds = Counter(
            "tongguan_agent_chain_seeds",
            "Seeds of audit chains handed out.",
            registry=self.registry,
        )
        self.trace_leases = Gauge(
            "tongguan_agent_trace_leases", "Trace-id leases that are out.", registry=self.registry
        )

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)


class RequestTimes:
    """Observes one request's times; `on_tokens` runs where tokens are made, the engine's thread."""

    __slots__ = ("_class", "_inter_token", "_last_ns", "_metrics", "_model", "_ttft", "started_ns")

    def __init__(self, metrics: Metrics, started_ns: int) -> None:
        self.started_ns = started_ns
        self._metrics = metrics
        self._last_ns = 0

    def begin(self, model: str, qos_class: str) -> None:
        """Name the model and the class, before the engine is asked."""
        self._model = model
        self._class = qos_class
        self._ttft = self._metrics.ttft.labels(model)
        self._inter_token = self._metrics.inter_token.labels(model)

    def on_tokens(self, count: int) -> None:
        """Take one step of `count` tokens."""
        if not count:
            return
        now_ns = time.monotonic_ns()
        if self._last_ns:
            seconds = (now_ns - self._last_ns) / 1e9
            self._inter_token.observe(seconds)
            self._metrics.latencies.next_token(self._class, seconds)
        else:
            seconds = (now_ns - self.started_ns) / 1e9
            self._ttft.observe(seconds)
            self._metrics.latencies.first_token(self._class, seconds)
        self._last_ns = now_ns

    def end(self) -> None:
        """Take the end of a request that reached the engine."""
        self._metrics.e2e.labels(self._model).observe((time.monotonic_ns() - self.started_ns) / 1e9)


class _EngineCollector(Collector):
    """Reads the engine's own numbers when asked; gives nothing before the model is loaded."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "tongguan_agent_ready",
            "1 while requests are served.",
            0 if self._node.not_ready() else 1,
        )
        yield ready
        engine = self._node.engine
        if engine is None:
            return
        stats = engine.stats()
        name = self._node.names[0]
        blocks = stats.kv_blocks_total
        for metric, text, value in (
            ("vllm:num_requests_running", "Requests being generated.", stats.running),
            ("vllm:num_requests_waiting", "Requests that wait for a place.", stats.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of KV blocks in use, 0 to 1.",
                stats.kv_blocks_used / blocks if blocks else 0.0,
            ),
            ("tongguan_agent_sequences_limit", "Places for requests.", stats.sequences_limit),
            ("tongguan_agent_queue_limit", "Requests that may wait.", stats.waiting_limit),
            ("tongguan_agent_kv_blocks", "KV blocks in all.", blocks),
            (
                "tongguan_agent_kv_blocks_cached",
                "KV blocks kept for prefixes, in use by no request.",
                stats.kv_blocks_cached,
            ),
        ):
            gauge = GaugeMetricFamily(metric, text, labels=("model_name",))
            gauge.add_metric((name,), value)
            yield gauge
        for metric, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens taken.", stats.prompt_tokens_total),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_tokens_queried_total,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                stats.prefix_tokens_hit_total,
            ),
            ("vllm:num_preemptions", "Requests put back to wait.", stats.preemptions_total),
            (
                "tongguan_agent_recomputed_tokens",
                "Tokens that preemption dropped from the KV cache.",
                stats.recomputed_tokens_total,
            ),
            ("tongguan_agent_steps", "Model steps.", stats.steps_total),
            ("tongguan_agent_step_seconds", "Time in model steps.", stats.step_seconds_total),
        ):
            counter = CounterMetricFamily(metric, text, labels=("model_name",))
            counter.add_metric((name,), value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests ended, by finished_reason.",
            labels=("model_name", "finished_reason"),
        )
        for ours, theirs in _FINISHED.items():
            success.add_metric((name, theirs), stats.finished_total.get(ours, 0))
        yield success
        info = GaugeMetricFamily(
            "tongguan_agent_model_info",
            "What is loaded; always 1.",
            labels=("model_name", "architecture", "dtype", "device", "context_length"),
        )
        model = engine.info
        info.add_metric(
            (name, model.architecture, model.dtype, model.device, str(model.context_length)), 1
        )
        yield info
