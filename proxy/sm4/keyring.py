"""Which envelope keys there are, and what is derived from them.

A key is one `kid` for one client and one audience (docs/envelope.md, "Key ids"). The ring chooses
by kid and never by trial: GCM does not commit to its key. Keys are derived once and kept. A known
kid with another R is refused. The ring never reads a clock: `now_ms` is an argument.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.sm4.cipher import KEY_BYTES, Aead, aead
from proxy.sm4.digest import HmacSm3, hkdf_expand, hkdf_extract
from proxy.sm4.signature import (
    PRIVATE_BYTES,
    PUBLIC_BYTES,
    Signer,
    Verifier,
    is_public,
    signer,
    verifier,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

KID_BYTES = 8
ROOT_BYTES = 32
PAD_BYTES_DEFAULT = 128
PAD_UNIT_MAX = 65536
# A kid is spent after 2^28 / k envelopes of one writer or 64 GiB, whichever comes first.
ENVELOPES_MAX = 1 << 28
SEALED_BYTES_MAX = 64 << 30
_ID = re.compile(r"[!-~]{1,255}")


class KeyringError(ValueError):
    """A key is malformed, or contradicts one already known. Never shows key bytes."""


def is_id(text: str, *, empty: bool = False) -> bool:
    """Say whether `text` can be a client, audience or model id: 0x21-0x7e, 1-255 bytes."""
    if not text:
        return empty
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class EnvelopeKey:
    """One key as issued. Times in unix ms; `pad` in bytes; `writers` seal under it in all.

    Signatures: none are taken without a `scheme` (`ed25519` or `sm2`) and its `sign_public`; with
    them they may be there, with `require_signature` they must. `sign_private` is the client's.
    """

    kid: bytes
    root: bytes = field(repr=False)
    client: str
    audience: str
    tenant: str
    suite: int
    digest: str
    not_before_ms: int
    not_after_ms: int
    pad: int = PAD_BYTES_DEFAULT
    writers: int = 1
    require_mac: bool = False
    require_signature: bool = False
    scheme: str = ""
    sign_public: bytes = b""
    sign_private: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        checks = (
            (len(self.kid) == KID_BYTES, "kid: expected 8 bytes"),
            (len(self.root) == ROOT_BYTES, "root: expected 32 bytes"),
            (is_id(self.client), "client: expected 1-255 printable characters, no space"),
            (is_id(self.audience), "audience: expected 1-255 printable characters, no space"),
            (is_id(self.tenant), "tenant: expected 1-255 printable characters, no space"),
            (self.suite in KEY_BYTES, "suite: expected 1 (SM4) or 2 (AES-256)"),
            (self.digest in {"sha256", "sm3"}, "digest: expected sha256 or sm3"),
            (0 <= self.not_before_ms < self.not_after_ms < 1 << 63, "validity: empty or negative"),
            (
                0 < self.pad <= PAD_UNIT_MAX and PAD_UNIT_MAX % self.pad == 0,
                "pad: expected a divisor of 65536",
            ),
            (self.writers >= 1, "writers: expected at least 1"),
            (
                not self.scheme or self.scheme in PUBLIC_BYTES,
                "scheme: expected ed25519, sm2, or nothing",
            ),
            (
                bool(self.scheme) or not (self.sign_public or self.sign_private),
                "scheme: missing, and there is a signature key",
            ),
            (
                bool(self.scheme) or not self.require_signature,
                "require_signature: needs scheme and sign_public",
            ),
            (
                len(self.sign_private) in {0, PRIVATE_BYTES},
                f"sign_private: expected {PRIVATE_BYTES} bytes",
            ),
        )
        for good, problem in checks:
            if not good:
                raise KeyringError(problem)
        if self.scheme and not is_public(self.scheme, self.sign_public):
            raise KeyringError(f"sign_public: not a public key of {self.scheme}")


class Derived:
    """A key with everything derived from it, and how much was sealed with it here."""

    __slots__ = (
        "_signer",
        "audience",
        "key",
        "mac",
        "request",
        "request_streams",
        "response",
        "response_streams",
        "sealed_bytes",
        "sealed_envelopes",
        "verifier",
    )

    def __init__(self, key: EnvelopeKey) -> None:
        self.key = key
        self.audience = key.audience.encode()
        prk = hkdf_extract(key.kid, key.root)
        size = KEY_BYTES[key.suite]
        self.request: Aead = aead(key.suite, self._expand(prk, b"smx1 req", size))
        self.response: Aead = aead(key.suite, self._expand(prk, b"smx1 resp", size))
        self.request_streams = HmacSm3(self._expand(prk, b"smx1 req stream", 32))
        self.response_streams = HmacSm3(self._expand(prk, b"smx1 resp stream", 32))
        self.mac = HmacSm3(self._expand(prk, b"smx1 mac", 32))
        self.verifier: Verifier | None = _verifier(key) if key.scheme else None
        self._signer: Signer | None = None
        self.sealed_envelopes = 0
        self.sealed_bytes = 0

    def signer(self) -> Signer | None:
        """Return what signs with the key's own private key, or None; raises `KeyringError`."""
        if self._signer is None and self.key.sign_private:
            self._signer = _signer(self.key)
        return self._signer

    def _expand(self, prk: bytes, label: bytes, size: int) -> bytes:
        return hkdf_expand(prk, label + derivation_info(self.key), size)

    def count(self, sealed_bytes: int, *, envelopes: int = 0) -> None:
        """Note what was sealed under this kid by this process."""
        self.sealed_envelopes += envelopes
        self.sealed_bytes += sealed_bytes

    def spent(self) -> bool:
        """Say whether this process has sealed all that one writer may under this kid."""
        return (
            self.sealed_envelopes >= ENVELOPES_MAX // self.key.writers
            or self.sealed_bytes >= SEALED_BYTES_MAX
        )


def check_signatures(keys: Iterable[EnvelopeKey]) -> None:
    """Raise `KeyringError` if signatures under one of these keys cannot be verified here."""
    for key in keys:
        if key.scheme:
            _verifier(key)


def _verifier(key: EnvelopeKey) -> Verifier:
    try:
        return verifier(key.scheme, key.sign_public)
    except ValueError as problem:
        raise KeyringError(f"kid {key.kid.hex()}: sign_public: {problem}") from None


def _signer(key: EnvelopeKey) -> Signer:
    try:
        made = signer(key.scheme, key.sign_private)
    except ValueError as problem:
        raise KeyringError(f"kid {key.kid.hex()}: sign_private: {problem}") from None
    if made.public() != key.sign_public:
        raise KeyringError(f"kid {key.kid.hex()}: sign_private is not that of sign_public")
    return made


def derivation_info(key: EnvelopeKey) -> bytes:
    """Return what follows the label in HKDF's info."""
    client, audience = key.client.encode(), key.audience.encode()
    return (
        b"\0"
        + bytes([key.suite])
        + len(client).to_bytes(2, "big")
        + client
        + len(audience).to_bytes(2, "big")
        + audience
    )


class Keyring:
    """The keys of one end. Not thread-safe: one loop owns it."""

    __slots__ = ("_derived", "_keys", "_window_ms")

    def __init__(self, keys: Iterable[EnvelopeKey], *, window_ms: int = 60_000) -> None:
        self._window_ms = window_ms
        self._keys: dict[bytes, EnvelopeKey] = {}
        self._derived: dict[bytes, Derived] = {}
        for key in keys:
            self.add(key)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: EnvelopeKey) -> None:
        """Take a key; raises `KeyringError` if its kid is known with anything else than this."""
        self.check([key])
        self._keys[key.kid] = key

    def check(self, keys: Iterable[EnvelopeKey]) -> None:
        """Raise `KeyringError` if one of these keys contradicts a known one."""
        for key in keys:
            known = self._keys.get(key.kid)
            if known is not None and known != key:
                raise KeyringError(f"kid {key.kid.hex()} is known already, with other contents")

    def replace(self, keys: Iterable[EnvelopeKey]) -> None:
        """Know these keys and no others; what a key that stays has sealed stays counted.

        Raises `KeyringError` as `check`, and then nothing has changed.
        """
        kept = {key.kid: key for key in keys}
        self.check(kept.values())
        check_signatures(kept.values())
        self._keys = kept
        self._derived = {kid: row for kid, row in self._derived.items() if kid in kept}

    def prepare(self, now_ms: int) -> None:
        """Derive what opens now, so that the first request does not wait for it.

        Raises `KeyringError` where the signatures of any key cannot be verified here.
        """
        check_signatures(self._keys.values())
        for kid in self.live_kids(now_ms):
            self.get(kid)

    def get(self, kid: bytes) -> Derived | None:
        """Return the derived keys of `kid`, or None if it is not known."""
        derived = self._derived.get(kid)
        if derived is None:
            key = self._keys.get(kid)
            if key is None:
                return None
            derived = self._derived[kid] = Derived(key)
        return derived

    def accepts(self, key: EnvelopeKey, time_ms: int) -> bool:
        """Say whether an envelope of that header time may be opened with `key`."""
        return (
            key.not_before_ms - self._window_ms <= time_ms <= key.not_after_ms + 2 * self._window_ms
        )

    def live_kids(self, now_ms: int) -> list[bytes]:
        """Return the kids with which an envelope made now would be opened."""
        return [kid for kid, key in self._keys.items() if self.accepts(key, now_ms)]

    def sealing_key(self, now_ms: int) -> Derived | None:
        """Return the key to seal with now: valid, not spent, the one that began last."""
        valid = [k for k in self._keys.values() if k.not_before_ms <= now_ms <= k.not_after_ms]
        for key in sorted(valid, key=lambda k: k.not_before_ms, reverse=True):
            derived = self.get(key.kid)
            if derived is not None and not derived.spent():
                return derived
        return None

    def drop_expired(self, now_ms: int) -> list[bytes]:
        """Forget keys whose grace has ended, with all that was derived; return their kids.

        The last header time is not-after + 2 windows, and it may be a window old when it comes.
        """
        grace_ms = 3 * self._window_ms
        gone = [kid for kid, key in self._keys.items() if now_ms > key.not_after_ms + grace_ms]
        for kid in gone:
            del self._keys[kid]
            self._derived.pop(kid, None)
        return gone
