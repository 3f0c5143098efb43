"""SM3 (GB/T 32905), HMAC-SM3 and HKDF-SM3 (RFC 5869), and the digest behind D.

OpenSSL's SM3 through `hashlib` where this Python's OpenSSL has it, else `cryptography`'s.
"""

from __future__ import annotations

import hashlib
from typing import Protocol, Self

DIGEST_BYTES = 32
_BLOCK_BYTES = 64


class Digest(Protocol):
    """A running hash."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take more bytes."""
        ...

    def digest(self) -> bytes:
        """Return the 32 bytes of the hash so far."""
        ...

    def copy(self) -> Self:
        """Return a copy that goes its own way."""
        ...


class _CryptographySm3:
    """SM3 by `cryptography`, in the shape of a `hashlib` object."""

    __slots__ = ("_state",)

    def __init__(self, state: object = None) -> None:
        from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 - only where needed

        self._state = state if isinstance(state, hashes.Hash) else hashes.Hash(hashes.SM3())

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Take more bytes."""
        self._state.update(data)

    def digest(self) -> bytes:
        """Return the hash so far."""
        return self._state.copy().finalize()

    def copy(self) -> _CryptographySm3:
        """Return a copy that goes its own way."""
        return _CryptographySm3(self._state.copy())


def openssl_sm3() -> Digest:
    """Return a fresh SM3 of this Python's OpenSSL; raises ValueError where it has none."""
    return hashlib.new("sm3")


def cryptography_sm3() -> Digest:
    """Return a fresh SM3 of `cryptography`."""
    return _CryptographySm3()


try:
    openssl_sm3()
    sm3 = openssl_sm3
except ValueError:  # an OpenSSL built without SM3, or in FIPS mode
    sm3 = cryptography_sm3


def new_digest(name: str) -> Digest:
    """Return a fresh running hash: `sha256` or `sm3`."""
    return sm3() if name == "sm3" else hashlib.sha256()


class HmacSm3:
    """HMAC-SM3 (RFC 2104) with the key already absorbed: one call is two short hashes."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        if len(key) > _BLOCK_BYTES:
            whole = sm3()
            whole.update(key)
            key = whole.digest()
        block = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner, self._outer = sm3(), sm3()
        self._inner.update(bytes(b ^ 0x36 for b in block))
        self._outer.update(bytes(b ^ 0x5C for b in block))

    def mac(self, message: bytes) -> bytes:
        """Return the 32-byte MAC of `message`."""
        inner = self._inner.copy()
        inner.update(message)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()


def hkdf_extract(salt: bytes, ikm: bytes) -> bytes:
    """Return HKDF-Extract-SM3's PRK (RFC 5869, 2.2)."""
    return HmacSm3(salt).mac(ikm)


def hkdf_expand(prk: bytes, info: bytes, length: int) -> bytes:
    """Return `length` bytes (at most 255 blocks of 32) of HKDF-Expand-SM3 (RFC 5869, 2.3)."""
    assert 0 < length <= 255 * DIGEST_BYTES
    mac, out, block = HmacSm3(prk), b"", b""
    for counter in range(1, -(-length // DIGEST_BYTES) + 1):
        block = mac.mac(block + info + bytes([counter]))
        out += block
    return out[:length]
