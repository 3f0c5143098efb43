"""Other engines on this node: what their metrics, models and answers mean. Pure.

vLLM, SGLang and llama.cpp say the same things under different names, and have renamed some of them.
`NAMES` has today's name first and former ones after it; the first that is there counts. What an
engine does not say is None, never zero: an idle engine and an unknown one are different.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A metrics text above this is refused; vLLM's has some 60 KB.
METRICS_BYTES_MAX: Final = 4 << 20
MODELS_MAX: Final = 64

# kind: (prefix of its metrics, field: names).
NAMES: Final[dict[str, tuple[str, dict[str, tuple[str, ...]]]]] = {
    # This agent keeps vLLM's names and has its own beside them, so it is looked for first.
    "tongguan": ("tongguan_agent_", {}),
    "vllm": (
        "vllm:",
        {
            "running": ("vllm:num_requests_running",),
            "waiting": ("vllm:num_requests_waiting",),
            "kv_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            "prefix_queried": (
                "vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries",
                "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries",
            ),
            "prefix_hit": (
                "vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits",
                "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits",
            ),
            "prefix_share": ("vllm:gpu_prefix_cache_hit_rate",),
            "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
            "prompt_tokens": ("vllm:prompt_tokens_total",),
            "generated_tokens": ("vllm:generation_tokens_total",),
        },
    ),
    "sglang": (
        "sglang:",
        {
            "running": ("sglang:num_running_reqs",),
            "waiting": ("sglang:num_queue_reqs",),
            "kv_share": ("sglang:token_usage", "sglang:full_token_usage"),
            "prefix_hit": ("sglang:cached_tokens_total",),
            "prefix_share": ("sglang:cache_hit_rate",),
            "preemptions": ("sglang:num_retractions_total", "sglang:num_retracted_requests_total"),
            "prompt_tokens": ("sglang:prompt_tokens_total",),
            "generated_tokens": ("sglang:generation_tokens_total",),
        },
    ),
    "llama.cpp": (
        "llamacpp:",
        {
            "running": ("llamacpp:requests_processing",),
            "waiting": ("llamacpp:requests_deferred",),
            # Today's builds have none.
            "kv_share": ("llamacpp:kv_cache_usage_ratio",),
            "prompt_tokens": ("llamacpp:prompt_tokens_total",),
            "generated_tokens": ("llamacpp:tokens_predicted_total",),
        },
    ),
}  # fmt: skip
# Several samples of these (one an engine of a data-parallel group) do not add up.
SHARES: Final = {"kv_share", "prefix_share"}


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine's metrics say; shares are 0 to 1, the rest counts."""

    kind: str
    running: float | None = None
    waiting: float | None = None
    kv_share: float | None = None
    prefix_queried: float | None = None
    prefix_hit: float | None = None
    prefix_share: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A served model; `context_tokens` is None where the engine does not say."""

    id: str
    context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a probe has seen an engine do; None: it could not be told."""

    token_ids: bool
    usage: bool
    stream_usage: bool
    prefix_cache: bool | None


class UpstreamError(Exception):
    """What came from an engine is not what it should be; the text says what."""


def load_of(text: str) -> Load:
    """Return what a metrics text says; kind "openai" where no engine is recognised.

    Raises `UpstreamError` for a text that is none of Prometheus.
    """
    if len(text) > METRICS_BYTES_MAX:
        raise UpstreamError(f"more than {METRICS_BYTES_MAX} bytes of metrics")
    kind = next((k for k, (prefix, _) in NAMES.items() if f"\n{prefix}" in f"\n{text}"), None)
    if kind is None:
        return Load("openai")
    fields = NAMES["vllm" if kind == "tongguan" else kind][1]
    samples = _samples(text, {name for names in fields.values() for name in names})
    found: dict[str, float] = {}
    for field, names in fields.items():
        values = next((samples[name] for name in names if samples.get(name)), None)
        if values is None:
            continue
        if field in SHARES:
            highest = max(values)
            # Named "perc" and mostly a ratio; one above 1 is a percentage.
            found[field] = highest / 100 if highest > 1 else highest
        else:
            found[field] = sum(values)
    if "prefix_share" not in found and found.get("prefix_queried"):
        found["prefix_share"] = found.get("prefix_hit", 0.0) / found["prefix_queried"]
    return Load(kind, **found)


def _samples(text: str, wanted: set[str]) -> dict[str, list[float]]:
    """Return values by sample name; only lines of interest are parsed, histograms are not."""
    lines = [
        line
        for line in text.splitlines()
        if line.partition("{")[0].partition(" ")[0] in wanted
    ]  # fmt: skip
    found: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                # SGLang breaks some gauges down by priority, beside the whole.
                whole = not sample.labels.get("priority")
                if whole and math.isfinite(sample.value) and sample.value >= 0:
                    found.setdefault(sample.name, []).append(sample.value)
    except ValueError as problem:
        raise UpstreamError(f"no Prometheus text: {str(problem)[:80]}") from None
    return found


def models_of(body: bytes) -> tuple[Model, ...]:
    """Return the models of `/v1/models`; raises `UpstreamError`."""
    try:
        rows = json.loads(body)["data"][:MODELS_MAX]
        return tuple(Model(str(row["id"]), _context(row)) for row in rows)
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise UpstreamError(f"/v1/models: {type(problem).__name__}") from None


def _context(row: dict[str, Any]) -> int | None:
    meta = row.get("meta")
    for place, name in ((row, "max_model_len"), (row, "context_length"), (meta, "n_ctx"),
                        (meta, "n_ctx_train")):  # fmt: skip
        value = place.get(name) if isinstance(place, dict) else None
        if isinstance(value, int) and value > 0:
            return value
    return None


def has_token_ids(answer: Any) -> bool:
    """Say whether a completion's answer carries prompt and output ids, as vLLM's does."""
    try:
        choice = answer["choices"][0]
        prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        ids = [*choice["token_ids"], *prompt]
    except (KeyError, IndexError, TypeError, AttributeError):
        return False
    return bool(ids) and all(isinstance(item, int) for item in ids)


def usage_of(answer: Any) -> tuple[int, int] | None:
    """Return (prompt tokens, of them cached) where the answer has usage."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return usage["prompt_tokens"], cached if isinstance(cached, int) else 0


def stream_has_usage(lines: Iterable[str]) -> bool:
    """Say whether some event of a stream carries usage."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            try:
                event = json.loads(line[6:])
            except (ValueError, RecursionError):
                return False
            if usage_of(event) is not None:
                return True
    return False


def pools(endpoints: Sequence[tuple[str, Capabilities | None]]) -> str:
    """Return the sidecar's pool sections for endpoints, best first.

    One endpoint serves all classes. Of several the first is P0's alone, and the others share P1
    and P2. A pool says `token_ids` only where every endpoint of it was seen to give them.
    """
    first, rest = endpoints[:1], endpoints[1:] or endpoints[:1]
    parts = []
    for name, members in (("dedicated", first), ("shared", rest), ("best_effort", rest)):
        urls = ", ".join(json.dumps(url) for url, _ in members)
        ids = all(seen is not None and seen.token_ids for _, seen in members)
        parts.append(
            f"[pools.{name}]\nendpoints = [{urls}]\n" + ("token_ids = true\n" if ids else "")
        )
    return "\n".join(parts)
