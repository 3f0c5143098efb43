"""The opener where replicas share a replay store: the store's word and the time, both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from proxy.sm4.envelope import EnvelopeError
from tests.unit.proxy.sm4_kit import (
    BODY,
    NOW_MS,
    begin,
    finished,
    make_key,
    make_receiver,
    open_request,
    seal_request,
)

if TYPE_CHECKING:
    from proxy.sm4.opener import RequestOpener

KEY = make_key()
WINDOW_MS = 60_000


def opener(**changes: Any) -> RequestOpener:
    return begin(make_receiver(shared_store=True, **changes))


@pytest.mark.parametrize("cuts", [None, [], [3, 4]])
@pytest.mark.parametrize("mac", [False, True])
def test_a_request_comes_out_after_the_store_s_yes(cuts: list[int] | None, mac: bool) -> None:
    _, wire = seal_request(KEY, cuts=cuts, mac=mac)
    made = opener()
    made.feed(wire, NOW_MS)
    assert made.finish(NOW_MS) is None
    assert made.to_insert == (wire[8:16], wire[24:36])

    opened = made.inserted("ok", NOW_MS)

    assert opened is not None
    assert opened.body == BODY
    assert made.held_bytes == 0


def test_a_stream_asks_at_its_first_frame_and_may_be_answered_before_its_end() -> None:
    _, wire = seal_request(KEY, cuts=[10, 10])
    made = opener()
    made.feed(wire[:60], NOW_MS)
    assert made.to_insert is None
    made.feed(wire[60:300], NOW_MS)
    assert made.to_insert is not None

    assert made.inserted("ok", NOW_MS) is None
    made.feed(wire[300:], NOW_MS)
    opened = made.finish(NOW_MS)

    assert opened is not None
    assert opened.body == BODY


@pytest.mark.parametrize("cuts", [None, [3]])
@pytest.mark.parametrize("verdict", ["replayed", "cache_full", "busy", "store_lost"])
def test_any_other_word_of_the_store_refuses(cuts: list[int] | None, verdict: Any) -> None:
    made = opener()
    made.feed(seal_request(KEY, cuts=cuts)[1], NOW_MS)
    assert made.finish(NOW_MS) is None

    with pytest.raises(EnvelopeError) as caught:
        made.inserted(verdict, NOW_MS)

    assert (caught.value.reason, caught.value.sealer) == (verdict, None)
    assert made.held_bytes == 0


@pytest.mark.parametrize(
    ("late_ms", "outcome"), [(WINDOW_MS, None), (WINDOW_MS + 1, "stale"), (10 * WINDOW_MS, "stale")]
)
def test_the_time_is_checked_after_the_store_s_answer(late_ms: int, outcome: str | None) -> None:
    made = opener()
    made.feed(seal_request(KEY)[1], NOW_MS)
    assert made.finish(NOW_MS) is None

    if outcome is None:
        assert made.inserted("ok", NOW_MS + late_ms) is not None
        return
    with pytest.raises(EnvelopeError) as caught:
        made.inserted("ok", NOW_MS + late_ms)
    assert caught.value.reason == outcome


def test_this_receiver_s_own_copies_are_refused_without_asking() -> None:
    receiver = make_receiver(shared_store=True)
    _, wire = seal_request(KEY)
    assert open_request(receiver, wire).body == BODY

    with pytest.raises(EnvelopeError) as caught:
        open_request(receiver, wire)

    assert caught.value.reason == "replayed"


@pytest.mark.parametrize("end", [-1, -40])
def test_what_is_not_authentic_is_not_asked_for_and_holds_nothing(end: int) -> None:
    _, wire = seal_request(KEY)
    made = opener()
    made.feed(wire[:end] + bytes([wire[end] ^ 1]) + wire[len(wire) + end + 1 :], NOW_MS)

    with pytest.raises(EnvelopeError) as caught:
        made.finish(NOW_MS)

    assert caught.value.reason == "bad_tag"
    assert made.to_insert is None
    assert made.held_bytes == 0


def test_a_signature_is_asked_for_after_the_store() -> None:
    import os

    from proxy.sm4.signature import draw

    private, public = draw("ed25519", os.urandom)
    key = make_key(scheme="ed25519", sign_public=public, sign_private=private)
    made = begin(make_receiver(key, shared_store=True))
    made.feed(seal_request(key, sign=True)[1], NOW_MS)
    assert made.finish(NOW_MS) is None
    assert made.check is None

    assert made.inserted("ok", NOW_MS) is None

    assert made.check is not None
    assert made.checked(valid=made.check.run()).signature
    assert finished(_fed(key), NOW_MS).signature


def _fed(key: Any) -> RequestOpener:
    made = begin(make_receiver(key, shared_store=True))
    made.feed(seal_request(key, sign=True)[1], NOW_MS)
    return made
