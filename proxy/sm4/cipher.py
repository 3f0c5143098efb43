"""The AEAD behind the channel: one interface, and what does the work behind it.

Suite 1 is SM4-128-GCM (GB/T 32907 with RFC 8998's mode), suite 2 AES-256-GCM; both with 12-byte
nonces and 16-byte tags. `open` gives out nothing before the tag is checked.

SM4 comes from `kernels.sm4` where it was built, in the best tier of this CPU, else from
`cryptography`; `choose_tier` picks another one before keys are made. `cryptography` is imported
when the first key that needs it is made: a sidecar with SM4 keys and the extension does not carry
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernels import sm4

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher, modes

SM4_GCM = 1
AES_256_GCM = 2
KEY_BYTES = {SM4_GCM: 16, AES_256_GCM: 32}
NONCE_BYTES = 12
TAG_BYTES = 16
AUTO, CRYPTOGRAPHY = "auto", "cryptography"

# The extension's own exception, so that its `open` needs no frame of ours around it.
TagError = sm4.InvalidTag
"""The tag does not fit: key, nonce, data or associated data differ."""

Buffer = bytes | bytearray | memoryview


class Aead(Protocol):
    """An authenticated cipher under one key."""

    def seal(self, nonce: bytes, plaintext: Buffer, aad: bytes, /) -> bytes:
        """Return ciphertext and tag; `nonce` is 12 bytes, never used twice with this key."""
        ...

    def open(self, nonce: bytes, sealed: Buffer, aad: bytes, /) -> bytes:
        """Return the plaintext of ciphertext and tag; raises `TagError`."""
        ...


class _CryptographySm4:
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

    def seal(self, nonce: bytes, plaintext: Buffer, aad: bytes, /) -> bytes:
        """See `Aead.seal`."""
        worker = self._cipher(self._algorithm, self._mode(nonce)).encryptor()
        worker.authenticate_additional_data(aad)
        return worker.update(plaintext) + worker.finalize() + worker.tag

    def open(self, nonce: bytes, sealed: Buffer, aad: bytes, /) -> bytes:
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

    __slots__ = ("_cipher", "_invalid", "seal")

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - see the module's text
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

        self._cipher = AESGCM(key)
        self._invalid = InvalidTag
        self.seal = self._cipher.encrypt

    def open(self, nonce: bytes, sealed: Buffer, aad: bytes, /) -> bytes:
        """See `Aead.open`."""
        try:
            return self._cipher.decrypt(nonce, sealed, aad)
        except self._invalid:
            raise TagError from None


class _Choice:
    """What does SM4's work in this process."""

    __slots__ = ("tier",)

    def __init__(self) -> None:
        self.tier = usable_tiers()[0]


def usable_tiers() -> tuple[str, ...]:
    """Return what can do SM4's work here, best first; `cryptography` is the last resort."""
    return (*sm4.TIERS, CRYPTOGRAPHY)


_choice = _Choice()


def tier() -> str:
    """Return what SM4 keys made from now on use; for the start log and a metric."""
    return _choice.tier


def choose_tier(name: str) -> str:
    """Use this tier (`auto`: the best) for SM4 keys made from now on; return its name.

    Raises ValueError, naming the usable ones.
    """
    usable = usable_tiers()
    if name not in (AUTO, *usable):
        raise ValueError(f"{name!r} is not usable here; usable: {', '.join((AUTO, *usable))}")
    _choice.tier = usable[0] if name == AUTO else name
    return _choice.tier


def native_frames(suite: int, key: bytes, mask: bytes, aad: bytes) -> sm4.Frames | None:
    """Return the extension's frames of a stream; None where the suite or tier is not its own."""
    if suite != SM4_GCM or _choice.tier == CRYPTOGRAPHY:
        return None
    return sm4.Frames(key, mask, aad, _choice.tier)


def aead(suite: int, key: bytes, *, one_message: bool = False) -> Aead:
    """Return the cipher of a suite under `key` (`KEY_BYTES` long); raises ValueError.

    `one_message`: the key is for one short message, so precompute little.
    """
    if len(key) != KEY_BYTES.get(suite, -1):
        raise ValueError("suite unknown, or key length not that of the suite")
    if suite != SM4_GCM:
        return _AesGcm(key)
    if _choice.tier == CRYPTOGRAPHY:
        return _CryptographySm4(key)
    return sm4.Sm4Gcm(key, _choice.tier, one_message)
