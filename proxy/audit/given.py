"""What a person gives to a check: key files, public keys, checkpoints and lists of a witness.

Reads files; raises `GivenError` with a text for that person.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from proxy.audit.escrow import NOTE_BYTES_MAX, open_all
from proxy.audit.layout import ESCROW_NAME, chain_dirs, open_regular, segments
from proxy.audit.note import (
    COSIGNATURE,
    ED25519,
    SM2,
    Keyset,
    NoteError,
    PublicKey,
    SignedNote,
    parse_checkpoint,
    parse_key,
    parse_keys,
    parse_note,
)
from proxy.audit.signed import Expected

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from proxy.keys.file import KeyFile

GIVEN_BYTES_MAX = 64 << 20
_HEAD = re.compile(r"([^\n]+) (\d{1,16}) ([A-Za-z0-9+/]{43}=) (open|closed)")


class GivenError(Exception):
    """A file that was given is not what it is given as; the text says why."""


@dataclass(frozen=True, slots=True)
class Given:
    """Keys to check with: `seeds` of MACs where there are any, public keys of signers."""

    seeds: dict[str, bytes] = field(default_factory=dict, repr=False)
    public: Keyset = field(default_factory=Keyset)
    files: tuple[tuple[Path, KeyFile], ...] = field(default=(), repr=False)


def read_keys(paths: Sequence[Path]) -> Given:
    """Read key files (auditor.json, sidecar.json) and files of public key lines."""
    seeds: dict[str, bytes] = {}
    public: list[PublicKey] = []
    files = []
    for path in paths:
        text = _text(path)
        if text.lstrip().startswith("{"):
            file = _key_file(path)
            files.append((path, file))
            seeds.update(file.chain_seeds)
            public += public_keys(file)
        else:
            try:
                public += parse_keys(text)
            except NoteError as problem:
                raise GivenError(f"{path}: neither a key file nor public keys: {problem}") from None
    if any(key.kind == SM2 for key in public):
        from proxy.sm4.sm2 import Sm2UnavailableError, available  # noqa: PLC0415 - ctypes

        if not available():
            raise GivenError(f"a key for SM2 was given: {Sm2UnavailableError()}")
    return Given(seeds, Keyset(public), tuple(files))


def open_escrows(
    given: Given, directory: Path, files: Sequence[Path] = ()
) -> tuple[Given, list[str]]:
    """Return `given` with the seeds of every escrow that an auditor's key in it opens.

    Escrows lie beside the chains of `directory`, and in `files`, one behind another. Also returns
    what was not opened, and why. Raises `GivenError`, OSError.
    """
    private = [file.auditor_private for _, file in given.files if file.auditor_private]
    if not private:
        return given, []
    notes = [(path.name, note) for path in files for note in _notes(_text(path)) if note.strip()]
    alone = bool(segments(directory))
    for chain in [directory] if alone else chain_dirs(directory):
        path = chain / ESCROW_NAME
        if path.exists():
            with open_regular(path) as file:
                text = file.read(NOTE_BYTES_MAX).decode("utf-8", "replace")
            notes.append((f"{chain.name}/{ESCROW_NAME}", text))
    seeds, problems = open_all(notes, private[0], given.public)
    return replace(given, seeds=given.seeds | seeds), problems


def public_keys(file: KeyFile) -> list[PublicKey]:
    """Return the public keys of checkpoints that a key file holds or signs with."""
    from proxy.audit.signing import NoteSigner  # noqa: PLC0415 - loads a library

    try:
        return [
            *map(parse_key, file.verify_keys),
            *(NoteSigner(*row).key for row in file.checkpoint_keys),
        ]
    except ValueError as problem:
        raise GivenError(f"verify_keys or checkpoint_keys: {problem}") from None


def read_checkpoints(path: Path, public: Keyset) -> list[Expected]:
    """Read a checkpoint (a signed note), several of them, or the list of a witness.

    Where public keys are given, each note must hold a signature of one of them.
    """
    text = _text(path)
    found: list[Expected] = []
    for number, part in enumerate(_notes(text)):
        try:
            note = parse_note(part)
            found += _heads(note, public, path.name)
        except NoteError as problem:
            raise GivenError(f"{path}: note {number + 1}: {problem}") from None
    return found


def _notes(text: str) -> list[str]:
    """Return the notes of a text: each ends with its signature lines."""
    notes: list[str] = []
    rows: list[str] = []
    signed = False
    for row in text.splitlines(keepends=True):
        if signed and not row.startswith("\u2014 "):
            notes.append("".join(rows))
            rows, signed = [], False
            if row == "\n":
                continue
        signed = row.startswith("\u2014 ")
        rows.append(row)
    return [*notes, "".join(rows)]


def _heads(note: SignedNote, public: Keyset, name: str) -> list[Expected]:
    witnesses = public.of_kind(COSIGNATURE)
    # A witness's list is signed with the key it cosigns with, as an ordinary note.
    lists = [PublicKey(key.name, ED25519, key.public) for key in witnesses]
    if len(public) and not public.merged(lists).signers(note):
        raise NoteError("no signature of a key that was given (--keys)")
    rows = [_HEAD.fullmatch(row) for row in note.text.splitlines()]
    if rows and all(rows):
        return [
            Expected(row[1], int(row[2]), base64.b64decode(row[3]), f"the witness's list {name}")
            for row in rows
            if row
        ]
    stated = parse_checkpoint(note.text)
    return [Expected(stated.origin, stated.size, stated.root, f"checkpoint {name}")]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > GIVEN_BYTES_MAX:
            raise GivenError(f"{path}: more than {GIVEN_BYTES_MAX} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise GivenError(f"{path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise GivenError(f"{path}: not text") from None


def _key_file(path: Path) -> KeyFile:
    from proxy.keys.file import KeyFileError, read  # noqa: PLC0415 - msgspec

    try:
        return read(path)
    except KeyFileError as problem:
        raise GivenError(str(problem)) from None
    except OSError as problem:
        raise GivenError(f"{path}: {problem.strerror}") from None
