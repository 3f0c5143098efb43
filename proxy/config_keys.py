"""Settings of the keys and of the channel that is sealed with them."""

import re
from typing import Literal
from urllib.parse import urlsplit

from proxy.settings import Section, setting

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Written into a request's path as it is: nothing to escape, and no way out of the mount.
_PATH = re.compile(r"(?!.*\.\.)[A-Za-z0-9_./-]{0,255}")


class Keys(Section):
    """Where keys come from."""

    provider: Literal["file", "directory", "http", "pkcs11"] = setting("file", "key provider")
    file: str = setting("", "key file; empty: 14081 is closed and audit has no keys")
    directory: str = setting("", "directory of mounted secrets: each *.json in it is a key file")
    poll_s: float = setting(
        0.25, "how often files that may change, and a key service, are looked at", ge=0.1, le=3600
    )
    expiry_alarm_s: float = setting(
        86400.0, "a key that nothing follows is an alarm so long before its end", ge=0
    )
    http_address: str = setting("", "key service, https://host:port; http for loopback alone")
    http_token_file: str = setting("", "file that holds the service's token")
    http_ca_file: str = setting("", "certificates the service is verified by; empty: system")
    http_namespace: str = setting("", "namespace at the service; empty: none")
    http_mount: str = setting("secret", "where its KV engine, version 2, is mounted")
    http_path: str = setting("tongguan", "the secret; one that ends in / is a folder of secrets")
    http_timeout_s: float = setting(5.0, "an answer that takes longer is none", ge=0.1, le=60)
    http_lease_s: float = setting(
        3600.0, "keys are used for so long after its last answer", ge=1, le=30 * 86400
    )
    pkcs11_module: str = setting("", "library of the token, a .so file")
    pkcs11_token: str = setting("", "label of the token that holds the root")
    pkcs11_pin_file: str = setting("", "file that holds the token's user PIN")


def keys_problems(keys: Keys) -> list[str]:
    """Return what is wrong between settings of the keys."""
    needed = {
        "file": (),
        "directory": ("directory",),
        "http": ("http_address", "http_token_file", "http_mount", "http_path"),
        "pkcs11": ("file", "pkcs11_module", "pkcs11_token", "pkcs11_pin_file"),
    }[keys.provider]
    problems = [
        f"keys.{name}: needed by keys.provider = {keys.provider!r}"
        for name in needed
        if not getattr(keys, name)
    ]
    if keys.http_address:
        url = urlsplit(keys.http_address)
        if url.scheme not in {"http", "https"} or not url.hostname or url.path.strip("/"):
            problems.append("keys.http_address: expected https://host:port, without a path")
        elif url.scheme == "http" and url.hostname not in _LOOPBACK:
            problems.append("keys.http_address: keys do not go unencrypted, expected https://")
        if url.username is not None or url.query:
            problems.append("keys.http_address: no credentials in here; use keys.http_token_file")
    problems += [
        f"keys.{name}: expected letters, digits, and any of -_./"
        for name in ("http_namespace", "http_mount", "http_path")
        if not _PATH.fullmatch(getattr(keys, name))
    ]
    return problems


class Envelope(Section):
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
