"""The SMX1 format, version 1: header, associated data, prelude, padding, trailer.

Encodes and decodes; decides nothing about time, replay or keys. Reading is strict: there is one
encoding of everything (docs/envelope.md). Every refusal is an `EnvelopeError` whose reason is for
metrics only and never reaches the peer.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec

from proxy.sm4.cipher import NONCE_BYTES, SM4_GCM, TAG_BYTES

if TYPE_CHECKING:
    from proxy.sm4.sealer import ResponseSealer

MEDIA_TYPE = "application/x-sm4-envelope"
MAGIC = b"SMX1"
HEADER_BYTES = 40
# A whole single envelope; what does not fit goes as a stream.
SINGLE_BYTES_MAX = 1 << 20
PRELUDE_BYTES_MAX = 65535
MAC_BYTES = 32
SIGNATURE_BYTES = 64

STREAM, MAC, RESPONSE, SIGNATURE = 1, 2, 4, 8
_KNOWN_FLAGS = STREAM | MAC | RESPONSE | SIGNATURE
_SUITES = (SM4_GCM, 2)
_HEADER = struct.Struct(">4sBBH8sQ12sI")
assert _HEADER.size == HEADER_BYTES
_U16 = struct.Struct(">H")
_REQUEST_PRELUDE = re.compile(rb"([A-Z]+) (/[!-~]*)\n([ -~]*)\n([ -~]*)\n")
_RESPONSE_PRELUDE = re.compile(rb"([0-9]{3})\n([ -~]*)\n")

Code = Literal["envelope_rejected", "envelope_stale", "envelope_cache_full", "envelope_busy"]
_CODES: dict[str, Code] = {
    "stale": "envelope_stale",
    "future": "envelope_stale",
    "cache_full": "envelope_cache_full",
    "busy": "envelope_busy",
    "store_lost": "envelope_cache_full",
}
# Every class a refusal can have (docs/envelope.md, "Outcome classes"); labels of the metric.
REASONS = (
    "bad_carrier",
    "bad_magic",
    "bad_suite",
    "bad_flags",
    "bad_reserved",
    "bad_length",
    "unknown_kid",
    "kid_expired",
    "stale",
    "future",
    "replayed",
    "cache_full",
    "bad_tag",
    "truncated",
    "trailing_data",
    "frame_too_large",
    "bad_padding",
    "bad_signature",
    "missing_signature",
    "bad_mac",
    "missing_mac",
    "bad_prelude",
    "model_mismatch",
    "tenant_mismatch",
    "busy",
    "store_lost",
)


class EnvelopeError(Exception):
    """An envelope is refused.

    `code` is what the peer may learn (a row of `proxy.errors.ERRORS`); `reason` is its outcome
    class, for metrics. `sealer` is set once the request is authentic (step 7 on): then the answer
    is sealed, with inner status 400. The text of the exception is the code and no more.
    """

    def __init__(self, reason: str, *, sealer: ResponseSealer | None = None) -> None:
        assert reason in REASONS, reason
        self.reason = reason
        self.code: Code = _CODES.get(reason, "envelope_rejected")
        self.sealer = sealer
        super().__init__(self.code)


class Header(msgspec.Struct, frozen=True):
    """The 40 bytes in front. `time_ms` is unix ms; `length` is L, 0 in a stream."""

    suite: int
    flags: int
    kid: bytes
    time_ms: int
    nonce: bytes
    length: int

    def encode(self) -> bytes:
        """Return the 40 bytes."""
        assert len(self.nonce) == NONCE_BYTES
        return _HEADER.pack(
            MAGIC, self.suite, self.flags, 0, self.kid, self.time_ms, self.nonce, self.length
        )


def decode_header(raw: bytes, *, response: bool) -> Header:
    """Return the header of 40 bytes, checked in the order of its fields.

    Raises `EnvelopeError`: bad_magic, bad_suite, bad_flags (also the wrong direction), bad_reserved
    or bad_length.
    """
    assert len(raw) == HEADER_BYTES
    magic, suite, flags, reserved, kid, time_ms, nonce, length = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise EnvelopeError("bad_magic")
    if suite not in _SUITES:
        raise EnvelopeError("bad_suite")
    if flags & ~_KNOWN_FLAGS or bool(flags & RESPONSE) is not response:
        raise EnvelopeError("bad_flags")
    if response and flags & SIGNATURE:
        raise EnvelopeError("bad_flags")
    if reserved:
        raise EnvelopeError("bad_reserved")
    if flags & STREAM:
        if length:
            raise EnvelopeError("bad_length")
    elif not TAG_BYTES <= length <= SINGLE_BYTES_MAX - HEADER_BYTES:
        raise EnvelopeError("bad_length")
    return Header(suite, flags, kid, time_ms, nonce, length)


def associated_data(
    header: bytes, model: bytes, audience: bytes, request_nonce: bytes = b""
) -> bytes:
    """Return the AAD; `request_nonce` in a response only."""
    assert len(model) <= 255
    assert len(audience) <= 255
    return b"".join(
        (
            header,
            len(model).to_bytes(2, "big"),
            model,
            len(audience).to_bytes(2, "big"),
            audience,
            request_nonce,
        )
    )


def pad(data: bytes, unit: int) -> bytes:
    """Return data, 0x80 and zeros up to the smallest multiple of `unit` bytes."""
    return (data + b"\x80").ljust(-(-(len(data) + 1) // unit) * unit, b"\0")


def padded_end(padded: bytes) -> int:
    """Return where the data ends before 0x80 and zeros; raises `EnvelopeError` bad_padding."""
    end = padded.rfind(b"\x80")
    if end < 0 or padded.count(0, end + 1) != len(padded) - end - 1:
        raise EnvelopeError("bad_padding")
    return end


def unpad(padded: bytes) -> bytes:
    """Return the data before 0x80 and zeros; raises `EnvelopeError` bad_padding."""
    return padded[: padded_end(padded)]


def trailer_bytes(flags: int) -> int:
    """Return how long the trailer is that the flags announce."""
    return (SIGNATURE_BYTES if flags & SIGNATURE else 0) + (MAC_BYTES if flags & MAC else 0)


def trailer_start(end: int, flags: int) -> int:
    """Return where the trailer of data up to `end` begins; see `split_trailer`."""
    start = end - trailer_bytes(flags)
    if start < 0:
        raise EnvelopeError("missing_signature" if flags & SIGNATURE else "missing_mac")
    return start


def split_trailer(data: bytes, flags: int) -> tuple[bytes, bytes]:
    """Return (data, trailer); raises missing_signature or missing_mac if it is too short."""
    start = trailer_start(len(data), flags)
    return data[:start], data[start:]


class RequestPrelude(msgspec.Struct, frozen=True):  # shared: see `decode_request_prelude`
    """What a request asks for; `content_type` and `qos` may be empty."""

    method: str
    target: str
    content_type: str
    qos: str

    def encode(self) -> bytes:
        """Return u16 len || prelude; raises ValueError if a field cannot stand in it."""
        text = f"{self.method} {self.target}\n{self.content_type}\n{self.qos}\n"
        try:
            raw = text.encode("ascii")
            if decode_request_prelude(raw) != self:
                raise ValueError("a field of the request cannot stand in an envelope")
        except (UnicodeEncodeError, EnvelopeError):
            raise ValueError("a field of the request cannot stand in an envelope") from None
        return len(raw).to_bytes(2, "big") + raw


class ResponsePrelude(msgspec.Struct, frozen=True):
    """Status and content type of an answer."""

    status: int
    content_type: str

    def encode(self) -> bytes:
        """Return u16 len || prelude; raises ValueError if a field cannot stand in it."""
        try:
            raw = f"{self.status:03d}\n{self.content_type}\n".encode("ascii")
            if decode_response_prelude(raw) != self:
                raise ValueError("status or type cannot stand in an envelope")
        except (UnicodeEncodeError, EnvelopeError):
            raise ValueError("status or type cannot stand in an envelope") from None
        return len(raw).to_bytes(2, "big") + raw


def decode_request_prelude(raw: bytes) -> RequestPrelude:
    """Return the prelude of a request; raises `EnvelopeError` bad_prelude."""
    # A client sends the same few again and again; long ones are not kept.
    return (_known_prelude if len(raw) <= _KNOWN_BYTES_MAX else _decode_request_prelude)(raw)


def _decode_request_prelude(raw: bytes) -> RequestPrelude:
    found = _REQUEST_PRELUDE.fullmatch(raw)
    if found is None or len(raw) > PRELUDE_BYTES_MAX:
        raise EnvelopeError("bad_prelude")
    method, target, content_type, qos = found.groups()
    return RequestPrelude(method.decode(), target.decode(), content_type.decode(), qos.decode())


_KNOWN_BYTES_MAX = 256
_known_prelude = lru_cache(maxsize=128)(_decode_request_prelude)


def decode_response_prelude(raw: bytes) -> ResponsePrelude:
    """Return the prelude of an answer; raises `EnvelopeError` bad_prelude."""
    found = _RESPONSE_PRELUDE.fullmatch(raw)
    if found is None or len(raw) > PRELUDE_BYTES_MAX:
        raise EnvelopeError("bad_prelude")
    status, content_type = found.groups()
    return ResponsePrelude(int(status), content_type.decode())


def prelude_end(data: bytes | bytearray, end: int) -> int:
    """Return where the prelude of `u16 len || prelude || ...` ends; raises bad_prelude.

    `end`: where the data (or a stream's first frame) ends.
    """
    size = 2 + _U16.unpack_from(data)[0] if end >= 2 else 2
    if end < size:
        raise EnvelopeError("bad_prelude")
    return int(size)


def split_prelude(data: bytes) -> tuple[bytes, bytes]:
    """Return (prelude, what follows) of `u16 len || prelude || ...`; raises bad_prelude."""
    size = prelude_end(data, len(data))
    return data[2:size], data[size:]


def media_type(content_type: str) -> str:
    """Return the type/subtype of a Content-Type, lower case, without parameters."""
    if content_type == MEDIA_TYPE:
        return content_type
    return content_type.partition(";")[0].strip(" \t").lower()
