"""One envelope key, and what is derived from it.

A key is one `kid` for one client and one audience (docs/envelope.md, "Key ids"). Which keys there
are, and which may be used, is the ring's (`proxy/sm4/keyring.py`).
"""

from __future__ import annotations

from functools import lru_cache

from proxy.discreet import Discreet
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

KID_BYTES = 8
ROOT_BYTES = 32
PAD_BYTES_DEFAULT = 128
PAD_UNIT_MAX = 65536
# A kid is spent after 2^28 / k envelopes of one writer or 64 GiB, whichever comes first.
ENVELOPES_MAX = 1 << 28
SEALED_BYTES_MAX = 64 << 30
DIGESTS = frozenset({"sha256", "sm3"})
TIME_END_MS = 1 << 63
ID_BYTES_MAX = 255


class KeyringError(ValueError):
    """A key is malformed, or contradicts one already known. Never shows key bytes."""


def is_id(text: str, *, empty: bool = False) -> bool:
    """Say whether `text` can be a client, audience or model id: 0x21-0x7e, 1-255 bytes."""
    if not text:
        return empty
    return len(text) <= ID_BYTES_MAX and text.isascii() and text.isprintable() and " " not in text


# Audiences and tenants are few, and each stands in many keys.
_is_usual_id = lru_cache(maxsize=256)(is_id)


class EnvelopeKey(Discreet, frozen=True):
    """One key as issued. Times in unix ms; `pad` in bytes; `writers` seal under it in all.

    Signatures: none are taken without a `scheme` (`ed25519` or `sm2`) and its `sign_public`; with
    them they may be there, with `require_signature` they must. `sign_private` is the client's.
    """

    shown = ("kid", "client", "audience", "tenant", "suite", "digest")

    kid: bytes
    root: bytes
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
    sign_private: bytes = b""

    def __post_init__(self) -> None:
        # One expression for the good ones: a hundred thousand are loaded in a second.
        if (
            len(self.kid) == KID_BYTES
            and len(self.root) == ROOT_BYTES
            and is_id(self.client)
            and _is_usual_id(self.audience)
            and _is_usual_id(self.tenant)
            and self.suite in KEY_BYTES
            and self.digest in DIGESTS
            and 0 <= self.not_before_ms < self.not_after_ms < TIME_END_MS
            and 0 < self.pad <= PAD_UNIT_MAX
            and PAD_UNIT_MAX % self.pad == 0
            and self.writers >= 1
            and not (self.scheme or self.sign_public or self.sign_private)
            and not self.require_signature
        ):
            return
        self._refuse()

    def _refuse(self) -> None:
        """Raise `KeyringError` with the first fault, if there is one."""
        checks = (
            (len(self.kid) == KID_BYTES, "kid: expected 8 bytes"),
            (len(self.root) == ROOT_BYTES, "root: expected 32 bytes"),
            (is_id(self.client), "client: expected 1-255 printable characters, no space"),
            (is_id(self.audience), "audience: expected 1-255 printable characters, no space"),
            (is_id(self.tenant), "tenant: expected 1-255 printable characters, no space"),
            (self.suite in KEY_BYTES, "suite: expected 1 (SM4) or 2 (AES-256)"),
            (self.digest in DIGESTS, "digest: expected sha256 or sm3"),
            (
                0 <= self.not_before_ms < self.not_after_ms < TIME_END_MS,
                "validity: empty or negative",
            ),
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


class Used:
    """How much this process has sealed under a kid."""

    __slots__ = ("envelopes", "sealed_bytes")

    def __init__(self) -> None:
        self.envelopes = 0
        self.sealed_bytes = 0


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
        "used",
        "verifier",
    )

    def __init__(self, key: EnvelopeKey, used: Used | None = None) -> None:
        self.key = key
        self.used = Used() if used is None else used
        self.audience = key.audience.encode()
        prk = hkdf_extract(key.kid, key.root)
        size = KEY_BYTES[key.suite]
        self.request: Aead = aead(key.suite, self._expand(prk, b"smx1 req", size))
        self.response: Aead = aead(key.suite, self._expand(prk, b"smx1 resp", size))
        self.request_streams = HmacSm3(self._expand(prk, b"smx1 req stream", 32))
        self.response_streams = HmacSm3(self._expand(prk, b"smx1 resp stream", 32))
        self.mac = HmacSm3(self._expand(prk, b"smx1 mac", 32))
        self.verifier: Verifier | None = verifier_of(key) if key.scheme else None
        self._signer: Signer | None = None

    def signer(self) -> Signer | None:
        """Return what signs with the key's own private key, or None; raises `KeyringError`."""
        if self._signer is None and self.key.sign_private:
            self._signer = _signer(self.key)
        return self._signer

    def _expand(self, prk: bytes, label: bytes, size: int) -> bytes:
        return hkdf_expand(prk, label + derivation_info(self.key), size)

    @property
    def sealed_envelopes(self) -> int:
        """Return how many envelopes were sealed under this kid by this process."""
        return self.used.envelopes

    @property
    def sealed_bytes(self) -> int:
        """Return how many bytes those were."""
        return self.used.sealed_bytes

    def count(self, sealed_bytes: int, *, envelopes: int = 0) -> None:
        """Note what was sealed under this kid by this process."""
        self.used.envelopes += envelopes
        self.used.sealed_bytes += sealed_bytes

    def spent(self) -> bool:
        """Say whether this process has sealed all that one writer may under this kid."""
        return (
            self.used.envelopes >= ENVELOPES_MAX // self.key.writers
            or self.used.sealed_bytes >= SEALED_BYTES_MAX
        )


def verifier_of(key: EnvelopeKey) -> Verifier:
    """Return what verifies under a key; raises `KeyringError` where that cannot be done here."""
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
