"""Measures what four bits in one product of one layer do, for `agent.engine.precision`.

The model is read in float32 and kept whole. Layer by layer, each of its products is quantised by
itself, with the codes that `agent.engine.convert` would choose, and a part of the calibration text
on which they were not chosen is read on from there to the end. Reading on from the layer, and not
from the start, halves the time: with 30 layers and 2 windows it is some 60 readings of the model
for each kind of product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from agent.engine import reading
from agent.engine.convert import CALIBRATION_WINDOWS
from agent.engine.precision import OPERATORS, Sensitivity, operator_bytes
from agent.engine.types import ModelFileError
from agent.engine.weights import load_weights
from kernels import calibrated, quant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.engine.opened import Opened
    from agent.engine.weights import LayerWeights

# Windows on which a change of the loss is measured; the same for all, so they compare.
JUDGE_WINDOWS: Final = 2
_LOSS_MAX: Final = 1e6


def measure(
    model: Opened, texts: Sequence[str], group: int, report: Callable[[str, float], None]
) -> list[Sensitivity]:
    """Return the table of a model; `texts` calibrate, their last windows judge.

    Raises `ModelFileError` for the model, ValueError for texts of less than two windows.
    """
    report("reading the model", 0.0)
    cpu = torch.device("cpu")
    weights = load_weights(model.spec, model.source, torch.float32, cpu, lambda _share: None)
    parts = reading.windows(model.tokenizer, texts, limit=CALIBRATION_WINDOWS + JUDGE_WINDOWS)
    if len(parts) < 2:
        raise ValueError(f"the text has less than two windows of {reading.WINDOW} tokens")
    judges = parts[-JUDGE_WINDOWS:] if len(parts) > JUDGE_WINDOWS else parts[-1:]
    teachers = parts[: -len(judges)]
    reader = reading.Reader(model.spec, weights)
    tokens = reading.scored(judges)
    before = sum(reader.read(part) for part in judges)
    rows, taught = ([reader.start(part) for part in some] for some in (judges, teachers))
    table: list[Sensitivity] = []
    for index, layer in enumerate(weights.layers):
        moments = {op: calibrated.Moments(getattr(layer, op).shape[1]) for op in OPERATORS}

        def add(op: str, x: torch.Tensor, moments: dict[str, Any] = moments) -> None:
            moments[op].add(x.numpy())

        taught = [reader.layer(x, layer, add) for x in taught]
        inputs: dict[str, torch.Tensor] = {}
        after = [reader.layer(x, layer, inputs.__setitem__) for x in rows]
        for place, operator in enumerate(OPERATORS):
            share = (index + place / len(OPERATORS)) / model.spec.layers
            # Later layers leave less to read: what is left of the time falls with the square.
            report("measuring", 1.0 - (1.0 - share) ** 2)
            weight: torch.Tensor = getattr(layer, operator)
            wide, cols = weight.shape
            changed = _in_four_bits(weight, group, moments[operator])
            x = inputs[operator]
            error = reading.relative_error(x @ (changed - weight).T, x @ weight.T)
            loss = _loss(reader, judges, rows, index, replace(layer, **{operator: changed}))
            table.append(
                Sensitivity(
                    operator,
                    index,
                    error,
                    (loss - before) / tokens,
                    operator_bytes(wide, cols, "fp16", group),
                    operator_bytes(wide, cols, "int4", group),
                )
            )
        rows = after
    report("done", 1.0)
    return table


def _in_four_bits(weight: torch.Tensor, group: int, moments: calibrated.Moments) -> torch.Tensor:
    try:
        packed = calibrated.quantize(weight.numpy(), group, moments)
    except quant.QuantError as problem:
        raise ModelFileError(f"a matrix cannot be held in four bits: {problem}") from None
    return torch.from_numpy(quant.dequantize(packed))


def _loss(
    reader: reading.Reader,
    judges: list[list[int]],
    rows: list[torch.Tensor],
    index: int,
    changed: LayerWeights,
) -> float:
    """Return the loss where layer `index`, which takes `rows`, is another."""
    total = 0.0
    for tokens, start in zip(judges, rows, strict=True):
        x = reader.layer(start, changed)
        for layer in reader.weights.layers[index + 1 :]:
            x = reader.layer(x, layer)
        total += reader.loss(x, tokens)
    return total


def table_text(table: list[Sensitivity], chosen: frozenset[tuple[str, int]]) -> str:
    """Return a table for people: error of the output, growth of the perplexity; * for four bits."""
    found = {(row.operator, row.layer): row for row in table}
    lines = ["layer" + "".join(f"{operator:>20}" for operator in OPERATORS)]
    for layer in sorted({row.layer for row in table}):
        line = f"{layer:5}"
        for operator in OPERATORS:
            row = found.get((operator, layer))
            mark = "*" if (operator, layer) in chosen else " "
            cell = "-" if row is None else f"{row.output_error:.4f} {row.loss_change:+9.3%}{mark}"
            line += f"{cell:>20}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def plain(table: list[Sensitivity]) -> list[dict[str, Any]]:
    """Return the table as JSON has it; `parse` reads it."""
    return [
        {
            "operator": row.operator,
            "layer": row.layer,
            "output_error": row.output_error,
            "loss_change": row.loss_change,
            "fp16_bytes": row.fp16_bytes,
            "int4_bytes": row.int4_bytes,
        }
        for row in table
    ]


def parse(value: Any) -> list[Sensitivity]:
    """Return the table that `plain` wrote; raises ValueError naming what is wrong."""
    if not isinstance(value, list) or not value or len(value) > 4_096:
        raise ValueError("table: a list of at most 4,096 rows is expected")
    table = []
    for number, row in enumerate(value):
        try:
            made = Sensitivity(**row)
        except TypeError:
            raise ValueError(f"table: row {number} has other members") from None
        whole = (made.layer, made.fp16_bytes, made.int4_bytes)
        real = (made.output_error, made.loss_change)
        if (
            made.operator not in OPERATORS
            or not all(type(v) is int and v >= 0 for v in whole)
            or not all(type(v) in {int, float} and abs(v) < _LOSS_MAX for v in real)
            or made.layer > 1_023
        ):
            raise ValueError(f"table: row {number} is malformed")
        table.append(made)
    if len({(row.operator, row.layer) for row in table}) != len(table):
        raise ValueError("table: a product of a layer is there twice")
    return table
