"""A pool's endpoints: least load, rest, what was tried, bounds."""

from __future__ import annotations

import pytest

from proxy.qos.pools import REST_NS, Endpoint, PoolState

URLS = ("http://a:1", "http://b:1", "http://c:1")


def pool(count=3, inflight=10):
    return PoolState("shared", [Endpoint(u, (u[7], 1)) for u in URLS[:count]], inflight)


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
    assert sorted(picked) == sorted(URLS * 2)


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
    for expected in URLS:
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
