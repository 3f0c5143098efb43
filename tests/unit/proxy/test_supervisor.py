"""Who is started when, when a start is given up, and what the exit code is."""

from __future__ import annotations

import signal

import pytest

from proxy.supervisor import PAUSE_FIRST_S, PAUSE_MOST_S, POLL_S, STEADY_S, Staff


def all_serving(count=3):
    staff = Staff(count)
    for index in range(count):
        assert staff.due(0) == index
        staff.started(index, 100 + index, 0)
        staff.serving(index)
    return staff


def test_workers_start_one_after_the_other():
    staff = Staff(2)
    assert staff.due(0) == 0
    staff.started(0, 100, 0)
    assert staff.due(0) is None
    assert staff.wait_s(0) == POLL_S
    staff.serving(0)
    assert staff.due(0) == 1
    staff.started(1, 101, 0)
    staff.serving(1)
    assert staff.due(1000) is None
    assert staff.wait_s(1000) == PAUSE_MOST_S
    assert staff.running() == [100, 101]


def test_worker_that_ends_is_started_again_after_a_pause_that_doubles():
    staff, now, pauses = all_serving(), 1.0, []
    for _ in range(12):
        assert staff.ended(staff.places[1].pid, -signal.SIGKILL, now) == 1
        pauses.append(staff.wait_s(now))
        assert staff.due(now) is None
        now += pauses[-1] + 0.001
        assert staff.due(now) == 1
        staff.started(1, 200, now)
    assert pauses[:3] == pytest.approx([PAUSE_FIRST_S, 2 * PAUSE_FIRST_S, 4 * PAUSE_FIRST_S])
    assert pauses[-1] == PAUSE_MOST_S
    assert not staff.ending


def test_worker_that_lived_long_begins_with_the_first_pause_again():
    staff = all_serving()
    for start in (1.0, 2.0, 3.0):
        staff.ended(staff.places[0].pid, 1, start)
        staff.started(0, 200, start)
    staff.ended(200, 1, 3.0 + STEADY_S)
    assert staff.wait_s(3.0 + STEADY_S) == pytest.approx(PAUSE_FIRST_S)


@pytest.mark.parametrize("code", [2, 3])
def test_worker_that_cannot_start_ends_all(code):
    staff = Staff(2)
    staff.started(0, 100, 0)
    staff.serving(0)
    staff.started(1, 101, 0)
    staff.ended(101, code, 1)
    assert (staff.ending, staff.code) == (True, code)
    assert staff.due(100) is None
    staff.ended(100, 0, 2)
    assert (staff.running(), staff.code) == ([], code)


@pytest.mark.parametrize("code", [2, 3])
def test_worker_that_once_served_is_tried_again_whatever_its_code(code):
    staff = all_serving()
    staff.ended(100, code, 1)
    assert not staff.ending
    assert staff.due(2) == 0


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0, 0), 0), ((0, -signal.SIGTERM, 0), 0), ((0, 1, 0), 1), ((0, -signal.SIGKILL, 0), 1)],
)
def test_exit_code_of_a_drain_is_the_worst(codes, expected):
    staff = all_serving()
    staff.ending = True
    for pid, code in zip(staff.running(), codes, strict=True):
        staff.ended(pid, code, 1)
    assert staff.due(100) is None
    assert (staff.running(), staff.code) == ([], expected)


def test_end_of_a_stranger_is_none_of_ours():
    staff = all_serving()
    assert staff.ended(999, 1, 1) is None
    assert len(staff.running()) == 3
