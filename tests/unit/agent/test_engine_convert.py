"""Quantising a model: what is written is what the engine then computes with, whatever happens."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agent.engine import compact, reading
from agent.engine.convert import Options, convert
from agent.engine.load import load_engine, read_model
from agent.engine.model import Model, Span
from agent.engine.model_folder import FolderError, Unfinished, changed, room
from agent.engine.precision import OPERATORS, Plan, default
from agent.engine.types import ModelFileError, Sampling
from kernels import quant
from tests.unit.agent import engine_kit as kit

ROOT = Path(__file__).resolve().parents[3]
FAST = Options(windows=1)


def silent(_phase, _share):
    pass


def weights_of(path, *, small=False):
    cpu = torch.device("cpu")
    return read_model(path, torch.float32, cpu, lambda _share: None, small=small)[2]


def unpacked(weight):
    return weight.unpacked().clone() if isinstance(weight, compact.Compact) else weight


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kit.write_folder(tmp_path_factory.mktemp("hf"), kit.tensors(1))


@pytest.fixture(scope="module")
def made(folder):
    out = folder.parent / "made"
    manifest = convert(folder, out, Options(group=64, windows=2), silent)
    return out, manifest


def test_the_ffn_is_in_four_bits_and_the_rest_in_fp16(folder, made):
    out, manifest = made
    before, after = weights_of(folder), weights_of(out)
    for one, two in zip(before.layers, after.layers, strict=True):
        assert torch.equal(two.qkv, one.qkv.half().float())
        assert torch.equal(two.out, one.out.half().float())
        assert not torch.equal(two.gate_up, one.gate_up.half().float())
        lost = torch.linalg.norm(two.gate_up - one.gate_up) / torch.linalg.norm(one.gate_up)
        assert 0.01 < lost < 0.2
    assert manifest["plan"] == default(kit.LAYERS, 64).plain()
    assert not list(out.glob(".*"))


@pytest.mark.skipif(not compact.AVAILABLE, reason="capability: AVX2 and kernels.cpu")
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_engine_follows_any_plan(tmp_path, architecture, group):
    named = kit.tensors(1, bias=architecture == "qwen2")
    source = kit.write_folder(tmp_path / "hf", named, architecture=architecture)
    int4 = frozenset({("qkv", 0), ("out", 1), ("down", 0), ("gate_up", 1)})
    plan = Plan(kit.LAYERS, group, int4)
    convert(source, tmp_path / "out", Options(plan=plan, windows=0), silent)
    small, plain = weights_of(tmp_path / "out", small=True), weights_of(tmp_path / "out")
    for index, (one, two) in enumerate(zip(small.layers, plain.layers, strict=True)):
        for operator in OPERATORS:
            weight = getattr(one, operator)
            four = plan.precision(operator, index) == "int4"
            assert weight.bits == (4 if four else 16)
            cols = weight.shape[1]  # of few columns there is one group, by whatever name
            assert not four or -(-cols // weight.group) == -(-cols // group)
            assert torch.equal(unpacked(weight), getattr(two, operator))
    # Few rows are computed from the small form, a long prompt from the unpacked one.
    spec = read_model(
        tmp_path / "out", torch.float32, torch.device("cpu"), lambda _share: None, small=False
    )[0]
    for count in (3, 40):
        span = Span(kit.random_prompt(1, count), 0, list(range(4)), logits=True)
        got, want = (
            Model(spec, weights, blocks=4, block_size=16).forward([span])
            for weights in (small, plain)
        )
        assert (got - want).abs().max() <= 3e-3 * want.abs().max()


def test_four_bits_of_the_same_group_are_kept_as_they_are(tmp_path):
    path = kit.write_gguf(tmp_path / "m.gguf", kit.tensors(3), kind="Q4_1")
    int4 = frozenset((op, layer) for op in OPERATORS for layer in range(kit.LAYERS))
    options = Options(plan=Plan(kit.LAYERS, 32, int4), windows=1)
    convert(path, tmp_path / "out", options, silent)
    for one, two in zip(weights_of(path).layers, weights_of(tmp_path / "out").layers, strict=True):
        for operator in OPERATORS:
            assert torch.equal(getattr(one, operator), getattr(two, operator))
    again = convert(tmp_path / "out", tmp_path / "again", options, silent)
    for name in ("model-layer-0000.safetensors", "model-layer-0001.safetensors"):
        first, second = load_file(tmp_path / "out" / name), load_file(tmp_path / "again" / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert again["quality"]["ratio"] == pytest.approx(1.0, abs=1e-3)


def test_a_gguf_becomes_a_folder_that_reads_and_speaks_the_same(tmp_path):
    named = {name: value.half().float() for name, value in kit.tensors(5, scale=2.0).items()}
    path = kit.write_gguf(tmp_path / "m.gguf", named)
    plan = Plan(kit.LAYERS, 128, frozenset())
    report = convert(path, tmp_path / "out", Options(plan=plan, windows=1), silent)
    assert report["quality"]["ratio"] == pytest.approx(1.0, abs=1e-3)
    prompt, texts = kit.random_prompt(6, 30), ["ab the\n<|im_end|>", "é"]
    answers = []
    for source in (path, tmp_path / "out"):
        engine = load_engine(str(source), kv_tokens=256)
        try:
            tokens = kit.collect(engine, prompt, Sampling(8, temperature=0.0)).token_ids
            chat = engine.tokenizer.apply_chat([{"role": "user", "content": "ab"}])
            encoded = [engine.tokenizer.encode(text) for text in texts]
            ends = engine.tokenizer.ends
            answers.append((tokens, chat, encoded, ends, engine.tokenizer.decode(range(kit.VOCAB))))
        finally:
            engine.close()
    assert answers[0] == answers[1]


def test_the_report_says_what_reading_both_says(folder, made):
    out, manifest = made
    quality = json.loads((out / "quality.json").read_text())
    assert {k: v for k, v in quality.items() if k != "output_errors"} == manifest["quality"]
    found = []
    for source, small in ((folder, False), (out, compact.AVAILABLE)):
        spec, tokenizer, weights = read_model(
            source, torch.float32, torch.device("cpu"), lambda _share: None, small=small
        )
        parts = reading.windows(tokenizer, reading.shipped("held_out"), limit=2)
        reader = reading.Reader(spec, weights)
        loss = sum(reader.read(part) for part in parts)
        found.append(reading.perplexity(loss, reading.scored(parts)))
    assert quality["source_perplexity"] == pytest.approx(found[0], rel=1e-5)
    assert quality["perplexity"] == pytest.approx(found[1], rel=1e-5)
    assert quality["ratio"] == pytest.approx(found[1] / found[0], rel=1e-5)
    places = [(row["operator"], row["layer"]) for row in quality["output_errors"]]
    assert places == [(op, i) for i in range(kit.LAYERS) for op in ("gate_up", "down")]
    assert all(0.005 < row["output_error"] < 0.3 for row in quality["output_errors"])
    assert f"{quality['ratio']:.4f}" in (out / "quality.txt").read_text()


def test_a_text_to_calibrate_on_lessens_the_error(folder, made):
    out, _ = made
    plain = folder.parent / "plain"
    convert(folder, plain, Options(group=64, plain=True, windows=2), silent)
    errors = [
        [
            row["output_error"]
            for row in json.loads((path / "quality.json").read_text())["output_errors"]
        ]
        for path in (out, plain)
    ]
    assert np.mean(errors[0]) < np.mean(errors[1])


def test_the_manifest_finds_what_was_changed(made, tmp_path):
    out, _ = made
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in out.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert changed(copy) == []
    raw = bytearray((copy / "model-layer-0001.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model-layer-0001.safetensors").write_bytes(raw)
    (copy / "tokenizer.json").unlink()
    (copy / "more.txt").touch()
    assert changed(copy) == [
        "tokenizer.json: missing", "more.txt: not in the manifest",
        "model-layer-0001.safetensors: its content is another",
    ]  # fmt: skip
    (copy / "quantization.json").write_text("[]")
    with pytest.raises(ModelFileError, match="no manifest"):
        changed(copy)


CHILD = """
import sys
from pathlib import Path
from agent.engine.convert import Options, convert
def report(phase, share):
    print(phase, share, flush=True)
    if share >= float(sys.argv[3]):
        sys.stdin.read()
convert(Path(sys.argv[1]), Path(sys.argv[2]), Options(group=64, windows=2), report)
"""


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_killed_at_any_place_it_goes_on_and_writes_the_same(folder, made, tmp_path, share):
    out = tmp_path / "out"
    command = [sys.executable, "-c", CHILD, str(folder), str(out), str(share)]
    child = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        for line in child.stdout:
            if float(line.split()[-1]) >= share:
                break
        child.send_signal(signal.SIGKILL)
    assert not out.exists()
    unfinished = tmp_path / "out.unfinished"
    if unfinished.exists():
        (unfinished / "model-layer-0001.safetensors.tmp").write_bytes(b"half of it")
        (unfinished / "model-layer-0000.safetensors").touch(exist_ok=True)
    convert(folder, out, Options(group=64, windows=2), silent)
    assert not unfinished.exists()
    for path in made[0].glob("*.safetensors"):
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert changed(out) == []


def test_finished_layers_are_not_made_again(folder, tmp_path):
    out = tmp_path / "out"

    def stop(_phase, share):
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, out, FAST, stop)
    shard = tmp_path / "out.unfinished" / "model-layer-0000.safetensors"
    inode = shard.stat().st_ino
    convert(folder, out, FAST, silent)
    assert (out / shard.name).stat().st_ino == inode


def test_another_model_or_other_options_do_not_go_on_with_it(folder, tmp_path):
    def stop(phase, _share):
        if phase == "layers":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", FAST, stop)
    with pytest.raises(FolderError, match="other options"):
        convert(folder, tmp_path / "out", Options(group=32, windows=1), silent)


def test_a_folder_that_exists_is_left_alone(folder, made):
    before = sorted(path.name for path in made[0].iterdir())
    with pytest.raises(FolderError, match="exists"):
        convert(folder, made[0], FAST, silent)
    assert sorted(path.name for path in made[0].iterdir()) == before


def test_two_do_not_write_one_folder(tmp_path):
    with Unfinished(tmp_path / "out", {"a": 1}) as first:
        with pytest.raises(FolderError, match="another process"):
            Unfinished(tmp_path / "out", {"a": 1}).__enter__()
        held = os.open(first.folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(held)
    with Unfinished(tmp_path / "out", {"a": 1}):
        pass


def test_a_full_disk_is_said_before_anything_is_written(tmp_path):
    room(tmp_path / "deep" / "out", 1)
    with pytest.raises(FolderError, match="MiB free"):
        room(tmp_path / "deep" / "out", 1 << 60)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["absent", "text", "layers", "dtype"])
def test_what_is_no_such_model_is_said(folder, tmp_path, fault):
    source, options, error = tmp_path / "m", FAST, ModelFileError
    if fault == "text":
        source.write_text("no model")
    elif fault == "layers":
        source, options, error = folder, Options(plan=default(7)), ValueError
    elif fault == "dtype":
        named = kit.tensors(1)
        named["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
        source = kit.write_folder(source, named)
    with pytest.raises(error):
        convert(source, tmp_path / "out", options, silent)
    assert not (tmp_path / "out").exists()


def mangled(made, tmp_path, change):
    """Copy the folder, with one shard's tensors changed."""
    from safetensors.torch import save_file

    copy = tmp_path / "copy"
    copy.mkdir()
    for path in made[0].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shard = copy / "model-layer-0000.safetensors"
    named = load_file(shard)
    change(named, "model.layers.0.mlp.up_proj.weight")
    shard.unlink()
    save_file(named, shard)
    return copy


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("shape", torch.tensor([kit.FFN, kit.HIDDEN + 8])),
        ("shape", torch.tensor([-1, kit.HIDDEN])),
        ("shape", torch.tensor([1.0, 2.0])),
        ("packed", torch.zeros(kit.FFN, 3, dtype=torch.int32)),
        ("packed", torch.zeros(kit.FFN, kit.HIDDEN // 8)),
        ("scale", torch.zeros(kit.FFN, 40, dtype=torch.float16)),
        ("scale", torch.zeros(3, 1, dtype=torch.float16)),
        ("scale", torch.full((kit.FFN, 1), torch.inf, dtype=torch.float16)),
        ("zero_point", torch.zeros(1, 1, dtype=torch.int32)),
        ("scale", None),
        ("shape", None),
    ],
)
@pytest.mark.parametrize("small", [False, True])
def test_a_packed_matrix_that_does_not_fit_together_is_refused(made, tmp_path, part, value, small):
    def change(named, name):
        del named[f"{name}_{part}"]
        if value is not None:
            named[f"{name}_{part}"] = value

    with pytest.raises(ModelFileError):
        weights_of(mangled(made, tmp_path, change), small=small and compact.AVAILABLE)


def test_a_part_that_nobody_reads_is_refused(made, tmp_path):
    def change(named, name):
        named[f"{name}_g_idx"] = torch.zeros(kit.HIDDEN, dtype=torch.int32)

    with pytest.raises(ModelFileError, match="g_idx has no place"):
        weights_of(mangled(made, tmp_path, change))


@pytest.mark.parametrize("shard", [False, True])
def test_a_disk_that_fills_up_leaves_what_is_whole(tmp_path, shard):
    import resource  # a limit on a file's size fails a write as a full disk does, without mounts

    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, resource.RLIM_INFINITY))
            with Unfinished(tmp_path / "out", {"a": 1}) as folder:
                folder.write("small", b"x" * 4_096)
                if shard:
                    folder.shard("large", {"a": np.zeros(2_000)})
                folder.write("large", b"x" * 8_192)
        except OSError as problem:
            code = 0 if problem.errno == errno.EFBIG and not shard else 2
        except FolderError as problem:
            code = 0 if "repeat the command" in str(problem) and shard else 3
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
    assert os.waitstatus_to_exitcode(status) == 0
    with Unfinished(tmp_path / "out", {"a": 1}) as folder:
        names = sorted(path.name for path in folder.folder.iterdir())
    assert names == [".begun.json", "small"]


def test_values_fp16_cannot_hold_stay_in_fp32(tmp_path):
    named = kit.tensors(4)
    named["model.layers.0.self_attn.o_proj.weight"][0, 0] = 1e6
    source = kit.write_folder(tmp_path / "hf", named)
    convert(source, tmp_path / "out", Options(windows=0), silent)
    assert weights_of(tmp_path / "out").layers[0].out[0, 0] == 1e6
    assert quant.GROUPS == (32, 64, 128)
