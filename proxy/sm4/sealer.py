"""Sealing: requests on the client's side, answers on the receiver's.

A sealer is bound to one envelope's context; a retry is a new one with a new nonce. Nonces (12 bytes
from the operating system, never used twice) and the time are arguments. Frames are cut to the
carrier's limit here; when to cut earlier is the caller's choice, one `data` call being at least one
frame.
"""

from __future__ import annotations

from typing import Literal

from proxy.sm4.cipher import NONCE_BYTES, TAG_BYTES
from proxy.sm4.digest import Digest, new_digest
from proxy.sm4.envelope import (
    HEADER_BYTES,
    MAC,
    RESPONSE,
    SIGNATURE,
    SINGLE_BYTES_MAX,
    STREAM,
    Header,
    RequestPrelude,
    ResponsePrelude,
    associated_data,
    media_type,
    trailer_bytes,
)
from proxy.sm4.frames import (
    EVENT_STREAM_PAD_MIN,
    FRAME_SEALED_MAX,
    SSE_PAD_MAX,
    SSE_SEALED_MAX,
    StreamCipher,
    frame_data_max,
    sse_event,
    sse_payload_bytes,
)
from proxy.sm4.keyring import Derived, is_id
from proxy.sm4.signature import Signer, signed_message

Carrier = Literal["raw", "sse"]
EVENT_STREAM = "text/event-stream"
# An upstream's Content-Type that cannot stand in a prelude is replaced by this one.
_FALLBACK_TYPE = "application/octet-stream"
_TYPE_BYTES_MAX = 1024


class SingleTooLargeError(ValueError):
    """The body does not fit in a single envelope of 1 MiB: use a stream."""


def _trailer(
    derived: Derived, flags: int, aad: bytes, digest: bytes, signer: Signer | None
) -> bytes:
    """Return what the flags announce, given D."""
    trailer = b""
    if flags & SIGNATURE:
        assert signer is not None
        trailer = signer.sign(signed_message(aad, digest))
    if flags & MAC:
        trailer += derived.mac.mac(aad + digest)
    return trailer


class StreamSealer:
    """Seals one stream: `head`, then any `data`, then `last` once; all ready for the HTTP body.

    A stream that breaks inside is simply not ended: the reader reports it as truncated.
    """

    __slots__ = (
        "_aad",
        "_as_event",
        "_data_max",
        "_derived",
        "_digest",
        "_first",
        "_flags",
        "_header",
        "_seal",
        "_signer",
        "_unit",
    )

    def __init__(
        self,
        derived: Derived,
        header: Header,
        aad: bytes,
        prelude: bytes,
        *,
        unit: int,
        carrier: Carrier,
        request_nonce: bytes = b"",
        signer: Signer | None = None,
    ) -> None:
        base = derived.response_streams if request_nonce else derived.request_streams
        self._seal = StreamCipher(base, header.suite, aad, header.nonce, request_nonce).frames.seal
        self._header = header.encode()
        self._aad = aad
        self._derived = derived
        self._flags = header.flags
        self._signer = signer
        self._as_event = carrier == "sse"
        self._unit = unit
        self._data_max = frame_data_max(
            unit, SSE_SEALED_MAX if carrier == "sse" else FRAME_SEALED_MAX
        )
        # The prelude lies wholly in frame 0.
        if len(prelude) > self._data_max - trailer_bytes(header.flags):
            raise ValueError("the prelude does not fit in the first frame")
        self._first = prelude
        self._digest: Digest | None = None
        if header.flags & (MAC | SIGNATURE):
            self._digest = new_digest(derived.key.digest)
            self._digest.update(prelude)

    def _frame(self, data: bytes, last: bool = False) -> bytes:  # noqa: FBT001, FBT002 - as below
        frame = self._seal(data, self._unit, last, self._as_event)
        size = len(frame)
        self._derived.used.sealed_bytes += sse_payload_bytes(size) if self._as_event else size
        return frame

    def head(self) -> bytes:
        """Return what comes first: the header."""
        return sse_event(self._header) if self._as_event else self._header

    def data(self, body: bytes) -> bytes:
        """Return frames with these body bytes; the first call brings the prelude too.

        Empty bytes make no frame but the first, which then brings the prelude alone.
        """
        if self._digest is not None:
            self._digest.update(body)
        whole = body
        if self._first:
            whole, self._first = self._first + body, b""
        size = self._data_max
        if 0 < len(whole) <= size:
            return self._frame(whole)
        return b"".join(self._frame(whole[i : i + size]) for i in range(0, len(whole), size))

    def last(self, body: bytes = b"") -> bytes:
        """Return the remaining frames, the last one among them, with the trailer."""
        if self._digest is not None:
            self._digest.update(body)
        trailer = b""
        if self._digest is not None:
            digest = self._digest.digest()
            trailer = _trailer(self._derived, self._flags, self._aad, digest, self._signer)
        whole, self._first = self._first + body, b""
        frames = []
        # The trailer lies wholly in the last frame, so the last cut leaves room for it.
        while len(whole) > self._data_max - len(trailer):
            frames.append(self._frame(whole[: self._data_max]))
            whole = whole[self._data_max :]
        frames.append(self._frame(whole + trailer, True))
        return b"".join(frames)


def _seal_single(
    derived: Derived,
    header: Header,
    prelude: bytes,
    body: bytes,
    model: bytes,
    request_nonce: bytes,
    signer: Signer | None = None,
) -> bytes:
    """Return a whole single envelope; sets L and the trailer. `prelude` is u16 len || prelude."""
    unit = derived.key.pad
    size = len(prelude) + len(body) + trailer_bytes(header.flags)
    padded_size = (size // unit + 1) * unit
    sealed_size = padded_size + TAG_BYTES
    if HEADER_BYTES + sealed_size > SINGLE_BYTES_MAX:
        raise SingleTooLargeError
    head = Header(
        header.suite, header.flags, header.kid, header.time_ms, header.nonce, sealed_size
    ).encode()
    aad = associated_data(head, model, derived.audience, request_nonce)
    trailer = b""
    if header.flags & (MAC | SIGNATURE):
        digest = new_digest(derived.key.digest)
        digest.update(prelude)
        digest.update(body)
        trailer = _trailer(derived, header.flags, aad, digest.digest(), signer)
    # One copy: see `envelope.pad` for what is put behind the data.
    padded = b"".join((prelude, body, trailer, b"\x80", bytes(padded_size - size - 1)))
    cipher = derived.response if request_nonce else derived.request
    sealed = cipher.seal(header.nonce, padded, aad)
    assert len(sealed) == sealed_size
    derived.count(len(sealed), envelopes=1)
    return head + sealed


class ResponseSealer:
    """Seals the answer to one request: same kid, suite, model, audience; MAC iff it had one."""

    __slots__ = ("_derived", "_mac", "_model", "_request_nonce")

    def __init__(self, derived: Derived, model: bytes, request_nonce: bytes, *, mac: bool) -> None:
        assert len(request_nonce) == NONCE_BYTES
        self._derived = derived
        self._model = model
        self._request_nonce = request_nonce
        self._mac = MAC if mac else 0

    def _header(self, flags: int, nonce: bytes, now_ms: int) -> Header:
        assert len(nonce) == NONCE_BYTES
        assert nonce != self._request_nonce
        key = self._derived.key
        return Header(key.suite, RESPONSE | self._mac | flags, key.kid, now_ms, nonce, 0)

    def single(
        self, status: int, content_type: str, body: bytes, *, nonce: bytes, now_ms: int
    ) -> bytes:
        """Return a whole answer; raises `SingleTooLargeError` when it would pass 1 MiB."""
        prelude = _response_prelude(status, content_type)
        header = self._header(0, nonce, now_ms)
        return _seal_single(self._derived, header, prelude, body, self._model, self._request_nonce)

    def stream(
        self, status: int, content_type: str, *, nonce: bytes, now_ms: int, carrier: Carrier
    ) -> StreamSealer:
        """Return the sealer of an answer of unknown or large size.

        `carrier` is "sse" for an event stream asked for with `Accept: text/event-stream`.
        """
        header = self._header(STREAM, nonce, now_ms)
        aad = associated_data(
            header.encode(), self._model, self._derived.audience, self._request_nonce
        )
        unit = self._derived.key.pad
        if media_type(content_type) == EVENT_STREAM:
            # Frames of single tokens would tell the tokens' lengths.
            unit = max(EVENT_STREAM_PAD_MIN, unit)
        if carrier == "sse":
            unit = min(unit, SSE_PAD_MAX)
        self._derived.count(0, envelopes=1)
        return StreamSealer(
            self._derived,
            header,
            aad,
            _response_prelude(status, content_type),
            unit=unit,
            carrier=carrier,
            request_nonce=self._request_nonce,
        )


def _response_prelude(status: int, content_type: str) -> bytes:
    """Return u16 len || prelude. The upstream chose the type: a bad one must not end the answer."""
    if len(content_type) > _TYPE_BYTES_MAX:
        content_type = _FALLBACK_TYPE
    try:
        return ResponsePrelude(status, content_type).encode()
    except ValueError:
        return ResponsePrelude(status, _FALLBACK_TYPE).encode()


class RequestSealer:
    """Seals one request, as a single envelope or as a stream.

    `model` is the body's model, as X-Model-Id carries it; empty when it has none. Raises ValueError
    if it cannot stand there (0x21-0x7e, at most 255 bytes), or if the kid demands a signature and
    there is no `signer`. With one, every request is signed.
    """

    __slots__ = ("_derived", "_header", "_model", "_signer", "mac", "nonce")

    def __init__(
        self,
        derived: Derived,
        *,
        model: str,
        mac: bool,
        nonce: bytes,
        now_ms: int,
        signer: Signer | None = None,
    ) -> None:
        assert len(nonce) == NONCE_BYTES
        if not is_id(model, empty=True):
            raise ValueError("the model's name cannot stand in an envelope")
        if signer is None and derived.key.require_signature:
            raise ValueError("this kid demands a signature, and there is no private key for it")
        self._signer = signer
        self.mac = mac or derived.key.require_mac
        self.nonce = nonce
        self._derived = derived
        self._model = model.encode()
        flags = (MAC if self.mac else 0) | (SIGNATURE if signer is not None else 0)
        self._header = Header(derived.key.suite, flags, derived.key.kid, now_ms, nonce, 0)

    @property
    def derived(self) -> Derived:
        """The key in use."""
        return self._derived

    @property
    def signed(self) -> bool:
        """Whether the request is signed."""
        return self._signer is not None

    @property
    def model(self) -> bytes:
        """The model id as in the AAD."""
        return self._model

    def single(self, prelude: RequestPrelude, body: bytes) -> bytes:
        """Return the whole envelope; raises `SingleTooLargeError` when it would pass 1 MiB."""
        raw = prelude.encode()
        return _seal_single(self._derived, self._header, raw, body, self._model, b"", self._signer)

    def stream(self, prelude: RequestPrelude) -> StreamSealer:
        """Return the sealer of a stream envelope (raw frames)."""
        key = self._derived.key
        header = Header(
            key.suite,
            self._header.flags | STREAM,
            key.kid,
            self._header.time_ms,
            self.nonce,
            0,
        )
        aad = associated_data(header.encode(), self._model, self._derived.audience)
        self._derived.count(0, envelopes=1)
        return StreamSealer(
            self._derived,
            header,
            aad,
            prelude.encode(),
            unit=key.pad,
            carrier="raw",
            signer=self._signer,
        )
