"""Alarms: a line a minute for each reason and peer, and none for a client's own second copy."""

from __future__ import annotations

import pytest

from proxy.alarms import EVERY_NS, OTHERS, OWN_COPY_NS, ROWS_MAX, TAKEN_MAX, Alarms, LatelyTaken

S = 1_000_000_000
ENVELOPE = bytes(20)


def test_the_first_is_told_and_the_next_a_minute_later_with_its_count() -> None:
    alarms = Alarms()

    assert alarms.note("bad_tag", "a", 5) == ("a", 1)
    assert [alarms.note("bad_tag", "a", 5 + i * S) for i in range(60)] == [None] * 60
    assert alarms.note("bad_tag", "a", 5 + EVERY_NS) == ("a", 61)
    assert alarms.note("bad_tag", "a", 6 + EVERY_NS) is None


def test_each_reason_and_each_peer_is_told_by_itself() -> None:
    alarms = Alarms()

    told = [alarms.note(reason, peer, 0) for reason in ("stale", "future") for peer in "ab"]

    assert told == [("a", 1), ("b", 1), ("a", 1), ("b", 1)]


def test_peers_beyond_the_bound_share_a_line_and_old_rows_make_room() -> None:
    alarms = Alarms()
    for index in range(ROWS_MAX):
        assert alarms.note("stale", str(index), index) == (str(index), 1)

    assert alarms.note("stale", "one more", ROWS_MAX) == (OTHERS, 1)
    assert alarms.note("stale", "and one", ROWS_MAX) is None
    assert alarms.note("stale", "0", ROWS_MAX) is None  # who has a row keeps it
    assert alarms.note("stale", "new", 2 * EVERY_NS) == ("new", 1)
    assert len(alarms._rows) == 1


@pytest.mark.parametrize(
    ("peer", "age_ns", "own"),
    [
        ("a", 0, True),
        ("a", OWN_COPY_NS, True),
        ("a", OWN_COPY_NS + 1, False),
        ("a", 3 * OWN_COPY_NS, False),
        ("b", 0, False),
    ],
)
@pytest.mark.parametrize("start_ns", [0, OWN_COPY_NS - 1, 7 * OWN_COPY_NS + 3])
def test_a_copy_is_the_peer_s_own_for_five_seconds(
    start_ns: int, peer: str, age_ns: int, own: bool
) -> None:
    taken = LatelyTaken()
    taken.add(b"other", "b", 0)
    taken.add(ENVELOPE, "a", start_ns)
    taken.add(b"another", "b", start_ns + age_ns)

    assert taken.is_own_copy(ENVELOPE, peer, start_ns + age_ns) is own


def test_what_was_never_taken_is_nobody_s_copy() -> None:
    assert not LatelyTaken().is_own_copy(ENVELOPE, "a", 0)
    assert not LatelyTaken().is_own_copy(b"", "a", 0)


def test_the_memory_of_what_was_taken_is_bounded() -> None:
    taken = LatelyTaken()
    for index in range(TAKEN_MAX + 10):
        taken.add(index.to_bytes(20, "big"), "a", OWN_COPY_NS)

    assert len(taken._current) == TAKEN_MAX
    assert not taken.is_own_copy((TAKEN_MAX + 1).to_bytes(20, "big"), "a", OWN_COPY_NS)
    taken.add(ENVELOPE, "a", 5 * OWN_COPY_NS)
    assert len(taken._current) + len(taken._previous) == 1
