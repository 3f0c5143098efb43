"""Write a GGUF model's dequantised weights as a Hugging Face folder (weights and config only)."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from agent.engine import spec as specs
from agent.engine.gguf_file import GgufFile
from agent.engine.sources import GgufSource, rope_factors
from agent.engine.weights import load_weights


def export(source: Path, folder: Path) -> None:
    with GgufFile(source) as file:
        spec = specs.from_gguf(file, rope_factors(file))
        weights = load_weights(
            spec, GgufSource(file), torch.float32, torch.device("cpu"), lambda _fraction: None
        )
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    tensors = {
        "model.embed_tokens.weight": weights.embed,
        "model.norm.weight": weights.final_norm,
    }
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split((queries, keys, keys))
        gate, up = layer.gate_up.split(spec.ffn)
        parts = {
            "input_layernorm": layer.attn_norm,
            "post_attention_layernorm": layer.ffn_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        tensors |= {f"model.layers.{index}.{n}.weight": t.contiguous() for n, t in parts.items()}
    assert weights.head is weights.embed, "the reference is written for a tied head"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
