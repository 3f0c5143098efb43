"""Secrets for the auditor alone: 32 bytes under a public key, X25519 or SM2 by the key's length.

    X25519 (32 bytes)    kem = a fresh ephemeral public key, shared = X25519(ephemeral, auditor)
    SM2    (64 bytes)    shared = 32 fresh random bytes, kem = their SM2 ciphertext, C1 || C3 || C2
    wrap key = HKDF-SHA256(ikm = shared, salt = kem || auditor's public key, info, 16)
    wrapped  = kem || SM4-GCM(wrap key, nonce 12 zeros, AAD = what the caller binds || kem)

Pure, but for the caller's random bytes and OpenSSL's in SM2; libraries are loaded when first used.
"""

from __future__ import annotations

import hashlib

from proxy.audit.chain import hkdf
from proxy.sm4.cipher import SM4_GCM, TagError, aead

SECRET_BYTES = 32
X25519_BYTES, SM2_BYTES = 32, 64
_NONCE = bytes(12)
_SEALED_BYTES = SECRET_BYTES + 16
# RFC 7748, 6.1 refuses an all-zero shared secret; these u-coordinates are what gives one.
_P = (1 << 255) - 19
_LOW_ORDER = frozenset(
    {
        0,
        1,
        _P - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    }
)
# Of the public key: its length says the scheme.
KEM_BYTES = {X25519_BYTES: 32, SM2_BYTES: 128}
WRAPPED_BYTES_MAX = max(KEM_BYTES.values()) + _SEALED_BYTES


class WrapError(ValueError):
    """Something does not open; the text says why."""


def usable_public(public: bytes) -> bool:
    """Say whether secrets can be wrapped to a key: it is a point, and none of low order."""
    if len(public) == SM2_BYTES:
        from proxy.sm4 import sm2  # noqa: PLC0415 - ctypes

        return sm2.is_point(public) and sm2.available()
    point = int.from_bytes(public, "little") & ((1 << 255) - 1)
    return len(public) == X25519_BYTES and point % _P not in _LOW_ORDER


def public_of(private: bytes, size: int) -> bytes:
    """Return the public key, of this many bytes, of a private key; raises ValueError."""
    if size == SM2_BYTES:
        from proxy.sm4.sm2 import Sm2Signer  # noqa: PLC0415 - ctypes

        return Sm2Signer(private).public()
    from cryptography.hazmat.primitives.asymmetric.x25519 import (  # noqa: PLC0415 - 3 MB of RSS
        X25519PrivateKey,
    )

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def key_id(public: bytes) -> bytes:
    """Return the 8 bytes by which an auditor's key is named."""
    return hashlib.sha256(public).digest()[:8]


def wrapped_bytes(public_bytes: int) -> int:
    """Return the size of a wrapped secret under a public key of a size."""
    return KEM_BYTES[public_bytes] + _SEALED_BYTES


def wrap(public: bytes, secret: bytes, info: bytes, bound: bytes, random: bytes) -> bytes:
    """Return 32 secret bytes wrapped; `random` is 32 fresh random bytes.

    Raises ValueError for a public key that is not `usable_public`.
    """
    if len(public) == SM2_BYTES:
        from proxy.sm4 import sm2_cipher  # noqa: PLC0415 - ctypes

        shared, kem = random, sm2_cipher.encrypt(public, random)
    else:
        from cryptography.hazmat.primitives.asymmetric.x25519 import (  # noqa: PLC0415 - see above
            X25519PrivateKey,
            X25519PublicKey,
        )

        ephemeral = X25519PrivateKey.from_private_bytes(random)
        kem = ephemeral.public_key().public_bytes_raw()
        shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(public))
    key = hkdf(shared, info, 16, salt=kem + public)
    return kem + aead(SM4_GCM, key, one_message=True).seal(_NONCE, secret, bound + kem)


def unwrap(private: bytes, public: bytes, wrapped: bytes, info: bytes, bound: bytes) -> bytes:
    """Return the secret; `public` is the private key's own. Raises `WrapError`."""
    size = KEM_BYTES[len(public)]
    kem, sealed = wrapped[:size], wrapped[size:]
    if len(sealed) != _SEALED_BYTES:
        raise WrapError("it is cut")
    try:
        if len(public) == SM2_BYTES:
            from proxy.sm4 import sm2_cipher  # noqa: PLC0415 - ctypes

            shared = sm2_cipher.decrypt(private, kem)
        else:
            from cryptography.hazmat.primitives.asymmetric.x25519 import (  # noqa: PLC0415
                X25519PrivateKey,
                X25519PublicKey,
            )

            ours = X25519PrivateKey.from_private_bytes(private)
            shared = ours.exchange(X25519PublicKey.from_public_bytes(kem))
        key = hkdf(shared, info, 16, salt=kem + public)
        return aead(SM4_GCM, key, one_message=True).open(_NONCE, sealed, bound + kem)
    except (TagError, ValueError):
        raise WrapError("it does not open: it was changed, or is of another place") from None
