"""Which product of which layer is computed from four bits, and which from FP16: a pure policy.

What is known about a model is a table of measured sensitivities: for each product of each layer,
what four bits in it alone do to its output and to the loss on a calibration text. From the least
loss for a byte upwards, products are put into four bits while their losses together stay within a
budget. Losses are added as if they did not meet: a model's own perplexity, measured afterwards, has
the last word. A gain is counted as nothing, since on another text it may be none.

Without a table the default holds: attention's projections FP16, the FFN four bits. Embedding and
head are FP16 in every plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Precision = Literal["fp16", "int4"]
# The products of a layer, in their order; each is one matrix in the engine.
OPERATORS: Final = ("qkv", "out", "gate_up", "down")
BUDGET: Final = 1.15
GROUP: Final = 128
_FOUR_BITS_BY_DEFAULT: Final = ("gate_up", "down")
_LAYERS_MAX: Final = 1_024


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What four bits in one product of one layer, and in nothing else, do.

    `output_error`: |change| / |output| of the product; `loss_change`: nats for each token of the
    calibration text, so that exp of it is the ratio of perplexities; bytes of the two forms.
    """

    operator: str
    layer: int
    output_error: float
    loss_change: float
    fp16_bytes: int
    int4_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`int4`: the (operator, layer) pairs in four bits.

    `estimate`: the ratio of perplexities that the table lets expect, None where there was no table.
    """

    layers: int
    group: int
    int4: frozenset[tuple[str, int]]
    budget: float = BUDGET
    estimate: float | None = None
    table: tuple[Sensitivity, ...] = field(default=(), compare=False)

    def precision(self, operator: str, layer: int) -> Precision:
        """Return how a product is held."""
        return "int4" if (operator, layer) in self.int4 else "fp16"

    def plain(self) -> dict[str, Any]:
        """Return the plan as JSON has it; `parse` reads it."""
        return {
            "version": 1,
            "group": self.group,
            "budget": self.budget,
            "estimate": self.estimate,
            "embedding": "fp16",
            "head": "fp16",
            "operators": {
                operator: [self.precision(operator, layer) for layer in range(self.layers)]
                for operator in OPERATORS
            },
        }


def parse(value: Any) -> Plan:
    """Return the plan that `Plan.plain` wrote; raises ValueError naming what is wrong."""
    if not isinstance(value, dict) or value.get("version") != 1:
        raise ValueError("a plan of version 1 is expected")
    group, operators = value.get("group"), value.get("operators")
    if group not in (32, 64, 128):
        raise ValueError("group: 32, 64 or 128")
    if not isinstance(operators, dict) or set(operators) != set(OPERATORS):
        raise ValueError(f"operators: exactly {', '.join(OPERATORS)}")
    columns = list(operators.values())
    if not all(isinstance(column, list) and column for column in columns):
        raise ValueError("operators: each has a list of its layers")
    layers = len(columns[0])
    if layers > _LAYERS_MAX or any(len(column) != layers for column in columns):
        raise ValueError("operators: each has the same layers, at most 1,024")
    if not all(precision in ("fp16", "int4") for column in columns for precision in column):
        raise ValueError("operators: a precision is fp16 or int4")
    chosen = frozenset(
        (operator, layer)
        for operator, column in operators.items()
        for layer, precision in enumerate(column)
        if precision == "int4"
    )
    budget, estimate = value.get("budget", BUDGET), value.get("estimate")
    for name, number in (("budget", budget), ("estimate", 1.0 if estimate is None else estimate)):
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not 1.0 <= number < math.inf:
            raise ValueError(f"{name}: a ratio of perplexities, at least 1")
    return Plan(layers, int(group), chosen, float(budget), estimate)


def default(layers: int, group: int = GROUP, budget: float = BUDGET) -> Plan:
    """Return the plan for a model of which nothing is known."""
    pairs = ((operator, layer) for operator in _FOUR_BITS_BY_DEFAULT for layer in range(layers))
    return Plan(layers, group, frozenset(pairs), budget)


def choose(table: Sequence[Sensitivity], *, budget: float = BUDGET, group: int = GROUP) -> Plan:
    """Return the plan for a table; a product that the table lacks stays FP16.

    A larger budget never takes a product out of four bits: they are taken in one order, and the
    first that does not fit ends it. Raises ValueError for a budget that is none and an empty table.
    """
    if not 1.0 <= budget < math.inf:
        raise ValueError("the budget is a ratio of perplexities, at least 1")
    if not table:
        raise ValueError("the table of sensitivities is empty")
    allowed, spent = math.log(budget), 0.0
    chosen: list[tuple[str, int]] = []
    for row in sorted(table, key=_order):
        total = spent + max(0.0, row.loss_change)
        # NaN, too, ends it.
        if row.int4_bytes >= row.fp16_bytes or not total <= allowed:
            break
        spent = total
        chosen.append((row.operator, row.layer))
    layers = 1 + max(row.layer for row in table)
    return Plan(layers, group, frozenset(chosen), budget, math.exp(spent), tuple(table))


def _order(row: Sensitivity) -> tuple[float, float, int, int]:
    """Return the key of the order: loss for each byte saved, then the error, then the place."""
    saved = row.fp16_bytes - row.int4_bytes
    cost = max(0.0, row.loss_change) / saved if saved > 0 else math.inf
    cost = math.inf if math.isnan(cost) else cost
    return cost, row.output_error, row.layer, OPERATORS.index(row.operator)


def operator_bytes(rows: int, cols: int, precision: Precision, group: int) -> int:
    """Return the bytes a matrix [rows, cols] takes in the engine."""
    if precision == "fp16":
        return 2 * rows * cols
    return rows * (-(-cols // 2) + 4 * -(-cols // group))


def saved_bytes(plan: Plan, table: Iterable[Sensitivity]) -> int:
    """Return the bytes that a plan saves against FP16 throughout."""
    return sum(
        row.fp16_bytes - row.int4_bytes for row in table if (row.operator, row.layer) in plan.int4
    )
