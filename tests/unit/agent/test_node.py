import pytest

from agent.errors import ApiError
from agent.node import STUCK_S, Node

NOW_NS = 10**12


def test_a_loop_that_has_not_turned_for_long_is_not_alive():
    node = Node(NOW_NS)
    assert node.alive(NOW_NS + STUCK_S * 10**9 - 1)
    assert not node.alive(NOW_NS + STUCK_S * 10**9)


@pytest.mark.parametrize(
    ("change", "reason", "code"),
    [
        ({}, "model loading: starting 0%", "model_loading"),
        ({"failure": "truncated"}, "model failed: truncated", "internal_error"),
        ({"draining": True, "engine": object()}, "draining", "draining"),
    ],
)
def test_not_ready_says_why_and_so_does_the_api(change, reason, code):
    node = Node(NOW_NS)
    for name, value in change.items():
        setattr(node, name, value)
    assert node.not_ready() == [reason]
    with pytest.raises(ApiError) as caught:
        node.require_engine()
    assert caught.value.kind.code == code


def test_with_an_engine_it_is_ready():
    node = Node(NOW_NS)
    node.engine = object()
    assert node.not_ready() == []
    assert node.require_engine() is node.engine
