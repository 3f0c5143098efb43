"""The table of sensitivities: measured against a direct computation, and read back."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from agent.engine import reading, sensitivity
from agent.engine.load import read_model
from agent.engine.opened import opened
from agent.engine.precision import OPERATORS, choose, operator_bytes
from kernels import calibrated, quant
from tests.unit.agent import engine_kit as kit

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


def silent(_phase, _share):
    pass


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return kit.write_folder(tmp_path_factory.mktemp("hf"), kit.tensors(1))


@pytest.fixture(scope="module")
def table(path):
    with opened(path) as model:
        return sensitivity.measure(model, [TEXT], 64, silent)


def test_every_product_of_every_layer_is_there(table):
    places = [(row.operator, row.layer) for row in table]
    assert places == [(op, layer) for layer in range(kit.LAYERS) for op in OPERATORS]
    for row in table:
        assert 0.001 < row.output_error < 0.3
        assert math.isfinite(row.loss_change)
        assert row.loss_change != 0.0
    down = next(row for row in table if row.operator == "down")
    assert down.fp16_bytes == operator_bytes(kit.HIDDEN, kit.FFN, "fp16", 64)
    assert down.int4_bytes == operator_bytes(kit.HIDDEN, kit.FFN, "int4", 64)


@pytest.mark.parametrize(("operator", "layer"), [("qkv", 0), ("down", 1)])
def test_a_row_is_what_reading_the_changed_model_from_the_start_says(path, table, operator, layer):
    spec, tokenizer, weights = read_model(
        path, torch.float32, torch.device("cpu"), lambda _share: None, small=False
    )
    parts = reading.windows(tokenizer, [TEXT])
    judges, teachers = parts[-2:], parts[:-2]
    reader = reading.Reader(spec, weights)
    old = getattr(weights.layers[layer], operator)
    moments = calibrated.Moments(old.shape[1])

    def seen(name, x):
        if name == operator:
            moments.add(x.numpy())

    for part in teachers:
        x = reader.start(part)
        for index, each in enumerate(weights.layers):
            x = reader.layer(x, each, seen if index == layer else None)
    packed = calibrated.quantize(old.numpy(), 64, moments)
    new = torch.from_numpy(quant.dequantize(packed))
    layers = list(weights.layers)
    layers[layer] = dataclasses.replace(layers[layer], **{operator: new})
    changed = reading.Reader(spec, dataclasses.replace(weights, layers=tuple(layers)))
    losses = [sum(one.read(part) for part in judges) for one in (reader, changed)]
    row = next(row for row in table if (row.operator, row.layer) == (operator, layer))
    expected = (losses[1] - losses[0]) / reading.scored(judges)
    assert row.loss_change == pytest.approx(expected, rel=0.02, abs=1e-6)


def test_a_text_of_one_window_judges_nothing(path):
    with opened(path) as model, pytest.raises(ValueError, match="two windows"):
        sensitivity.measure(model, ["short"], 64, silent)


def test_a_table_survives_json_and_shows_what_was_chosen(table):
    assert sensitivity.parse(json.loads(json.dumps(sensitivity.plain(table)))) == table
    plan = choose(table, budget=1.5)
    text = sensitivity.table_text(table, plan.int4)
    assert text.count("*") == len(plan.int4)
    assert len(text.splitlines()) == 1 + kit.LAYERS


@pytest.mark.parametrize(
    "change",
    [
        {"operator": "ffn"}, {"layer": -1}, {"layer": True}, {"layer": 2_000}, {"extra": 1},
        {"output_error": "0"}, {"loss_change": None}, {"int4_bytes": 1.5},
    ],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(table, change):
    rows = sensitivity.plain(table)
    rows[1] |= change
    with pytest.raises(ValueError, match="row 1"):
        sensitivity.parse(rows)


@pytest.mark.parametrize("value", [None, [], {}, "x", [7]])
def test_no_table_at_all_is_refused(value):
    with pytest.raises(ValueError, match="table"):
        sensitivity.parse(value)


def test_a_product_that_is_there_twice_is_refused(table):
    rows = sensitivity.plain(table)
    with pytest.raises(ValueError, match="twice"):
        sensitivity.parse([*rows, rows[0]])
