from hypothesis import given
from hypothesis import strategies as st

from proxy.spans.sampling import bound_of, why_kept

LOW = b"00-ffffffffffffffff0000000000000000-b7ad6b7169203331-01"
HIGH = b"00-0000000000000000ffffffffffffffff-b7ad6b7169203331-00"
MS = 1_000_000


def why(traceparent=HIGH, **facts):
    told = {
        "outcome": "ok",
        "status": 200,
        "qos": "P1",
        "first_byte_ns": 0,
        "late_ns": 800 * MS,
        "bound": bound_of(0.1),
    }
    return why_kept(traceparent=traceparent, **told | facts)


def test_the_low_half_of_the_id_decides():
    assert why(LOW) == "ratio"
    assert why(HIGH) is None
    assert why(HIGH, bound=bound_of(1)) == "ratio"
    assert why(LOW, bound=bound_of(0)) is None


def test_what_went_wrong_is_kept_whatever_its_id():
    for outcome in ("client_gone", "client_stalled", "upstream_error", "truncated", "shed",
                    "rejected", "timeout"):  # fmt: skip
        assert why(outcome=outcome, bound=0) == "error"
    assert why(status=500, bound=0) == "error"
    assert why(status=499, bound=0) is None


def test_a_late_p0_is_kept_and_only_a_p0():
    assert why(qos="P0", first_byte_ns=800 * MS) is None
    assert why(qos="P0", first_byte_ns=800 * MS + 1) == "p0_late"
    assert why(qos="P1", first_byte_ns=9000 * MS) is None


@given(st.floats(0, 1), st.integers(0, (1 << 64) - 1))
def test_a_greater_share_keeps_all_that_a_smaller_one_does(ratio, low):
    traceparent = b"00-%016x%016x-b7ad6b7169203331-00" % (1, low)
    if why(traceparent, bound=bound_of(ratio / 2)) is not None:
        assert why(traceparent, bound=bound_of(ratio)) == "ratio"
