"""Opening a request's envelope that lies in a file or comes through a pipe, in constant memory.

A receiver's order (`opener`) without its clock and replay cache: who opens a stored envelope learns
that a holder of the key sealed these bytes at the header's time, not that they are new. The kid's
own times hold for the header's time.

A stream's body is released frame by frame, each after its tag and padding. Signature and MAC are in
the last frame, so what was released is authentic (GCM) but whole only after `finish`: who must not
act on a part keeps it aside until then. A single is released by `finish`, after everything.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from proxy.sm4.cipher import TagError
from proxy.sm4.digest import Digest, new_digest
from proxy.sm4.envelope import (
    HEADER_BYTES,
    MAC,
    MAC_BYTES,
    SIGNATURE,
    SIGNATURE_BYTES,
    STREAM,
    EnvelopeError,
    Header,
    RequestPrelude,
    associated_data,
    decode_header,
    decode_request_prelude,
    split_prelude,
    split_trailer,
    unpad,
)
from proxy.sm4.frames import RawFrames, StreamCipher
from proxy.sm4.signature import signed_message

if TYPE_CHECKING:
    from proxy.sm4.keyring import Derived, EnvelopeKey, Keyring


class StoredOpener:
    """Opens one stored request. Holds at most a single envelope (1 MiB) or one frame (64 KiB).

    `model`: what X-Model-Id would have said; `times_ms`: the first and last header time that is
    taken, bounds included (None: as the kid's times say). Feed it any cuts; every method raises
    `EnvelopeError`, and after one nothing more is released.
    """

    __slots__ = (
        "_aad",
        "_buffer",
        "_cipher",
        "_derived",
        "_digest",
        "_failed",
        "_frames",
        "_keys",
        "_model",
        "_times_ms",
        "complete",
        "header",
        "prelude",
    )

    def __init__(
        self, keys: Keyring, *, model: str, times_ms: tuple[int, int] | None = None
    ) -> None:
        self._keys = keys
        self._times_ms = times_ms
        self._model = model.encode()
        self._buffer = bytearray()
        self._aad = b""
        self._derived: Derived | None = None
        self._cipher: StreamCipher | None = None
        self._frames: RawFrames | None = None
        self._digest: Digest | None = None
        self._failed = False
        self.header: Header | None = None
        self.prelude: RequestPrelude | None = None
        self.complete = False

    @property
    def key(self) -> EnvelopeKey:
        """The key of the envelope, once its header has come."""
        assert self._derived is not None
        return self._derived.key

    def feed(self, data: bytes) -> list[bytes]:
        """Return the body bytes that these bytes release (often none)."""
        if self._failed:
            raise EnvelopeError("bad_carrier")
        try:
            return self._feed(data)
        except EnvelopeError:
            self._failed = True
            raise

    def finish(self) -> bytes:
        """Return the rest of the body at the end of the envelope's bytes."""
        if self._failed:
            raise EnvelopeError("bad_carrier")
        try:
            return self._finish()
        except EnvelopeError:
            self._failed = True
            raise

    def _feed(self, data: bytes) -> list[bytes]:
        header = self.header
        if header is None:
            self._buffer += data
            if len(self._buffer) < HEADER_BYTES:
                return []
            whole = bytes(self._buffer)
            self._buffer.clear()
            header = self._take_header(whole[:HEADER_BYTES])
            data = whole[HEADER_BYTES:]
        if self._frames is None:
            self._buffer += data
            if len(self._buffer) > header.length:
                raise EnvelopeError("trailing_data")
            return []
        out = [self._take_frame(sealed, last=last) for sealed, last in self._frames.feed(data)]
        return [body for body in out if body]

    def _take_header(self, raw: bytes) -> Header:
        """Steps 1 and 2, the latter by the kid's times alone."""
        header = decode_header(raw, response=False)
        derived = self._keys.get(header.kid)
        if derived is None:
            raise EnvelopeError("unknown_kid")
        if header.suite != derived.key.suite:
            raise EnvelopeError("bad_suite")
        if self._times_ms is not None:
            if header.time_ms < self._times_ms[0]:
                raise EnvelopeError("stale")
            if header.time_ms > self._times_ms[1]:
                raise EnvelopeError("future")
        if not self._keys.accepts(derived.key, header.time_ms):
            raise EnvelopeError("kid_expired")
        self._derived = derived
        self._aad = associated_data(raw, self._model, derived.audience)
        if header.flags & (MAC | SIGNATURE):
            self._digest = new_digest(derived.key.digest)
        if header.flags & STREAM:
            self._frames = RawFrames()
            self._cipher = StreamCipher(
                derived.request_streams, header.suite, self._aad, header.nonce
            )
        self.header = header
        return header

    def _take_frame(self, sealed: bytes, *, last: bool) -> bytes:
        header, cipher = self.header, self._cipher
        assert header is not None
        assert cipher is not None
        padded = cipher.open_padded(sealed, last=last)
        if self.prelude is None:
            self._check_policy(header)
        data, trailer = unpad(padded), b""
        if last:
            data, trailer = split_trailer(data, header.flags)
        if self._digest is not None:
            self._digest.update(data)
        if last:
            self._check_trailer(header, trailer)
            self.complete = True
        return self._past_prelude(data)

    def _past_prelude(self, data: bytes) -> bytes:
        if self.prelude is not None:
            return data
        raw, body = split_prelude(data)
        self.prelude = decode_request_prelude(raw)
        return body

    def _finish(self) -> bytes:
        header, derived = self.header, self._derived
        if header is None or derived is None:
            raise EnvelopeError("truncated")
        if header.flags & STREAM:
            if not self.complete:
                raise EnvelopeError("truncated")
            return b""
        if len(self._buffer) < header.length:
            raise EnvelopeError("truncated")
        try:
            padded = derived.request.open(header.nonce, bytes(self._buffer), self._aad)
        except TagError:
            raise EnvelopeError("bad_tag") from None
        finally:
            self._buffer.clear()
        data, trailer = split_trailer(unpad(padded), header.flags)
        self._check_policy(header)
        if self._digest is not None:
            self._digest.update(data)
        self._check_trailer(header, trailer)
        self.complete = True
        return self._past_prelude(data)

    def _check_policy(self, header: Header) -> None:
        """What the kid demands, after the first tag: a flipped flag is a bad tag before."""
        key = self.key
        if header.flags & SIGNATURE:
            if not key.scheme:
                raise EnvelopeError("bad_signature")
        elif key.require_signature:
            raise EnvelopeError("missing_signature")
        if key.require_mac and not header.flags & MAC:
            raise EnvelopeError("missing_mac")

    def _check_trailer(self, header: Header, trailer: bytes) -> None:
        if self._digest is None:
            return
        derived = self._derived
        assert derived is not None
        digest = self._digest.digest()
        if header.flags & SIGNATURE:
            verifier = derived.verifier
            message = signed_message(self._aad, digest)
            if verifier is None or not verifier.verify(trailer[:SIGNATURE_BYTES], message):
                raise EnvelopeError("bad_signature")
        if header.flags & MAC and not hmac.compare_digest(
            derived.mac.mac(self._aad + digest), trailer[-MAC_BYTES:]
        ):
            raise EnvelopeError("bad_mac")
