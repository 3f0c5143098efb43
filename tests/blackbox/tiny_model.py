"""Writes a two-layer Llama of random weights as GGUF: real file, real tokenizer, no sense."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 32, 4, 2, 64, 2
CONTEXT = 4096
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write(path: Path) -> Path:
    """Write the model to `path`; the same bytes each time."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "th", "<|start|>", "<|end|>"]
    kinds = [1] * (len(letters) + 1) + [3, 3]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)

    random = np.random.default_rng(2)

    def tensor(name: str, *shape: int) -> None:
        scale = 1.0 if len(shape) == 1 else 0.3
        values = np.ones(shape) if len(shape) == 1 else random.normal(0, scale, shape)
        writer.add_tensor(name, values.astype(np.float32))

    head_dim = HIDDEN // HEADS
    rows = random.normal(0, 0.3, (len(tokens), HIDDEN)).astype(np.float32)
    rows[-1] = 0  # <|end|> is never the likeliest: at temperature 0 an answer ends by max_tokens
    writer.add_tensor("token_embd.weight", rows)
    tensor("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        tensor(block + "attn_norm.weight", HIDDEN)
        tensor(block + "ffn_norm.weight", HIDDEN)
        tensor(block + "attn_q.weight", HIDDEN, HIDDEN)
        tensor(block + "attn_k.weight", KV_HEADS * head_dim, HIDDEN)
        tensor(block + "attn_v.weight", KV_HEADS * head_dim, HIDDEN)
        tensor(block + "attn_output.weight", HIDDEN, HIDDEN)
        tensor(block + "ffn_gate.weight", FFN, HIDDEN)
        tensor(block + "ffn_up.weight", FFN, HIDDEN)
        tensor(block + "ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
