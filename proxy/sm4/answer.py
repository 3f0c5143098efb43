"""Opening the answer to a request one has sealed.

The answer is bound to the request by its N; its time is not checked. A stream's body is released
frame by frame, each after its tag and padding; it is complete only after the last frame and, if the
request had one, the MAC. Anything but an envelope is refused.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Protocol

from proxy.sm4.cipher import TagError
from proxy.sm4.digest import Digest, new_digest
from proxy.sm4.envelope import (
    HEADER_BYTES,
    MAC,
    MEDIA_TYPE,
    STREAM,
    EnvelopeError,
    Header,
    ResponsePrelude,
    associated_data,
    decode_header,
    decode_response_prelude,
    media_type,
    split_prelude,
    split_trailer,
    unpad,
)
from proxy.sm4.frames import RawFrames, SseFrames, StreamCipher
from proxy.sm4.sealer import EVENT_STREAM

if TYPE_CHECKING:
    from proxy.sm4.keyring import Derived


class Asked(Protocol):
    """What an answer depends on of its request; a `RequestSealer` is one."""

    @property
    def derived(self) -> Derived:
        """The key of the request."""
        ...

    @property
    def model(self) -> bytes:
        """The model id as in the AAD."""
        ...

    @property
    def mac(self) -> bool:
        """Whether the request had a MAC."""
        ...

    @property
    def nonce(self) -> bytes:
        """N of the request."""
        ...


class AnswerOpener:
    """Opens one answer, given its outer Content-Type and Content-Encoding (None: absent).

    Feed it the HTTP body in any cuts. Every method raises `EnvelopeError`; after one, nothing more
    is released.
    """

    __slots__ = (
        "_aad",
        "_buffer",
        "_cipher",
        "_derived",
        "_digest",
        "_ended",
        "_failed",
        "_header",
        "_mac",
        "_model",
        "_raw_frames",
        "_request_nonce",
        "_sse",
        "prelude",
    )

    def __init__(
        self,
        request: Asked,
        content_type: str | None,
        content_encoding: str | None,
    ) -> None:
        kind = media_type(content_type or "")
        if content_encoding is not None or kind not in {MEDIA_TYPE, EVENT_STREAM}:
            raise EnvelopeError("bad_carrier")
        self._derived: Derived = request.derived
        self._model = request.model
        self._mac = request.mac
        self._request_nonce = request.nonce
        self._sse = SseFrames() if kind == EVENT_STREAM else None
        self._raw_frames = RawFrames()
        self._buffer = bytearray()
        self._header: Header | None = None
        self._aad = b""
        self._cipher: StreamCipher | None = None
        self._digest: Digest | None = new_digest(self._derived.key.digest) if self._mac else None
        self._ended = False
        self._failed = False
        self.prelude: ResponsePrelude | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the body bytes that these bytes of the HTTP body release (often none)."""
        try:
            return self._feed(data)
        except EnvelopeError:
            self._failed = True
            raise

    def finish(self) -> bytes:
        """Return the rest of the body at the end of the HTTP body: a single's is released here."""
        try:
            return self._finish()
        except EnvelopeError:
            self._failed = True
            raise

    @property
    def complete(self) -> bool:
        """Whether a stream's last frame has come and was verified."""
        return self._ended

    @property
    def collecting(self) -> bool:
        """Whether a single is coming, which is released when it is whole."""
        return self._header is not None and self._cipher is None

    def _feed(self, data: bytes) -> list[bytes]:
        if self._failed:
            raise EnvelopeError("bad_carrier")
        out: list[bytes] = []
        if self._sse is not None:
            for event in self._sse.feed(data):
                if isinstance(event, bytes):
                    self._take_header(event)
                    if self._cipher is None:
                        raise EnvelopeError("bad_carrier")
                else:
                    out.append(self._take_frame(*event))
            return [body for body in out if body]
        if self._header is None:
            self._buffer += data
            if len(self._buffer) < HEADER_BYTES:
                return []
            header_raw, data = (
                bytes(self._buffer[:HEADER_BYTES]),
                bytes(self._buffer[HEADER_BYTES:]),
            )
            self._buffer.clear()
            header = self._take_header(header_raw)
        else:
            header = self._header
        if self._cipher is None:
            self._buffer += data
            if len(self._buffer) > header.length:
                raise EnvelopeError("trailing_data")
            return []
        out.extend(self._take_frame(*frame) for frame in self._raw_frames.feed(data))
        return [body for body in out if body]

    def _take_header(self, raw: bytes) -> Header:
        """Step 1 of an answer."""
        header = decode_header(raw, response=True)
        has_mac = bool(header.flags & MAC)
        if has_mac is not self._mac:
            raise EnvelopeError("bad_flags" if has_mac else "missing_mac")
        key = self._derived.key
        if header.kid != key.kid:
            raise EnvelopeError("unknown_kid")
        if header.suite != key.suite:
            raise EnvelopeError("bad_suite")
        self._aad = associated_data(raw, self._model, self._derived.audience, self._request_nonce)
        if header.flags & STREAM:
            self._cipher = StreamCipher(
                self._derived.response_streams,
                header.suite,
                self._aad,
                header.nonce,
                self._request_nonce,
            )
        self._header = header
        return header

    def _take_frame(self, sealed: bytes, last: bool) -> bytes:  # noqa: FBT001 - as readers yield
        assert self._header is not None
        assert self._cipher is not None
        data = self._cipher.open(sealed, last=last)
        trailer = b""
        if last:
            data, trailer = split_trailer(data, self._header.flags)
        if self._digest is not None:
            self._digest.update(data)
        if last:
            self._check_mac(trailer)
        if self.prelude is None:
            data = self._take_prelude(data)
        self._ended = last
        return data

    def _check_mac(self, trailer: bytes) -> None:
        if self._digest is None:
            return
        mac = self._derived.mac.mac(self._aad + self._digest.digest())
        if not hmac.compare_digest(mac, trailer):
            raise EnvelopeError("bad_mac")

    def _take_prelude(self, data: bytes) -> bytes:
        raw, body = split_prelude(data)
        self.prelude = decode_response_prelude(raw)
        return body

    def _finish(self) -> bytes:
        if self._failed:
            raise EnvelopeError("bad_carrier")
        header = self._header
        if header is None:
            raise EnvelopeError("truncated")
        if self._cipher is not None:
            if not self._ended:
                raise EnvelopeError("truncated")
            if self._sse is not None:
                self._sse.finish()
            return b""
        if len(self._buffer) < header.length:
            raise EnvelopeError("truncated")
        try:
            padded = self._derived.response.open(header.nonce, bytes(self._buffer), self._aad)
        except TagError:
            raise EnvelopeError("bad_tag") from None
        finally:
            self._buffer.clear()
        data, trailer = split_trailer(unpad(padded), header.flags)
        if self._digest is not None:
            self._digest.update(data)
        self._check_mac(trailer)
        body = self._take_prelude(data)
        self._ended = True
        return body
