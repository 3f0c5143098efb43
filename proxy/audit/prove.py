"""Proofs that one record is in a signed log, for who holds public keys and nothing else.

`prove` streams a chain once and keeps two ranges of its tree; `check` needs the proof alone:
{line_b64, index, size, path, note}. The note is one that a witness cosigned where there is one.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from proxy.audit.layout import chain_dirs, open_regular, segments
from proxy.audit.note import (
    COSIGNATURE,
    ED25519,
    SM2,
    Keyset,
    NoteError,
    parse_checkpoint,
    parse_note,
)
from proxy.audit.pruned import kept_for
from proxy.audit.reader import Line, parse_line, stored_lines
from proxy.audit.tree import (
    PROOF_NODES_MAX,
    ProofError,
    Range,
    WholeTree,
    from_frontier,
    inclusion,
    leaf_hash,
    root_from_inclusion,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_PATHS_KEPT = 1024
PROOF_BYTES_MAX = 4 << 20


class NoProofError(Exception):
    """There is no proof of this record here, or what was given is none; the text says why.

    `cls` is the class of finding it comes closest to.
    """

    def __init__(self, message: str, cls: str = "unsigned_range") -> None:
        super().__init__(message)
        self.cls = cls


@dataclass(frozen=True, slots=True)
class Proven:
    """A record that holds: who signed the checkpoint it is in, who cosigned that and when."""

    record: dict[str, Any]
    origin: str
    size: int
    signers: tuple[str, ...]
    witnesses: tuple[tuple[str, int], ...]


def find_chain(directory: Path, origin: str) -> Path:
    """Return the chain of an origin; raises `NoProofError`, OSError."""
    chains = [directory] if segments(directory) else chain_dirs(directory)
    for chain in chains:
        for _, path in segments(chain)[:1]:
            with open_regular(path) as file:
                line = parse_line(next(stored_lines(file), (0, b""))[1])
            if isinstance(line, Line) and line.record["origin"] == origin:
                return chain
    raise NoProofError(f"no chain of origin {origin} in {directory}", "truncated")


def _before(chain: Path, origin: str) -> Range:
    """Return the leaves before a chain's first record; raises `NoProofError`, OSError."""
    first = segments(chain)[0][0]
    if not first:
        return Range()
    kept = kept_for(chain.parent, origin, first)
    if kept is None:
        raise NoProofError(f"the first {first} records are missing, and none says of them", "gap")
    return from_frontier(kept.upto, kept.frontier)


def chain_lines(chain: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (index, stored line without newline) of a chain; raises OSError."""
    index = None
    for first, path in segments(chain):
        index = first if index is None else index
        with open_regular(path) as file:
            for _, raw in stored_lines(file):
                if not raw.endswith(b"\n"):
                    return
                yield index, raw[:-1]
                index += 1


def checkpoint_of(line: bytes) -> dict[str, Any] | None:
    """Return the record if a line is a checkpoint."""
    if b'"kind":"checkpoint"' not in line:
        return None
    parsed = parse_line(line + b"\n")
    if isinstance(parsed, Line) and parsed.record["kind"] == "checkpoint":
        return parsed.record
    return None


def prove(directory: Path, origin: str, seq: int) -> dict[str, Any]:
    """Return the proof of record `seq` of a chain; raises `NoProofError`, OSError."""
    chain = find_chain(directory, origin)
    before, after = _before(chain, origin), Range(seq + 1)
    if seq < before.end:
        raise NoProofError(f"record {seq} was pruned: the log begins at {before.end}", "gap")
    line = b""
    leaves: list[bytes] = []
    paths: dict[int, list[bytes]] = {}
    best: tuple[int, str] | None = None
    cosigned = False
    for index, stored in chain_lines(chain):
        if index == seq:
            before.extend(leaves)
            leaves, line = [], stored
            if before.end != seq:
                raise NoProofError("records are missing before it: verify says which", "gap")
            continue
        record = checkpoint_of(stored) if index > seq else None
        if record is not None:
            after.extend(leaves)
            leaves = []
            paths[index] = inclusion(before, after)
            if len(paths) > _PATHS_KEPT:
                del paths[min(paths)]
            size = _cosigned_size(record)
            if size in paths:
                best, cosigned = (size, record["cosigned"]), True
            elif not cosigned:
                best = index, record["note"]
        leaves.append(leaf_hash(stored))
    if not line:
        raise NoProofError(f"no record {seq} in the chain of {origin}", "truncated")
    if best is None:
        raise NoProofError(f"no checkpoint covers record {seq} yet")
    size, note = best
    stated = parse_checkpoint(parse_note(note).text)
    if root_from_inclusion(leaf_hash(line), seq, size, paths[size]) != stated.root:
        raise NoProofError(
            "the records here are not the ones that were signed: verify says which",
            "checkpoint_mismatch",
        )
    return _proof(line, seq, size, paths[size], note)


def prove_many(chain: Path, origin: str, seqs: Sequence[int]) -> list[dict[str, Any]]:
    """Return proofs of many records, all to one note; raises `NoProofError`, OSError.

    Keeps the hashes of the whole chain in memory, about 130 bytes a record.
    """
    leaves: list[bytes] = []
    lines: dict[int, bytes] = {}
    wanted, best = set(seqs), (0, "")
    for index, stored in chain_lines(chain):
        if not leaves and index:
            raise NoProofError(f"the first segments of {origin} were pruned", "gap")
        record = checkpoint_of(stored)
        if record is not None:
            best = index, record["note"]
        if index in wanted:
            lines[index] = stored
        leaves.append(leaf_hash(stored))
    size, note = best
    late = [seq for seq in seqs if seq >= size]
    if late:
        raise NoProofError(f"no checkpoint covers record {late[0]} of {origin} yet")
    tree = WholeTree(leaves)
    if tree.root(0, size) != parse_checkpoint(parse_note(note).text).root:
        raise NoProofError(f"verify first: {origin} is not as it was signed", "checkpoint_mismatch")
    return [_proof(lines[seq], seq, size, tree.path(seq, size), note) for seq in seqs]


def _proof(line: bytes, seq: int, size: int, path: list[bytes], note: str) -> dict[str, Any]:
    return {
        "line_b64": base64.b64encode(line).decode(),
        "index": seq,
        "size": size,
        "path": [node.hex() for node in path],
        "note": note,
    }


def _cosigned_size(record: dict[str, Any]) -> int:
    text = record.get("cosigned")
    if not isinstance(text, str):
        return -1
    try:
        return parse_checkpoint(parse_note(text).text).size
    except NoteError:
        return -1


def check(data: bytes, keys: Keyset) -> Proven:
    """Return what a proof proves; raises `NoProofError` where it does not."""
    if len(data) > PROOF_BYTES_MAX:
        raise NoProofError(f"a proof of more than {PROOF_BYTES_MAX} bytes", "malformed")
    try:
        proof = orjson.loads(data)
        raw = base64.b64decode(proof["line_b64"], validate=True)
        index, size, note_text = proof["index"], proof["size"], proof["note"]
        path = [bytes.fromhex(node) for node in proof["path"]]
        if type(index) is not int or type(size) is not int or type(note_text) is not str:
            raise TypeError  # noqa: TRY301 - one exit for all that is no proof
        if len(path) > PROOF_NODES_MAX or any(len(node) != 32 for node in path):
            raise ValueError("path")  # noqa: TRY301
    except (ValueError, KeyError, TypeError, binascii.Error):
        raise NoProofError("not a proof: line_b64, index, size, path, note", "malformed") from None
    line = parse_line(raw + b"\n")
    if not isinstance(line, Line):
        raise NoProofError(f"the line is none: {line.note}", "malformed")
    try:
        note = parse_note(note_text)
        stated = parse_checkpoint(note.text)
        root = root_from_inclusion(leaf_hash(raw), index, size, path)
    except (NoteError, ProofError) as problem:
        raise NoProofError(str(problem), "checkpoint_mismatch") from None
    if (line.record["seq"], line.record["origin"]) != (index, stated.origin):
        raise NoProofError("the record is of another place or chain", "checkpoint_mismatch")
    if size != stated.size or root != stated.root:
        raise NoProofError("the path does not lead to the signed root", "checkpoint_mismatch")
    return _signed(line.record, stated.origin, size, note_text, keys)


def _signed(record: dict[str, Any], origin: str, size: int, text: str, keys: Keyset) -> Proven:
    note = parse_note(text)
    good = keys.signers(note)
    signers = tuple(sorted(key.name for key in good if key.kind != COSIGNATURE))
    named = {(signature.name, signature.key_id) for signature in note.signatures}
    for key in keys.of_kind(ED25519, SM2):
        if (key.name, key.key_id) in named and key not in good:
            raise NoProofError(f"the signature of {key.name} does not hold", "checkpoint_mismatch")
    if not signers:
        raise NoProofError("no signature of a key that was given (--keys)", "key_unknown")
    times = {
        (signature.name, signature.key_id): int.from_bytes(signature.blob[:8], "big")
        for signature in note.signatures
    }
    witnesses = tuple(
        sorted((key.name, times[key.name, key.key_id]) for key in good if key.kind == COSIGNATURE)
    )
    return Proven(record, origin, size, signers, witnesses)
