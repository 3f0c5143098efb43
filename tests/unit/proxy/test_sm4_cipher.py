"""What does SM4's work: the choice, and that every choice gives the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernels import sm4
from proxy.sm4.cipher import (
    AES_256_GCM,
    AUTO,
    CRYPTOGRAPHY,
    SM4_GCM,
    Aead,
    TagError,
    aead,
    choose_tier,
    native_frames,
    tier,
    usable_tiers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# RFC 8998, A.1.
KEY = bytes.fromhex("0123456789abcdeffedcba9876543210")
NONCE = bytes.fromhex("00001234567800000000abcd")
AAD = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
PLAIN = bytes.fromhex(
    "aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbccccccccccccccccdddddddddddddddd"
    "eeeeeeeeeeeeeeeeffffffffffffffffeeeeeeeeeeeeeeeeaaaaaaaaaaaaaaaa"
)
SEALED = bytes.fromhex(
    "17f399f08c67d5ee19d0dc9969c4bb7d5fd46fd3756489069157b282bb200735"
    "d82710ca5c22f0ccfa7cbf93d496ac15a56834cbcf98c397b4024a2691233b8d"
    "83de3541e4c2b58177e065a9bf7b62ec"
)


@pytest.fixture(params=usable_tiers())
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    yield choose_tier(request.param)
    choose_tier(AUTO)


@pytest.mark.parametrize("one_message", [False, True])
def test_every_choice_gives_the_published_bytes(chosen: str, one_message: bool) -> None:
    cipher = aead(SM4_GCM, KEY, one_message=one_message)
    assert cipher.seal(NONCE, PLAIN, AAD) == SEALED
    assert cipher.open(NONCE, SEALED, AAD) == PLAIN
    assert tier() == chosen


@pytest.mark.parametrize("suite", [SM4_GCM, AES_256_GCM])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_buffers_of_any_kind_are_taken(chosen: str, suite: int, kind: type) -> None:
    cipher = aead(suite, bytes(16 * suite))
    sealed = cipher.seal(NONCE, kind(PLAIN), AAD)
    assert cipher.open(NONCE, kind(sealed), AAD) == PLAIN
    assert chosen


@pytest.mark.parametrize("suite", [SM4_GCM, AES_256_GCM])
def test_every_refusal_is_one_error(chosen: str, suite: int) -> None:
    cipher = aead(suite, bytes(16 * suite))
    sealed = bytearray(cipher.seal(NONCE, PLAIN, AAD))
    for nonce, data, aad in (
        (NONCE, sealed[:-1], AAD),
        (NONCE, sealed[:15], AAD),
        (NONCE, b"", AAD),
        (NONCE, sealed + b"\0", AAD),
        (NONCE, sealed, AAD[1:]),
        (NONCE[::-1], sealed, AAD),
    ):
        with pytest.raises(TagError):
            cipher.open(nonce, data, aad)
    assert chosen


@pytest.mark.parametrize("name", ["", "AUTO", "gfni", "auto ", "avx2", "none"])
def test_a_tier_that_is_not_usable_names_those_that_are(name: str) -> None:
    before = tier()
    with pytest.raises(ValueError, match="not usable here") as refused:
        choose_tier(name)
    for usable in (AUTO, *usable_tiers()):
        assert usable in str(refused.value)
    assert tier() == before


def test_auto_is_the_best_tier_and_cryptography_the_last() -> None:
    assert choose_tier(AUTO) == usable_tiers()[0] == (sm4.TIERS or (CRYPTOGRAPHY,))[0]
    assert usable_tiers()[-1] == CRYPTOGRAPHY


@pytest.mark.skipif(not sm4.AVAILABLE, reason="capability: kernels.sm4 was built")
def test_the_chosen_tier_is_in_the_key(chosen: str) -> None:
    cipher: Aead = aead(SM4_GCM, KEY)
    assert isinstance(cipher, sm4.Sm4Gcm) is (chosen != CRYPTOGRAPHY)
    if isinstance(cipher, sm4.Sm4Gcm):
        assert cipher.tier == chosen


def test_only_sm4_in_a_tier_of_the_extension_has_its_frames(chosen: str) -> None:
    frames = native_frames(SM4_GCM, KEY, bytes(12), b"")
    assert (frames is None) is (chosen == CRYPTOGRAPHY)
    assert native_frames(AES_256_GCM, bytes(32), bytes(12), b"") is None


@pytest.mark.parametrize(
    ("suite", "size"), [(SM4_GCM, 15), (SM4_GCM, 32), (AES_256_GCM, 16), (3, 16), (0, 0)]
)
def test_a_key_of_another_length_is_refused(suite: int, size: int) -> None:
    with pytest.raises(ValueError, match="suite"):
        aead(suite, bytes(size))
