"""The replay cache forgets nothing that could still be in time, and never grows past its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sm4.replay import ReplayCache

WINDOW_MS = 60_000
AHEAD_MS = 5_000
KID, OTHER = b"kid-kid1", b"kid-kid2"
N1, N2, N3 = (bytes([i]) * 12 for i in (1, 2, 3))


def test_the_second_of_the_same_is_a_replay() -> None:
    cache = ReplayCache()

    assert not cache.seen(KID, N1, 0)
    assert cache.insert(KID, N1, 0) == "ok"
    assert cache.seen(KID, N1, 0)
    assert cache.insert(KID, N1, 0) == "replayed"


def test_the_same_nonce_under_another_kid_is_another_envelope() -> None:
    cache = ReplayCache()
    cache.insert(KID, N1, 0)

    assert cache.insert(OTHER, N1, 0) == "ok"


def test_asking_puts_nothing_in() -> None:
    cache = ReplayCache()

    cache.seen(KID, N1, 0)

    assert cache.insert(KID, N1, 0) == "ok"


@pytest.mark.parametrize("age_ms", [0, 59_999, 60_000, 119_999, 120_000])
@pytest.mark.parametrize("start_ms", [0, 1, 60_000, 119_999, 120_000, 130_000])
def test_an_entry_lives_two_windows_wherever_the_turn_falls(start_ms: int, age_ms: int) -> None:
    cache = ReplayCache(window_ms=WINDOW_MS)
    cache.seen(OTHER, N3, 0)
    cache.insert(KID, N1, start_ms)

    assert cache.seen(KID, N1, start_ms + age_ms)
    assert cache.insert(KID, N1, start_ms + age_ms) == "replayed"


def test_an_entry_is_forgotten_after_four_windows() -> None:
    cache = ReplayCache(window_ms=WINDOW_MS)
    cache.insert(KID, N1, 0)

    assert not cache.seen(KID, N1, 4 * WINDOW_MS)
    assert cache.entries == 0


def test_a_long_silence_clears_both_generations() -> None:
    cache = ReplayCache(window_ms=WINDOW_MS)
    cache.insert(KID, N1, 0)
    cache.insert(KID, N2, 2 * WINDOW_MS)

    assert not cache.seen(KID, N2, 100 * WINDOW_MS)
    assert cache.entries_of(KID) == 0


def test_a_clock_that_stands_still_or_steps_back_forgets_nothing() -> None:
    cache = ReplayCache(window_ms=WINDOW_MS)
    cache.insert(KID, N1, 500_000)

    assert cache.seen(KID, N1, 500_000)
    assert cache.seen(KID, N1, 0)


def test_a_full_cache_refuses_and_keeps_what_it_has() -> None:
    cache = ReplayCache(limit=2)
    cache.insert(KID, N1, 0)
    cache.insert(OTHER, N2, 0)

    assert cache.insert(KID, N3, 0) == "cache_full"
    assert cache.seen(KID, N1, 0)
    assert not cache.seen(KID, N3, 0)
    assert (cache.entries, cache.full_refusals, cache.limit) == (2, 1, 2)


def test_one_kid_cannot_fill_the_cache_for_the_others() -> None:
    cache = ReplayCache(limit_per_kid=1, limit=10)
    cache.insert(KID, N1, 0)

    assert cache.insert(KID, N2, 0) == "cache_full"
    assert cache.insert(OTHER, N2, 0) == "ok"


def test_both_generations_count_towards_a_kid_s_limit() -> None:
    cache = ReplayCache(window_ms=WINDOW_MS, limit_per_kid=2)
    cache.insert(KID, N1, 0)
    cache.insert(KID, N2, 2 * WINDOW_MS)

    assert cache.insert(KID, N3, 2 * WINDOW_MS) == "cache_full"
    assert cache.insert(KID, N3, 4 * WINDOW_MS) == "ok"


def test_a_replay_in_a_full_cache_is_called_a_replay() -> None:
    cache = ReplayCache(limit=1)
    cache.insert(KID, N1, 0)

    assert cache.insert(KID, N1, 0) == "replayed"


@given(
    steps=st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 5)), max_size=60),
)
def test_nothing_in_time_is_ever_accepted_twice(steps: list[tuple[int, int]]) -> None:
    """Envelope i has header time 20 s * i; it is tried whenever its time is acceptable."""
    cache = ReplayCache(window_ms=WINDOW_MS)
    accepted: set[int] = set()
    now_ms = 0
    for delay_ms, number in steps:
        now_ms += delay_ms
        time_ms = 20_000 * number
        if not now_ms - WINDOW_MS <= time_ms <= now_ms + AHEAD_MS:
            continue
        verdict = cache.insert(KID, bytes([number]) * 12, now_ms)
        assert verdict == ("replayed" if number in accepted else "ok")
        accepted.add(number)
