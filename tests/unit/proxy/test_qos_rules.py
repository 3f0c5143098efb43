"""Classification rules, and the look at a body's first bytes that they need."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config import load
from proxy.http.body import view
from proxy.http.peek import PEEK_BYTES, peek
from proxy.qos.limits import LimitsError, read_limits
from proxy.qos.rules import choose, rules_of, tokens


def rules(*rows, tenant="t", sla=""):
    text = "".join(f"[[qos.rules]]\n{row}\n" for row in rows)
    return rules_of(load(text, {}).qos.rules, tenant, sla)


def chosen(found, body, length=None):
    rule = choose(found, peek(body, len(body) if length is None else length))
    return None if rule is None else (rule.number, rule.qos)


def test_the_first_rule_that_holds_wins():
    found = rules("qos='P2'\nmodel='a*'", "qos='P1'\nmodel='ab'", "qos='P0'")
    assert chosen(found, b'{"model":"ab"}') == (1, "P2")
    assert chosen(found, b'{"model":"b"}') == (3, "P0")


def test_what_follows_a_rule_without_conditions_is_never_asked():
    assert len(rules("qos='P2'\ntenant='t'", "qos='P0'\nmodel='x'")) == 1


def test_rules_of_other_tenants_and_slas_are_left_out_but_keep_their_number():
    rows = ("qos='P2'\ntenant='other'", "qos='P2'\nsla='gold'", "qos='P1'\nmodel='m'")
    assert [rule.number for rule in rules(*rows)] == [3]
    assert [rule.number for rule in rules(*rows, sla="gold")] == [2]


@pytest.mark.parametrize(
    ("pattern", "model", "holds"),
    [
        ("gpt-*", "gpt-4", True),
        ("gpt-*", "a-gpt-4", False),
        ("m?", "m1", True),
        ("m?", "m12", False),
        ("m[12]", "m3", False),
        ("a.c", "abc", False),
        ("Model", "model", False),
        ("*", "", False),
    ],
)
def test_a_model_is_a_name_or_a_pattern(pattern, model, holds):
    found = rules(f"qos='P2'\nmodel='{pattern}'")
    assert (chosen(found, json.dumps({"model": model}).encode()) is not None) is holds


@pytest.mark.parametrize(
    ("row", "least", "most"),
    [
        ("prompt_bytes_min = 10", 10, None),
        ("prompt_bytes_max = 20", 0, 20),
        ("prompt_tokens_min = 3", 9, None),
        ("prompt_tokens_max = 3", 0, 12),
        ("prompt_bytes_min = 20\nprompt_tokens_min = 3", 20, None),
        ("prompt_bytes_max = 9\nprompt_tokens_max = 9", 0, 9),
    ],
)
def test_a_prompts_length_is_that_of_its_value(row, least, most):
    found = rules(f"qos='P2'\n{row}")
    for size in range(2, 40):
        body = b'{"model":"m","prompt":"%b"}' % (b"x" * (size - 2))
        holds = size >= least and (most is None or size <= most)
        assert (chosen(found, body) is not None) is holds, size


def test_a_token_is_four_bytes_begun():
    assert [tokens(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_no_model_within_what_is_seen_is_the_default_class():
    found = rules("qos='P2'\nprompt_bytes_min=1")
    assert chosen(found, b'{"prompt":"' + b"x" * PEEK_BYTES + b'","model":"m"}') is None
    assert chosen(found, b'{"model":"m","prompt":"' + b"x" * PEEK_BYTES + b'"}') == (1, "P2")
    assert chosen(found, b"plain text") == (1, "P2")  # seen whole: its length is the prompt's


# --- the look


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model":"m"}', "m"),
        (b' { "messages" : [{"role":"user","content":"a}\\"{"}] , "model" : "m" } ', "m"),
        (b'{"a":{"model":"x"},"model":"m"}', "m"),
        (b'{"a":["model","x"],"model":"m"}', "m"),
        (b'{"a":"\\"model\\":\\"x\\"","model":"m"}', "m"),
        (b'{"model":"m\\u0061"}', "ma"),
        (b'{"model":7}', ""),
        (b'{"model":null}', ""),
        (b'["model","m"]', ""),
        (b"", ""),
        (b"{", ""),
        (b'{"model"', ""),
        (b'{"model":"m', ""),
        (b'{"x":"model":"m"}', ""),
        (b"\xff\xfe", ""),
        (b"}}}}", ""),
    ],
)
def test_the_model_is_the_top_members(body, model):
    assert peek(body, len(body)).model == model


def test_a_prompt_that_goes_on_is_as_long_as_the_body_may_be():
    body = b'{"model":"m","prompt":"' + b"x" * 100_000
    assert peek(body, 200_000).prompt_bytes == 200_000 - 22


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=4), values, max_size=4),
    st.text(max_size=9),
    values,
    st.integers(0, 9999),
    st.booleans(),
)
@settings(deadline=None)
def test_the_look_agrees_with_the_reader(more, model, prompt, limit, spaced):
    table = {**more, "model": model, "messages": prompt, "max_tokens": limit}
    separators = (", ", ": ") if spaced else (",", ":")
    body = json.dumps(table, separators=separators).encode()
    seen, read = peek(body, len(body)), view(body)
    assert read is not None
    assert seen.model == read.model
    assert seen.prompt_bytes == read.prompt[1] - read.prompt[0]
    assert seen.max_tokens == read.max_tokens


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_looked_at_without_harm(body):
    peek(body, len(body))


# --- the agent's limits


def test_limits_are_read_by_class():
    assert read_limits(b'{"P1":{"limit":7.9,"age_ms":1.5},"P0":{"limit":1,"age_ms":0},"x":1}') == {
        "P0": (1, 0),
        "P1": (7, 1_000_000),
    }
    assert read_limits(b"{}") == {}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"1",
        b'{"P1":[]}',
        b'{"P1":{}}',
        b'{"P1":{"limit":1}}',
        b'{"P1":{"limit":-1,"age_ms":0}}',
        b'{"P1":{"limit":1,"age_ms":-1}}',
        b'{"P1":{"limit":true,"age_ms":0}}',
        b'{"P1":{"limit":"1","age_ms":0}}',
        b'{"P1":{"limit":1e300,"age_ms":0}}',
        b'{"P1":{"limit":NaN,"age_ms":0}}',
    ],
)
def test_a_malformed_answer_is_refused_whole(text):
    with pytest.raises(LimitsError):
        read_limits(text)
