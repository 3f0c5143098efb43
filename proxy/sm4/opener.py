"""The order on receipt of a request (docs/envelope.md, "Order on receipt").

    0 outer fields   1 form   2 time   3 not seen   4 GCM tag   5 time again, then insert
    6 padding, trailer, D, signature, MAC   7 prelude, model, tenant   8 the caller forwards

An opener is fed the HTTP body in any cuts and refuses as early as the order allows. Nothing is
given out before the last step: a stream's frames are held until its last one is verified. Time and
bytes are arguments; one loop owns the receiver, so step 5 needs no lock.

Two questions are for others, and the opener waits for what they say: whether the store that
replicas share had `(kid, N)` (step 5, `to_insert` and `inserted`), and whether a signature is good
(step 6, `check` and `checked`): that takes too long for the loop.

What is held grows with what has arrived, never by an announced length.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from proxy.discreet import Discreet
from proxy.http.body import BodyError, model_of
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
    associated_data,
    decode_header,
    decode_request_prelude,
    padded_end,
    prelude_end,
    split_trailer,
    trailer_start,
    unpad,
)
from proxy.sm4.frames import RawFrames, StreamCipher
from proxy.sm4.sealer import ResponseSealer
from proxy.sm4.signature import Verifier, signed_message

if TYPE_CHECKING:
    from proxy.sm4.keyring import Derived
    from proxy.sm4.receiver import Receiver
    from proxy.sm4.replay import Verdict


class OpenedRequest(Discreet, frozen=True):
    """A verified request. `model` is empty if the body names none; bodies show in no repr."""

    shown = ("method", "content_type", "qos", "tenant", "client", "kid", "model")

    method: str
    target: str
    content_type: str
    qos: str
    body: bytes
    tenant: str
    client: str
    kid: bytes
    suite: int
    mac: bool
    signature: bool
    model: str
    sealer: ResponseSealer


class SignatureCheck(Discreet, frozen=True):
    """What step 6 wants to know; `run` may be called from any thread."""

    verifier: Verifier
    signature: bytes
    message: bytes

    def run(self) -> bool:
        """Say whether the signature is good."""
        return self.verifier.verify(self.signature, self.message)


class RequestOpener:
    """Opens one HTTP body. After an `EnvelopeError` it is finished and holds nothing."""

    __slots__ = (
        "_aad",
        "_buffer",
        "_cipher",
        "_data",
        "_data_end",
        "_derived",
        "_digest",
        "_ended",
        "_first_bytes",
        "_frames",
        "_header",
        "_model",
        "_receiver",
        "_settled",
        "_tenant",
        "_total",
        "_trailer",
        "admitted",
        "check",
        "to_insert",
    )

    def __init__(self, receiver: Receiver, model: str, tenant: str | None) -> None:
        self._receiver: Receiver | None = receiver
        self._model = model
        self._tenant = tenant
        # Not opened yet; a single that came in one piece is left where it lies.
        self._buffer: bytes | bytearray | memoryview = b""
        self._header: Header | None = None
        self._derived: Derived | None = None
        self._aad = b""
        self._cipher: StreamCipher | None = None
        self._frames: RawFrames | None = None
        # What the tags let through, unparsed: a stream's is held until its last frame is verified,
        # a single's stands here padded. Data ends at `_data_end`.
        self._data: bytes | bytearray = b""
        self._data_end = 0
        self._first_bytes = 0
        self._trailer: bytes | None = None
        self._total = 0
        self._digest: Digest | None = None
        self._ended = False
        # Step 5 of this receiver's own cache is behind it.
        self.admitted = False
        self._settled = not receiver.shared_store
        # (kid, N) that the shared store has to take; set once, by step 5.
        self.to_insert: tuple[bytes, bytes] | None = None
        self.check: SignatureCheck | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes this opener holds: unverified ones and a stream's plaintext."""
        frames = self._frames.held_bytes if self._frames is not None else 0
        return len(self._buffer) + frames + len(self._data)

    @property
    def envelope(self) -> bytes:
        """Kid and N; empty before the header was good."""
        header = self._header
        return b"" if header is None else header.kid + header.nonce

    def feed(self, data: bytes, now_ms: int) -> None:
        """Take bytes of the HTTP body; raises `EnvelopeError` as early as can be known."""
        try:
            self._feed(data, now_ms)
        except EnvelopeError:
            self._drop()
            raise

    def overdue(self, now_ms: int) -> bool:
        """Say whether a single, or a stream's frame 0, can no longer come in time."""
        header, receiver = self._header, self._receiver
        if header is None or receiver is None or self._cipher is not None:
            return False
        return header.time_ms < now_ms - receiver.window_ms

    def finish(self, now_ms: int) -> OpenedRequest | None:
        """Return the request at the end of the HTTP body; raises `EnvelopeError`.

        None: it goes on with `inserted` (first, if there is a `to_insert`) or `checked`.
        """
        try:
            opened = self._finish(now_ms)
        except EnvelopeError:
            self._drop()
            raise
        if opened is not None:
            self._drop()
        return opened

    def inserted(self, verdict: Verdict, now_ms: int) -> OpenedRequest | None:
        """Take the shared store's word on `to_insert`; otherwise as `finish`.

        None also before the HTTP body has ended.
        """
        header, receiver = self._header, self._receiver
        assert header is not None
        assert receiver is not None
        assert not self._settled, "inserted twice"
        try:
            self._check_verdict(receiver, header, verdict, now_ms)
            self._settled = True
            opened = self._judge() if self._ended else None
        except EnvelopeError:
            self._drop()
            raise
        if opened is not None:
            self._drop()
        return opened

    def _check_verdict(
        self, receiver: Receiver, header: Header, verdict: Verdict, now_ms: int
    ) -> None:
        # The time after the answer: what was in time when asked may be forgotten by now.
        receiver.check_time(header.time_ms, now_ms)
        if verdict != "ok":
            raise EnvelopeError(verdict)

    def checked(self, *, valid: bool) -> OpenedRequest:
        """Take the answer to `check` and return the request; raises `EnvelopeError`."""
        header, derived = self._header, self._derived
        assert header is not None
        assert derived is not None
        try:
            if not valid:
                raise EnvelopeError("bad_signature")
            self._check_mac(header, derived)
            return self._parse(header, derived)
        finally:
            self._drop()

    def _drop(self) -> None:
        self._receiver = None
        self._buffer = b""
        self._data = b""
        self._frames = None
        self._cipher = None
        self._digest = None

    def _feed(self, data: bytes, now_ms: int) -> None:
        receiver = self._receiver
        assert receiver is not None, "fed after its end"
        self._total += len(data)
        if self._total > receiver.max_body_bytes:
            raise EnvelopeError("frame_too_large")
        header = self._header
        if header is None:
            if self._buffer:
                data = bytes(self._buffer) + data
            if len(data) < HEADER_BYTES:
                self._buffer = bytearray(data)
                return
            header = self._check_header(data[:HEADER_BYTES], receiver, now_ms)
            rest = memoryview(data)[HEADER_BYTES:]
            if header.flags & STREAM:
                self._frames, self._data, self._buffer = RawFrames(), bytearray(), b""
                data = bytes(rest)
            else:
                self._buffer = rest if len(rest) == header.length else bytearray(rest)
        elif self._frames is None and data:
            if isinstance(self._buffer, memoryview):  # it was whole
                raise EnvelopeError("trailing_data")
            self._buffer += data
        if self._frames is not None:
            for sealed, last in self._frames.feed(data):
                self._take_frame(receiver, sealed, last=last, now_ms=now_ms)
        elif len(self._buffer) > header.length:
            raise EnvelopeError("trailing_data")

    def _check_header(self, raw: bytes, receiver: Receiver, now_ms: int) -> Header:
        """Steps 1 to 3."""
        header = decode_header(raw, response=False)
        derived = receiver.keyring.get(header.kid)
        if derived is None:
            raise EnvelopeError("unknown_kid")
        if header.suite != derived.key.suite:
            raise EnvelopeError("bad_suite")
        receiver.check_time(header.time_ms, now_ms)
        # A kid that has sealed all it may answers nothing more, so nothing more is taken.
        if not receiver.keyring.accepts(derived.key, header.time_ms) or derived.spent():
            raise EnvelopeError("kid_expired")
        self._header = header
        if receiver.replay.seen(header.kid, header.nonce, now_ms):
            raise EnvelopeError("replayed")
        self._derived = derived
        self._aad = associated_data(raw, self._model.encode(), derived.audience)
        return header

    def _admit(self, receiver: Receiver, header: Header, now_ms: int) -> None:
        """Step 5, right after the tag: the time again, then insert, with one `now_ms`."""
        receiver.check_time(header.time_ms, now_ms)
        verdict = receiver.replay.insert(header.kid, header.nonce, now_ms)
        if verdict != "ok":
            raise EnvelopeError(verdict)
        self.admitted = True
        if receiver.shared_store:
            self.to_insert = header.kid, header.nonce

    def _take_frame(self, receiver: Receiver, sealed: bytes, *, last: bool, now_ms: int) -> None:
        header, derived = self._header, self._derived
        assert header is not None
        assert derived is not None
        if self._cipher is None:
            self._cipher = StreamCipher(
                derived.request_streams, header.suite, self._aad, header.nonce
            )
            padded = self._cipher.open_padded(sealed, last=last)
            self._admit(receiver, header, now_ms)
            data = unpad(padded)
            self._first_bytes = len(data)
            if header.flags & (SIGNATURE | MAC):
                self._digest = new_digest(derived.key.digest)
        else:
            data = self._cipher.open(sealed, last=last)
        if last:
            data, self._trailer = split_trailer(data, header.flags)
            self._first_bytes = min(self._first_bytes, len(self._data) + len(data))
        if self._digest is not None:  # as it comes: a large body's hash would hold the loop up
            self._digest.update(data)
        self._data += data
        self._data_end = len(self._data)

    def _finish(self, now_ms: int) -> OpenedRequest | None:
        receiver, header, derived = self._receiver, self._header, self._derived
        assert receiver is not None, "finished twice"
        if header is None or derived is None:
            raise EnvelopeError("truncated")
        if header.flags & STREAM:
            if self._trailer is None:
                raise EnvelopeError("truncated")
        else:
            if len(self._buffer) < header.length:
                raise EnvelopeError("truncated")
            try:
                self._data = derived.request.open(header.nonce, self._buffer, self._aad)
            except TagError:
                raise EnvelopeError("bad_tag") from None
            self._buffer = b""
            self._admit(receiver, header, now_ms)
        self._ended = True
        return self._judge() if self._settled else None

    def _judge(self) -> OpenedRequest | None:
        """Steps 6 and 7 of a whole body; None: `check` has to be answered first."""
        header, derived = self._header, self._derived
        assert header is not None
        assert derived is not None
        flags = header.flags
        if not flags & STREAM:
            self._split_single(flags)
        if flags & (SIGNATURE | MAC):
            if not self._verify(header, derived):
                return None
        elif derived.key.require_signature:
            raise EnvelopeError("missing_signature")
        elif derived.key.require_mac:
            raise EnvelopeError("missing_mac")
        return self._parse(header, derived)

    def _split_single(self, flags: int) -> None:
        """Note where a single's data ends, which stays where it lies, and keep its trailer."""
        padded = bytes(self._data)
        end = padded_end(padded)
        start = trailer_start(end, flags)
        self._data_end = self._first_bytes = start
        self._trailer = padded[start:end]

    def _verify(self, header: Header, derived: Derived) -> bool:
        """Rest of step 6: D once, signature, MAC. False: `check` has to be answered first."""
        trailer = self._trailer
        assert trailer is not None
        if not header.flags & SIGNATURE:
            if derived.key.require_signature:
                raise EnvelopeError("missing_signature")
        elif derived.verifier is None:
            raise EnvelopeError("bad_signature")
        if self._digest is None:
            self._digest = new_digest(derived.key.digest)
            self._digest.update(memoryview(self._data)[: self._data_end])
        if header.flags & SIGNATURE:
            assert derived.verifier is not None
            message = signed_message(self._aad, self._digest.digest())
            self.check = SignatureCheck(derived.verifier, trailer[:SIGNATURE_BYTES], message)
            return False
        self._check_mac(header, derived)
        return True

    def _check_mac(self, header: Header, derived: Derived) -> None:
        if not header.flags & MAC:
            if derived.key.require_mac:
                raise EnvelopeError("missing_mac")
            return
        assert self._digest is not None
        assert self._trailer is not None
        mac = derived.mac.mac(self._aad + self._digest.digest())
        if not hmac.compare_digest(mac, self._trailer[-MAC_BYTES:]):
            raise EnvelopeError("bad_mac")

    def _parse(self, header: Header, derived: Derived) -> OpenedRequest:
        """Step 7; from here on the answer is sealed."""
        has_mac = bool(header.flags & MAC)
        sealer = ResponseSealer(derived, self._model.encode(), header.nonce, mac=has_mac)
        try:
            # The prelude lies wholly in the first frame.
            start = prelude_end(self._data, self._first_bytes)
            prelude = decode_request_prelude(bytes(self._data[2:start]))
        except EnvelopeError as problem:
            raise EnvelopeError(problem.reason, sealer=sealer) from None
        body = bytes(self._data[start : self._data_end])
        try:
            model = model_of(body, prelude.content_type)
        except BodyError:
            raise EnvelopeError("model_mismatch", sealer=sealer) from None
        if model != self._model:
            raise EnvelopeError("model_mismatch", sealer=sealer)
        if self._tenant is not None and self._tenant != derived.key.tenant:
            raise EnvelopeError("tenant_mismatch", sealer=sealer)
        key = derived.key
        return OpenedRequest(
            prelude.method,
            prelude.target,
            prelude.content_type,
            prelude.qos,
            body,
            key.tenant,
            key.client,
            key.kid,
            key.suite,
            has_mac,
            bool(header.flags & SIGNATURE),
            model,
            sealer,
        )
