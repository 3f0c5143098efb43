"""Escrow: a chain seed under the auditor's public key, in a note that its maker signed.

    tongguan chain seed escrow v1
    <seed id>
    <origin>
    <x25519 or sm2> <auditor's key id, 16 hex> <base64 of the wrapped seed>

    \u2014 <agent's key name> <signature>

The agent writes it before the seed is used and keeps it; the sidecar puts it beside its chain. It
is signed because anybody can wrap a seed of their own to a public key: an escrow that no known
agent signed says nothing. Pure, but for the caller's random bytes.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

from proxy.audit import wrap
from proxy.audit.note import COSIGNATURE, ED25519, Keyset, NoteError, PublicKey, parse_note
from proxy.discreet import Discreet

if TYPE_CHECKING:
    from collections.abc import Iterable

NOTE_BYTES_MAX = 16 << 10
_TITLE = "tongguan chain seed escrow v1"
_INFO = b"tongguan chain seed escrow"
_SCHEMES = {"x25519": wrap.X25519_BYTES, "sm2": wrap.SM2_BYTES}
_ROW = re.compile(r"(x25519|sm2) ([0-9a-f]{16}) ([A-Za-z0-9+/]+={0,2})")
_SEED_ID = re.compile(r"[0-9A-Za-z]{1,64}")


class EscrowError(ValueError):
    """This escrow gives no seed; the text says why."""


class Opened(Discreet, frozen=True):
    """A seed that its maker signed for and the auditor could open."""

    shown = ("seed_id", "origin", "signer")

    seed_id: str
    origin: str
    seed: bytes
    signer: str


def _bound(seed_id: str, origin: str) -> bytes:
    return f"{seed_id}\n{origin}\n".encode()


def note_text(seed_id: str, origin: str, seed: bytes, public: bytes, random: bytes) -> str:
    """Return the text to be signed; `public` is the auditor's key, `random` 32 fresh bytes."""
    scheme = next(name for name, size in _SCHEMES.items() if size == len(public))
    wrapped = wrap.wrap(public, seed, _INFO, _bound(seed_id, origin), random)
    packed = base64.b64encode(wrapped).decode()
    return f"{_TITLE}\n{seed_id}\n{origin}\n{scheme} {wrap.key_id(public).hex()} {packed}\n"


def makers(public: Keyset) -> Keyset:
    """Return the keys that may sign escrows: agents' and witnesses', for ordinary notes."""
    return Keyset(PublicKey(k.name, ED25519, k.public) for k in public.of_kind(COSIGNATURE))


def open_note(note: str, private: bytes, known: Keyset) -> Opened:
    """Return the seed of an escrow; `known` is `makers` of the keys that are believed.

    Raises `EscrowError`.
    """
    try:
        parsed = parse_note(note)
    except NoteError as problem:
        raise EscrowError(f"no escrow: {problem}") from None
    rows = parsed.text.split("\n")
    row = _ROW.fullmatch(rows[3]) if len(rows) == 5 else None
    if row is None or rows[0] != _TITLE or not _SEED_ID.fullmatch(rows[1]):
        raise EscrowError("no escrow of a chain seed")
    signers = sorted(key.name for key in known.signers(parsed))
    if not signers:
        raise EscrowError("not signed by an agent whose key was given (--keys)")
    seed_id, origin, size = rows[1], rows[2], _SCHEMES[row[1]]
    try:
        public = wrap.public_of(private, size)
    except ValueError:
        public = b""
    if wrap.key_id(public).hex() != row[2]:
        raise EscrowError("it is for another auditor's key")
    try:
        wrapped = base64.b64decode(row[3], validate=True)
        seed = wrap.unwrap(private, public, wrapped, _INFO, _bound(seed_id, origin))
    except ValueError as problem:
        raise EscrowError(str(problem)) from None
    return Opened(seed_id, origin, seed, signers[0])


def open_all(
    notes: Iterable[tuple[str, str]], private: bytes, public: Keyset
) -> tuple[dict[str, bytes], list[str]]:
    """Return seeds by id of (where, note), and what could not be opened and why."""
    seeds: dict[str, bytes] = {}
    problems: list[str] = []
    known = makers(public)
    for where, note in notes:
        try:
            opened = open_note(note, private, known)
        except EscrowError as problem:
            problems.append(f"{where}: {problem}")
        else:
            seeds[opened.seed_id] = opened.seed
    return seeds, problems
