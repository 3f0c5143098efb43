"""100,000 random cases: every tier against `cryptography`, whole calls and calls into buffers."""

from __future__ import annotations

import random

import pytest

from kernels import sm4
from tests.unit.kernels.sm4_oracle import built, oracle

SEED = random.SystemRandom().getrandbits(32)
DENSE_CASES, DENSE_LENGTH_MAX, AAD_MAX, KEY_LASTS = 99_600, 2048, 128, 64
# Powers of two and their neighbours. The oracle takes 7 ms for 1 MiB, so few of the long ones.
LONG = [
    (1 << exponent) + step
    for exponent in range(12, 23)
    for step in (-1, 0, 1)
    for _ in range(1 << max(0, 17 - exponent))
]


def ciphers(key: bytes, *, one_message: bool) -> dict[str, sm4.Sm4Gcm]:
    return {tier: sm4.Sm4Gcm(key, tier, one_message) for tier in sm4.TIERS}


def compare_in_buffers(cipher, at, nonce, text, aad, sealed, *, in_place):
    """Input `at[0]` and output `at[1]` bytes behind a 64-byte boundary, guard bytes around."""
    size = len(text) + 16
    source = memoryview(bytearray(64 + at[0] + size + 64))
    target = source if in_place else memoryview(bytearray(64 + at[1] + size + 64))
    first, second = 64 + at[0], 64 + (at[0] if in_place else at[1])
    source[first : first + len(text)] = text
    before, behind = bytes(target[:second]), bytes(target[second + size :])
    out = target[second : second + size]
    assert cipher.seal_into(nonce, source[first : first + len(text)], out, aad) == size
    assert out == sealed
    assert target[:second] == before
    assert target[second + size :] == behind
    source[first : first + size] = sealed
    out = target[second : second + len(text)]
    assert cipher.open_into(nonce, source[first : first + size], out, aad) == len(text)
    assert out == text
    assert target[second + size :] == behind


@built
@pytest.mark.parametrize("part", range(4))
def test_dense_lengths_alignments_and_additional_data(part):
    draw = random.Random(SEED + part)
    material = draw.randbytes(1 << 16)
    tiers = {}
    for number in range(DENSE_CASES // 4):
        if number % KEY_LASTS == 0:
            key = draw.randbytes(16)
            tiers = ciphers(key, one_message=number % (2 * KEY_LASTS) == 0)
        length, aad_length = draw.randrange(DENSE_LENGTH_MAX + 1), draw.randrange(AAD_MAX + 1)
        start = draw.randrange(len(material) - DENSE_LENGTH_MAX - AAD_MAX)
        text = material[start : start + length]
        aad = material[start + length : start + length + aad_length]
        nonce = draw.randbytes(12)
        sealed = oracle(key, nonce, text, aad)
        for tier, cipher in tiers.items():
            where = (SEED, part, number, tier, length, aad_length)
            assert cipher.seal(nonce, text, aad) == sealed, where
            assert cipher.open(nonce, sealed, aad) == text, where
        if number % 4 == 0:
            # Each tier in turn, and then, tier by tier, each alignment in turn.
            turn, which = divmod(number // 4, len(sm4.TIERS))
            tier, at = sm4.TIERS[which], (turn % 64, draw.randrange(64))
            in_place = draw.random() < 0.5
            compare_in_buffers(tiers[tier], at, nonce, text, aad, sealed, in_place=in_place)


@built
def test_powers_of_two_up_to_4_mib():
    draw = random.Random(SEED)
    material = draw.randbytes((4 << 20) + 1)
    for number, length in enumerate(LONG):
        key, nonce = draw.randbytes(16), draw.randbytes(12)
        aad = material[: draw.randrange(AAD_MAX + 1)]
        text = material[:length]
        sealed = oracle(key, nonce, text, aad)
        for tier, cipher in ciphers(key, one_message=number % 2 == 0).items():
            where = (SEED, number, tier, length, len(aad))
            assert cipher.seal(nonce, text, aad) == sealed, where
            assert cipher.open(nonce, sealed, aad) == text, where


@built
def test_lengths_around_the_widest_groups():
    """64 blocks and twice as many, apart and in place."""
    draw = random.Random(SEED)
    for length in (edge + by for edge in range(1024, 9217, 1024) for by in range(-17, 18)):
        key, nonce = draw.randbytes(16), draw.randbytes(12)
        text, aad = draw.randbytes(length), draw.randbytes(draw.randrange(AAD_MAX + 1))
        sealed = oracle(key, nonce, text, aad)
        for cipher in ciphers(key, one_message=length % 2 == 0).values():
            assert cipher.seal(nonce, text, aad) == sealed, (SEED, cipher.tier, length)
            at = draw.randrange(64), draw.randrange(64)
            for in_place in (False, True):
                compare_in_buffers(cipher, at, nonce, text, aad, sealed, in_place=in_place)


@built
def test_long_additional_data():
    draw = random.Random(SEED)
    material = draw.randbytes(1 << 17)
    for aad_length in [*range(900, 1100), 2047, 2048, 2049, 4096, 65535, 65536, 65537, 100_000]:
        key, nonce = draw.randbytes(16), draw.randbytes(12)
        text, aad = material[: draw.randrange(1200)], material[:aad_length]
        sealed = oracle(key, nonce, text, aad)
        for tier, cipher in ciphers(key, one_message=aad_length % 2 == 0).items():
            where = (SEED, tier, aad_length, len(text))
            assert cipher.seal(nonce, text, aad) == sealed, where
            assert cipher.open(nonce, sealed, aad) == text, where


@built
def test_there_are_as_many_cases_as_promised():
    assert DENSE_CASES + len(LONG) + 208 >= 100_000
    assert {max(LONG), min(LONG)} == {(4 << 20) + 1, 4095}


@built
@pytest.mark.slow
def test_the_counter_carries_into_its_top_byte():
    """Block 2^24 of one message, in place; each tier opens what the one before has sealed."""
    length = (1 << 28) + 1000
    room = memoryview(bytearray(length + 16))
    text = room[:length]
    tiers = sm4.TIERS if len(sm4.TIERS) % 2 == 0 else (*sm4.TIERS, "portable")
    nonce = bytes(12)
    for sealing, opening in zip(tiers[::2], tiers[1::2], strict=True):
        sm4.Sm4Gcm(bytes(16), sealing).seal_into(nonce, text, room)
        assert text[-4096:] != bytes(4096)
        sm4.Sm4Gcm(bytes(16), opening).open_into(nonce, room, room)
        assert text[-4096:] == bytes(4096)
