"""Settings of the keys and of the channel that is sealed with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from proxy.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where keys come from."""

    provider: Literal["file"] = setting("file", "key provider")
    file: str = setting("", "key file; empty: 14081 is closed and audit has no keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Receiver side of the SM4 channel."""

    window_s: int = setting(60, "how old an envelope may be", ge=1, le=600)
    ahead_s: int = setting(5, "how far ahead its clock may be, at most window_s", ge=0, le=60)
    fence_s: int = setting(
        10,
        "start fence: nothing from before start + fence; 0: none",
        ge=0,
        le=120,
    )
    unverified_bytes: int = setting(64 << 20, "unverified sealed bodies together", ge=1 << 20)
    replay_entries: int = setting(1 << 20, "replay cache, all kids", ge=1)
    replay_entries_per_kid: int = setting(1 << 18, "replay cache, one kid", ge=1)
    signature_queue: int = setting(
        256, "signatures waiting to be verified; beyond it 503 envelope_busy", ge=1, le=65536
    )
    progress_s: float = setting(5.0, "a sealed body without progress is refused", ge=0.1)
    replay_store: Literal["memory", "redis"] = setting(
        "memory", "who remembers envelopes; redis for replicas that share one audience"
    )
    replay_store_url: str = setting(
        "redis://127.0.0.1:6379/0", "redis:// or rediss://host:port/db, or unix:///path"
    )
    replay_store_password_file: str = setting("", "file that holds the store's password")
    replay_store_timeout_s: float = setting(
        0.5, "a store that answers later is lost: sealed requests are refused", ge=0.01, le=10
    )
    state_dir: str = setting("", "volume for the first-start marker; empty: always fence")
    sm4_tier: str = setting("auto", "what does SM4's work: auto, a tier, or cryptography")


def envelope_problems(envelope: Envelope) -> list[str]:
    """Return what is wrong between settings of the channel."""
    name, url = "envelope.replay_store_url", urlsplit(envelope.replay_store_url)
    if url.scheme not in {"redis", "rediss", "unix"} or not (url.hostname or url.path):
        return [f"{name}: expected redis://, rediss:// or unix://"]
    if url.password is not None or "password" in url.query:
        return [f"{name}: no password in here; use envelope.replay_store_password_file"]
    return []
