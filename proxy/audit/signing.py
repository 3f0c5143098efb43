"""Who signs checkpoints, and the check of a signature: Ed25519 (RFC 8032).

The libraries are loaded when a key is first used: a sidecar without a checkpoint key has none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from proxy.audit.note import COSIGNATURE, ED25519, PublicKey, Signature, cosigned_message

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SCHEMES = (ED25519,)


class Signer(Protocol):
    """Signs with one private key."""

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of a signature over `message`."""
        ...

    def public(self) -> bytes:
        """Return the public key."""
        ...


class _Ed25519Signer:
    __slots__ = ("_key",)

    def __init__(self, private: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
            Ed25519PrivateKey,
        )

        self._key = Ed25519PrivateKey.from_private_bytes(private)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()


def signer(scheme: str, private: bytes) -> Signer:
    """Return what signs with `private`; raises ValueError."""
    if scheme != ED25519:
        raise ValueError(f"no signer for {scheme}")
    return _Ed25519Signer(private)


@lru_cache(maxsize=64)
def _ed25519(public: bytes) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
        Ed25519PublicKey,
    )

    return Ed25519PublicKey.from_public_bytes(public)


def holds(scheme: str, public: bytes, signature: bytes, message: bytes) -> bool:
    """Say whether `signature` is this key's over `message`; False where it cannot be told."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

    if scheme != ED25519:
        return False
    try:
        _ed25519(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


class NoteSigner:
    """A named key that signs note texts."""

    __slots__ = ("_signer", "key")

    def __init__(self, name: str, scheme: str, private: bytes) -> None:
        """Raise `NoteError` or ValueError for what is no key."""
        self._signer = signer(scheme, private)
        self.key = PublicKey(name, scheme, self._signer.public())

    def sign(self, text: str) -> Signature:
        """Return the signature line's parts."""
        return Signature(self.key.name, self.key.key_id, self._signer.sign(text.encode()))


class Cosigner:
    """A witness's key: signs (note text, time)."""

    __slots__ = ("_signer", "key")

    def __init__(self, name: str, private: bytes) -> None:
        """Raise `NoteError` for a bad name."""
        self._signer = signer(ED25519, private)
        self.key = PublicKey(name, COSIGNATURE, self._signer.public())

    def sign(self, text: str, seconds: int) -> Signature:
        """Return the cosignature of a note text at a Unix time."""
        blob = seconds.to_bytes(8, "big") + self._signer.sign(cosigned_message(text, seconds))
        return Signature(self.key.name, self.key.key_id, blob)
