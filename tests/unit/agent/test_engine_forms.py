"""Folders that GPTQ's and AWQ's tools wrote: read, served, quantised again; others refused by name.

The tensors are packed here from these projects' descriptions, not by code of ours.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from agent.engine import compact
from agent.engine.convert import Options, convert
from agent.engine.load import load_engine, read_model
from agent.engine.precision import OPERATORS, Plan
from agent.engine.types import ModelFileError, Sampling
from tests.unit.agent import engine_kit as kit

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def words(codes, order=range(8)):
    """Pack eight neighbours of the last axis, the one at order[i] in nibble i."""
    eights = codes.reshape(codes.shape[0], -1, 8).astype(np.uint64)
    packed = sum(eights[:, :, place] << np.uint64(4 * i) for i, place in enumerate(order))
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def in_four_bits(shape, rng, *, act_order):
    """Return codes [rows, k], zero points and scales [rows, groups], each column's group."""
    rows, k = shape
    groups = -(-k // GROUP)
    q = rng.integers(0, 16, (rows, k))
    zero = rng.integers(1, 16, (rows, groups))
    scale = rng.uniform(0.02, 0.06, (rows, groups)).astype(np.float16)
    group_of = np.arange(k) // GROUP
    return q, zero, scale, rng.permutation(group_of) if act_order else group_of


def written(folder, method, *, act_order=False, zeros=1, bias=False, **changes):
    """Write a folder in a form and one of the same values as floats; return both.

    `zeros`: the version of GPTQ, which tells how zero points are stored.
    """
    rng, floats, packed = np.random.default_rng(5), {}, {}
    for name, tensor in kit.tensors(1).items():
        floats[name] = packed[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        del packed[name]
        q, zero, scale, group_of = in_four_bits(tensor.shape, rng, act_order=act_order)
        base = name.removesuffix("weight")
        values = (q - zero[:, group_of]) * scale[:, group_of].astype(np.float32)
        floats[name] = torch.from_numpy(values.astype(np.float32))
        scales = torch.from_numpy(np.ascontiguousarray(scale.T))
        if method["quant_method"] == "gptq":
            stored = zero - 1 if zeros == 1 else zero
            packed |= {
                f"{base}qweight": words(q).T.contiguous(),
                f"{base}qzeros": words(np.ascontiguousarray(stored.T)),
                f"{base}scales": scales,
                f"{base}g_idx": torch.from_numpy(group_of.astype(np.int32)),
            }
        else:
            packed |= {
                f"{base}qweight": words(np.ascontiguousarray(q.T), AWQ_ORDER),
                f"{base}qzeros": words(np.ascontiguousarray(zero.T), AWQ_ORDER),
                f"{base}scales": scales,
            }
        if bias:
            packed[f"{base}bias"] = torch.zeros(tensor.shape[0], dtype=torch.float16)
    form = method | ({"checkpoint_format": "gptq_v2"} if zeros == 2 else {}) | changes
    folder.mkdir()
    kit.write_folder(folder / "floats", floats)
    kit.write_folder(folder / "packed", packed, quantization_config=form)
    return folder / "packed", folder / "floats"


def weights_of(path, *, small):
    cpu = torch.device("cpu")
    return read_model(path, torch.float32, cpu, lambda _share: None, small=small)[2]


def spoken(path, **options):
    engine = load_engine(str(path), kv_tokens=256, **options)
    try:
        return kit.collect(engine, kit.random_prompt(6, 30), Sampling(8, temperature=0.0)).token_ids
    finally:
        engine.close()


CASES = {
    "gptq": (GPTQ, {}),
    "gptq-v2": (GPTQ, {"zeros": 2}),
    "gptq-act-order": (GPTQ | {"desc_act": True}, {"act_order": True}),
    "gptq-biases": (GPTQ, {"bias": True}),
    "awq": (AWQ, {}),
    "awq-old-names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "version": "GEMM"}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_its_values_are_those_of_the_floats(tmp_path, case):
    method, options = CASES[case]
    packed, floats = written(tmp_path / "m", method, **options)
    whole, same = weights_of(packed, small=False), weights_of(floats, small=False)
    for one, two in zip(whole.layers, same.layers, strict=True):
        for operator in OPERATORS:
            got, want = getattr(one, operator), getattr(two, operator)
            # Ours are computed in FP16: a product of a whole number below 16 and a scale.
            assert torch.allclose(got, want, rtol=2.0**-11, atol=0.0)
    assert spoken(packed) == spoken(floats)


@pytest.mark.skipif(not compact.AVAILABLE, reason="capability: AVX2 and kernels.cpu")
@pytest.mark.parametrize("case", CASES)
def test_it_stays_in_four_bits_where_columns_keep_their_order(tmp_path, case):
    method, options = CASES[case]
    packed, floats = written(tmp_path / "m", method, **options)
    for layer in weights_of(packed, small=True).layers:
        bits = {operator: getattr(layer, operator).bits for operator in OPERATORS}
        # Of one group only, `qkv` and the like have nothing to be ordered by.
        ordered = {"down": 16} if "act_order" in options else {}
        assert bits == dict.fromkeys(OPERATORS, 4) | ordered
    assert spoken(packed, dtype="int4") == spoken(floats)


@pytest.mark.parametrize("case", ["gptq", "awq", "gptq-act-order"])
def test_it_is_quantised_to_a_folder_of_ours(tmp_path, case):
    method, options = CASES[case]
    packed, _ = written(tmp_path / "m", method, **options)
    every = frozenset((op, layer) for op in OPERATORS for layer in range(kit.LAYERS))
    plan = Plan(kit.LAYERS, GROUP, every if case != "gptq-act-order" else frozenset())
    manifest = convert(packed, tmp_path / "out", Options(plan=plan, windows=1), lambda *_: None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert manifest["quality"]["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert spoken(tmp_path / "out") == spoken(packed)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        (GPTQ, {"bits": 8}, "gptq with 8 bits"),
        (GPTQ, {"group_size": -1}, "groups of -1"),
        (GPTQ, {"group_size": []}, "groups of"),
        (GPTQ, {"checkpoint_format": "marlin"}, "gptq's form 'marlin'"),
        (AWQ, {"version": "gemv"}, "awq's form 'gemv'"),
        (AWQ, {"zero_point": False}, "awq's form"),
        (AWQ, {"quant_method": "bitsandbytes"}, "quantization 'bitsandbytes'"),
        (AWQ, {"quant_method": ["gptq"]}, "quantization"),
        (GPTQ, {"group_size": 64}, "qzeros is"),
        (AWQ, {"quant_method": "gptq"}, "shape"),
    ],
)
def test_a_form_that_is_not_read_is_refused_by_name(tmp_path, method, changes, said):
    packed, _ = written(tmp_path / "m", method, **changes)
    with pytest.raises(ModelFileError, match=said):
        weights_of(packed, small=False)


@pytest.mark.parametrize("value", [[1, 2], "gptq", 4])
def test_settings_that_are_no_object_are_malformed(tmp_path, value):
    folder = kit.write_folder(tmp_path / "m", quantization_config=value)
    with pytest.raises(ModelFileError, match="quantization_config is no object"):
        weights_of(folder, small=False)


DOWN = "model.layers.0.mlp.down_proj."


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("qweight", torch.zeros(4, dtype=torch.int32)),
        ("qweight", torch.zeros(kit.FFN // 8, kit.HIDDEN)),
        ("qzeros", torch.zeros(1, 1, dtype=torch.int32)),
        ("qzeros", torch.full((2, kit.HIDDEN // 8), -1, dtype=torch.int32)),
        ("scales", torch.zeros(2, 3)),
        ("scales", torch.full((2, kit.HIDDEN), torch.inf)),
        ("g_idx", torch.full((kit.FFN,), -1, dtype=torch.int32)),
        ("g_idx", torch.full((kit.FFN,), 2**31 - 1, dtype=torch.int32)),
        ("g_idx", torch.zeros(kit.FFN, dtype=torch.int32)),
        ("g_idx", torch.zeros(3, dtype=torch.int32)),
        ("bias", torch.ones(kit.HIDDEN)),
        ("qzeros", None), ("scales", None), ("g_idx", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("small", [False, True])
def test_parts_that_do_not_fit_together_are_refused(tmp_path, part, value, small):
    from safetensors.torch import load_file, save_file

    packed, _ = written(tmp_path / "m", GPTQ | {"desc_act": True})
    file = packed / "model.safetensors"
    named = load_file(file)
    named.pop(DOWN + part, None)
    if value is not None:
        named[DOWN + part] = value
    file.unlink()
    save_file(named, file)
    with pytest.raises(ModelFileError):
        weights_of(packed, small=small and compact.AVAILABLE)
