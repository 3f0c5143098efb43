"""The AEAD behind the channel: one interface, so that a faster SM4 can take its place.

Suite 1 is SM4-128-GCM (GB/T 32907 with RFC 8998's mode), suite 2 AES-256-GCM; both with 12-byte
nonces and 16-byte tags. `open` gives out nothing before the tag is checked.

`cryptography` is imported when the first key of a suite is made: a sidecar without keys does not
carry it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher, modes

SM4_GCM = 1
AES_256_GCM = 2
KEY_BYTES = {SM4_GCM: 16, AES_256_GCM: 32}
NONCE_BYTES = 12
TAG_BYTES = 16

# What does the work; for the start log and a metric.
TIER: str = "cryptography"


Buffer = bytes | bytearray | memoryview


class TagError(Exception):
    """The tag does not fit: key, nonce, data or associated data differ."""


class Aead(Protocol):
    """An authenticated cipher under one key."""

    def seal(self, nonce: bytes, plaintext: Buffer, aad: bytes) -> bytes:
        """Return ciphertext and tag; `nonce` is 12 bytes, never used twice with this key."""
        ...

    def open(self, nonce: bytes, sealed: Buffer, aad: bytes) -> bytes:
        """Return the plaintext of ciphertext and tag; raises `TagError`."""
        ...


class _Sm4Gcm:
    """SM4-GCM by OpenSSL's cipher objects: it has no one-call interface for SM4."""

    __slots__ = ("_algorithm", "_cipher", "_invalid", "_mode")

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - see the module's text
        from cryptography.hazmat.primitives.ciphers import (  # noqa: PLC0415
            Cipher,
            algorithms,
            modes,
        )

        self._algorithm = algorithms.SM4(key)
        self._cipher: type[Cipher[modes.GCM]] = Cipher
        self._mode = modes.GCM
        self._invalid = InvalidTag

    def seal(self, nonce: bytes, plaintext: Buffer, aad: bytes) -> bytes:
        """See `Aead.seal`."""
        worker = self._cipher(self._algorithm, self._mode(nonce)).encryptor()
        worker.authenticate_additional_data(aad)
        return worker.update(plaintext) + worker.finalize() + worker.tag

    def open(self, nonce: bytes, sealed: Buffer, aad: bytes) -> bytes:
        """See `Aead.open`."""
        if len(sealed) < TAG_BYTES:
            raise TagError
        mode = self._mode(nonce, bytes(sealed[-TAG_BYTES:]))
        worker = self._cipher(self._algorithm, mode).decryptor()
        worker.authenticate_additional_data(aad)
        # What update() gives is unverified until finalize() returns: it stays in here till then.
        plaintext = worker.update(sealed[:-TAG_BYTES])
        try:
            return plaintext + worker.finalize()
        except self._invalid:
            raise TagError from None


class _AesGcm:
    """AES-256-GCM by OpenSSL's one-call interface."""

    __slots__ = ("_cipher", "_invalid")

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - see the module's text
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

        self._cipher = AESGCM(key)
        self._invalid = InvalidTag

    def seal(self, nonce: bytes, plaintext: Buffer, aad: bytes) -> bytes:
        """See `Aead.seal`."""
        return self._cipher.encrypt(nonce, plaintext, aad)

    def open(self, nonce: bytes, sealed: Buffer, aad: bytes) -> bytes:
        """See `Aead.open`."""
        try:
            return self._cipher.decrypt(nonce, sealed, aad)
        except self._invalid:
            raise TagError from None


def aead(suite: int, key: bytes) -> Aead:
    """Return the cipher of a suite under `key` (`KEY_BYTES` long); raises ValueError."""
    if len(key) != KEY_BYTES.get(suite, -1):
        raise ValueError("suite unknown, or key length not that of the suite")
    return _Sm4Gcm(key) if suite == SM4_GCM else _AesGcm(key)
