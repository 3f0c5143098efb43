"""Canonical JSON: what is written, what is mended, what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.audit.canonical import (
    DEPTH,
    NotCanonical,
    _encode_slowly,
    clean_text,
    decode,
    encode,
    fit,
)

texts = st.text(max_size=60)
values = st.recursive(
    st.integers(-(2**53) + 1, 2**53 - 1) | texts | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.text(st.characters(), max_size=400)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


def test_escapes_are_those_of_rfc_8785():
    # RFC 8785, 3.2.2.2: short escapes where there are any, else \u00xx in lower case, else literal.
    assert (
        encode({"a": '\b\t\n\f\r"\\\x00\x1f/\x7f\u2028\u20ac'})
        == ('{"a":"\\b\\t\\n\\f\\r\\"\\\\\\u0000\\u001f/\x7f\u2028\u20ac"}').encode()
    )


def test_every_character_below_space_is_escaped_as_the_standard_library_does():
    for code in range(0x21):
        text = chr(code)
        assert encode({"a": text}) == json.dumps({"a": text}, separators=(",", ":")).encode()


def test_members_are_sorted():
    assert encode({"b": 1, "a": {"d": 2, "c": 3}}) == b'{"a":{"c":3,"d":2},"b":1}'


@given(st.dictionaries(st.text(st.characters(max_codepoint=127), max_size=9), texts, max_size=6))
def test_the_slow_form_equals_the_fast_one_for_ascii_names(record):
    assert encode(record) == _encode_slowly(record)


@given(st.dictionaries(texts, values, max_size=5))
def test_what_is_written_is_read_back(record):
    assert decode(_encode_slowly(record)) == record


def test_names_outside_the_basic_plane_sort_by_utf_16():
    # RFC 8785, 3.2.3: U+10000 is D800 DC00 there and comes before U+FFFF.
    data = '{"\U00010000":1,"\uffff":2}'.encode()
    assert decode(data) == {"\U00010000": 1, "\uffff": 2}
    with pytest.raises(NotCanonical):
        decode('{"\uffff":2,"\U00010000":1}'.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"1",
        b"{} ",
        b" {}",
        b"\xef\xbb\xbf{}",
        b'{"a": 1}',
        b'{"b":1,"a":1}',
        b'{"a":1,"a":1}',
        b'{"a":1,"a":2}',
        b'{"a":1.0}',
        b'{"a":1e3}',
        b'{"a":-0}',
        b'{"a":01}',
        b'{"a":null}',
        b'{"a":[null]}',
        b'{"a":9007199254740992}',
        b'{"a":-9007199254740992}',
        b'{"a":18446744073709551616}',
        b'{"a":"\\/"}',
        b'{"a":"\\u0041"}',
        b'{"a":"\\u000A"}',
        b'{"a":"\\u000a"}',
        b'{"a":"\\u001F"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"' + b"x" * 257 + b'"}',
        b'{"a":{"note":"' + b"x" * 257 + b'"}}',
        b'{"a":"' + "é".encode() * 129 + b'"}',
        b'{"a":NaN}',
        b'{"a":1}\x00',
        b"[" * 2000,
        b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a":' + b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1) + b"}",
    ],
)
def test_what_is_not_canonical_is_refused(data):
    with pytest.raises(NotCanonical):
        decode(data)


def test_long_members_of_the_record_itself_may_be_long():
    long = "x" * 1000
    record = {"cosigned": long, "note": long, "origin": long}
    assert decode(encode(record)) == record
    assert fit(record) is record


def test_text_is_cut_at_a_character_and_surrogates_are_replaced():
    assert clean_text("é" * 200) == "é" * 128
    assert clean_text("a" * 255 + "é") == "a" * 255
    assert clean_text("\ud800x\udfff") == "\ufffdx\ufffd"
    assert clean_text("\U0001f600" * 100) == "\U0001f600" * 64


def test_what_fits_is_not_copied():
    record = {"a": "x" * 256, "b": {"c": [1, True]}, "d": 2**53 - 1}
    assert fit(record) is record


@pytest.mark.parametrize(
    ("value", "mended"),
    [
        ("x" * 300, "x" * 256),
        ("\ud800", "\ufffd"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        (2**53, "0x20000000000000"),
        (1 << 20_000, "0x1" + "0" * 253),
        (b"x", "b'x'"),
        ({"a": None, "b": 1}, {"b": 1}),
        ([1, None, 2.0], [1, "2.0"]),
        ({1: "é" * 300}, {"1": "é" * 128}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_fit_is_mended(value, mended):
    assert fit({"a": value}) == {"a": mended}


def test_what_is_unknown_is_absent():
    assert fit({"a": None, "b": 1}) == {"b": 1}


@given(st.dictionaries(st.text(st.characters(max_codepoint=126), max_size=9), anything, max_size=4))
def test_nothing_makes_a_record_unwritable(members):
    assert decode(encode(fit(members))) == json.loads(encode(fit(members)))
