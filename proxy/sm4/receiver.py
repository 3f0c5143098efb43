"""The order on receipt of a request (docs/envelope.md, "Order on receipt").

    0 outer fields   1 form   2 time   3 not seen   4 GCM tag   5 time again, then insert
    6 padding, trailer, D, signature, MAC   7 prelude, model, tenant   8 the caller forwards

An opener is fed the HTTP body in any cuts and refuses as early as the order allows. Nothing is
given out before the last step: a stream's frames are held until its last one is verified. Time and
bytes are arguments; one loop owns the receiver, so step 5 needs no lock.

What is held grows with what has arrived, never by an announced length.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.http.body import BodyError, model_of
from proxy.sm4.cipher import TagError
from proxy.sm4.digest import new_digest
from proxy.sm4.envelope import (
    HEADER_BYTES,
    MAC,
    MEDIA_TYPE,
    SIGNATURE,
    STREAM,
    EnvelopeError,
    Header,
    associated_data,
    decode_header,
    decode_request_prelude,
    media_type,
    padded_end,
    prelude_end,
    split_trailer,
    trailer_start,
    unpad,
)
from proxy.sm4.frames import RawFrames, StreamCipher
from proxy.sm4.keyring import Derived, Keyring, is_id
from proxy.sm4.sealer import ResponseSealer

if TYPE_CHECKING:
    from proxy.sm4.replay import ReplayCache

__all__ = ["Budget", "EnvelopeError", "OpenedRequest", "Receiver", "RequestOpener"]

PEER_SHARE = 8


class Budget:
    """Unverified bytes over all peers, at most an eighth of them for one peer's address."""

    __slots__ = ("_held", "_limit", "_peers", "refusals")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._peers: dict[str, int] = {}
        self.refusals = 0

    @property
    def held_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._held

    @property
    def share_bytes(self) -> int:
        """The most that one peer may hold."""
        return self._limit // PEER_SHARE

    def take(self, peer: str, size: int) -> bool:
        """Take `size` bytes for `peer`; False (nothing taken) when a limit would be passed."""
        held = self._peers.get(peer, 0)
        if self._held + size > self._limit or held + size > self._limit // PEER_SHARE:
            self.refusals += 1
            return False
        self._held += size
        self._peers[peer] = held + size
        return True

    def give_back(self, peer: str, size: int) -> None:
        """Give back bytes that were taken."""
        held = self._peers.get(peer, 0) - size
        assert held >= 0
        self._held -= size
        if held:
            self._peers[peer] = held
        else:
            self._peers.pop(peer, None)


@dataclass(slots=True)
class OpenedRequest:
    """A verified request. `model` is empty if the body names none; bodies show in no repr."""

    method: str
    target: str = field(repr=False)
    content_type: str
    qos: str
    body: bytes = field(repr=False)
    tenant: str
    client: str
    kid: bytes
    suite: int
    mac: bool
    signature: bool
    model: str
    sealer: ResponseSealer = field(repr=False)


class Receiver:
    """What all requests of one audience share.

    `window_ms` back and `ahead_ms` ahead are inclusive. `start_ms` is the receiver's clock at its
    start; a time up to `start_ms + fence_ms` is stale (0: no fence). `max_body_bytes` bounds the
    sealed body; the door answers 413 before that, this is the second place that checks.
    """

    __slots__ = (
        "ahead_ms",
        "fence_until_ms",
        "keyring",
        "max_body_bytes",
        "replay",
        "window_ms",
    )

    def __init__(
        self,
        keyring: Keyring,
        replay: ReplayCache,
        *,
        window_ms: int = 60_000,
        ahead_ms: int = 5_000,
        start_ms: int,
        fence_ms: int,
        max_body_bytes: int,
    ) -> None:
        self.keyring = keyring
        self.replay = replay
        self.window_ms = window_ms
        self.ahead_ms = ahead_ms
        self.fence_until_ms = start_ms + fence_ms if fence_ms > 0 else -1
        self.max_body_bytes = max_body_bytes
        # The first request of a kid shall not wait for its keys, nor for the cipher's library.
        for kid in keyring.live_kids(start_ms):
            keyring.get(kid)

    def begin(
        self,
        content_type: str | None,
        content_encoding: str | None,
        model_id: str | None,
        model_id_repeated: bool,  # noqa: FBT001 - one outer field after the other
        tenant_id: str | None,
    ) -> RequestOpener:
        """Return the opener of one HTTP body, given the outer fields it came with (None: absent).

        Raises `EnvelopeError` bad_carrier or model_mismatch.
        """
        if content_encoding is not None or media_type(content_type or "") != MEDIA_TYPE:
            raise EnvelopeError("bad_carrier")
        model = model_id or ""
        if model_id_repeated or not is_id(model, empty=True):
            raise EnvelopeError("model_mismatch")
        return RequestOpener(self, model, tenant_id)

    def check_time(self, time_ms: int, now_ms: int) -> None:
        """Raise `EnvelopeError` stale or future if a header's time is not acceptable now."""
        if time_ms < now_ms - self.window_ms or time_ms <= self.fence_until_ms:
            raise EnvelopeError("stale")
        if time_ms > now_ms + self.ahead_ms:
            raise EnvelopeError("future")


class RequestOpener:
    """Opens one HTTP body. After an `EnvelopeError` it is finished and holds nothing."""

    __slots__ = (
        "_aad",
        "_buffer",
        "_cipher",
        "_data",
        "_data_end",
        "_derived",
        "_first_bytes",
        "_frames",
        "_header",
        "_model",
        "_receiver",
        "_tenant",
        "_total",
        "_trailer",
    )

    def __init__(self, receiver: Receiver, model: str, tenant: str | None) -> None:
        self._receiver: Receiver | None = receiver
        self._model = model
        self._tenant = tenant
        # Not opened yet; a single that came in one piece is left where it lies.
        self._buffer: bytearray | memoryview = bytearray()
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

    @property
    def held_bytes(self) -> int:
        """Bytes this opener holds: unverified ones and a stream's plaintext."""
        frames = self._frames.held_bytes if self._frames is not None else 0
        return len(self._buffer) + frames + len(self._data)

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

    def finish(self, now_ms: int) -> OpenedRequest:
        """Return the request at the end of the HTTP body; raises `EnvelopeError`."""
        try:
            return self._finish(now_ms)
        finally:
            self._drop()

    def _drop(self) -> None:
        self._receiver = None
        self._buffer = bytearray()
        self._data = b""
        self._frames = None
        self._cipher = None

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
            header = self._header = self._check_header(data[:HEADER_BYTES], receiver, now_ms)
            rest = memoryview(data)[HEADER_BYTES:]
            if header.flags & STREAM:
                self._frames, self._data, self._buffer = RawFrames(), bytearray(), bytearray()
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
        else:
            data = self._cipher.open(sealed, last=last)
        if last:
            data, self._trailer = split_trailer(data, header.flags)
            self._first_bytes = min(self._first_bytes, len(self._data) + len(data))
        self._data += data
        self._data_end = len(self._data)

    def _finish(self, now_ms: int) -> OpenedRequest:
        receiver, header, derived = self._receiver, self._header, self._derived
        assert receiver is not None, "finished twice"
        if header is None or derived is None:
            raise EnvelopeError("truncated")
        if header.flags & STREAM:
            if self._trailer is None:
                raise EnvelopeError("truncated")
            trailer = self._trailer
        else:
            if len(self._buffer) < header.length:
                raise EnvelopeError("truncated")
            try:
                padded = derived.request.open(header.nonce, self._buffer, self._aad)
            except TagError:
                raise EnvelopeError("bad_tag") from None
            self._admit(receiver, header, now_ms)
            trailer = self._split_single(padded, header.flags)
        self._verify(header, derived, trailer)
        return self._parse(header, derived)

    def _split_single(self, padded: bytes, flags: int) -> bytes:
        """Keep a single's data where it lies and return its trailer."""
        end = padded_end(padded)
        start = trailer_start(end, flags)
        self._data, self._data_end, self._first_bytes = padded, start, start
        return padded[start:end]

    def _verify(self, header: Header, derived: Derived, trailer: bytes) -> None:
        """Rest of step 6: what policy demands, signature, MAC."""
        if header.flags & SIGNATURE:
            # No key provider issues signature keys yet: bit3 without a key at the kid.
            raise EnvelopeError("bad_signature")
        if derived.key.require_signature:
            raise EnvelopeError("missing_signature")
        if header.flags & MAC:
            digest = new_digest(derived.key.digest)
            digest.update(memoryview(self._data)[: self._data_end])
            mac = derived.mac.mac(self._aad + digest.digest())
            if not hmac.compare_digest(mac, trailer):
                raise EnvelopeError("bad_mac")
        elif derived.key.require_mac:
            raise EnvelopeError("missing_mac")

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
            False,  # signature
            model,
            sealer,
        )
