"""Which class a request has: the whole table."""

from __future__ import annotations

import itertools

import pytest

from proxy.qos.classes import CLASSES, POOL_OF, UnknownClassError, classify

POOLS = {"P0": "dedicated", "P1": "shared", "P2": "best_effort"}
PLAIN = [c.encode() for c in CLASSES] + [c.lower().encode() for c in CLASSES]
UNKNOWN = [
    b"P3",
    b"P",
    b"0",
    b"P0,P1",
    b"P0, P1",
    b"P0, P0",
    b"P0 ",
    b" P0",
    b"P00",
    b"P\xc2\xb2",
    b"high",
    b"*",
    b"p0\x00",
]


def test_each_class_has_its_pool():
    assert POOL_OF == POOLS


@pytest.mark.parametrize(
    ("value", "default", "cap", "reject"),
    list(itertools.product([None, b"", *PLAIN], CLASSES, CLASSES, [False, True])),
)
def test_the_class_asked_for_or_the_default_but_never_above_the_cap(value, default, cap, reject):
    verdict = classify(value, repeated=False, default=default, reject_unknown=reject, max_class=cap)
    asked = value.decode().upper() if value else default
    # A larger number is a lower class.
    effective = f"P{max(int(asked[1]), int(cap[1]))}"
    assert verdict.qos == effective
    assert verdict.pool == POOLS[effective]
    assert verdict.capped is (effective != asked)


@pytest.mark.parametrize(
    ("value", "default", "cap"), list(itertools.product(UNKNOWN, CLASSES, CLASSES))
)
def test_what_is_unknown_counts_as_nothing_or_is_refused(value, default, cap):
    unknown, absent = (
        classify(v, repeated=False, default=default, reject_unknown=False, max_class=cap)
        for v in (value, None)
    )
    assert unknown == absent
    with pytest.raises(UnknownClassError):
        classify(value, repeated=False, default=default, reject_unknown=True, max_class=cap)


@pytest.mark.parametrize("value", [*PLAIN, b"P0, P1"])
def test_two_fields_are_unknown_even_if_the_first_is_plain(value):
    verdict = classify(value, repeated=True, default="P2", reject_unknown=False, max_class="P0")
    assert (verdict.qos, verdict.capped) == ("P2", False)
    with pytest.raises(UnknownClassError):
        classify(value, repeated=True, default="P2", reject_unknown=True, max_class="P0")


def test_the_refusal_shows_nothing_of_the_value():
    with pytest.raises(UnknownClassError) as caught:
        classify(b"secret", repeated=False, default="P1", reject_unknown=True, max_class="P1")
    assert "secret" not in str(caught.value)
