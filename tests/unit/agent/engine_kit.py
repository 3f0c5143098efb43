"""Random models of two layers, written in milliseconds, and ways to run an engine to its end."""

import itertools
import json
import threading
from dataclasses import dataclass, field

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from agent.engine.tokenizer import _ALPHABET

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 32, 4, 2, 64
HEAD_DIM = HIDDEN // HEADS
CONTEXT = 512
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Every byte is a token, then a few merges, then nothing: any text can be encoded.
BYTES = sorted(_ALPHABET, key=_ALPHABET.get)
MERGES = [("a", "b"), ("Ġ", "t")]
TOKENS = CONTROL + BYTES + ["ab", "Ġt"]
VOCAB = len(TOKENS)
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tensors(seed=0, *, bias=False, scale=1.0):
    """Return a model's tensors by Hugging Face name, half-split rotary order."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5

    named = {
        "model.embed_tokens.weight": torch.randn((VOCAB, HIDDEN), generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for index in range(LAYERS):
        at = f"model.layers.{index}."
        named |= {
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            at + "self_attn.q_proj.weight": make(HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": make(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": make(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": make(HIDDEN, HEADS * HEAD_DIM),
            at + "mlp.gate_proj.weight": make(FFN, HIDDEN),
            at + "mlp.up_proj.weight": make(FFN, HIDDEN),
            at + "mlp.down_proj.weight": make(HIDDEN, FFN),
        }
        if bias:
            named |= {
                at + "self_attn.q_proj.bias": make(HEADS * HEAD_DIM),
                at + "self_attn.k_proj.bias": make(KV_HEADS * HEAD_DIM),
                at + "self_attn.v_proj.bias": make(KV_HEADS * HEAD_DIM),
            }
    return named


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def interleave(tensor):
    """Return rows in the order GGUF's llama stores Q and K: the pairs of a rotation adjacent."""
    heads = tensor.view(-1, 2, HEAD_DIM // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def write_gguf(path, named=None, *, architecture="llama", kind="F32", metadata=(), **overrides):
    """Write a GGUF file; `overrides` replace or (None) drop architecture keys by last name."""
    named = tensors() if named is None else named
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    } | {name.replace("__", "."): value for name, value in overrides.items()}
    for name, value in numbers.items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if architecture == "llama" else "qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (VOCAB - len(CONTROL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for add, key, value in metadata:
        getattr(writer, add)(key, value)
    for name, tensor in named.items():
        values = tensor
        if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
            values = interleave(values)
        array = values.contiguous().numpy()
        if kind == "F32" or array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        else:
            quantisation = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(array, quantisation)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config(architecture="llama", **changes):
    return {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[architecture]],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": VOCAB,
        "eos_token_id": 2,
    } | changes


def tokenizer_json():
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index, "content": token, "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for index, token in enumerate(CONTROL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **BYTE_LEVEL},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **BYTE_LEVEL},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(TOKENS)},
            "merges": [list(pair) for pair in MERGES],
        },
    }  # fmt: skip


def write_folder(folder, named=None, *, architecture="llama", **changes):
    """Write a Hugging Face folder."""
    folder.mkdir(exist_ok=True)
    save_file(tensors() if named is None else named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(architecture, **changes)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return folder


def steered(token_ids, seed=0):
    """Return tensors of a model that says `token_ids` after any prompt that ends in the first.

    Attention and FFN write nothing; the head maps each token's own direction to the next one.
    """
    named = {
        name: torch.ones_like(value) if "norm" in name else torch.zeros_like(value)
        for name, value in tensors(seed).items()
    }
    directions = torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(seed))
    directions = directions / directions.pow(2).mean(-1, keepdim=True).sqrt()
    head = torch.zeros((VOCAB, HIDDEN))
    assert len(set(token_ids[:-1])) == len(token_ids) - 1, "one token, one successor"
    for now, after in itertools.pairwise(token_ids):
        head[after] += directions[now]
    return named | {"model.embed_tokens.weight": directions, "lm_head.weight": head}


@dataclass
class Collected:
    """All deltas of one generation."""

    deltas: list = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, delta):
        assert not self.done.is_set(), "a delta after the final one"
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.done.set()

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self):
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def finish(self):
        return self.deltas[-1].finish_reason


def collect_all(engine, requests, timeout_s=100):
    """Run (prompt, sampling) pairs at once; return each one's deltas."""
    all_collected = []
    for prompt, sampling in requests:
        collected = Collected()
        engine.submit(prompt, sampling, collected.take)
        all_collected.append(collected)
    for collected in all_collected:
        assert collected.done.wait(timeout_s), "a generation never ended"
    return all_collected


def collect(engine, prompt, sampling, timeout_s=100):
    return collect_all(engine, [(prompt, sampling)], timeout_s)[0]


def reference_logits(named, token_ids):
    """Return last-token logits by a direct, unbatched, uncached computation in float64."""
    w = {name: value.double() for name, value in named.items()}
    x = w["model.embed_tokens.weight"][token_ids]
    count = len(token_ids)
    inverse = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angle = torch.arange(count).double()[:, None] * inverse
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(value):
        return value / (value.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    def rotate(value):
        half = HEAD_DIM // 2
        pairs = torch.complex(value[..., :half].contiguous(), value[..., half:].contiguous())
        pairs = pairs * turn[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    for index in range(LAYERS):
        at = f"model.layers.{index}."

        def project(value, part, at=at):
            bias = w.get(f"{at}{part}.bias", 0.0)
            return value @ w[f"{at}{part}.weight"].T + bias

        h = norm(x)
        q = rotate(project(h, "self_attn.q_proj").view(count, HEADS, HEAD_DIM))
        k = rotate(project(h, "self_attn.k_proj").view(count, KV_HEADS, HEAD_DIM))
        v = project(h, "self_attn.v_proj").view(count, KV_HEADS, HEAD_DIM)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + project(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), "self_attn.o_proj")
        h = norm(x)
        gate = torch.nn.functional.silu(project(h, "mlp.gate_proj"))
        x = x + project(gate * project(h, "mlp.up_proj"), "mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x)[-1] @ head.T


def greedy(named, prompt, count):
    """Return tokens by the reference computation, whatever they are."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(named, tokens).argmax()))
    return tokens[len(prompt) :]


def random_prompt(seed, length):
    return np.random.default_rng(seed).integers(len(CONTROL), VOCAB, length).tolist()
