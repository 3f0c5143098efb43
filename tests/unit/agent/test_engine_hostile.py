"""Model folders and plans that are damaged or made to hurt: each is refused in one sentence."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from agent import model_cli
from agent.engine.convert import Options, convert
from agent.engine.model_folder import FolderError, Unfinished
from agent.engine.opened import opened
from agent.engine.precision import OPERATORS
from agent.engine.sensitivity import measure
from agent.engine.types import ModelFileError
from tests.unit.agent import engine_kit as kit

DEEP = "[" * 100_000
HUGE = "1" + "0" * 400


def silent(_phase, _share):
    pass


def run(*arguments):
    return CliRunner().invoke(model_cli.model, [str(part) for part in arguments])


@pytest.fixture
def folder(tmp_path):
    return kit.write_folder(tmp_path / "hf", kit.tensors(1))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, id=f"{name}-{case}")
        for name, case, text in [
            ("config.json", "deep", DEEP),
            ("generation_config.json", "deep", DEEP),
            ("tokenizer.json", "deep", DEEP),
            ("tokenizer_config.json", "deep", DEEP),
            ("model.safetensors.index.json", "deep", DEEP),
            ("config.json", "digits", json.dumps(kit.config()).replace("10000.0", HUGE)),
            ("config.json", "more-digits", json.dumps(kit.config()).replace("10000.0", HUGE * 20)),
            ("config.json", "epsilon", json.dumps(kit.config()).replace("1e-05", HUGE)),
        ]
    ],
)
def test_json_made_to_hurt_is_malformed(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(ModelFileError, match=f"malformed {name}"), opened(folder):
        pass


def test_a_tokens_number_takes_no_memory(folder):
    described = kit.tokenizer_json()
    described["model"]["vocab"]["zz"] = 4_000_000_000  # 32 GB of pointers
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ModelFileError, match="a token has the number"), opened(folder):
        pass


def test_an_end_of_true_is_no_token(folder):
    (folder / "config.json").write_text(json.dumps(kit.config(eos_token_id=True)))
    with opened(folder) as model:
        assert 1 not in model.tokenizer.ends


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_written(tmp_path, value):
    named = kit.tensors(1)
    named["model.layers.0.self_attn.q_proj.weight"][0, 0] = value
    source = kit.write_folder(tmp_path / "hf", named)
    with pytest.raises(ModelFileError, match="no number"):
        convert(source, tmp_path / "out", Options(plain=True, windows=0), silent)
    assert not (tmp_path / "out").exists()


def test_a_perplexity_beyond_all_numbers_is_said(tmp_path):
    named = kit.tensors(1)
    named["lm_head.weight"] = named["model.embed_tokens.weight"] * 1e4
    source = kit.write_folder(tmp_path / "hf", named)
    done = run("quantize", source, "--plain", "--out", tmp_path / "out")
    assert (done.exit_code, "perplexity cannot be told" in done.output) == (1, True), done.output
    assert not (tmp_path / "out").exists()


def test_a_product_that_is_nothing_has_no_error(tmp_path):
    named = kit.tensors(1)
    named["model.layers.1.mlp.down_proj.weight"].zero_()
    source = kit.write_folder(tmp_path / "hf", named)
    with opened(source) as model:
        rows = measure(model, ["The quick brown fox. " * 80], 32, silent)
    error = {(row.operator, row.layer): row.output_error for row in rows}
    assert error.pop(("down", 1)) == 0.0
    assert all(0.0 < value < 1.0 for value in error.values())
    convert(source, tmp_path / "out", Options(plain=True, windows=1), silent)
    quality = json.loads(
        (tmp_path / "out" / "quality.json").read_text(), parse_constant=pytest.fail
    )
    assert quality["output_errors"][-1] == {"operator": "down", "layer": 1, "output_error": 0.0}


def test_a_folder_whose_place_was_taken_is_gone_on_with_by_its_own_options_only(folder, tmp_path):
    out = tmp_path / "out"

    def take(phase, _share):
        if phase == "reading back":
            out.mkdir(exist_ok=True)

    with pytest.raises(FolderError, match="meanwhile"):
        convert(folder, out, Options(group=64, windows=1), take)
    out.rmdir()
    with pytest.raises(FolderError, match="other options"):
        convert(folder, out, Options(group=32, windows=1), silent)
    manifest = convert(folder, out, Options(group=64, windows=1), silent)
    assert manifest["plan"]["group"] == 64
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("place", ["link", ".", "/"])
def test_a_place_that_cannot_be_is_refused_before_the_work(folder, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    done = run("quantize", folder, "--out", place)
    assert done.exit_code == 1, done.output
    assert done.output.startswith("opening:"), done.output
    assert "layers" not in done.output
    assert sorted(tmp_path.iterdir()) == before


def test_who_may_read_one_file_may_read_all(tmp_path):
    with Unfinished(tmp_path / "out", {"a": 1}) as made:
        made.shard("model.safetensors", {"a": torch.zeros(2).numpy()})
        made.write("config.json", b"{}")
        modes = {path.name: path.stat().st_mode & 0o777 for path in made.folder.iterdir()}
    (tmp_path / "plain").touch()
    assert set(modes.values()) == {(tmp_path / "plain").stat().st_mode & 0o777}


ROWS = [
    {
        "operator": operator, "layer": layer, "output_error": 0.1, "loss_change": 0.01,
        "fp16_bytes": 64, "int4_bytes": 20,
    }
    for operator in OPERATORS for layer in range(kit.LAYERS)
]  # fmt: skip
PLAN = {
    "version": 1, "group": 32, "budget": 1.15, "estimate": None,
    "operators": {operator: ["int4"] * kit.LAYERS for operator in OPERATORS},
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "text"),
    [
        pytest.param(command, text, id=f"{command}-{case}")
        for command, case, text in [
            ("quantize", "deep", DEEP),
            ("quantize", "group", json.dumps(PLAN | {"group": []})),
            (
                "quantize",
                "entry",
                json.dumps(PLAN | {"operators": {key: [[]] for key in OPERATORS}}),
            ),
            ("plan", "deep", DEEP),
            ("plan", "no-plan", json.dumps({"table": ROWS})),
            ("plan", "group", json.dumps({"table": ROWS, "plan": PLAN | {"group": 7}})),
            ("plan", "nan", json.dumps({"table": ROWS, "plan": PLAN}).replace("0.01", "NaN")),
            (
                "plan",
                "infinite",
                json.dumps({"table": ROWS, "plan": PLAN}).replace("0.01", "1e999"),
            ),
            ("plan", "digits", json.dumps({"table": ROWS, "plan": PLAN}).replace("0.01", HUGE)),
        ]
    ],
)
def test_a_plan_or_table_made_to_hurt_is_wrong_use(folder, tmp_path, command, text):
    path = tmp_path / "given.json"
    path.write_text(text)
    if command == "quantize":
        done = run("quantize", folder, "--out", tmp_path / "out", "--plan", path)
    else:
        done = run("plan", "--table", path)
    assert done.exit_code == 2, done.output
    assert "given.json" in done.output
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("budget", ["nan", "inf"])
def test_a_budget_that_is_no_ratio_is_wrong_use(tmp_path, budget):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"table": ROWS, "plan": PLAN}))
    assert run("plan", "--table", path).exit_code == 0
    done = run("plan", "--table", path, "--budget", budget)
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True), done.output


def test_a_text_that_is_none_is_named(folder, tmp_path):
    text = tmp_path / "image.png"
    text.write_bytes(b"\x89PNG\xff")
    for command in (["plan", folder], ["quantize", folder, "--out", tmp_path / "out"]):
        done = run(*command, "--text", text)
        assert (done.exit_code, "image.png" in done.output) == (2, True), done.output
