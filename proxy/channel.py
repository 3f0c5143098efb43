"""Starting the sealed door's receiver: keys, replay cache, start fence, the store replicas share.

Order: the marker on the pod's volume is on disk before anything is served, and the fence counts
from the receiver's own clock.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.settings import StartError, one_line
from proxy.sm4.keyring import Keyring, KeyringError
from proxy.sm4.receiver import Receiver
from proxy.sm4.replay import ReplayCache

if TYPE_CHECKING:
    from proxy.context import Context
    from proxy.health import Health
    from proxy.keys.provider import KeySet


def start_channel(context: Context, health: Health, keys: KeySet) -> None:
    """Give the context its receiver; raises StartError or SettingsError."""
    settings = context.settings.envelope
    window_ms = settings.window_s * 1000
    # More would let an envelope outlive the cache that remembers it, or a restart.
    ahead_ms = min(settings.ahead_s * 1000, window_ms)
    audiences = keys.audiences()
    if len(audiences) != 1:
        raise StartError(
            f"keys.file: one receiver has one audience, these keys name {len(audiences)}"
        )
    shared = settings.replay_store == "redis"
    # What replicas share has been served by others: the marker on one volume says nothing.
    fresh = not shared and _first_start(context, next(iter(audiences)))
    fence_ms = 0 if fresh else settings.fence_s * 1000
    if fence_ms:
        fence_ms = max(fence_ms, ahead_ms)
    start_ms = context.clock.wall_ms()
    health.fence_until_ms = start_ms + fence_ms if fence_ms else -1
    try:
        context.receiver = Receiver(
            Keyring(keys.envelope_keys(), window_ms=window_ms),
            ReplayCache(
                window_ms=window_ms,
                limit_per_kid=settings.replay_entries_per_kid,
                limit=settings.replay_entries,
            ),
            window_ms=window_ms,
            ahead_ms=ahead_ms,
            start_ms=start_ms,
            fence_ms=fence_ms,
            max_body_bytes=context.settings.limits.body_bytes,
            shared_store=shared,
        )
    except KeyringError as problem:
        raise StartError(f"keys.file: {problem}") from None
    keys.forget_envelope_keys()
    if shared:
        _share_replay(context, health, context.receiver)


def _first_start(context: Context, audience: str) -> bool:
    """Say whether this audience provably never served: its pod's own, unmarked volume."""
    uid, directory = context.settings.identity.pod_uid, context.settings.envelope.state_dir
    if not uid or uid not in audience or not directory:
        return False
    marker = Path(directory) / f"served-{hashlib.sha256(audience.encode()).hexdigest()[:16]}"
    try:
        handle = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    except OSError as problem:
        raise StartError(f"envelope.state_dir: {problem}") from None
    os.fsync(handle)
    os.close(handle)
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(parent)
    os.close(parent)
    return True


def _share_replay(context: Context, health: Health, receiver: Receiver) -> None:
    settings = context.settings.envelope
    try:
        from proxy.sharing import SharedReplay  # noqa: PLC0415 - an extra's package
    except ImportError:
        raise StartError(
            "envelope.replay_store: redis needs a package: pip install 'tongguan[redis]'"
        ) from None
    name = "envelope.replay_store_password_file"
    password = one_line(settings.replay_store_password_file, name).decode("utf-8", "replace")

    def fence_again() -> None:
        """Refuse what may have been taken before the store lost it."""
        if settings.fence_s:
            fence_ms = max(settings.fence_s * 1000, receiver.ahead_ms)
            receiver.fence_until_ms = context.clock.wall_ms() + fence_ms
            health.fence_until_ms = receiver.fence_until_ms

    context.shared_replay = SharedReplay(
        context.loop,
        settings.replay_store_url,
        password or None,
        window_ms=settings.window_s * 1000,
        timeout_s=settings.replay_store_timeout_s,
        on_renewed=fence_again,
    )
    context.shared_replay.start()
