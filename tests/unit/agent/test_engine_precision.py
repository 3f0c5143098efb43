"""The plan: never over its budget by its own estimate, larger with a larger budget, one answer."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.engine.precision import (
    OPERATORS,
    Plan,
    Sensitivity,
    choose,
    default,
    operator_bytes,
    parse,
    saved_bytes,
)

LAYERS = 4


def every(*column):
    return {operator: list(column) for operator in OPERATORS}


losses = st.one_of(
    st.floats(-0.05, 0.3), st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e-12])
)
sizes = st.integers(0, 1 << 40)
tables = st.lists(st.tuples(losses, st.floats(0, 2), sizes, sizes), min_size=1, max_size=16).map(
    lambda rows: [
        Sensitivity(OPERATORS[at % 4], at // 4, error, loss, wide, small)
        for at, (loss, error, wide, small) in enumerate(rows)
    ]
)
budgets = st.floats(1.0, 3.0)


@given(tables, budgets)
def test_never_over_the_budget_by_its_own_estimate(table, budget):
    plan = choose(table, budget=budget)
    assert 1.0 <= plan.estimate <= budget * (1 + 1e-12)
    total = sum(
        max(0.0, row.loss_change) for row in table if (row.operator, row.layer) in plan.int4
    )
    assert math.exp(total) == pytest.approx(plan.estimate)
    assert saved_bytes(plan, table) >= 0


@given(tables, budgets, budgets)
def test_a_larger_budget_takes_nothing_out_of_four_bits(table, one, two):
    small, large = choose(table, budget=min(one, two)), choose(table, budget=max(one, two))
    assert small.int4 <= large.int4
    assert saved_bytes(small, table) <= saved_bytes(large, table)


@given(tables, budgets, st.integers())
def test_the_order_of_the_table_changes_nothing(table, budget, seed):
    shuffled = list(table)
    random.Random(seed).shuffle(shuffled)
    assert choose(shuffled, budget=budget) == choose(table, budget=budget)


@given(tables, budgets)
def test_a_plan_survives_json(table, budget):
    plan = choose(table, budget=budget, group=64)
    assert parse(plan.plain()) == plan


def test_the_least_loss_for_a_byte_goes_first():
    table = [
        Sensitivity("down", 0, 0.1, 0.10, 4_000, 1_000),
        Sensitivity("gate_up", 0, 0.1, 0.11, 8_000, 2_000),
        Sensitivity("qkv", 0, 0.1, 0.01, 400, 100),
    ]
    assert choose(table, budget=math.exp(0.115)).int4 == {("gate_up", 0)}
    assert choose(table, budget=math.exp(0.5)).int4 == {(row.operator, 0) for row in table}


def test_four_bits_that_save_nothing_are_not_taken():
    assert not choose([Sensitivity("out", 0, 0.0, 0.0, 100, 100)]).int4


def test_the_default_is_attention_in_fp16_and_the_ffn_in_four_bits():
    plan = default(LAYERS)
    for layer in range(LAYERS):
        assert [plan.precision(op, layer) for op in OPERATORS] == ["fp16", "fp16", "int4", "int4"]
    assert (plan.group, plan.budget, plan.estimate) == (128, 1.15, None)
    assert plan.plain()["embedding"] == plan.plain()["head"] == "fp16"


@pytest.mark.parametrize("budget", [0.99, math.nan, -1.0])
def test_a_budget_below_one_is_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        choose([Sensitivity("out", 0, 0.0, 0.0, 100, 10)], budget=budget)


def test_an_empty_table_is_refused():
    with pytest.raises(ValueError, match="empty"):
        choose([])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version"),
        ({"group": 48}, "group"),
        ({"group": True}, "group"),
        ({"operators": {}}, "operators"),
        ({"operators": every()}, "operators"),
        ({"operators": every("int4") | {"out": ["fp16"] * 2}}, "operators"),
        ({"operators": every("int3")}, "operators"),
        ({"operators": every(*["int4"] * 1_025)}, "operators"),
        ({"budget": 0.5}, "budget"),
        ({"budget": math.inf}, "budget"),
        ({"estimate": "1"}, "estimate"),
    ],
)
def test_a_plan_that_is_none_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        parse(default(LAYERS).plain() | change)


def test_bytes_of_the_two_forms():
    assert operator_bytes(10, 576, "fp16", 128) == 11_520
    # 288 bytes of codes and five groups of four bytes, the last of them short.
    assert operator_bytes(10, 576, "int4", 128) == 10 * (288 + 20)


def test_the_table_is_no_part_of_a_plans_identity():
    plan = Plan(1, 32, frozenset())
    assert dataclasses.replace(plan, table=(Sensitivity("out", 0, 0, 0, 1, 1),)) == plan
