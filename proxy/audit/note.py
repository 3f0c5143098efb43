"""Signed notes (C2SP signed-note), checkpoints (tlog-checkpoint), cosignatures (tlog-cosignature).

A note is text, an empty line, and signature lines:

    <origin> LF <size> LF <base64 of the root> LF
    LF
    U+2014 SP <key name> SP <base64 of key id (4) || signature> LF

Signatures of keys that a reader does not know are passed over, as the format asks; that every
*required* one is there and holds is the reader's demand. A public key is written as a line,
`<name>+<key id, hex>+<base64 of type || key>`, which other tools of the format read too.

Pure, but for the libraries that verify, loaded when a key is first used.
"""

from __future__ import annotations

import base64
import binascii
import re
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from proxy.audit.tree import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

ED25519 = "ed25519"
SM2 = "sm2"
COSIGNATURE = "cosignature/v1"
# Type bytes of the key id. SM2 has none assigned: 0xff and a name of its own, as the format asks.
TYPES = {ED25519: b"\x01", COSIGNATURE: b"\x04", SM2: b"\xffSM2-SM3"}
PUBLIC_BYTES = {ED25519: 32, COSIGNATURE: 32, SM2: 64}
SIGNATURE_BYTES = {ED25519: 64, COSIGNATURE: 72, SM2: 64}
NOTE_BYTES_MAX = 16 << 10
SIGNATURES_MAX = 16

_NAME = re.compile(r"[!-*,-~]{1,128}")  # printable ASCII, no space, no plus
_LINE = re.compile(r"\u2014 ([^ +\n]{1,255}) ([A-Za-z0-9+/]+={0,2})")
_SIZE = re.compile(r"0|[1-9][0-9]{0,15}")


class NoteError(ValueError):
    """A note, a checkpoint or a key is not of its form; the text says why."""


class Signature(msgspec.Struct, frozen=True):
    """One signature line; `blob` is what follows the key id."""

    name: str
    key_id: bytes
    blob: bytes

    def line(self) -> str:
        """Return the line, its newline included."""
        packed = base64.b64encode(self.key_id + self.blob).decode()
        return f"\u2014 {self.name} {packed}\n"


class SignedNote(msgspec.Struct, frozen=True):
    """A note's text, its last newline included, and its signatures."""

    text: str
    signatures: tuple[Signature, ...]


class Checkpoint(msgspec.Struct, frozen=True):
    """What a checkpoint states: this origin's tree had this root at this size."""

    origin: str
    size: int
    root: bytes

    def text(self) -> str:
        """Return the note text that is signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


class PublicKey(msgspec.Struct, frozen=True):
    """A key that notes are verified with."""

    name: str
    kind: str
    public: bytes

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise NoteError("a key name has 1-128 printable characters, no space, no plus")
        if len(self.public) != PUBLIC_BYTES[self.kind]:
            raise NoteError(f"a public key for {self.kind} has {PUBLIC_BYTES[self.kind]} bytes")

    @property
    def key_id(self) -> bytes:
        """Its first four bytes stand before each signature."""
        return sha256(self.name.encode() + b"\n" + TYPES[self.kind] + self.public).digest()[:4]

    def line(self) -> str:
        """Return the key as a line of text."""
        packed = base64.b64encode(TYPES[self.kind] + self.public).decode()
        return f"{self.name}+{self.key_id.hex()}+{packed}"

    def signs(self, text: str, signature: Signature) -> bool:
        """Say whether a signature line is this key's over a note text."""
        from proxy.audit.signing import holds  # noqa: PLC0415 - loads a library

        if (signature.name, signature.key_id) != (self.name, self.key_id):
            return False
        blob = signature.blob
        if len(blob) != SIGNATURE_BYTES[self.kind]:
            return False
        if self.kind == COSIGNATURE:
            seconds = int.from_bytes(blob[:8], "big")
            return holds(ED25519, self.public, blob[8:], cosigned_message(text, seconds))
        return holds(self.kind, self.public, blob, text.encode())


def cosigned_message(text: str, seconds: int) -> bytes:
    """Return what a witness signs (tlog-cosignature)."""
    return f"cosignature/v1\ntime {seconds}\n{text}".encode()


def _b64(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise NoteError("not base64") from None
    # One byte string has one spelling: what a reader takes must not be malleable.
    if base64.b64encode(data).decode() != text:
        raise NoteError("not canonical base64")
    return data


def parse_key(line: str) -> PublicKey:
    """Return the key of a line; raises `NoteError`."""
    name, _, rest = line.partition("+")
    key_id, _, packed = rest.partition("+")
    data = _b64(packed)
    for kind, mark in TYPES.items():
        if data.startswith(mark) and len(data) == len(mark) + PUBLIC_BYTES[kind]:
            key = PublicKey(name, kind, data[len(mark) :])
            if key.key_id.hex() != key_id:
                raise NoteError("the key id is not of this name and key")
            return key
    raise NoteError("a key of no type known here")


def parse_keys(text: str) -> list[PublicKey]:
    """Return the keys of a text with a key a line; empty lines and `#` lines are passed over."""
    rows = [line.strip() for line in text.splitlines()]
    return [parse_key(row) for row in rows if row and not row.startswith("#")]


def parse_note(note: str) -> SignedNote:
    """Return a note's parts; raises `NoteError`."""
    if len(note) > NOTE_BYTES_MAX:
        raise NoteError(f"a note of more than {NOTE_BYTES_MAX} bytes")
    if any(c < " " and c != "\n" for c in note):
        raise NoteError("a control character")
    text, found, tail = note.rpartition("\n\n")
    if not found or not tail.endswith("\n"):
        raise NoteError("no signature lines")
    signatures = []
    for line in tail[:-1].split("\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            raise NoteError("not a signature line")
        data = _b64(match[2])
        if len(data) < 5:
            raise NoteError("a signature without bytes")
        signatures.append(Signature(match[1], data[:4], data[4:]))
    if len(signatures) > SIGNATURES_MAX:
        raise NoteError(f"more than {SIGNATURES_MAX} signatures")
    return SignedNote(text + "\n", tuple(signatures))


def parse_checkpoint(text: str) -> Checkpoint:
    """Return what a note text states; raises `NoteError` (extension lines are refused)."""
    rows = text.split("\n")
    if len(rows) != 4 or rows[3] or not rows[0] or not _SIZE.fullmatch(rows[1]):
        raise NoteError("not a checkpoint: origin, size, root")
    root = _b64(rows[2])
    if len(root) != HASH_BYTES:
        raise NoteError("the root is no SHA-256")
    return Checkpoint(rows[0], int(rows[1]), root)


def write_note(text: str, signatures: Iterable[Signature]) -> str:
    """Return a note."""
    return text + "\n" + "".join(signature.line() for signature in signatures)


class Keyset:
    """Public keys by key id."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[PublicKey] = ()) -> None:
        self._keys = {(key.name, key.key_id): key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: PublicKey) -> bool:
        return self._keys.get((key.name, key.key_id)) == key

    def lines(self) -> list[str]:
        """Return the keys as lines."""
        return [key.line() for key in self._keys.values()]

    def merged(self, keys: Iterable[PublicKey]) -> Keyset:
        """Return a set with more keys."""
        return Keyset([*self._keys.values(), *keys])

    def of_kind(self, *kinds: str) -> list[PublicKey]:
        """Return the keys of some kinds."""
        return [key for key in self._keys.values() if key.kind in kinds]

    def signers(self, note: SignedNote) -> set[PublicKey]:
        """Return the keys whose signature on a note holds."""
        found = set()
        for signature in note.signatures:
            key = self._keys.get((signature.name, signature.key_id))
            if key is not None and key.signs(note.text, signature):
                found.add(key)
        return found
