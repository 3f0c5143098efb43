"""How each operator of a loaded model is held, and which unit computes it after what.

It is read off the loaded weights: what is there, not what a plan had wanted. Made once, when the
model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from agent.engine.compact import FEW_ROWS, Compact
from agent.engine.precision import OPERATORS
from agent.engine.stack import ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent.engine.weights import Weight, Weights

_NAMES: Final = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
}  # fmt: skip
# A layer's stages, in order, each with what it waits for; "before": the layer before, or the
# embedding. A product is named as its operator.
STAGES: Final = (
    ("attention_norm", ("before",)),
    ("qkv", ("attention_norm",)),
    ("rotation", ("qkv",)),
    ("cache", ("rotation",)),
    ("attention", ("cache",)),
    ("out", ("attention",)),
    ("ffn_norm", ("before", "out")),
    ("gate_up", ("ffn_norm",)),
    ("silu", ("gate_up",)),
    ("down", ("silu",)),
)


def placement(weights: Weights, *, whole_steps: bool, threads: int) -> dict[str, Any]:
    """Return what `/v1/node/plan` shows; `whole_steps`: few rows take all layers in one call."""
    rows = [
        *_operator("embedding", [(None, weights.embed)]),
        *(
            row
            for operator in OPERATORS
            for row in _operator(
                operator, [(i, getattr(layer, operator)) for i, layer in enumerate(weights.layers)]
            )
        ),
        *_operator("head", [(None, weights.head)], counted=not weights.tied),
    ]
    device = weights.embed.device
    return {
        "schema": 1,
        "device": str(device),
        "threads": threads if device.type == "cpu" else None,
        "compute": _NAMES.get(weights.compute, str(weights.compute)),
        "kv": _NAMES.get(weights.kv, str(weights.kv)),
        "bytes": sum(row["bytes"] for row in rows),
        "operators": rows,
        "schedule": _schedule(weights, whole_steps=whole_steps),
    }


def _operator(
    name: str, weights: Iterable[tuple[int | None, Weight]], *, counted: bool = True
) -> list[dict[str, Any]]:
    """Return a row for each form in which an operator is held; `counted` False: bytes elsewhere."""
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    for layer, weight in weights:
        form = _form(weight)
        row = found.setdefault(
            form,
            {
                "operator": name, "precision": form[0], "group": form[1],
                "layers": [], "rows": weight.shape[0], "cols": weight.shape[1], "bytes": 0,
            },
        )  # fmt: skip
        if layer is not None:
            row["layers"].append(layer)
        row["bytes"] += weight.nbytes if counted else 0
    return list(found.values())


def _form(weight: Weight) -> tuple[str, int | None]:
    if isinstance(weight, Compact):
        return ("int4" if weight.bits == 4 else "fp16"), weight.group
    return _NAMES.get(weight.dtype, str(weight.dtype)), None


def _schedule(weights: Weights, *, whole_steps: bool) -> list[dict[str, Any]]:
    """Return the ways a step goes through the model, by its count of rows."""
    small = any(
        isinstance(getattr(layer, op), Compact) for layer in weights.layers for op in OPERATORS
    )
    device = weights.embed.device
    if device.type != "cpu":
        return [_way("any", dict.fromkeys(("products", "rest"), f"torch on {device}"))]
    if not small:
        return [_way("any", {"products": "BLAS", "rest": "torch"})]
    few = {"products": "kernels.cpu", "rest": "kernels.cpu" if whole_steps else "torch"}
    most = ROWS_MAX if whole_steps else FEW_ROWS
    return [
        _way(f"1 to {most}", few, one_call=whole_steps),
        _way(f"from {most + 1}", {"products": "BLAS, unpacked one at a time", "rest": "torch"}),
    ]


def _way(rows: str, units: dict[str, str], *, one_call: bool = False) -> dict[str, Any]:
    products = set(OPERATORS)
    layer = [
        {
            "stage": name,
            "unit": units["products" if name in products else "rest"],
            "waits_for": list(waits),
        }
        for name, waits in STAGES
    ]
    outside = "torch" if units["rest"] == "kernels.cpu" else units["rest"]
    return {
        "rows": rows,
        "one_call": one_call,
        "first": [{"stage": "embedding", "unit": outside, "waits_for": []}],
        "each_layer": layer,
        "last": [
            {"stage": "final_norm", "unit": outside, "waits_for": ["before"]},
            {"stage": "head", "unit": units["products"], "waits_for": ["final_norm"]},
        ],
    }
