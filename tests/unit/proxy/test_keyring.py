"""The keyring: what is a key, which one is used, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proxy.sm4.keyring import EnvelopeKey, Keyring, KeyringError
from tests.unit.proxy.sm4_kit import NOW_MS, make_key

WINDOW_MS = 60_000


def test_a_key_is_found_by_its_kid_and_derived_once() -> None:
    key = make_key()
    ring = Keyring([key])

    derived = ring.get(key.kid)

    assert derived is not None
    assert derived.key is key
    assert ring.get(key.kid) is derived
    assert ring.get(b"another!") is None


def test_a_known_kid_with_another_root_is_refused() -> None:
    with pytest.raises(KeyringError, match="known already"):
        Keyring([make_key(), make_key(root=bytes(32))])


@pytest.mark.parametrize("change", [{"audience": "other"}, {"tenant": "other"}, {"digest": "sm3"}])
def test_a_known_kid_with_other_facts_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(KeyringError, match="known already"):
        Keyring([make_key(), make_key(**change)])


def test_the_same_key_twice_is_one_key() -> None:
    assert len(Keyring([make_key(), make_key()])) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"kid": b"short"},
        {"kid": bytes(9)},
        {"root": bytes(31)},
        {"root": b""},
        {"client": ""},
        {"client": "a" * 256},
        {"client": "with space"},
        {"client": "élan"},
        {"audience": ""},
        {"audience": "a" * 256},
        {"audience": "a\nb"},
        {"tenant": ""},
        {"suite": 0},
        {"suite": 3},
        {"digest": "md5"},
        {"not_before_ms": NOW_MS, "not_after_ms": NOW_MS},
        {"not_before_ms": -1},
        {"pad": 0},
        {"pad": 3},
        {"pad": 131072},
        {"pad": -128},
        {"writers": 0},
    ],
)
def test_a_malformed_key_is_refused_without_showing_it(change: dict[str, Any]) -> None:
    with pytest.raises(KeyringError) as refused:
        make_key(**change)
    text = str(refused.value)
    assert text.partition(":")[0] in {*change, "validity"}
    assert make_key().root.hex() not in text


@pytest.mark.parametrize("pad", [1, 128, 65536])
@pytest.mark.parametrize("size", [1, 255])
def test_the_bounds_themselves_are_accepted(pad: int, size: int) -> None:
    key = make_key(pad=pad, client="c" * size, audience="~" * size)

    assert Keyring([key]).get(key.kid) is not None


def test_secrets_show_in_no_repr() -> None:
    key = make_key()

    assert key.root.hex() not in repr(key)
    assert str(key.root) not in repr(key)
    assert "root" not in repr(key)


def test_header_times_are_accepted_from_a_window_before_to_two_after() -> None:
    key = make_key()
    ring = Keyring([key], window_ms=WINDOW_MS)

    assert ring.accepts(key, key.not_before_ms - WINDOW_MS)
    assert ring.accepts(key, key.not_after_ms + 2 * WINDOW_MS)
    assert not ring.accepts(key, key.not_before_ms - WINDOW_MS - 1)
    assert not ring.accepts(key, key.not_after_ms + 2 * WINDOW_MS + 1)


def test_live_kids_are_those_that_open_now() -> None:
    old = make_key(not_before_ms=1, not_after_ms=2)
    current = make_key(2)
    ring = Keyring([old, current])

    assert ring.live_kids(NOW_MS) == [current.kid]
    assert ring.live_kids(0) == [old.kid]


def rotation() -> tuple[EnvelopeKey, EnvelopeKey]:
    old = make_key(not_before_ms=NOW_MS - 100_000, not_after_ms=NOW_MS + 100_000)
    new = make_key(2, not_before_ms=NOW_MS, not_after_ms=NOW_MS + 200_000)
    return old, new


def test_a_sealer_takes_the_key_that_began_last_from_its_not_before() -> None:
    old, new = rotation()
    ring = Keyring([new, old])

    before, after = ring.sealing_key(NOW_MS - 1), ring.sealing_key(NOW_MS)

    assert before is not None
    assert after is not None
    assert (before.key, after.key) == (old, new)


def test_a_sealer_has_no_key_out_of_time() -> None:
    ring = Keyring(rotation())

    assert ring.sealing_key(NOW_MS - 100_001) is None
    assert ring.sealing_key(NOW_MS + 200_001) is None
    assert Keyring([]).sealing_key(NOW_MS) is None


def test_a_spent_key_seals_no_more() -> None:
    key = make_key(writers=4)
    ring = Keyring([key])
    derived = ring.sealing_key(NOW_MS)
    assert derived is not None

    derived.count(0, envelopes=(1 << 28) // 4 - 1)
    assert ring.sealing_key(NOW_MS) is derived
    derived.count(0, envelopes=1)

    assert ring.sealing_key(NOW_MS) is None


def test_64_gib_spend_a_key_too() -> None:
    key = make_key()
    derived = Keyring([key]).get(key.kid)
    assert derived is not None

    derived.count((64 << 30) - 1)
    assert not derived.spent()
    derived.count(1)

    assert derived.spent()


def test_expired_keys_are_dropped_when_their_grace_is_over() -> None:
    old, new = rotation()
    ring = Keyring([old, new], window_ms=WINDOW_MS)
    end_ms = old.not_after_ms + 3 * WINDOW_MS

    assert ring.drop_expired(end_ms) == []
    assert ring.drop_expired(end_ms + 1) == [old.kid]
    assert ring.get(old.kid) is None
    assert ring.get(new.kid) is not None


def test_client_and_audience_are_in_the_derived_keys() -> None:
    sealed = set()
    for change in ({}, {"client": "b"}, {"audience": "b"}, {"suite": 2}, {"kid": b"another!"}):
        key = msgspec.structs.replace(make_key(), **change)
        derived = Keyring([key]).get(key.kid)
        assert derived is not None
        sealed.add(derived.request.seal(bytes(12), b"x", b""))
        sealed.add(derived.response.seal(bytes(12), b"x", b""))
        sealed.add(derived.mac.mac(b"x"))
        sealed.add(derived.request_streams.mac(b"x"))
        sealed.add(derived.response_streams.mac(b"x"))

    assert len(sealed) == 5 * 5


def test_replaced_keys_are_the_only_ones_and_what_was_sealed_stays_counted() -> None:
    stays, goes, comes = (
        make_key(kid=b"stays..."),
        make_key(kid=b"goes...."),
        make_key(kid=b"comes..."),
    )
    ring = Keyring([stays, goes])
    derived = ring.get(stays.kid)
    assert derived is not None
    derived.count(7, envelopes=2)
    assert ring.get(goes.kid) is not None
    ring.replace([comes, stays])
    assert ring.get(stays.kid) is derived
    assert ring.get(goes.kid) is None
    assert (found := ring.get(comes.kid)) is not None
    assert found.key == comes


def test_replacing_with_other_contents_of_a_kid_changes_nothing() -> None:
    key, more = make_key(kid=b"stays..."), make_key(kid=b"comes...")
    ring = Keyring([key])
    with pytest.raises(KeyringError, match="other contents"):
        ring.replace([more, msgspec.structs.replace(key, pad=256)])
    assert (found := ring.get(key.kid)) is not None
    assert found.key == key
    assert ring.get(more.kid) is None


def test_what_is_derived_is_kept_within_its_bound_and_counts_are_not_lost(monkeypatch) -> None:
    monkeypatch.setattr("proxy.sm4.keyring.DERIVED_MAX", 2)
    keys = [make_key(kid=bytes([number]) * 8) for number in range(3)]
    ring = Keyring(keys)
    first = ring.get(keys[0].kid)
    assert first is not None
    first.count(7, envelopes=2)
    ring.get(keys[1].kid)
    assert ring.get(keys[0].kid) is first
    ring.get(keys[2].kid)
    assert len(ring._derived) == 2
    again = ring.get(keys[0].kid)
    assert again is not None
    assert again is not first
    first.count(1)  # a stream that is still being sealed
    assert (again.sealed_envelopes, again.sealed_bytes) == (2, 8)


def test_the_number_of_live_kids_is_that_of_their_list_at_every_time() -> None:
    keys = [
        make_key(kid=bytes([n]) * 8, not_before_ms=NOW_MS + b, not_after_ms=NOW_MS + b + span)
        for n, (b, span) in enumerate([(0, 1), (0, 500_000), (100_000, 900_000), (-1, 60_000)])
    ]
    ring = Keyring(keys, window_ms=WINDOW_MS)
    for offset in range(-200_000, 1_400_000, 20_000):
        for now_ms in (NOW_MS + offset - 1, NOW_MS + offset, NOW_MS + offset + 1):
            ring.drop_expired(now_ms - 10_000_000)
            assert ring.live(now_ms) == len(ring.live_kids(now_ms))
    assert len(ring.live_kids(NOW_MS, 2)) == 2
    ring.drop_expired(NOW_MS + 500_000 + 3 * WINDOW_MS + 1)
    assert len(ring) == 1
    assert ring.live(NOW_MS + 500_000 + 3 * WINDOW_MS + 1) == 1


def test_a_plan_changes_nothing_until_it_is_taken() -> None:
    old, new = make_key(kid=b"old....."), make_key(kid=b"new.....")
    ring, rests = Keyring([old]), []
    plan = ring.plan([new], now_ms=NOW_MS, rest=lambda: rests.append(1))
    assert ring.get(new.kid) is None
    assert ring.get(old.kid) is not None
    assert rests
    ring.take(plan)
    assert ring.get(old.kid) is None
    assert ring.get(new.kid) is plan.derived[new.kid]


def test_a_key_that_stays_is_the_object_it_was() -> None:
    key = make_key()
    ring = Keyring([key])
    ring.replace([msgspec.structs.replace(key)])
    assert next(iter(ring)) is key
