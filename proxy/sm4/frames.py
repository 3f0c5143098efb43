"""Sealed streams: the stream's own key, frames, and the two carriers that take them.

    frame = u32 (bit 31 = last | n) || sealed of n bytes, tag included

A frame's nonce is its number and whether it is the last, so frames cannot be moved, dropped or
called last. Readers are fed any cut of the bytes and yield whole frames; what they hold is bounded
by one frame.
"""

from __future__ import annotations

import binascii
import struct
from typing import TYPE_CHECKING, Protocol

from proxy.sm4.cipher import (
    KEY_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    TagError,
    aead,
    native_frames,
)
from proxy.sm4.envelope import HEADER_BYTES, EnvelopeError, pad, unpad

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.sm4.cipher import Aead, Buffer
    from proxy.sm4.digest import HmacSm3

LAST = 1 << 31
FRAME_SEALED_MIN = TAG_BYTES + 1
FRAME_SEALED_MAX = 65536 + TAG_BYTES
# An SSE event of ours stays below the line limits of common readers.
SSE_SEALED_MAX = 32768
SSE_PAD_MAX = 16384
EVENT_STREAM_PAD_MIN = 512
_COUNTER_MAX = (1 << 32) - 1
_LABEL = b"smx1 stream"
_PREFIX_BYTES = 4
# `data: ` and the base64 of a frame of the largest raw size; longer is no frame of ours.
_SSE_LINE_MAX = 6 + 4 * -(-(_PREFIX_BYTES + FRAME_SEALED_MAX) // 3)
_NONCE = struct.Struct(">7sIB")
_U32 = struct.Struct(">I").pack
_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_", b"+/")


class Frames(Protocol):
    """The frames of one stream, in order: sealed or opened, not both. `kernels.sm4.Frames` is one.

    RuntimeError: the last frame has been. OverflowError: a stream has at most 2^32 frames.
    """

    def seal(self, data: bytes, unit: int, last: bool, as_event: bool, /) -> bytes:  # noqa: FBT001
        """Return the next frame, padded to a multiple of `unit` bytes, or its SSE event.

        Raises ValueError where it does not fit.
        """
        ...

    def open(self, sealed: Buffer, last: bool, /) -> bytes:  # noqa: FBT001
        """Return the next frame's padded data; raises `TagError`."""
        ...


class PureFrames:
    """`Frames` over any cipher."""

    __slots__ = ("_aad", "_cipher", "_counter", "_ended", "_mask")

    def __init__(self, cipher: Aead, mask: bytes, aad: bytes) -> None:
        self._cipher = cipher
        self._mask: tuple[bytes, int, int] = _NONCE.unpack(mask)
        self._aad = aad
        self._counter = 0
        self._ended = False

    def _next(self, *, last: bool) -> tuple[bytes, bytes]:
        counter = self._counter
        if self._ended:
            raise RuntimeError("the last frame has been")
        if counter > _COUNTER_MAX:
            raise OverflowError("a stream has at most 2^32 frames")
        zeros, counted, ended = self._mask
        self._counter = counter + 1
        self._ended = last
        nonce = _NONCE.pack(zeros, counter ^ counted, last ^ ended)
        return nonce, b"" if counter else self._aad

    def seal(self, data: bytes, unit: int, last: bool, as_event: bool, /) -> bytes:  # noqa: FBT001
        """See `Frames.seal`."""
        padded = pad(data, unit)
        size = len(padded) + TAG_BYTES
        if size > FRAME_SEALED_MAX:
            raise ValueError("the data does not fit in a frame")
        nonce, aad = self._next(last=last)
        frame = _U32(size | LAST if last else size) + self._cipher.seal(nonce, padded, aad)
        return sse_event(frame) if as_event else frame

    def open(self, sealed: Buffer, last: bool, /) -> bytes:  # noqa: FBT001
        """See `Frames.open`."""
        nonce, aad = self._next(last=last)
        return self._cipher.open(nonce, sealed, aad)


class StreamCipher:
    """Seals or opens the frames of one stream, in order."""

    __slots__ = ("frames",)

    def __init__(
        self, base: HmacSm3, suite: int, aad: bytes, nonce: bytes, request_nonce: bytes = b""
    ) -> None:
        key, mask = stream_secrets(base, suite, nonce, request_nonce)
        native = native_frames(suite, key, mask, aad)
        self.frames: Frames = native or PureFrames(aead(suite, key), mask, aad)

    def seal(self, data: bytes, unit: int, *, last: bool) -> bytes:
        """Return the next frame; see `Frames.seal`."""
        return self.frames.seal(data, unit, last, False)

    def open_padded(self, sealed: Buffer, *, last: bool) -> bytes:
        """Return the next frame's padded data; raises `EnvelopeError` bad_tag."""
        try:
            return self.frames.open(sealed, last)
        except (TagError, OverflowError):
            raise EnvelopeError("bad_tag") from None

    def open(self, sealed: Buffer, *, last: bool) -> bytes:
        """Return the next frame's data; raises `EnvelopeError` bad_tag or bad_padding."""
        return unpad(self.open_padded(sealed, last=last))


def stream_secrets(
    base: HmacSm3, suite: int, nonce: bytes, request_nonce: bytes = b""
) -> tuple[bytes, bytes]:
    """Return (K_s, mask) of a stream."""
    tail = nonce + request_nonce
    blocks = base.mac(_LABEL + b"\x01" + tail) + base.mac(_LABEL + b"\x02" + tail)
    size = KEY_BYTES[suite]
    return blocks[:size], blocks[size : size + NONCE_BYTES]


def frame_data_max(unit: int, sealed_max: int) -> int:
    """Return how many data bytes fit in a frame padded to `unit`, sealed within `sealed_max`."""
    return (sealed_max - TAG_BYTES) // unit * unit - 1


def parse_frame_size(prefix: bytes) -> tuple[int, bool]:
    """Return (n, last) of a frame's first 4 bytes; raises frame_too_large or bad_length."""
    word = int.from_bytes(prefix, "big")
    size, last = word & ~LAST, bool(word & LAST)
    if size > FRAME_SEALED_MAX:
        raise EnvelopeError("frame_too_large")
    if size < FRAME_SEALED_MIN:
        raise EnvelopeError("bad_length")
    return size, last


class RawFrames:
    """Cuts raw bytes into frames."""

    __slots__ = ("_buffer", "_ended")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._ended = False

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """Take bytes, yield (sealed, last) of each frame that is whole.

        To be run to its end before the next call. Raises trailing_data after the last frame,
        frame_too_large and bad_length.
        """
        self._buffer += data
        while True:
            if self._ended:
                if self._buffer:
                    raise EnvelopeError("trailing_data")
                return
            if len(self._buffer) < _PREFIX_BYTES:
                return
            size, last = parse_frame_size(bytes(self._buffer[:_PREFIX_BYTES]))
            if len(self._buffer) < _PREFIX_BYTES + size:
                return
            with memoryview(self._buffer) as whole:
                sealed = bytes(whole[_PREFIX_BYTES : _PREFIX_BYTES + size])
            del self._buffer[: _PREFIX_BYTES + size]
            self._ended = last
            yield sealed, last


def sse_event(payload: bytes) -> bytes:
    """Return the SSE event that carries a header or one frame."""
    text = binascii.b2a_base64(payload, newline=False).translate(_TO_URL).rstrip(b"=")
    return b"data: %b\n\n" % text


def sse_payload_bytes(event_bytes: int) -> int:
    """Return how many bytes an event of that many carries."""
    return (event_bytes - 8) * 3 // 4


def _decode_base64url(text: bytes) -> bytes:
    """Return the bytes of strict base64url without `=`; raises bad_carrier."""
    # One encoding of everything: no padding, no other alphabet, no loose bits at the end.
    if not text or len(text) % 4 == 1 or b"+" in text or b"/" in text or b"=" in text:
        raise EnvelopeError("bad_carrier")
    standard = text.translate(_FROM_URL) + b"=" * (-len(text) % 4)
    try:
        raw = binascii.a2b_base64(standard, strict_mode=True)
    except binascii.Error:
        raise EnvelopeError("bad_carrier") from None
    if binascii.b2a_base64(raw, newline=False) != standard:
        raise EnvelopeError("bad_carrier")
    return raw


class SseFrames:
    """Reads the SSE carrier: first the header's event, then one frame an event."""

    __slots__ = ("_buffer", "_ended", "_header", "_pending")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._pending: bytes | None = None
        self._header = False
        self._ended = False

    def feed(self, data: bytes) -> Iterator[bytes | tuple[bytes, bool]]:
        """Take bytes, yield the 40 header bytes once, then (sealed, last) of each frame.

        To be run to its end before the next call. Raises bad_carrier, frame_too_large and
        trailing_data.
        """
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end]).removesuffix(b"\r")
            del self._buffer[: end + 1]
            if len(line) > _SSE_LINE_MAX:
                raise EnvelopeError("bad_carrier")
            event = self._line(line)
            if event is not None:
                yield event
        if len(self._buffer) > _SSE_LINE_MAX + 1:
            raise EnvelopeError("bad_carrier")

    def finish(self) -> None:
        """Check at the end of the HTTP body that nothing but a comment follows the last frame."""
        if self._ended and self._buffer.rstrip(b"\r") and not self._buffer.startswith(b":"):
            raise EnvelopeError("trailing_data")

    def _line(self, line: bytes) -> bytes | tuple[bytes, bool] | None:
        if line.startswith(b":"):
            return None
        if line:
            if self._ended:
                raise EnvelopeError("trailing_data")
            if self._pending is not None or not line.startswith(b"data:"):
                raise EnvelopeError("bad_carrier")
            self._pending = _decode_base64url(line.removeprefix(b"data:").removeprefix(b" "))
            return None
        payload, self._pending = self._pending, None
        if payload is None:
            return None
        if not self._header:
            if len(payload) != HEADER_BYTES:
                raise EnvelopeError("bad_carrier")
            self._header = True
            return payload
        return self._frame(payload)

    def _frame(self, payload: bytes) -> tuple[bytes, bool]:
        if len(payload) < _PREFIX_BYTES:
            raise EnvelopeError("bad_carrier")
        size, last = parse_frame_size(payload[:_PREFIX_BYTES])
        if size > SSE_SEALED_MAX:
            raise EnvelopeError("frame_too_large")
        if len(payload) != _PREFIX_BYTES + size:
            raise EnvelopeError("bad_carrier")
        self._ended = last
        return payload[_PREFIX_BYTES:], last
