"""A pool's endpoints: least load, rest, ejection and return, what was tried, bounds."""

from __future__ import annotations

import random

import pytest

from proxy.qos.pools import (
    DOUBLINGS_MAX,
    REST_NS,
    SAMPLES_MIN,
    SLOW_NS,
    Ejection,
    Endpoint,
    PoolState,
)

URLS = ("http://a:1", "http://b:1", "http://c:1", "http://d:1")


RULES = Ejection(errors=3, slow_factor=4.0, first_ns=1000, most_ns=5000)
MS = 1_000_000


def pool(count=3, inflight=10, rules=RULES):
    return PoolState("shared", [Endpoint(u, (u[7], 1)) for u in URLS[:count]], inflight, rules)


def fail(state, index, now_ns=0, times=RULES.errors):
    for _ in range(times):
        state.fail(state.endpoints[index], now_ns)


def states(state):
    return [endpoint.state.name for endpoint in state.endpoints]


def loads(state, *outstanding):
    for endpoint, load in zip(state.endpoints, outstanding, strict=True):
        endpoint.outstanding = load


@pytest.mark.parametrize(
    ("outstanding", "chosen"), [((2, 1, 3), 1), ((1, 1, 1), 0), ((5, 4, 0), 2), ((1, 0, 0), 1)]
)
def test_the_least_loaded_is_picked_and_the_first_of_equals(outstanding, chosen):
    state = pool()
    loads(state, *outstanding)
    assert state.pick(0).url == URLS[chosen]


def test_a_load_that_grows_moves_the_choice_on():
    state = pool()
    picked = []
    for _ in range(6):
        endpoint = state.pick(0)
        endpoint.outstanding += 1
        picked.append(endpoint.url)
    assert sorted(picked) == sorted(URLS[:3] * 2)


def test_one_that_refused_rests_and_comes_back():
    state = pool()
    loads(state, 0, 5, 6)
    state.refuse(state.endpoints[0], 100)
    assert state.pick(100).url == URLS[1]
    assert state.pick(100 + REST_NS - 1).url == URLS[1]
    assert state.pick(100 + REST_NS).url == URLS[0]


def test_when_all_rest_the_least_loaded_is_still_tried():
    state = pool()
    loads(state, 3, 2, 1)
    for endpoint in state.endpoints:
        state.refuse(endpoint, 0)
    assert state.pick(1).url == URLS[2]


def test_what_was_tried_is_not_tried_again():
    state = pool()
    tried = set()
    for expected in URLS[:3]:
        endpoint = state.pick(0, frozenset(tried))
        assert endpoint.url == expected
        tried.add(endpoint.url)
    assert state.pick(0, frozenset(tried)) is None


def test_a_resting_one_is_picked_before_one_that_was_tried():
    state = pool(2)
    state.refuse(state.endpoints[0], 0)
    assert state.pick(1, frozenset({URLS[1]})).url == URLS[0]


def test_the_last_one_is_never_given_up():
    state = pool(1)
    for now in range(3):
        state.refuse(state.endpoints[0], now)
        assert state.pick(now).url == URLS[0]


def test_the_only_one_is_tried_once_a_request():
    state = pool(1)
    assert state.pick(0, frozenset({URLS[0]})) is None


def test_places_are_bounded_by_the_pool_and_by_the_class():
    state = pool(inflight=2)
    assert not state.admit(0)
    assert state.admit(1)
    assert not state.admit(1)
    assert state.admit(5)
    assert not state.admit(5)
    assert (state.inflight, state.refused) == (2, 3)


def test_a_place_given_back_is_free_again():
    state = pool(inflight=1)
    assert state.admit(9)
    state.release()
    assert state.admit(9)
    assert (state.inflight, state.refused) == (1, 0)


def test_a_place_cannot_be_given_back_twice():
    state = pool()
    assert state.admit(9)
    state.release()
    with pytest.raises(AssertionError, match="twice"):
        state.release()
    assert state.inflight == 0


# --- ejection and return


def test_errors_in_a_row_eject_and_the_others_are_used():
    state = pool()
    loads(state, 0, 5, 6)
    fail(state, 0)
    assert states(state) == ["EJECTED", "HEALTHY", "HEALTHY"]
    assert state.pick(999).url == URLS[1]
    assert state.ejections == {"errors": 1, "slow": 0}


def test_an_answer_between_errors_starts_the_count_anew():
    state = pool()
    for _ in range(5):
        fail(state, 0, times=RULES.errors - 1)
        state.answer(state.endpoints[0], 0)
    assert states(state) == ["HEALTHY"] * 3


def test_refused_connections_count_as_errors():
    state = pool()
    for _ in range(RULES.errors):
        state.refuse(state.endpoints[0], 0)
    assert states(state)[0] == "EJECTED"


def test_no_number_of_errors_ejects_where_that_is_off():
    state = pool(rules=Ejection(errors=0))
    fail(state, 0, times=1000)
    assert states(state) == ["HEALTHY"] * 3


def test_the_last_healthy_one_is_suspect_and_still_used():
    state = pool()
    for index in range(3):
        fail(state, index)
    assert states(state) == ["EJECTED", "EJECTED", "SUSPECT"]
    assert state.pick(999).url == URLS[2]
    assert state.ejections["errors"] == 2


def test_the_only_one_is_suspect_until_it_answers():
    state = pool(1)
    fail(state, 0, times=50)
    assert states(state) == ["SUSPECT"]
    assert state.pick(0) is state.endpoints[0]
    state.answer(state.endpoints[0], 1)
    assert states(state) == ["HEALTHY"]
    assert not state.endpoints[0].watch  # its answers need no report any more


def test_when_its_time_is_over_one_request_tries_it():
    state = pool()
    loads(state, 0, 5, 6)
    fail(state, 0)
    assert state.pick(999).url == URLS[1]
    tried = state.pick(1000)
    assert tried.url == URLS[0]
    assert state.probe(tried, 1000)
    assert states(state)[0] == "HALF_OPEN"
    assert state.pick(1000).url == URLS[1]  # one at a time
    assert not state.probe(tried, 1000)


def test_the_request_that_tries_closes_it_by_its_answer():
    state = pool()
    fail(state, 0)
    endpoint = state.endpoints[0]
    assert state.probe(endpoint, 1000)
    state.answer(endpoint, 1001, probe=True)
    assert states(state) == ["HEALTHY"] * 3
    assert endpoint.errors == 0
    assert state.probes == {"passed": 1, "failed": 0}


def test_each_failed_try_doubles_the_time_up_to_the_longest():
    state, now = pool(), 0
    endpoint = state.endpoints[0]
    fail(state, 0)
    waits = [endpoint.until_ns]
    for _ in range(4):
        now = endpoint.until_ns
        assert not state.probe(endpoint, now - 1)
        assert state.probe(endpoint, now)
        state.fail(endpoint, now, probe=True)
        waits.append(endpoint.until_ns - now)
    assert waits == [1000, 2000, 4000, 5000, 5000]
    assert state.probes == {"passed": 0, "failed": 4}


def test_doubling_is_bounded():
    state, now = pool(), 0
    endpoint = state.endpoints[0]
    fail(state, 0)
    for _ in range(100):
        now = endpoint.until_ns
        assert state.probe(endpoint, now)
        state.fail(endpoint, now, probe=True)
    assert endpoint.doublings == DOUBLINGS_MAX


def test_one_that_was_well_for_long_starts_with_the_first_time_again():
    state = pool()
    endpoint = state.endpoints[0]
    fail(state, 0)
    assert state.probe(endpoint, 1000)
    state.fail(endpoint, 1000, probe=True)
    assert state.probe(endpoint, 3000)
    state.answer(endpoint, 3000, probe=True)
    fail(state, 0, now_ns=3001)
    assert endpoint.until_ns == 3001 + 4000  # it came back and fell again
    assert state.probe(endpoint, 7001)
    state.answer(endpoint, 7001, probe=True)
    fail(state, 0, now_ns=99_000)
    assert endpoint.until_ns == 99_000 + 1000


def test_a_try_that_says_nothing_lets_the_next_request_try():
    state = pool()
    endpoint = state.endpoints[0]
    fail(state, 0)
    assert state.probe(endpoint, 1000)
    state.forgo(endpoint)
    assert states(state)[0] == "HALF_OPEN"
    assert state.pick(1000) is endpoint
    assert state.probe(endpoint, 1000)


@pytest.mark.parametrize("end", ["answer", "fail"])
def test_what_was_sent_before_the_ejection_changes_nothing(end):
    state = pool()
    endpoint = state.endpoints[0]
    fail(state, 0)
    getattr(state, end)(endpoint, 500)
    assert states(state)[0] == "EJECTED"
    assert endpoint.until_ns == 1000
    assert state.probe(endpoint, 1000)
    getattr(state, end)(endpoint, 1001)
    assert endpoint.probing


def test_a_suspect_has_to_prove_itself_once_another_one_is_back():
    state = pool(2)
    fail(state, 0)
    fail(state, 1)
    assert states(state) == ["EJECTED", "SUSPECT"]
    assert state.probe(state.endpoints[0], 1000)
    state.answer(state.endpoints[0], 1000, probe=True)
    assert states(state) == ["HEALTHY", "EJECTED"]


def test_an_ejected_one_is_better_than_none():
    state = pool(2)
    fail(state, 0)
    assert state.pick(1, frozenset({URLS[1]})).url == URLS[0]


def test_a_suspect_is_tried_one_request_at_a_time_too():
    """For a pool that lets another one serve: only then is the answer of `probe` asked for."""
    state = pool(1)
    fail(state, 0)
    endpoint = state.endpoints[0]
    assert not state.probe(endpoint, 999)
    assert state.probe(endpoint, 1000)
    assert not state.probe(endpoint, 1000)
    state.fail(endpoint, 1000, probe=True)
    assert not state.probe(endpoint, 2999)
    assert state.probe(endpoint, 3000)
    assert states(state) == ["SUSPECT"]


# --- other settings


def test_an_endpoint_that_stays_keeps_what_is_known_of_it():
    state = pool(2)
    fail(state, 0)
    endpoints = [Endpoint(u, (u[7], 1)) for u in (URLS[2], URLS[0])]
    state.renew(endpoints, 7, RULES)
    assert [e.url for e in state.endpoints] == [URLS[2], URLS[0]]
    assert states(state) == ["HEALTHY", "EJECTED"]
    assert state.inflight_max == 7


def test_one_that_was_left_alone_is_used_when_the_others_are_gone():
    state = pool(2)
    fail(state, 0)
    state.renew([Endpoint(URLS[0], ("a", 1))], 7, RULES)
    assert states(state) == ["SUSPECT"]
    assert state.pick(0).url == URLS[0]
    state.answer(state.endpoints[0], 1)
    assert states(state) == ["HEALTHY"]


def test_one_of_several_is_watched_and_one_alone_is_not():
    state = pool(1)
    assert not state.endpoints[0].watch
    state.renew([Endpoint(u, (u[7], 1)) for u in URLS[:2]], 7, RULES)
    assert [e.watch for e in state.endpoints] == [True, True]
    state.renew([Endpoint(URLS[1], ("b", 1))], 7, RULES)
    assert [e.watch for e in state.endpoints] == [False]


# --- latency


def served(state, *latencies_ms, times=SAMPLES_MIN):
    for endpoint, latency in zip(state.endpoints, latencies_ms, strict=True):
        for _ in range(times):
            state.answer(endpoint, 0, int(latency * MS))


@pytest.mark.parametrize(
    ("latencies_ms", "out"),
    [
        ((10, 10, 100), [2]),
        ((200, 210, 190), []),
        ((100, 100, 399), []),
        ((100, 100, 401), [2]),
        ((1, 1, 40), []),  # forty times slower, and nobody minds
        ((10, 300, 300), []),  # the others' median is the slow one's
        ((10, 10, 10), []),
    ],
)
def test_one_far_slower_than_the_others_is_ejected(latencies_ms, out):
    state = pool()
    served(state, *latencies_ms)
    state.judge(7)
    assert [i for i, s in enumerate(states(state)) if s == "EJECTED"] == out
    assert state.ejections == {"errors": 0, "slow": len(out)}
    assert all(state.endpoints[i].until_ns == 1007 for i in out)


def test_the_faster_of_two_stays():
    state = pool(2)
    served(state, 500, 10)
    state.judge(0)
    assert states(state) == ["EJECTED", "HEALTHY"]


def test_few_answers_are_no_average():
    state = pool()
    served(state, 10, 10, 1000, times=SAMPLES_MIN - 1)
    state.judge(0)
    assert states(state) == ["HEALTHY"] * 3


def test_one_slow_answer_is_no_outlier():
    state = pool()
    served(state, 100, 100, 100)
    state.answer(state.endpoints[2], 0, 2000 * MS)
    state.judge(0)
    assert states(state) == ["HEALTHY"] * 3


def test_one_that_is_back_starts_a_new_average():
    state = pool()
    served(state, 10, 10, 1000)
    state.judge(0)
    endpoint = state.endpoints[2]
    assert state.probe(endpoint, 1000)
    state.answer(endpoint, 1000, 10 * MS, probe=True)
    state.judge(1001)
    assert states(state) == ["HEALTHY"] * 3
    assert endpoint.samples == 1


@pytest.mark.parametrize(("count", "factor"), [(1, 4.0), (3, 0.0)])
def test_nothing_is_slow_alone_or_where_that_is_off(count, factor):
    state = pool(count, rules=Ejection(slow_factor=factor))
    served(state, *(10, 10, 5000)[-count:])
    state.judge(0)
    assert states(state) == ["HEALTHY"] * count


def test_the_average_follows_by_a_tenth():
    state = pool(1)
    served(state, 100)
    state.answer(state.endpoints[0], 0, 200 * MS)
    assert state.endpoints[0].first_byte_ns == pytest.approx(110 * MS)
    assert SLOW_NS < 100 * MS


def test_equals_take_turns():
    state = pool()
    assert [state.pick(0).url for _ in range(6)] == [*URLS[:3], *URLS[:3]]


def test_whatever_happens_one_endpoint_is_used_and_at_most_one_tries():
    dice = random.Random(7)
    for _ in range(200):
        state, now, probing = pool(dice.randint(1, 4)), 0, set()
        for _ in range(100):
            now += dice.randint(0, 1500)
            endpoint = state.pick(now)
            assert endpoint is not None
            probe = bool(endpoint.state) and state.probe(endpoint, now)
            if probe:
                assert endpoint.url not in probing
            end = dice.choice(["fail", "answer", "forgo", "still out"])
            if end == "still out" and probe:
                probing.add(endpoint.url)
            elif end == "fail":
                state.fail(endpoint, now, probe=probe)
            elif end == "answer":
                state.answer(endpoint, now, probe=probe)
            elif probe:
                state.forgo(endpoint)
            suspects = states(state).count("SUSPECT")
            assert suspects == (0 if "HEALTHY" in states(state) else 1)
            assert all(e.until_ns <= now + RULES.most_ns for e in state.endpoints)
