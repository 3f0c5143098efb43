"""The clock rule: forward steps are taken, backward ones are not."""

from __future__ import annotations

import time

import pytest

from proxy.clock import ManualClock, SystemClock

START_NS = 1_767_225_600_000_000_000
SECOND = 1_000_000_000


class Kernel:
    """The kernel's clocks, set by hand."""

    def __init__(self):
        self.wall = START_NS
        self.boot = 5 * SECOND

    def run(self, ns):
        self.wall += ns
        self.boot += ns


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    boottime = time.CLOCK_BOOTTIME

    def clock_gettime_ns(which):
        assert which == boottime  # the only one that goes on through a suspend
        return made.boot

    monkeypatch.setattr("proxy.clock.time.time_ns", lambda: made.wall)
    monkeypatch.setattr("proxy.clock.time.clock_gettime_ns", clock_gettime_ns)
    return made


def test_it_starts_at_the_wall_clock_and_runs_with_it(kernel):
    clock = SystemClock()
    assert clock.wall_ns() == START_NS
    kernel.run(1_500_000)
    assert clock.wall_ns() == START_NS + 1_500_000
    assert clock.wall_ms() == START_NS // 1_000_000 + 1
    assert clock.behind_ms() == 0


def test_a_step_back_is_not_taken_and_time_goes_on(kernel):
    clock = SystemClock()
    kernel.run(10 * SECOND)
    before = clock.wall_ns()
    kernel.wall -= 3600 * SECOND
    assert clock.wall_ns() == before
    kernel.run(SECOND)
    assert clock.wall_ns() == before + SECOND
    assert clock.behind_ms() == 3_600_000


def test_a_step_forward_is_taken_at_once_and_kept(kernel):
    clock = SystemClock()
    kernel.wall += 60 * SECOND
    assert clock.wall_ns() == START_NS + 60 * SECOND
    kernel.wall -= 60 * SECOND
    kernel.run(SECOND)
    assert clock.wall_ns() == START_NS + 61 * SECOND
    assert clock.behind_ms() == 60_000


def test_two_threads_that_see_one_step_take_it_once(kernel, monkeypatch):
    clock = SystemClock()
    kernel.wall += 3600 * SECOND
    inside = []

    def interrupted(which):
        if not inside:  # between this thread's readings another one takes the step
            inside.append(which)
            clock.wall_ns()
        return kernel.boot

    monkeypatch.setattr("proxy.clock.time.clock_gettime_ns", interrupted)
    assert clock.wall_ns() == START_NS + 3600 * SECOND
    kernel.run(SECOND)
    assert clock.wall_ns() == START_NS + 3601 * SECOND


def test_a_pause_between_the_readings_is_no_step_of_the_wall_clock(kernel, monkeypatch):
    clock = SystemClock()

    def paused(which):
        del which
        kernel.run(SECOND)
        return kernel.boot

    monkeypatch.setattr("proxy.clock.time.clock_gettime_ns", paused)
    clock.wall_ns()
    monkeypatch.setattr("proxy.clock.time.clock_gettime_ns", lambda _: kernel.boot)
    assert clock.wall_ns() == START_NS + SECOND
    assert clock.behind_ms() == 0


def test_a_slow_wall_clock_does_not_slow_it(kernel):
    clock = SystemClock()
    for _ in range(10):
        kernel.boot += SECOND
        kernel.wall += SECOND - 1_000_000
    assert clock.wall_ns() == START_NS + 10 * SECOND
    assert clock.behind_ms() == 10


def test_time_passed_in_suspend_counts(kernel):
    clock = SystemClock()
    kernel.run(8 * 3600 * SECOND)  # boottime goes on while the machine sleeps
    assert clock.wall_ms() == START_NS // 1_000_000 + 8 * 3_600_000


@pytest.mark.parametrize("steps", [(5, -3, 7), (-9, 2, -1), (0, 0, 0), (-1, -1, 10)])
def test_it_never_decreases_whatever_the_wall_clock_does(kernel, steps):
    clock = SystemClock()
    seen = [clock.wall_ns()]
    for step in steps:
        kernel.wall += step * SECOND
        kernel.boot += 1000
        seen += [clock.wall_ns(), clock.wall_ns()]
    assert seen == sorted(seen)


def test_the_real_clocks_agree():
    clock = SystemClock()
    assert abs(clock.wall_ns() - time.time_ns()) < SECOND
    assert clock.behind_ms() < 1000
    first = clock.mono_ns()
    assert first <= clock.mono_ns()


def test_the_manual_clock_moves_only_when_told():
    clock = ManualClock(wall_ms=1000, mono_ns=7)
    assert (clock.wall_ms(), clock.wall_ns(), clock.mono_ns()) == (1000, 1_000_000_000, 7)
    assert (clock.wall_ms(), clock.mono_ns()) == (1000, 7)
    clock.advance_ms(3)
    assert (clock.wall_ms(), clock.mono_ns()) == (1003, 3_000_007)
