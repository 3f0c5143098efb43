"""The side that asks: which key now, what its Accept is, what it learns of an unsealed answer."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sm4.caller import Recipient, accept, answer_opener, clear_code, pieces, seal_whole
from proxy.sm4.envelope import MEDIA_TYPE, STREAM, EnvelopeError, decode_header
from proxy.sm4.frames import frame_data_max
from proxy.sm4.keyring import EnvelopeKey, Keyring
from proxy.sm4.sealer import RequestSealer
from tests.unit.proxy.sm4_kit import (
    MODEL,
    NOW_MS,
    PRELUDE,
    derived_of,
    fresh_nonce,
    make_key,
    seal_request,
)


def key(kid: int, begins_s: int, ends_s: int, **more: object) -> EnvelopeKey:
    """Return a key that is valid from and to so many seconds from now."""
    changes = {
        "kid": bytes([kid]) * 8,
        "not_before_ms": NOW_MS + begins_s * 1000,
        "not_after_ms": NOW_MS + ends_s * 1000,
    }
    return msgspec.structs.replace(make_key(), **(changes | more))


def kid_at(recipient: Recipient, seconds: float) -> int | None:
    derived = recipient.key(NOW_MS + int(seconds * 1000))
    return None if derived is None else derived.key.kid[0]


OLD, NEW, GAP = key(1, -100, 100), key(2, 50, 200), key(3, 300, 400)


@pytest.mark.parametrize("keys", [[OLD, NEW, GAP], [GAP, NEW, OLD]])
def test_the_key_that_began_last_is_used_from_the_moment_it_begins(keys: list[EnvelopeKey]) -> None:
    recipient = Recipient(Keyring(keys), keys)
    want = [(-101, None), (-100, 1), (0, 1), (49.999, 1), (50, 2), (100, 2), (100.001, 2),
            (200, 2), (200.001, None), (299.999, None), (300, 3), (400, 3), (400.001, None),
            (0, 1)]  # fmt: skip

    assert [kid_at(recipient, at) for at, _ in want] == [kid for _, kid in want]
    assert recipient.until_ms() == NOW_MS + 400_000
    assert [recipient.in_time(NOW_MS + at * 1000) for at in (0, 250, 350)] == [True, False, True]


@given(st.lists(st.integers(-150, 450), max_size=12))
def test_what_was_chosen_before_changes_nothing(moments: list[int]) -> None:
    keys = [OLD, NEW, GAP]
    used = Recipient(Keyring(keys), keys)

    for at in moments:
        assert kid_at(used, at) == kid_at(Recipient(Keyring(keys), keys), at)


def test_a_spent_key_gives_way_to_the_one_before_it_and_then_to_none() -> None:
    keys = [key(1, -100, 100, writers=1 << 28), key(2, -50, 100, writers=1 << 28)]
    ring = Keyring(keys)
    recipient = Recipient(ring, keys)

    for want in (2, 1, None):
        assert kid_at(recipient, 0) == want
        if want is not None:
            derived = ring.get(bytes([want]) * 8)
            assert derived is not None
            derived.count(0, envelopes=1)


def test_a_key_that_the_ring_has_dropped_is_used_no_more() -> None:
    ring = Keyring([OLD])
    recipient = Recipient(ring, [OLD])
    assert kid_at(recipient, 0) == 1

    late_ms = OLD.not_after_ms + 10 * 60_000
    assert ring.drop_expired(late_ms) == [OLD.kid]
    assert recipient.key(late_ms) is None
    assert kid_at(recipient, 0) is None


def test_keys_of_several_audiences_or_of_none_are_no_recipient() -> None:
    other = msgspec.structs.replace(NEW, audience="somebody/else")
    for keys in ([], [OLD, other]):
        with pytest.raises(ValueError, match="one audience"):
            Recipient(Keyring(keys), keys)


@pytest.mark.parametrize(
    ("asked", "events", "want"),
    [
        ("", False, "application/x-sm4-envelope"),
        ("", True, "application/x-sm4-envelope, text/event-stream"),
        ("*/*", False, "application/x-sm4-envelope, */*"),
        ("*/*", True, "application/x-sm4-envelope, text/event-stream, */*"),
        ("Text/Event-Stream", True, "application/x-sm4-envelope, Text/Event-Stream"),
    ],
)
def test_accept_is_what_was_asked_behind_what_can_carry_it(
    asked: str, events: bool, want: str
) -> None:
    assert accept(asked, events=events) == want


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"code":"draining","message":"secret"}}', "draining"),
        (b'{"error":{"code":"no code of ours"}}', None),
        (b'{"error":{"code":7}}', None),
        (b'{"error":"draining"}', None),
        (b"", None),
        (b"\xff\xfe", None),
        (b'{"error":{"code":"drain', None),
        (b'{"error":{"code":' + b"[" * 9_000 + b"]" * 9_000 + b"}}", None),
    ],
)
def test_of_an_unsealed_answer_no_more_is_learned_than_a_code_of_ours(
    body: bytes, code: str | None
) -> None:
    assert clear_code(body) == code


@pytest.mark.parametrize(
    ("status", "kind", "sealed"),
    [
        (200, MEDIA_TYPE, True),
        (502, MEDIA_TYPE, True),  # its outer status is not authenticated, its inside is
        (200, "text/event-stream; charset=utf-8", True),
        (500, "text/event-stream", False),
        (200, "application/json", False),
        (200, f"application/json, {MEDIA_TYPE}", False),
        (200, None, False),
    ],
)
def test_what_calls_itself_an_envelope_is_opened(
    status: int, kind: str | None, sealed: bool
) -> None:
    sealer, _ = seal_request(make_key())

    assert (answer_opener(sealer, status, kind, None) is not None) is sealed
    if sealed:
        with pytest.raises(EnvelopeError) as caught:
            answer_opener(sealer, status, kind, "identity")
        assert caught.value.reason == "bad_carrier"


@given(st.integers(0, 16), st.integers(1, 700_000))
def test_pieces_are_the_body_and_fill_their_frames(pad_log: int, size: int) -> None:
    body = bytes(size)
    parts = list(pieces(1 << pad_log, body))

    assert b"".join(parts) == body
    whole = frame_data_max(1 << pad_log, 65536 + 16) * 4
    assert {len(part) for part in parts[:-1]} <= {whole}
    assert 0 < len(parts[-1]) <= whole


@pytest.mark.parametrize(("size", "streams"), [(100, False), ((1 << 20) - 300, False),
                                               (1 << 20, True)])  # fmt: skip
def test_what_is_too_large_for_a_single_goes_as_a_stream(size: int, streams: bool) -> None:
    sealer = RequestSealer(
        derived_of(make_key()), model=MODEL, mac=False, nonce=fresh_nonce(), now_ms=NOW_MS
    )

    wire = seal_whole(sealer, PRELUDE, bytes(size))

    assert bool(decode_header(wire[:40], response=False).flags & STREAM) is streams
