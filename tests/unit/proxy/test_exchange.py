"""How an exchange ends: the whole table, written out."""

from __future__ import annotations

import itertools

import pytest

from proxy.audit.record import OUTCOMES, PHASES
from proxy.errors import ERRORS
from proxy.exchange import PHASE_NAMES, Action, End, Exchange, Progress, closing

# (outcome, code, action) before an answer head was written, and after it where the client stands
# between two events of an event stream, and anywhere else.
TABLE = {
    End.ANSWERED: (
        ("ok", None, "nothing"),
        ("ok", None, "nothing"),
        ("ok", None, "nothing"),
    ),
    End.CLIENT_GONE: (
        ("client_gone", None, "nothing"),
        ("client_gone", None, "nothing"),
        ("client_gone", None, "nothing"),
    ),
    End.CLIENT_STALLED: (
        ("client_stalled", None, "nothing"),
        ("client_stalled", None, "cut"),
        ("client_stalled", None, "cut"),
    ),
    End.REQUEST_FAILED: (
        ("rejected", "invalid_request", "reply"),
        ("rejected", "invalid_request", "event"),
        ("rejected", "invalid_request", "cut"),
    ),
    End.NO_UPSTREAM: (
        ("upstream_error", "no_upstream", "reply"),
        ("upstream_error", "no_upstream", "event"),
        ("upstream_error", "no_upstream", "cut"),
    ),
    End.UPSTREAM_RESET: (
        ("upstream_error", "upstream_reset", "reply"),
        ("truncated", "upstream_reset", "event"),
        ("truncated", "upstream_reset", "cut"),
    ),
    End.UPSTREAM_PROTOCOL: (
        ("upstream_error", "upstream_protocol", "reply"),
        ("truncated", "upstream_protocol", "event"),
        ("truncated", "upstream_protocol", "cut"),
    ),
    End.UPSTREAM_ENVELOPE: (
        ("upstream_error", "upstream_envelope", "reply"),
        ("truncated", "upstream_envelope", "event"),
        ("truncated", "upstream_envelope", "cut"),
    ),
    End.UPSTREAM_TIMEOUT: (
        ("timeout", "upstream_timeout", "reply"),
        ("timeout", "upstream_timeout", "event"),
        ("timeout", "upstream_timeout", "cut"),
    ),
    End.DRAIN_EXPIRED: (
        ("shed", "draining", "reply"),
        ("truncated", "draining", "event"),
        ("truncated", "draining", "cut"),
    ),
}
CASES = list(itertools.product(End, Progress, (False, True), (False, True)))


def test_the_table_here_names_every_end():
    assert set(TABLE) == set(End)


@pytest.mark.parametrize(("end", "progress", "event_stream", "between"), CASES)
def test_closing(end, progress, event_stream, between):
    if progress in (Progress.READING, Progress.WAITING):
        outcome, code, action = TABLE[end][0]
    else:
        outcome, code, action = TABLE[end][1 if event_stream and between else 2]
    found = closing(end, progress, event_stream=event_stream, between_events=between)
    assert (found.outcome, found.code, found.action) == (outcome, code, Action(action))


@pytest.mark.parametrize(("end", "progress", "event_stream", "between"), CASES)
def test_whatever_happens_is_recordable_and_no_second_head_is_written(
    end, progress, event_stream, between
):
    found = closing(end, progress, event_stream=event_stream, between_events=between)
    assert found.outcome in OUTCOMES
    assert found.code is None or found.code in ERRORS
    assert (found.outcome == "ok") is (end is End.ANSWERED)
    if progress >= Progress.BEGUN:
        assert found.action is not Action.REPLY
        assert found.action is not Action.EVENT or (event_stream and between)
    else:
        assert found.action in (Action.REPLY, Action.NOTHING)
    # An action that writes an error has one to write.
    assert found.action in (Action.NOTHING, Action.CUT) or found.code is not None


def test_an_early_reply_is_recorded_as_its_code_says():
    for end in End:
        found = closing(end, Progress.WAITING, event_stream=False, between_events=True)
        if found.code is not None:
            assert ERRORS[found.code].outcome == found.outcome


def test_each_progress_has_a_phase_of_the_record():
    assert set(PHASE_NAMES) == set(Progress)
    assert set(PHASE_NAMES.values()) == PHASES


def test_an_exchange_closes_once():
    exchange = Exchange()
    assert not exchange.closed
    exchange.finish()
    assert exchange.closed
    with pytest.raises(AssertionError, match="exactly once"):
        exchange.finish()


def test_exchanges_share_no_state():
    first, second = Exchange(), Exchange()
    first.finish()
    first.status = 200
    assert (second.closed, second.status, Exchange().closed) == (False, 0, False)


@pytest.mark.parametrize(
    ("at_ns", "microseconds"), [(0, None), (5_000, 0), (5_999, 0), (6_000, 1), (2_005_000, 2000)]
)
def test_times_are_microseconds_from_the_start_and_absent_if_they_never_came(at_ns, microseconds):
    exchange = Exchange()
    exchange.start_ns = 5_000
    assert exchange.since_start_us(at_ns) == microseconds
