"""Sealed token ids: the side file `<first seq>.ids` of a segment (docs/audit.md, "Token ids").

The head holds a fresh 32-byte segment key, wrapped to the auditor's public key (`wrap`); entries
hold the ids of one record each, SM4-GCM under a data key of their own. Integers are little-endian.
Whoever holds the pod's keys but not the auditor's private key cannot read an entry once written.

Pure, but for the caller's random bytes.
"""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING, Literal

from proxy.audit import wrap
from proxy.audit.chain import hkdf, hkdf_expand, sha256_hex
from proxy.audit.wrap import WrapError
from proxy.sm4.cipher import SM4_GCM, TagError, aead

if TYPE_CHECKING:
    from collections.abc import Sequence

TokenIds = Literal["sealed", "commit", "plain", "off"]

MAGIC = b"TGIDS\0\0\1"
# Wrap formats by the length of the auditor's public key.
_FORMATS = {wrap.X25519_BYTES: 1, wrap.SM2_BYTES: 2}
_FIXED = struct.Struct("<8sB3xQ8s")
HEAD_BYTES_MAX = _FIXED.size + wrap.WRAPPED_BYTES_MAX
KEY_BYTES = 32
# Ids of one record; the rest is counted but not kept. Above any model's context today.
IDS_LIMIT = 1 << 20
# `plain` writes the list into the line; this many always leave room for the record.
PLAIN_LIMIT = 3000
EMPTY_SHA256 = sha256_hex(b"")

_NONCE = bytes(12)
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


def _info(origin: str) -> bytes:
    return _WRAP_INFO + b"\0" + origin.encode()


def make_head(
    public: bytes, origin: str, first_seq: int, segment_key: bytes, random: bytes
) -> bytes:
    """Return the head of a side file.

    `public` is the auditor's key, 32 bytes of X25519 or 64 of SM2; `random` 32 fresh bytes. Raises
    ValueError for a public key that cannot be used.
    """
    fixed = _FIXED.pack(MAGIC, _FORMATS[len(public)], first_seq, wrap.key_id(public))
    return fixed + wrap.wrap(public, segment_key, _info(origin), fixed, random)


def open_head(head: bytes, origin: str, first_seq: int, auditor_private: bytes) -> bytes:
    """Return the segment key of a head, which may be followed by more; raises `IdsError`."""
    if len(head) < _FIXED.size:
        raise IdsError("the head of the side file is cut")
    magic, form, seq, key_id = _FIXED.unpack_from(head)
    if magic != MAGIC:
        raise IdsError("not a side file of token ids")
    size = next((size for size, number in _FORMATS.items() if number == form), 0)
    if not size:
        raise IdsError(f"wrap format {form} is not known here")
    try:
        public = wrap.public_of(auditor_private, size)
    except ValueError:
        public = b""
    if key_id != wrap.key_id(public):
        raise IdsError(OTHER_AUDITOR)
    if seq != first_seq:
        raise IdsError("the head belongs to another segment")
    wrapped = head[_FIXED.size : _FIXED.size + wrap.wrapped_bytes(size)]
    if len(wrapped) != wrap.wrapped_bytes(size):
        raise IdsError("the head of the side file is cut")
    try:
        return wrap.unwrap(auditor_private, public, wrapped, _info(origin), head[: _FIXED.size])
    except WrapError:
        raise IdsError("the segment key does not open: the head was changed") from None


def commit_key(root: bytes, first_seq: int) -> bytes:
    """Return the segment key where ids are not sealed; `root` is `chain.ids_root` of the seed."""
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
