"""`tongguan model`: planned, quantised by the plan, checked; mistakes have their exit codes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from agent import model_cli
from tests.unit.agent import engine_kit as kit


def run(*arguments):
    return CliRunner().invoke(model_cli.model, [str(part) for part in arguments])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return kit.write_folder(tmp_path_factory.mktemp("hf"), kit.tensors(1))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    return path


@pytest.fixture(scope="module")
def planned(source, text, tmp_path_factory):
    done = run("plan", source, "--json", "--group", 32, "--text", text, "--budget", 1.4)
    assert done.exit_code == 0, done.output
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(done.stdout)
    return path


def test_a_plan_is_measured_and_followed(source, planned, tmp_path):
    plan = json.loads(planned.read_text())["plan"]
    assert plan["group"] == 32
    assert plan["estimate"] <= plan["budget"] == 1.4
    chosen = [p for column in plan["operators"].values() for p in column]
    assert "int4" in chosen
    done = run("quantize", source, "--plan", planned, "--out", tmp_path / "out")
    assert done.exit_code in {0, 3}, done.output
    assert "Perplexity over" in done.stdout
    manifest = json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert manifest["plan"] == plan
    assert manifest["quality"]["within_budget"] == (done.exit_code == 0)
    checked = run("check", tmp_path / "out")
    assert (checked.exit_code, checked.stdout) == (0, "as written\n")
    (tmp_path / "out" / "config.json").write_text("{}")
    checked = run("check", tmp_path / "out")
    assert (checked.exit_code, checked.stdout.splitlines()[0]) == (
        1, "config.json: its content is another"
    )  # fmt: skip


def test_a_table_is_read_in_place_of_measuring(planned):
    done = run("plan", "--table", planned, "--budget", 1)
    assert done.exit_code == 0, done.output
    assert "1 allowed" in done.stdout
    wide = run("plan", "--table", planned, "--budget", 100)
    assert f"{4 * kit.LAYERS} of {4 * kit.LAYERS} products in four bits at group 32" in wide.stdout


def test_a_result_beyond_its_budget_has_an_exit_code_of_its_own(source, planned, tmp_path):
    value = json.loads(planned.read_text())
    value["plan"] |= {"budget": 1.0, "operators": {
        name: ["int4"] * kit.LAYERS for name in value["plan"]["operators"]
    }}  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(value))
    out = tmp_path / "out"
    done = run("quantize", source, "--plain", "--plan", tmp_path / "plan.json", "--out", out)
    assert json.loads((out / "quality.json").read_text())["ratio"] > 1.1
    assert done.exit_code == 3
    assert "BEYOND" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["quantize", "nowhere", "--out", "out"], 1, "cannot read"),
        (["quantize", "{source}", "--out", "{source}"], 1, "exists"),
        (["quantize", "{source}", "--out", "out", "--group", "48"], 2, "--group"),
        (["quantize", "{source}"], 2, "--out"),
        (["quantize", "{source}", "--out", "out", "--plan", "nowhere"], 2, "nowhere"),
        (["quantize", "{source}", "--out", "out", "--plan", "{text}"], 2, "own.txt"),
        (["plan", "nowhere"], 1, "cannot read"),
        (["plan", "{source}", "--budget", "0.5"], 2, "--budget"),
        (["plan", "{source}", "--text", "nowhere"], 1, "nowhere"),
        (["plan", "--table", "nowhere"], 2, "nowhere"),
        (["check", "{source}"], 1, "no manifest"),
        (["check", "nowhere"], 1, "no manifest"),
    ],
)
def test_mistakes_are_said(source, text, tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    done = run(*(part.format(source=source, text=text) for part in arguments))
    assert done.exit_code == code, done.output
    assert said in done.output
    assert "Traceback" not in done.output
    assert not list(tmp_path.glob("out*"))


def test_progress_says_how_long_it_will_take():
    now = [0.0]
    lines = []
    progress = model_cli.Progress(lambda: now[0], lambda line, **_options: lines.append(line))
    progress("layers", 0.0)
    for share in (0.05, 0.1, 0.14, 0.2, 1.0):
        now[0] = share * 1_000
        progress("layers", share)
    assert lines == [
        "layers:   0%", "layers:  10%, about 15 min left",
        "layers:  20%, about 13 min left", "layers: 100%",
    ]  # fmt: skip
