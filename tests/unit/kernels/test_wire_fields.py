"""A request's small fields in C: the same bytes as their twins'."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import wire
from proxy import answer, trace

pytestmark = pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire: no extension built here")
GOOD = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NUMBERS = st.integers(0, (1 << 64) - 1)


def plain_answer_head(*args: bytes | str | int) -> bytes:
    """Return what the twin says; the module's name for it is taken by the C function."""
    return answer._answer_head(*args)


@given(st.integers(0, 54), st.integers(0, 255))
def test_a_changed_byte_is_taken_only_where_the_expression_takes_it(at, byte):
    changed = GOOD[:at] + bytes((byte,)) + GOOD[at + 1 :]
    plain = wire.traceparents(lambda _value: False)(changed)
    assert plain == (trace._TRACEPARENT.fullmatch(changed) is not None and changed[:2] == b"00")


@pytest.mark.parametrize("zeros", [(3, 35), (36, 52), (53, 55)])
def test_ids_of_zeros_are_refused_and_flags_of_zeros_are_not(zeros):
    first, end = zeros
    value = GOOD[:first] + b"0" * (end - first) + GOOD[end:]
    assert trace.valid(value) == (end == 55)


@pytest.mark.parametrize("value", [GOOD + b"-", GOOD[:-1], b"", GOOD.decode()])
def test_what_is_not_55_bytes_is_left_to_the_twin(value):
    assert not wire.traceparents(lambda _value: False)(value)


@given(
    st.integers(100, 999),
    st.lists(st.binary(max_size=40), min_size=6, max_size=6),
    st.text("0123456789-", max_size=24),
    NUMBERS,
    NUMBERS,
)
def test_an_answer_head_is_the_twins(status, parts, trace_id, queue_ns, upstream_ns):
    reason, lines, framing, fields, tail, body = parts
    args = (status, reason, lines, framing, fields, trace_id, queue_ns, upstream_ns, tail, body)
    assert wire.answer_heads(answer._answer_head)(*args) == plain_answer_head(*args)


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, b"0.000"), (499, b"0.000"), (500, b"0.001"), (999_999, b"1.000"), (1_234_567, b"1.235")],
)
def test_durations_are_rounded_to_the_nearest_microsecond(ns, text):
    head = answer.answer_head(200, b"OK", b"", b"", b"X: ", "t", ns, 0, b"\r\n", b"")
    assert b"queue;dur=" + text + b", upstream;dur=0.000\r\n" in head


@pytest.mark.parametrize("wrong", [-1, 1 << 64])
def test_a_duration_that_is_none_raises(wrong):
    with pytest.raises(OverflowError):
        wire.answer_heads(answer._answer_head)(200, b"OK", b"", b"", b"", "t", wrong, 0, b"", b"")


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 8, 9])
def test_other_types_raise(place):
    args = [200, b"OK", b"", b"", b"", "t", 0, 0, b"", b""]
    args[place] = None
    with pytest.raises(TypeError):
        wire.answer_heads(answer._answer_head)(*args)
