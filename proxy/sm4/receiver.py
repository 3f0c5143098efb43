"""What all requests of one audience share: keys, replay cache, clock rules, bounds.

`RequestOpener` (`proxy/sm4/opener.py`) is the order on receipt; a receiver begins one for each HTTP
body. It reads no clock: times are arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.sm4.envelope import MEDIA_TYPE, EnvelopeError, media_type
from proxy.sm4.keyring import Keyring, is_id
from proxy.sm4.opener import RequestOpener

if TYPE_CHECKING:
    from proxy.sm4.replay import ReplayCache


class Receiver:
    """What all requests of one audience share.

    `window_ms` back and `ahead_ms` ahead are inclusive. `start_ms` is the receiver's clock at its
    start; a time up to `start_ms + fence_ms` is stale (0: no fence). `max_body_bytes` bounds the
    sealed body; the door answers 413 before that, this is the second place that checks. With
    `shared_store` every opener waits for `inserted` too. Raises `KeyringError` for signatures that
    cannot be verified here.
    """

    __slots__ = (
        "ahead_ms",
        "fence_until_ms",
        "keyring",
        "max_body_bytes",
        "replay",
        "shared_store",
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
        shared_store: bool = False,
    ) -> None:
        self.keyring = keyring
        self.replay = replay
        self.window_ms = window_ms
        self.ahead_ms = ahead_ms
        self.fence_until_ms = start_ms + fence_ms if fence_ms > 0 else -1
        self.max_body_bytes = max_body_bytes
        self.shared_store = shared_store
        # The first request of a kid shall not wait for its keys, nor for the cipher's library.
        keyring.prepare(start_ms)

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
