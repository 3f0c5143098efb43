"""The side that asks: which key now, what its request is, and what it may take for an answer.

For whoever that is: the httpx transport (`proxy/client.py`) and the sidecar that seals on the way
out (`proxy/outbound.py`). Who sent an envelope takes nothing but an envelope; of an unsealed answer
no more is learned than its status and which of our error codes it names. Pure: times, nonces and
bytes are arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from proxy.errors import ERRORS
from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import MEDIA_TYPE, RequestPrelude, media_type
from proxy.sm4.frames import FRAME_SEALED_MAX, frame_data_max
from proxy.sm4.sealer import EVENT_STREAM, RequestSealer, SingleTooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from proxy.sm4.keyring import Derived, EnvelopeKey, Keyring

# Outer fields of an answer that whoever asked may see, as hints; lower case.
HINTS = (
    "date",
    "retry-after",
    "server-timing",
    "x-qos-class",
    "x-qos-pool",
    "x-request-id",
    "x-should-retry",
    "x-tongguan-error",
    "x-trace-id",
)
# How much of an unsealed answer is looked at for one of our error codes.
CLEAR_BYTES_MAX = 16 << 10
_PIECE_FRAMES = 4  # how much of a large body is sealed at a time


class Recipient:
    """One audience to seal to: its keys in `ring`, and which of them now. Keeps no root.

    Raises ValueError unless `keys` are some, and all for one audience.
    """

    __slots__ = ("_derived", "_from_ms", "_ring", "_rows", "_until_ms", "audience")

    def __init__(self, ring: Keyring, keys: Iterable[EnvelopeKey]) -> None:
        found = list(keys)
        audiences = {key.audience for key in found}
        if len(audiences) != 1:
            raise ValueError(f"keys of one audience are needed, these name {len(audiences)}")
        self.audience = audiences.pop()
        self._ring = ring
        # The one that began last first (docs/envelope.md, "Keys").
        self._rows = sorted(
            ((key.not_before_ms, key.not_after_ms, key.kid) for key in found), reverse=True
        )
        self._derived: Derived | None = None
        self._from_ms = self._until_ms = 0

    def key(self, now_ms: int) -> Derived | None:
        """Return the key to seal with now, or None: none is valid, or those that are are spent."""
        derived = self._derived
        if derived is not None:
            if self._from_ms <= now_ms < self._until_ms and not derived.spent():
                return derived
            self._derived = None
        until_ms = 1 << 63
        for not_before_ms, not_after_ms, kid in self._rows:
            if now_ms < not_before_ms:
                until_ms = not_before_ms
            elif now_ms <= not_after_ms:
                derived = self._ring.get(kid)
                if derived is not None and not derived.spent():
                    self._derived = derived
                    self._from_ms = not_before_ms
                    self._until_ms = min(until_ms, not_after_ms + 1)
                    return derived
        return None

    def in_time(self, now_ms: int) -> bool:
        """Say whether a key is valid now, spent or not; changes nothing."""
        return any(begins <= now_ms <= ends for begins, ends, _ in self._rows)

    def until_ms(self) -> int:
        """Return when the last of its keys ends, unix ms."""
        return max(ends for _, ends, _ in self._rows)


def pieces(pad: int, body: bytes) -> Iterator[bytes]:
    """Yield a large body in pieces that fill their frames."""
    size = _PIECE_FRAMES * frame_data_max(pad, FRAME_SEALED_MAX)
    for start in range(0, len(body), size):
        yield body[start : start + size]


def seal_whole(sealer: RequestSealer, prelude: RequestPrelude, body: bytes) -> bytes:
    """Return a whole request: a single envelope, or a stream where that is too small."""
    try:
        return sealer.single(prelude, body)
    except SingleTooLargeError:
        stream = sealer.stream(prelude)
        return stream.head() + stream.last(body)


def accept(asked: str, *, events: bool) -> str:
    """Return the outer Accept: what was asked for, and what can carry it.

    `events`: a streamed answer is to come as an event stream (the SSE carrier).
    """
    carriers = MEDIA_TYPE
    if events and EVENT_STREAM not in asked.lower():
        carriers = f"{MEDIA_TYPE}, {EVENT_STREAM}"
    return f"{carriers}, {asked}" if asked else carriers


def answer_opener(
    sealer: RequestSealer, status: int, content_type: str | None, content_encoding: str | None
) -> AnswerOpener | None:
    """Return what opens the answer with this outer status and fields; None: it is not sealed.

    Raises `EnvelopeError` bad_carrier.
    """
    kind = media_type(content_type or "")
    if kind != MEDIA_TYPE and not (kind == EVENT_STREAM and status == 200):
        return None
    return AnswerOpener(sealer, content_type, content_encoding)


class _ErrorMember(msgspec.Struct):
    code: Any = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorMember


def clear_code(body: bytes) -> str | None:
    """Return our error code that an unsealed answer names; its text is nobody's word."""
    try:
        code = msgspec.json.decode(body, type=_ErrorBody).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return code if isinstance(code, str) and code in ERRORS else None
