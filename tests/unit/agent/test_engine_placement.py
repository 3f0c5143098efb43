"""What `/v1/node/plan` says is what was loaded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from agent.engine import compact
from agent.engine.convert import Options, convert
from agent.engine.load import load_engine, read_model
from agent.engine.placement import STAGES, placement
from agent.engine.precision import OPERATORS, Plan, operator_bytes
from tests.unit.agent import engine_kit as kit

SMALL = pytest.mark.skipif(not compact.AVAILABLE, reason="capability: AVX2 and kernels.cpu")


def placed(path, dtype):
    engine = load_engine(str(path), kv_tokens=64, dtype=dtype, threads=1)
    try:
        return engine.placement
    finally:
        engine.close()


def by_name(found):
    return {(row["operator"], row["precision"]): row for row in found["operators"]}


@SMALL
def test_a_plan_that_differs_from_layer_to_layer(tmp_path):
    source = kit.write_folder(tmp_path / "hf", kit.tensors(1))
    int4 = frozenset({("qkv", 0), ("down", 0), ("down", 1)})
    options = Options(plan=Plan(kit.LAYERS, 64, int4), windows=0)
    convert(source, tmp_path / "out", options, lambda _phase, _share: None)
    found = placed(tmp_path / "out", "int4")
    rows = by_name(found)
    assert rows["qkv", "int4"]["layers"] == [0]
    assert rows["qkv", "fp16"]["layers"] == [1]
    assert rows["down", "int4"]["layers"] == [0, 1]
    assert rows["down", "int4"]["group"] == 64
    assert rows["down", "int4"]["bytes"] == 2 * operator_bytes(kit.HIDDEN, kit.FFN, "int4", 64)
    assert rows["gate_up", "fp16"]["bytes"] == 2 * operator_bytes(
        2 * kit.FFN, kit.HIDDEN, "fp16", 64
    )
    assert rows["embedding", "fp16"]["bytes"] == 2 * kit.VOCAB * kit.HIDDEN
    assert rows["head", "fp16"]["bytes"] == 0, "it is the embedding's memory"
    assert found["bytes"] == sum(row["bytes"] for row in found["operators"])
    assert (found["compute"], found["kv"], found["threads"]) == ("fp32", "fp16", 1)
    assert [way["rows"] for way in found["schedule"]] == ["1 to 32", "from 33"]
    assert found["schedule"][0]["one_call"] is False, "heads of 8 are too small for it"


def test_float32_says_so(tmp_path):
    found = placed(kit.write_gguf(tmp_path / "m.gguf", kit.tensors(1), kind="Q4_1"), "float32")
    assert {row["precision"] for row in found["operators"]} == {"fp32"}
    (way,) = found["schedule"]
    units = {stage["stage"]: stage["unit"] for stage in way["each_layer"]}
    assert units["down"] == "BLAS"
    assert units["attention"] == "torch"


def test_every_stage_waits_for_stages_that_come_earlier():
    names = [name for name, _ in STAGES]
    assert [name for name in names if name in OPERATORS] == list(OPERATORS)
    for place, (name, waits) in enumerate(STAGES):
        assert waits, name
        assert set(waits) <= {"before", *names[:place]}


def test_another_device_has_one_way_and_no_cpu_threads(tmp_path):
    path = kit.write_folder(tmp_path / "hf", kit.tensors(1))
    cpu = torch.device("cpu")
    _, _, weights = read_model(path, torch.bfloat16, cpu, lambda _share: None, small=False)
    weights = dataclasses.replace(weights, embed=weights.embed.to("meta"))
    found = placement(weights, whole_steps=False, threads=4)
    assert (found["device"], found["threads"], found["compute"]) == ("meta", None, "bf16")
    (way,) = found["schedule"]
    assert {stage["unit"] for stage in way["each_layer"]} == {"torch on meta"}
