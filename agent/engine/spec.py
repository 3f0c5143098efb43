"""The shape of a model, read from GGUF metadata or a Hugging Face `config.json`, and checked.

Llama and Qwen2 differ only in the QKV bias, the tied head and, in GGUF, the order of the rows of Q
and K. Everything else a file may ask for (experts, sliding windows, other rotary scalings) is
refused by name: a model that runs with the wrong mathematics is worse than none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agent.engine.types import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.engine.gguf_file import GgufFile

ARCHITECTURES: Final = ("llama", "qwen2")
_HF_CLASSES: Final = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
# Bounds that keep a damaged file from asking for absurd memory; far above real models.
_LAYERS_MAX: Final = 1_024
_WIDTH_MAX: Final = 1 << 20
_CONTEXT_MAX: Final = 1 << 24
_NUMBER_MAX: Final = 1e300


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions and constants of one model."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rms_eps: float
    rope_theta: float
    # Divisors of the rotary frequencies, one for each pair of dimensions; None: all 1.
    rope_factors: tuple[float, ...] | None = None
    # Rows of Q and K lie in interleaved pairs and must be put in halves.
    permuted: bool = False

    def __post_init__(self) -> None:
        sizes = {
            "layers": (self.layers, _LAYERS_MAX),
            "hidden size": (self.hidden, _WIDTH_MAX),
            "head count": (self.heads, _WIDTH_MAX),
            "KV head count": (self.kv_heads, _WIDTH_MAX),
            "head dimension": (self.head_dim, _WIDTH_MAX),
            "FFN size": (self.ffn, _WIDTH_MAX),
            "vocabulary": (self.vocab, _CONTEXT_MAX),
            "context": (self.context, _CONTEXT_MAX),
        }
        for name, (value, limit) in sizes.items():
            if not 1 <= value <= limit:
                raise ModelFileError(f"the model's {name} is {value}, expected 1 to {limit}")
        if self.heads % self.kv_heads:
            raise ModelFileError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelFileError(f"the head dimension {self.head_dim} is odd")
        if not 0.0 < self.rms_eps < 1.0:
            raise ModelFileError(f"the norm's epsilon is {self.rms_eps}")
        if not 1.0 <= self.rope_theta < math.inf:
            raise ModelFileError(f"the rotary base is {self.rope_theta}")
        factors = self.rope_factors
        if factors is not None and (
            len(factors) != self.head_dim // 2 or not all(0.0 < f < math.inf for f in factors)
        ):
            raise ModelFileError("the rotary factors do not fit the head dimension")


def from_gguf(file: GgufFile, rope_factors: tuple[float, ...] | None) -> ModelSpec:
    """Return the spec of a GGUF file; `rope_factors` are those of its `rope_freqs` tensor."""
    arch = file.get("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ModelFileError(
            f"architecture {arch!r} is not supported ({', '.join(ARCHITECTURES)} are)"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if file.get(f"{arch}.{key}", int, 0):
            raise ModelFileError(f"{arch}.{key} is set: such models are not supported")
    hidden = file.get(f"{arch}.embedding_length", int)
    heads = file.get(f"{arch}.attention.head_count", int)
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden // heads if heads > 0 else 0)
    for key in ("rope.dimension_count", "attention.value_length"):
        if file.get(f"{arch}.{key}", int, head_dim) != head_dim:
            raise ModelFileError(f"{arch}.{key} differs from the head dimension {head_dim}")
    scaling = file.get(f"{arch}.rope.scaling.type", str, "none")
    if scaling == "linear":
        factor = file.get(f"{arch}.rope.scaling.factor", float)
        rope_factors = (factor,) * (head_dim // 2)
    elif scaling != "none":
        raise ModelFileError(f"rotary scaling {scaling!r} is not supported")
    return ModelSpec(
        architecture=arch,
        layers=file.get(f"{arch}.block_count", int),
        hidden=hidden,
        heads=heads,
        kv_heads=file.get(f"{arch}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        ffn=file.get(f"{arch}.feed_forward_length", int),
        vocab=len(file.get("tokenizer.ggml.tokens", list)),
        context=file.get(f"{arch}.context_length", int),
        rms_eps=file.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_theta=file.get(f"{arch}.rope.freq_base", float, 10_000.0),
        rope_factors=rope_factors,
        permuted=arch == "llama",
    )


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec a Hugging Face `config.json` describes."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    arch = _HF_CLASSES.get(name) if isinstance(name, str) else None
    if arch is None:
        raise ModelFileError(
            f"architecture {name!r} is not supported ({', '.join(_HF_CLASSES)} are)"
        )
    if config.get("use_sliding_window"):
        raise ModelFileError("use_sliding_window is set: such models are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"activation {config.get('hidden_act')!r} is not supported")
    hidden = _whole(config, "hidden_size")
    heads = _whole(config, "num_attention_heads")
    head_dim = _whole(config, "head_dim", hidden // heads if heads > 0 else 0)
    # Since transformers 5 the base and the scaling live together in rope_parameters.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelFileError("malformed config.json: the rotary settings are no object")
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", 10_000.0))
    return ModelSpec(
        architecture=arch,
        layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=_whole(config, "intermediate_size"),
        vocab=_whole(config, "vocab_size"),
        context=_whole(config, "max_position_embeddings", 2_048),
        rms_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factors=_rope_factors(rope, theta, head_dim),
    )


def _rope_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return (_number(rope, "factor"),) * (head_dim // 2)
    if kind != "llama3":
        raise ModelFileError(f"rotary scaling {kind!r} is not supported")
    factor, low = _number(rope, "factor"), _number(rope, "low_freq_factor")
    high = _number(rope, "high_freq_factor")
    context = _number(rope, "original_max_position_embeddings")
    if not 0.0 < low < high or context <= 0 or factor <= 0 or theta < 1.0:
        raise ModelFileError("the rotary scaling's factors are out of order")
    factors = []
    for index in range(head_dim // 2):
        turns = context / (2 * math.pi * theta ** (2 * index / head_dim))
        # Long waves are stretched by `factor`, short ones kept, those between blended.
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1.0 / ((1.0 - blend) / factor + blend))
    return tuple(factors)


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ModelFileError(f"malformed config.json: {key} is not a whole number")


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, float):
        return value
    if type(value) is int and abs(value) < _NUMBER_MAX:
        return float(value)
    raise ModelFileError(f"malformed config.json: {key} is not a number")
