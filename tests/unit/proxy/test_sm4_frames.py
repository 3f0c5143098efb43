"""The frames of a stream: the extension's and the pure ones give the same bytes and refusals."""

from __future__ import annotations

import itertools
import os

import pytest

from kernels import sm4
from proxy.sm4.cipher import CRYPTOGRAPHY, SM4_GCM, TagError, aead, choose_tier
from proxy.sm4.frames import Frames, PureFrames, sse_event, sse_payload_bytes

KEY, AAD = bytes(range(16)), b"header and names"
MASK = bytes(range(100, 112))
UNITS = (1, 16, 128, 512, 65536)
pytestmark = pytest.mark.skipif(not sm4.AVAILABLE, reason="capability: kernels.sm4 was built")


@pytest.fixture(params=sm4.TIERS)
def native(request: pytest.FixtureRequest) -> sm4.Frames:
    return sm4.Frames(KEY, MASK, AAD, request.param)


@pytest.fixture
def pure() -> PureFrames:
    choose_tier(CRYPTOGRAPHY)
    try:
        return PureFrames(aead(SM4_GCM, KEY), MASK, AAD)
    finally:
        choose_tier("auto")


def fresh(frames: Frames) -> Frames:
    """Return frames of the same stream from its beginning."""
    if isinstance(frames, PureFrames):
        return PureFrames(aead(SM4_GCM, KEY), MASK, AAD)
    return sm4.Frames(KEY, MASK, AAD, sm4.TIER)


@pytest.mark.parametrize("as_event", [False, True])
def test_frames_are_the_same_bytes_at_every_length(
    native: sm4.Frames, pure: PureFrames, as_event: bool
) -> None:
    for size in range(600):
        data = os.urandom(size)
        unit = UNITS[size % 4]
        assert native.seal(data, unit, False, as_event) == pure.seal(data, unit, False, as_event)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 4095, 32000, 65533, 65535])
@pytest.mark.parametrize("unit", UNITS)
def test_long_and_last_frames_are_the_same_bytes(
    native: sm4.Frames, pure: PureFrames, size: int, unit: int
) -> None:
    data = os.urandom(size)
    for last in (False, True):
        assert native.seal(data, unit, last, False) == pure.seal(data, unit, last, False)


def test_frames_grow_after_a_short_first_one(native: sm4.Frames, pure: PureFrames) -> None:
    for size in (3, 200, 5000, 17, 65535):
        data = os.urandom(size)
        assert native.seal(data, 128, False, False) == pure.seal(data, 128, False, False)


@pytest.mark.parametrize("size", range(64))
def test_an_event_is_that_of_the_frame(native: sm4.Frames, size: int) -> None:
    data = os.urandom(size)
    frame = fresh(native).seal(data, 1, False, False)
    event = fresh(native).seal(data, 1, False, True)
    assert event == sse_event(frame)
    assert sse_payload_bytes(len(event)) == len(frame)


def test_each_opens_what_the_other_sealed(native: sm4.Frames, pure: PureFrames) -> None:
    chunks = [os.urandom(size) for size in (0, 1, 200, 511, 9000)]
    sealer, opener = fresh(native), pure
    for one, other in ((sealer, opener), (fresh(pure), native)):
        for index, chunk in enumerate(chunks):
            last = index == len(chunks) - 1
            frame = one.seal(chunk, 128, last, False)
            padded = other.open(frame[4:], last)
            assert padded.rstrip(b"\0") == chunk + b"\x80"


def test_every_changed_bit_is_refused(native: sm4.Frames) -> None:
    frame = fresh(native).seal(b"data", 16, False, False)[4:]
    for at, bit in itertools.product(range(len(frame)), range(8)):
        changed = bytearray(frame)
        changed[at] ^= 1 << bit
        with pytest.raises(TagError):
            fresh(native).open(changed, False)
    assert fresh(native).open(memoryview(frame), False) == b"data\x80".ljust(16, b"\0")


@pytest.mark.parametrize("kind", ["native", "pure"])
def test_order_last_and_aad_are_part_of_a_frame(kind: str, native: sm4.Frames) -> None:
    choices: dict[str, Frames] = {
        "native": native,
        "pure": PureFrames(aead(SM4_GCM, KEY), MASK, AAD),
    }
    base = choices[kind]
    sealer = fresh(base)
    first, second = (sealer.seal(b"x", 16, False, False)[4:] for _ in range(2))
    with pytest.raises(TagError):
        fresh(base).open(second, False)
    with pytest.raises(TagError):
        fresh(base).open(first, True)
    with pytest.raises(TagError):
        sm4.Frames(KEY, MASK, AAD + b"!", sm4.TIER).open(first, False)
    opener = fresh(base)
    opener.open(first, False)
    opener.open(second, False)


@pytest.mark.parametrize("kind", ["native", "pure"])
def test_nothing_follows_the_last_frame(kind: str, native: sm4.Frames, pure: PureFrames) -> None:
    choices: dict[str, Frames] = {"native": native, "pure": pure}
    frames = choices[kind]
    frames.seal(b"", 16, True, False)
    with pytest.raises(RuntimeError, match="last frame"):
        frames.seal(b"", 16, False, False)
    with pytest.raises(RuntimeError, match="last frame"):
        frames.open(bytes(32), False)


@pytest.mark.parametrize("kind", ["native", "pure"])
@pytest.mark.parametrize(("size", "unit"), [(65536, 65536), (65536, 1), (65537, 128), (1 << 20, 1)])
def test_data_that_does_not_fit_is_refused_and_takes_no_number(
    kind: str, size: int, unit: int, native: sm4.Frames, pure: PureFrames
) -> None:
    choices: dict[str, Frames] = {"native": native, "pure": pure}
    frames = choices[kind]
    with pytest.raises(ValueError, match="does not fit"):
        frames.seal(bytes(size), unit, False, False)
    assert frames.seal(b"x", 16, False, False) == fresh(frames).seal(b"x", 16, False, False)


@pytest.mark.parametrize("sealed", [b"", bytes(15), bytes(65536 + 17)])
def test_what_is_no_sealed_frame_is_refused(native: sm4.Frames, sealed: bytes) -> None:
    with pytest.raises(TagError):
        native.open(sealed, False)


@pytest.mark.parametrize("unit", [0, -1, 65537, 1 << 70])
def test_a_unit_out_of_bounds_is_refused(native: sm4.Frames, unit: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        native.seal(b"x", unit, False, False)


@pytest.mark.parametrize(
    "arguments",
    [
        (KEY[:15], MASK, AAD, sm4.TIER),
        (KEY, MASK[:11], AAD, sm4.TIER),
        (KEY, MASK, AAD, "no such tier"),
        (KEY, MASK, "text", sm4.TIER),
        (KEY, MASK, AAD),
        (),
    ],
)
def test_a_malformed_stream_is_not_made(arguments: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        sm4.Frames(*arguments)


@pytest.mark.parametrize("arguments", [(), (b"x", 16, False), ("text", 16, False, False)])
def test_a_malformed_call_is_refused(native: sm4.Frames, arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        native.seal(*arguments)


def test_an_arguments_error_stops_before_the_next_argument_is_asked(native: sm4.Frames) -> None:
    """Its code would run while that error is set: a SystemError instead of the error."""

    class Flag:
        def __init__(self) -> None:
            self.asked = 0

        def __bool__(self) -> bool:
            self.asked += 1
            if self.asked > 1:
                raise KeyError("asked")
            return True

    flags = Flag(), Flag()
    with pytest.raises(TypeError, match="integer"):
        native.seal(b"", "16", *flags)  # type: ignore[arg-type]
    assert [flag.asked for flag in flags] == [0, 0]
    flags[0].asked = 1
    with pytest.raises(KeyError):
        native.seal(b"", 16, *flags)  # type: ignore[arg-type]
    assert flags[1].asked == 0
    assert native.seal(b"", 16, False, False)[:4] == bytes([0, 0, 0, 32])
