"""The retry table and its budget."""

from __future__ import annotations

import itertools

import pytest

from proxy.retry import COUNTED, FREE, WINDOW_S, Attempt, Retries, denial

FACTS = {"answered": False, "reused": True, "again": False, "held": True, "unwritten": True}
LOST = Attempt(**FACTS)


def but(**facts):
    return Attempt(**(FACTS | facts))


@pytest.mark.parametrize("repeatable", [False, True])
def test_an_idle_connection_that_ends_before_the_request_was_written_is_forgiven(repeatable):
    assert denial(LOST, repeatable=repeatable) is None


def test_a_written_request_is_sent_again_only_where_the_pool_is_repeatable():
    assert denial(but(unwritten=False), repeatable=True) is None
    assert denial(but(unwritten=False), repeatable=False) == "unprovable"


@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("unwritten", [False, True])
@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"answered": True}, "answered"),
        ({"answered": True, "reused": False}, "answered"),
        ({"reused": False}, "fresh"),
        ({"again": True}, "once"),
        ({"held": False}, "streamed"),
    ],
)
def test_nothing_else_is(facts, why, unwritten, repeatable):
    assert denial(but(**facts, unwritten=unwritten), repeatable=repeatable) == why


def test_no_answered_request_and_no_second_second_attempt_in_the_whole_table():
    for values in itertools.product([False, True], repeat=len(FACTS)):
        facts = dict(zip(FACTS, values, strict=True))
        for repeatable in (False, True):
            if denial(Attempt(**facts), repeatable=repeatable) is None:
                assert not facts["answered"]
                assert not facts["again"]
                assert facts["reused"]
                assert facts["held"]
                assert facts["unwritten"] or repeatable


def test_counts_name_why():
    retries = Retries(10)
    assert retries.decide(LOST, repeatable=True, started=0) == "unwritten"
    assert retries.decide(but(unwritten=False), repeatable=True, started=0) == "repeatable"
    assert retries.decide(but(unwritten=False), repeatable=False, started=0) is None
    assert retries.decide(but(again=True), repeatable=True, started=0) is None
    assert (
        retries.decide(but(answered=True), repeatable=True, started=0) is None
    )  # nothing to be counted
    assert retries.made == {"unwritten": 1, "repeatable": 1, "refused": 0}
    assert retries.denied == {**dict.fromkeys(COUNTED, 0), "unprovable": 1, "once": 1}


def made(retries, started=0, tries=1000):
    rows = [retries.decide(LOST, repeatable=False, started=started) for _ in range(tries)]
    return tries - rows.count(None)


def test_little_traffic_has_a_few_and_no_more():
    retries = Retries(10)
    assert made(retries) == FREE
    assert retries.denied["budget"] == 1000 - FREE


def test_the_budget_is_a_share_of_the_requests():
    retries = Retries(10)
    assert made(retries, 1000) == 100
    assert made(retries, 1500) == 50


def test_the_budget_rolls():
    retries = Retries(10)
    assert made(retries, 1000) == 100
    for _ in range(WINDOW_S - 1):
        retries.tick(1000)
        assert made(retries, 1000) == 0
    retries.tick(1000)  # the start of those 1000 requests leaves the window
    assert made(retries, 1000) == FREE


def test_nothing_is_sent_again_without_a_budget():
    retries = Retries(0)
    assert made(retries, 1_000_000) == 0


def test_a_denied_attempt_takes_nothing_of_the_budget():
    retries = Retries(10)
    for _ in range(100):
        retries.decide(but(again=True), repeatable=True, started=0)
    assert made(retries) == FREE
