"""Who signs checkpoints, and the check of a signature: Ed25519, or SM2 with SM3.

The libraries are loaded when a key is first used: a sidecar without a checkpoint key has none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from proxy.audit.note import COSIGNATURE, ED25519, PublicKey, Signature, cosigned_message
from proxy.sm4 import signature

if TYPE_CHECKING:
    from proxy.sm4.signature import Verifier


@lru_cache(maxsize=64)
def _verifier(scheme: str, public: bytes) -> Verifier:
    return signature.verifier(scheme, public)


def holds(scheme: str, public: bytes, signed: bytes, message: bytes) -> bool:
    """Say whether `signed` is this key's signature over `message`.

    False where it is no key, and where SM2 is not to be had here: who was given such a key is told
    before (`given.read_keys`).
    """
    try:
        return _verifier(scheme, public).verify(signed, message)
    except ValueError:
        return False


class NoteSigner:
    """A named key that signs note texts."""

    __slots__ = ("_signer", "key")

    def __init__(self, name: str, scheme: str, private: bytes) -> None:
        """Raise `NoteError` or ValueError for what is no key, `Sm2UnavailableError`."""
        self._signer = signature.signer(scheme, private)
        self.key = PublicKey(name, scheme, self._signer.public())

    def sign(self, text: str) -> Signature:
        """Return the signature line's parts."""
        return Signature(self.key.name, self.key.key_id, self._signer.sign(text.encode()))


class Cosigner:
    """A witness's key: signs (note text, time)."""

    __slots__ = ("_signer", "key")

    def __init__(self, name: str, private: bytes) -> None:
        """Raise `NoteError` for a bad name."""
        self._signer = signature.signer(ED25519, private)
        self.key = PublicKey(name, COSIGNATURE, self._signer.public())

    def sign(self, text: str, seconds: int) -> Signature:
        """Return the cosignature of a note text at a Unix time."""
        blob = seconds.to_bytes(8, "big") + self._signer.sign(cosigned_message(text, seconds))
        return Signature(self.key.name, self.key.key_id, blob)
