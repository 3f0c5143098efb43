"""Sealed token ids: the side file `<first seq>.ids` of a segment (docs/audit.md, "Token ids").

The head holds a fresh 32-byte segment key, wrapped to the auditor's X25519 key; entries hold the
ids of one record each, SM4-GCM under a data key of their own. Integers are little-endian. Whoever
holds the pod's keys but not the auditor's private key cannot read an entry once written.

Pure, but for the caller's random bytes; X25519 comes from `cryptography`, when first used.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Literal

from proxy.audit.chain import hkdf, hkdf_expand, sha256_hex
from proxy.sm4.cipher import SM4_GCM, TagError, aead

if TYPE_CHECKING:
    from collections.abc import Sequence

TokenIds = Literal["sealed", "commit", "plain", "off"]

MAGIC = b"TGIDS\0\0\1"
WRAP_X25519 = 1
HEAD = struct.Struct("<8sB3xQ8s32s48s")
HEAD_BYTES = HEAD.size
KEY_BYTES = 32
# Ids of one record; the rest is counted but not kept. Above any model's context today.
IDS_LIMIT = 1 << 20
# `plain` writes the list into the line; this many always leave room for the record.
PLAIN_LIMIT = 3000
EMPTY_SHA256 = sha256_hex(b"")

_NONCE = bytes(12)
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
_WRAP_INFO = b"tongguan audit ids wrap"


OTHER_AUDITOR = "sealed to another auditor's key"


class IdsError(ValueError):
    """A side file, or an entry of it, is not what its record says; the text says why."""


def pack(ids: Sequence[int]) -> bytes:
    """Return ids as u32 little-endian; raises ValueError for what is no u32."""
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as problem:
        raise ValueError("a token id is no u32") from problem


def unpack(data: bytes) -> list[int]:
    """Return the ids of `pack`ed bytes."""
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def usable_public(public: bytes) -> bool:
    """Say whether an X25519 key is none of the points that make every shared secret zero."""
    point = int.from_bytes(public, "little") & ((1 << 255) - 1)
    return len(public) == KEY_BYTES and point % _P not in _LOW_ORDER


def auditor_key_id(public: bytes) -> bytes:
    """Return the 8 bytes by which a head names the auditor's key."""
    return hashlib.sha256(public).digest()[:8]


def _wrap_key(shared: bytes, ephemeral: bytes, public: bytes, origin: str) -> bytes:
    info = _WRAP_INFO + b"\0" + origin.encode()
    return hkdf(shared, info, 16, salt=ephemeral + public)


def make_head(
    public: bytes, origin: str, first_seq: int, segment_key: bytes, ephemeral_private: bytes
) -> bytes:
    """Return the head of a side file.

    `public` is the auditor's X25519 key, 32 bytes; `ephemeral_private` 32 fresh random bytes.
    Raises ValueError for a public key of low order.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import (  # noqa: PLC0415 - 3 MB of RSS
        X25519PrivateKey,
        X25519PublicKey,
    )

    private = X25519PrivateKey.from_private_bytes(ephemeral_private)
    ephemeral = private.public_key().public_bytes_raw()
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    key = _wrap_key(shared, ephemeral, public, origin)
    fixed = HEAD.pack(MAGIC, WRAP_X25519, first_seq, auditor_key_id(public), ephemeral, bytes(48))[
        :-48
    ]
    return fixed + aead(SM4_GCM, key, one_message=True).seal(_NONCE, segment_key, fixed)


def open_head(head: bytes, origin: str, first_seq: int, auditor_private: bytes) -> bytes:
    """Return the segment key of a head; raises `IdsError`."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import (  # noqa: PLC0415 - 3 MB of RSS
        X25519PrivateKey,
        X25519PublicKey,
    )

    if len(head) != HEAD_BYTES:
        raise IdsError("the head of the side file is cut")
    magic, wrap, seq, key_id, ephemeral, sealed = HEAD.unpack(head)
    if magic != MAGIC:
        raise IdsError("not a side file of token ids")
    if wrap != WRAP_X25519:
        raise IdsError(f"wrap format {wrap} is not known here")
    private = X25519PrivateKey.from_private_bytes(auditor_private)
    public = private.public_key().public_bytes_raw()
    if key_id != auditor_key_id(public):
        raise IdsError(OTHER_AUDITOR)
    if seq != first_seq:
        raise IdsError("the head belongs to another segment")
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(ephemeral))
        key = _wrap_key(shared, ephemeral, public, origin)
        return aead(SM4_GCM, key, one_message=True).open(_NONCE, sealed, head[:-48])
    except (TagError, ValueError):
        raise IdsError("the segment key does not open: the head was changed") from None


def commit_key(seed: bytes, origin: str, first_seq: int) -> bytes:
    """Return the segment key where ids are not sealed: it comes from the chain seed."""
    root = hkdf(seed, b"tongguan audit ids\0" + origin.encode(), KEY_BYTES)
    return hkdf(root, b"segment" + struct.pack("<Q", first_seq), KEY_BYTES)


class SegmentIds:
    """Data keys of one segment."""

    __slots__ = ("_prk",)

    def __init__(self, segment_key: bytes) -> None:
        self._prk = hmac.digest(bytes(32), segment_key, "sha256")

    def data_key(self, seq: int) -> bytes:
        """Return the 16-byte key of one record."""
        return hkdf_expand(self._prk, b"ids" + struct.pack("<Q", seq), 16)

    def seal(self, seq: int, packed: bytes) -> tuple[str, bytes]:
        """Return (commitment hex, entry) of one record's packed ids."""
        key = self.data_key(seq)
        sealed = aead(SM4_GCM, key, one_message=True).seal(_NONCE, packed, b"")
        return commitment(key, packed), struct.pack("<I", len(sealed)) + sealed

    def open(self, seq: int, entry: bytes) -> bytes:
        """Return the packed ids of an entry; raises `IdsError`."""
        (length,) = struct.unpack_from("<I", entry) if len(entry) >= 4 else (-1,)
        if length < 16 or len(entry) != 4 + length:
            raise IdsError("the entry is cut")
        try:
            cipher = aead(SM4_GCM, self.data_key(seq), one_message=True)
            return cipher.open(_NONCE, entry[4:], b"")
        except TagError:
            raise IdsError("the entry does not open: it was changed or moved") from None


def entry_bytes(count: int) -> int:
    """Return the size of an entry of `count` ids."""
    return 4 + 4 * count + 16


def commitment(data_key: bytes, packed: bytes) -> str:
    """Return HMAC-SHA256(data key, ids), hex."""
    return hmac.digest(data_key, packed, "sha256").hex()
