"""The frames of `Frames`, drawn at random: sealed as the pure twin does, opened whole or damaged.

What a stream of damaged frames must give is worked out here from the format (docs/envelope.md)
and `cryptography`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from kernels import sm4
from proxy.sm4.cipher import CRYPTOGRAPHY, SM4_GCM, aead, choose_tier
from proxy.sm4.frames import FRAME_SEALED_MAX, PureFrames
from tests.fuzz.sm4_calls import (
    NONCE,
    TAG,
    call,
    flipped,
    kind,
    opened,
)

if TYPE_CHECKING:
    import random

    from tests.fuzz.sm4_calls import Bench

Sealed = list[tuple[bytes, bool]]
UNITS = (1, 16, 128, 512, 4096, 65536)


def _stream(bench: Bench, rng: random.Random) -> tuple[bytes, bytes, bytes]:
    raw, mask = rng.randbytes(16), rng.randbytes(NONCE)
    return raw, mask, rng.randbytes(rng.choice((0, 40, rng.randrange(200))))


def _data(rng: random.Random) -> bytes:
    which = rng.randrange(40)
    if which < 39:
        return rng.randbytes(rng.randrange((20, 300, 1200)[which % 3]))
    return rng.randbytes(rng.choice((rng.randrange(70_000), FRAME_SEALED_MAX - rng.randrange(20))))


def frames_sealed(bench: Bench, rng: random.Random) -> None:
    """Seal a stream as the pure twin does over `cryptography`, errors included."""
    raw, mask, aad = _stream(bench, rng)
    native = sm4.Frames(raw, mask, aad, bench.tier)
    choose_tier(CRYPTOGRAPHY)
    pure = PureFrames(aead(SM4_GCM, raw), mask, aad)
    for _ in range(rng.randrange(1, 12)):
        data, last, event = _data(rng), rng.random() < 0.1, rng.random() < 0.5
        unit = rng.choice((*UNITS, rng.randrange(1, 65537)) if rng.random() < 0.1 else UNITS[:4])
        expected: object
        try:
            expected = pure.seal(data, unit, last, event)
        except (ValueError, RuntimeError) as error:
            expected = type(error)
        try:
            found = call(rng, native.seal, (), kind(rng, data), unit, last, event)
        except (ValueError, RuntimeError) as error:
            found = type(error)
        assert found == expected, (len(data), unit, last, event)


def _damaged(rng: random.Random, frames: Sealed) -> Sealed:
    """Return the stream after one or two things that happen to streams on their way."""
    frames = list(frames)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(frames))
        sealed, last = frames[at]
        which = rng.randrange(9)
        if which == 0 and sealed:
            frames[at] = flipped(rng, sealed), last
        elif which == 1:
            frames[at] = sealed[: rng.randrange(len(sealed) + 1)], last
        elif which == 2:
            frames[at] = sealed + rng.randbytes(rng.choice((1, 16, 100))), last
        elif which == 3:
            frames[at] = sealed, not last
        elif which == 4:
            frames[at] = rng.randbytes(rng.choice((0, 15, 16, 17, 300, FRAME_SEALED_MAX + 1))), last
        elif which == 5:
            frames.insert(rng.randrange(len(frames) + 1), frames[at])
        elif which == 6:
            other = rng.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
        elif which == 7 and len(frames) > 1:
            del frames[at]
        else:
            frames = frames[: at + 1]
    return frames


def frames_opened(bench: Bench, rng: random.Random) -> None:
    """Open what is the stream's next frame and nothing else, whatever came before."""
    raw, mask, aad = _stream(bench, rng)
    sealing = sm4.Frames(raw, mask, aad, bench.tier)
    count = rng.randrange(1, 10)
    sealed = [
        (sealing.seal(_data(rng)[:30_000], rng.choice(UNITS[:5]), n == count - 1, False)[4:],
         n == count - 1)
        for n in range(count)
    ]  # fmt: skip
    opening = sm4.Frames(raw, mask, aad, bench.tier)
    counter, ended = 0, False
    for frame, last in _damaged(rng, sealed):
        expected: object
        if not TAG <= len(frame) <= FRAME_SEALED_MAX:
            expected = sm4.InvalidTag
        elif ended:
            expected = RuntimeError
        else:
            plain = struct.pack(">7sIB", b"", counter, last)
            nonce = bytes(a ^ b for a, b in zip(plain, mask, strict=True))
            expected = opened(raw, nonce, frame, aad if counter == 0 else b"")
            expected = sm4.InvalidTag if expected is None else expected
            counter, ended = counter + 1, last
        try:
            found = call(rng, opening.open, (), kind(rng, frame), last)
        except (sm4.InvalidTag, RuntimeError) as error:
            found = type(error)
        assert found == expected, (counter, len(frame), last)


class Undecided:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise KeyError("undecided")


class Asked:
    """True, by code that must not run while an error is on its way."""

    def __bool__(self) -> bool:
        return True


def frames_refused(bench: Bench, rng: random.Random) -> None:
    """Refuse each wrong argument by its own error, and go on with the stream as before."""
    raw, mask, aad = _stream(bench, rng)
    right: tuple[Any, ...] = (raw, mask, aad, bench.tier)
    at = rng.randrange(4)
    wrong, error = rng.choice((
        (rng.randbytes(rng.choice((0, 15, 17))), (ValueError, TypeError)),
        (None, TypeError), ("\0" * 12, (TypeError, ValueError)), (12, TypeError),
        (bytearray(3), (TypeError, ValueError)),
    ))  # fmt: skip
    if not (at == 2 and type(wrong) is bytes):
        try:
            sm4.Frames(*right[:at], wrong, *right[at + 1 :])
        except (ValueError, TypeError) as refusal:
            assert isinstance(refusal, error)
        else:
            raise AssertionError((at, wrong))
    frames = sm4.Frames(*right)
    data, _ = rng.choice(bench.no_buffers), None
    cases: tuple[tuple[Any, tuple[object, ...], type[Exception]], ...] = (
        (frames.seal, (data[0], 1, False, False), data[1]),
        (frames.open, (data[0], False), data[1]),
        (frames.seal, (b"", rng.choice((0, -1, 65537, 1 << 62)), False, False), ValueError),
        (frames.seal, (b"", 1 << 80, False, False), OverflowError),
        (frames.seal, (b"", "1", Asked(), Asked()), TypeError),
        (frames.seal, (b"", 1, Undecided(), Asked()), KeyError),
        (frames.seal, (b"", 1, Undecided(), False), KeyError),
        (frames.seal, (b"", 1, False, Undecided()), KeyError),
        (frames.open, (b"", Undecided()), KeyError),
        (frames.seal, (b"",) * rng.choice((0, 1, 2, 3, 5)), TypeError),
        (frames.open, (b"",) * rng.choice((0, 1, 3)), TypeError),
        (frames.seal, (bytes(65536), 1, False, False), ValueError),
        (frames.open, (rng.randbytes(rng.choice((0, 15))), False), sm4.InvalidTag),
    )
    for function, values, expected in cases:
        try:
            call(rng, function, (), *values)
        except Exception as refusal:  # noqa: BLE001 - any at all is looked at
            assert type(refusal) is expected, (values, refusal)
        else:
            raise AssertionError(values)
    choose_tier(CRYPTOGRAPHY)
    pure = PureFrames(aead(SM4_GCM, raw), mask, aad)
    assert frames.seal(b"next", 16, True, False) == pure.seal(b"next", 16, True, False)


PROPERTIES = (frames_sealed, frames_opened, frames_opened, frames_refused)
