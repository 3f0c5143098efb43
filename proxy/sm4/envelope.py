"""The SMX1 format, version 1: header, associated data, prelude, padding, trailer.

Encodes and decodes; decides nothing about time, replay or keys. Reading is strict: there is one
encoding of everything (docs/envelope.md). Every refusal is an `EnvelopeError` whose reason is for
metrics only and never reaches the peer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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

Code = Literal["envelope_rejected", "envelope_stale", "envelope_cache_full", "envelope_busy"]
_CODES: dict[str, Code] = {
    "stale": "envelope_stale",
    "future": "envelope_stale",
    "cache_full": "envelope_cache_full",
    "busy": "envelope_busy",
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


@dataclass(frozen=True, slots=True)
class Header:
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


def unpad(padded: bytes) -> bytes:
    """Return the data before 0x80 and zeros; raises `EnvelopeError` bad_padding."""
    data = padded.rstrip(b"\0")
    if not data.endswith(b"\x80"):
        raise EnvelopeError("bad_padding")
    return data[:-1]


def trailer_bytes(flags: int) -> int:
    """Return how long the trailer is that the flags announce."""
    return (SIGNATURE_BYTES if flags & SIGNATURE else 0) + (MAC_BYTES if flags & MAC else 0)


def split_trailer(data: bytes, flags: int) -> tuple[bytes, bytes]:
    """Return (data, trailer); raises missing_signature or missing_mac if it is too short."""
    size = trailer_bytes(flags)
    if len(data) < size:
        raise EnvelopeError("missing_signature" if flags & SIGNATURE else "missing_mac")
    return data[: len(data) - size], data[len(data) - size :]


def _printable(text: bytes) -> bool:
    return all(0x20 <= c <= 0x7E for c in text)


@dataclass(frozen=True, slots=True)
class RequestPrelude:
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


@dataclass(frozen=True, slots=True)
class ResponsePrelude:
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
    parts = raw.split(b"\n")
    if len(raw) > PRELUDE_BYTES_MAX or len(parts) != 4 or parts[3]:
        raise EnvelopeError("bad_prelude")
    line, content_type, qos, _ = parts
    method, space, target = line.partition(b" ")
    if (
        not space
        or not method
        or not all(0x41 <= c <= 0x5A for c in method)
        or not target.startswith(b"/")
        or not all(0x21 <= c <= 0x7E for c in target)
        or not _printable(content_type)
        or not _printable(qos)
    ):
        raise EnvelopeError("bad_prelude")
    return RequestPrelude(method.decode(), target.decode(), content_type.decode(), qos.decode())


def decode_response_prelude(raw: bytes) -> ResponsePrelude:
    """Return the prelude of an answer; raises `EnvelopeError` bad_prelude."""
    parts = raw.split(b"\n")
    if len(raw) > PRELUDE_BYTES_MAX or len(parts) != 3 or parts[2]:
        raise EnvelopeError("bad_prelude")
    status, content_type, _ = parts
    if len(status) != 3 or not status.isdigit() or not _printable(content_type):
        raise EnvelopeError("bad_prelude")
    return ResponsePrelude(int(status), content_type.decode())


def split_prelude(data: bytes) -> tuple[bytes, bytes]:
    """Return (prelude, what follows) of `u16 len || prelude || ...`; raises bad_prelude."""
    size = int.from_bytes(data[:2], "big") + 2
    if len(data) < max(2, size):
        raise EnvelopeError("bad_prelude")
    return data[2:size], data[size:]


def media_type(content_type: str) -> str:
    """Return the type/subtype of a Content-Type, lower case, without parameters."""
    return content_type.partition(";")[0].strip(" \t").lower()
