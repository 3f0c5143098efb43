"""The witness: what a node knows of the audit logs of its sidecars, and what it will cosign.

Pure. It keeps one head per origin (size, root, who signs) and lets it only grow: a new checkpoint
must be signed by the keys that signed the first one, and come with an RFC 6962 consistency proof
from the head that is kept. Whoever holds a sidecar's keys can so rewrite its log only behind the
last head, or be seen. The protocol is C2SP's tlog-witness, its status codes too; that a log's key
is learnt from its first submission is ours.

    head kept   submission                            answer
    none        old 0, offered keys hold              keep, cosign
    none        no key offered                        404
    size n      a key's signature is missing          403
    size n      old is not n                          409 and n
    size n      size n, another root                  409 and n: a fork
    size n      the proof does not lead there         422: a fork, or a broken log
    size n      it does                               keep, cosign
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from proxy.audit.note import (
    ED25519,
    SM2,
    Keyset,
    NoteError,
    PublicKey,
    SignedNote,
    parse_checkpoint,
    parse_keys,
    parse_note,
)
from proxy.audit.tree import EMPTY_ROOT, PROOF_NODES_MAX, ProofError, check_consistency

ORIGINS_MAX = 65_536
ORIGIN_BYTES_MAX = 1024
KEYS_MAX = 4
_OLD = re.compile(r"old (0|[1-9][0-9]{0,15})")


class RefusedError(Exception):
    """A submission is not cosigned. `size` is what is kept, where the answer names it.

    `fork`: two histories of one log were shown; that is an attack or a broken log, never a retry.
    """

    def __init__(self, status: int, message: str, *, size: int = -1, fork: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.size = size
        self.fork = fork


@dataclass(frozen=True, slots=True)
class Head:
    """What is kept of one log; `keys` are the public key lines of all who sign it."""

    origin: str
    size: int
    root: bytes
    keys: tuple[str, ...]
    closed: bool
    seen_s: int

    def line(self) -> str:
        """Return the line of the exported list."""
        state = "closed" if self.closed else "open"
        return f"{self.origin} {self.size} {base64.b64encode(self.root).decode()} {state}\n"


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed submission."""

    old_size: int
    proof: tuple[bytes, ...]
    note: SignedNote
    origin: str
    size: int
    root: bytes


def parse_submission(body: str) -> Asked:
    """Return what a request's body asks; raises `RefusedError` (400)."""
    head, found, note_text = body.partition("\n\n")
    first, *proof_lines = head.split("\n")
    old = _OLD.fullmatch(first)
    if not found or old is None or len(proof_lines) > PROOF_NODES_MAX:
        raise RefusedError(400, "expected: old <size>, proof lines, an empty line, a signed note")
    try:
        proof = tuple(base64.b64decode(line, validate=True) for line in proof_lines)
        note = parse_note(note_text)
        stated = parse_checkpoint(note.text)
    except (NoteError, ValueError) as problem:
        raise RefusedError(400, str(problem)) from None
    if any(len(node) != 32 for node in proof):
        raise RefusedError(400, "a proof line is no SHA-256")
    if len(stated.origin.encode()) > ORIGIN_BYTES_MAX:
        raise RefusedError(400, f"an origin of more than {ORIGIN_BYTES_MAX} bytes")
    return Asked(int(old[1]), proof, note, stated.origin, stated.size, stated.root)


def parse_offered(text: str) -> tuple[PublicKey, ...]:
    """Return the log keys that a submission offers, a line each; raises `RefusedError` (400)."""
    try:
        keys = parse_keys(text.replace(", ", "\n"))
    except NoteError as problem:
        raise RefusedError(400, f"log key: {problem}") from None
    if len(keys) > KEYS_MAX or any(key.kind not in (ED25519, SM2) for key in keys):
        raise RefusedError(400, f"expected at most {KEYS_MAX} keys of a log")
    return tuple(keys)


def judge(
    head: Head | None,
    asked: Asked,
    offered: tuple[PublicKey, ...],
    *,
    closed: bool,
    now_s: int,
    room: bool = True,
) -> Head:
    """Return the head to keep and cosign; raises `RefusedError`.

    `head` is what is kept of this origin; `offered` counts only where nothing is; `closed` is the
    submitter's word that the log ends here; `room`: another origin may be kept.
    """
    if head is None:
        if not offered:
            raise RefusedError(404, "this origin is not known: offer the keys that sign it")
        if not room:
            raise RefusedError(507, f"{ORIGINS_MAX} origins are kept already")
        keys: tuple[PublicKey, ...] = offered
        size, root = 0, EMPTY_ROOT
    else:
        keys = tuple(parse_keys("\n".join(head.keys)))
        size, root = head.size, head.root
    if not set(keys) <= Keyset(keys).signers(asked.note):
        raise RefusedError(403, "a signature of the log is missing or does not hold")
    if asked.old_size > asked.size:
        raise RefusedError(400, "the old size is beyond the checkpoint")
    if asked.old_size != size:
        raise RefusedError(409, f"{size} records are known here", size=size)
    if asked.size == size and asked.root != root:
        raise RefusedError(409, "another root of the size that is known", size=size, fork=True)
    try:
        check_consistency(size, root, asked.size, asked.root, asked.proof)
    except ProofError as problem:
        raise RefusedError(422, f"consistency proof: {problem}", fork=size > 0) from None
    if head is not None and head.closed and asked.size > size:
        raise RefusedError(422, "the log was closed and has grown", fork=True)
    lines = tuple(key.line() for key in keys)
    return Head(asked.origin, asked.size, asked.root, lines, closed, now_s)
