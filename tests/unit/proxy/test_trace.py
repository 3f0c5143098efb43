"""W3C trace context: what is kept and what is made (Recommendation, sections 3.2 and 4.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import trace

GOOD = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, SPAN = GOOD[3:35], GOOD[36:52]


@pytest.mark.parametrize(
    "value",
    [
        GOOD,
        GOOD[:-2] + b"00",
        GOOD[:-2] + b"ff",  # unknown flags are no reason to refuse
        b"01" + GOOD[2:],
        b"fe" + GOOD[2:],
        b"cc" + GOOD[2:] + b"-what-the-future-will-be-like",
        b"01" + GOOD[2:] + b"-" + b"x" * 200,
        b"00-" + b"0" * 31 + b"1-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 15 + b"1-01",
    ],
)
def test_a_valid_one_is_kept(value):
    assert trace.valid(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"garbage",
        GOOD.upper(),
        b"ff" + GOOD[2:],
        b"0" + GOOD[2:],
        b"000" + GOOD[2:],
        b"0g" + GOOD[2:],
        b"00-" + b"0" * 32 + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
        b"00-" + TRACE[:-1] + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"a-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + SPAN[:-1] + b"-01",
        b"00-" + TRACE + b"-" + SPAN + b"a-01",
        b"00-" + TRACE + b"-" + SPAN,
        b"00-" + TRACE + b"-" + SPAN + b"-",
        b"00-" + TRACE + b"-" + SPAN + b"-1",
        b"00-" + TRACE + b"-" + SPAN + b"-001",
        b"00-" + TRACE + b"-" + SPAN + b"-0x",
        GOOD + b"-",
        GOOD + b"-more",  # version 00 has four parts
        GOOD + b" ",
        b" " + GOOD,
        GOOD + b"\n",
        GOOD + b"\r\nX-Evil: 1",
        GOOD + b", " + GOOD,  # two fields, joined
        b"01" + GOOD[2:] + b"more",  # a later version still parts by a dash
        b"01" + GOOD[2:] + b"-",
        b"01" + GOOD[2:] + b"-a b",
        b"01" + GOOD[2:] + b"-" + b"x" * 201,
        GOOD.replace(b"-", b"_"),
    ],
)
def test_an_invalid_one_is_not_kept(value):
    assert not trace.valid(value)


@given(st.integers(min_value=0, max_value=(1 << 192) - 1))
def test_what_is_made_is_valid_and_unsampled(bits):
    made = trace.make(bits, 0)
    assert trace.valid(made)
    assert made.startswith(b"00-")
    assert made.endswith(b"-00")


def test_ids_are_the_bits_given():
    assert trace.make(int(SPAN, 16) << 128 | int(TRACE, 16), 0) == b"00-%b-%b-00" % (TRACE, SPAN)


@given(st.integers(min_value=0, max_value=(1 << 192) - 1), st.integers(0, 1 << 64))
def test_the_low_half_of_its_id_says_whether_it_is_sampled(bits, below):
    made = trace.make(bits, below)
    assert made.endswith(b"-01" if int(made[19:35], 16) < below else b"-00")


@pytest.mark.parametrize("bits", [0, 1, 1 << 128, (1 << 128) - 1, (1 << 192) - (1 << 128)])
def test_a_zero_id_is_never_made(bits):
    _, trace_id, span_id, _ = trace.make(bits, 0).split(b"-")
    assert trace_id.strip(b"0")
    assert span_id.strip(b"0")
