"""Signatures of requests (docs/envelope.md, "Plaintext"): Ed25519 (RFC 8032), SM2 with SM3.

What is signed is short (AAD and D), so a signature costs the same for every body: about 0.1 ms to
verify with Ed25519, 0.3 ms with SM2. The libraries are imported when the first key needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

ED25519 = "ed25519"
SM2 = "sm2"
PUBLIC_BYTES = {ED25519: 32, SM2: 64}
PRIVATE_BYTES = 32
_Y_OF_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_LABEL = b"SMX1 signature\0"
_DRAWS_MAX = 100
# Ed25519's points whose order divides 8, as y with the sign of x taken off: 0, 1, -1 (and 0 and 1
# written as p and p + 1), and the two y of order 8.
_SMALL_ORDER = frozenset(
    y.to_bytes(32, "little")
    for p in ((1 << 255) - 19,)
    for y in (0, 1, p - 1, p, p + 1, _Y_OF_ORDER_8, p - _Y_OF_ORDER_8)
)


class Verifier(Protocol):
    """Verifies under one public key; may be used from several threads."""

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Say whether the 64 bytes are this key's signature over `message`."""
        ...


class Signer(Protocol):
    """Signs with one private key."""

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of a signature over `message`."""
        ...

    def public(self) -> bytes:
        """Return the public key."""
        ...


class _Ed25519Verifier:
    """Ed25519 by `cryptography`."""

    __slots__ = ("_invalid", "_key")

    def __init__(self, public: bytes) -> None:
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - see the module
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
            Ed25519PublicKey,
        )

        self._key: Ed25519PublicKey = Ed25519PublicKey.from_public_bytes(public)
        self._invalid = InvalidSignature

    def verify(self, signature: bytes, message: bytes) -> bool:
        """See `Verifier.verify`."""
        try:
            self._key.verify(signature, message)
        except self._invalid:
            return False
        return True


class _Ed25519Signer:
    """Ed25519 by `cryptography`, where `ed25519` finds nothing that signs."""

    __slots__ = ("_key",)

    def __init__(self, private: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
            Ed25519PrivateKey,
        )

        self._key: Ed25519PrivateKey = Ed25519PrivateKey.from_private_bytes(private)

    def sign(self, message: bytes) -> bytes:
        """See `Signer.sign`."""
        return self._key.sign(message)

    def public(self) -> bytes:
        """See `Signer.public`."""
        return self._key.public_key().public_bytes_raw()


def signed_message(aad: bytes, digest: bytes) -> bytes:
    """Return what a signature is over; `digest` is D."""
    return _LABEL + aad + digest


def verifier(scheme: str, public: bytes) -> Verifier:
    """Return what verifies under `public`; raises ValueError."""
    if scheme == SM2:
        from proxy.sm4.sm2 import Sm2Verifier  # noqa: PLC0415 - see the module

        return Sm2Verifier(public)
    return _Ed25519Verifier(public)


def signer(scheme: str, private: bytes) -> Signer:
    """Return what signs with `private`; raises ValueError."""
    if scheme == SM2:
        from proxy.sm4.sm2 import Sm2Signer  # noqa: PLC0415 - see the module

        return Sm2Signer(private)
    from proxy.sm4.ed25519 import Ed25519Signer, Ed25519UnavailableError  # noqa: PLC0415

    try:
        return Ed25519Signer(private)
    except Ed25519UnavailableError:
        return _Ed25519Signer(private)


def is_public(scheme: str, public: bytes) -> bool:
    """Say whether these bytes can be a scheme's public key.

    SM2's is on its curve. Ed25519's is none of the points of small order, under which one signature
    may be good for many messages, without any private key.
    """
    if len(public) != PUBLIC_BYTES[scheme]:
        return False
    if scheme == SM2:
        from proxy.sm4.sm2 import is_point  # noqa: PLC0415 - see the module

        return is_point(public)
    return public[:31] + bytes([public[31] & 0x7F]) not in _SMALL_ORDER


def draw(scheme: str, random: Callable[[int], bytes]) -> tuple[bytes, bytes]:
    """Return (private, public) of a fresh pair; `random(n)` gives n bytes from the system."""
    private = random(PRIVATE_BYTES)
    if scheme == SM2:
        from proxy.sm4.sm2 import is_private  # noqa: PLC0415 - see the module

        for _ in range(_DRAWS_MAX):  # one in 2^32 is out of range
            if is_private(private):
                break
            private = random(PRIVATE_BYTES)
    return private, signer(scheme, private).public()
