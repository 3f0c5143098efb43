"""What is signed of a chain under verification: its tree, its checkpoints, its witness.

Pure. Lines in, findings out through the caller; memory is the tree's frontier and the roots of the
last `_ROOTS_KEPT` checkpoints. Keys are *pinned* (given by who verifies) or only *declared* (in the
chain's own genesis): a chain whose keys are declared by itself alone proves that it is of one
piece, not whose it is.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from proxy.audit.findings import Evidence, hashed
from proxy.audit.note import (
    COSIGNATURE,
    ED25519,
    SM2,
    Keyset,
    NoteError,
    PublicKey,
    parse_checkpoint,
    parse_key,
    parse_note,
)
from proxy.audit.tree import HASH_BYTES, ProofError, Range, from_frontier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.audit.findings import Place


class Find(Protocol):
    """Who takes findings."""

    def __call__(
        self, cls: str, seq: int, place: Place, note: str, evidence: Evidence = ..., /
    ) -> None:
        """Take one."""


UNSIGNED_SLACK = 256
_LEAVES_AT_ONCE = 512
_ROOTS_KEPT = 1024
# A cosigned note is of one of the last checkpoints, or of none that is remembered.
_ROOTS_SAVED = 32
_STATE = (
    "signed_to", "witnessed_to", "checkpoint_seq", "note", "note_sha256", "note_seq", "_known",
    "_signers_known", "_bound", "_interval_ns", "_first_ns", "_last_ns",
)  # fmt: skip
# checkpoint_s is 10: the 30 s that may lie unsigned at a chain's end.
_UNSIGNED_INTERVALS = 3


@dataclass(frozen=True, slots=True)
class Expected:
    """What somebody else holds of a chain: a size and its root, and whose word it is."""

    origin: str
    size: int
    root: bytes
    source: str


class SignedCheck:
    """See the module. `find(class, seq, place, note)` takes findings."""

    __slots__ = (
        "_bound",
        "_find",
        "_first_ns",
        "_interval_ns",
        "_known",
        "_last_ns",
        "_leaves",
        "_mismatched",
        "_pinned",
        "_required",
        "_roots",
        "_signers_known",
        "_tree",
        "_waiting",
        "checkpoint_seq",
        "note",
        "note_seq",
        "note_sha256",
        "signed_to",
        "witnessed_to",
    )

    def __init__(
        self,
        pinned: Keyset,
        find: Find,
    ) -> None:
        self.signed_to = -1
        self.witnessed_to = -1
        self.checkpoint_seq = -1
        self.note_sha256: str | None = None
        self.note = ""  # the last checkpoint's text
        self.note_seq = -1
        self._pinned = pinned
        self._find = find
        self._waiting: deque[Expected] = deque()
        self._tree = Range()
        self._known = True
        self._leaves: list[bytes] = []
        self._required: list[PublicKey] = []
        self._signers_known = False
        self._roots: deque[tuple[int, bytes]] = deque(maxlen=_ROOTS_KEPT)
        self._mismatched: list[tuple[Expected, bytes]] = []
        self._bound = UNSIGNED_SLACK
        self._interval_ns = 0
        self._first_ns: int | None = None
        self._last_ns = 0

    @property
    def required(self) -> bool:
        """Whether the chain promised checkpoints."""
        return bool(self._required)

    def expect(self, expected: Sequence[Expected]) -> None:
        """Compare the tree with what others hold of it, when it has grown so far."""
        self._waiting = deque(sorted(expected, key=lambda e: e.size))

    def state(self) -> dict[str, Any]:
        """Return all that is known so far, as JSON can hold it; of roots the last ones."""
        self._grow()
        tree = self._tree
        roots = [(size, root.hex()) for size, root in list(self._roots)[-_ROOTS_SAVED:]]
        return {name: getattr(self, name) for name in _STATE} | {
            "tree": (tree.begin, tree.end, tree.sizes[:], [node.hex() for node in tree.hashes]),
            "required": [key.line() for key in self._required],
            "roots": roots,
        }

    def restore(self, state: dict[str, Any], expected: Sequence[Expected]) -> None:
        """Go on behind what `state` was made of; `expected`: what others hold of later sizes."""
        for name in _STATE:
            setattr(self, name, state[name])
        begin, end, sizes, hashes = state["tree"]
        self._tree = Range(begin)
        self._tree.end, self._tree.sizes = end, list(sizes)
        self._tree.hashes = [bytes.fromhex(node) for node in hashes]
        self._required = [parse_key(line) for line in state["required"]]
        self._roots.extend((size, bytes.fromhex(root)) for size, root in state["roots"])
        self.expect(expected)

    def skip_to(self, size: int, frontier: Sequence[bytes] | None) -> None:
        """Begin at `size`; without a frontier no root can be checked."""
        self._known = frontier is not None
        if frontier is None:
            self._tree = Range(size)
            return
        try:
            self._tree = from_frontier(size, frontier)
        except ProofError:
            self._known = False

    def add(self, line: bytes) -> None:
        """Take a stored line without its newline, whatever it is."""
        self._leaves.append(hashlib.sha256(b"\0" + line).digest())
        if len(self._leaves) >= _LEAVES_AT_ONCE:
            self._grow()

    def add_leaves(self, leaves: bytes) -> None:
        """Take the leaf hashes of plain lines, 32 bytes each."""
        self._grow()
        end = self._tree.end + len(leaves) // HASH_BYTES
        if self._waiting and self._waiting[0].size <= end:
            step = range(0, len(leaves), HASH_BYTES)
            self._leaves = [leaves[at : at + HASH_BYTES] for at in step]
            self._grow()
        else:
            self._tree.extend_packed(leaves)

    def join(self, leaves: Range) -> bool:
        """Take leaves that somebody else hashed.

        False: they do not go on from here, or hide a size that others hold something of.
        """
        self._grow()
        hidden = self._waiting and self._waiting[0].size <= leaves.end
        if hidden or leaves.begin != self._tree.end:
            return False
        self._tree.join(leaves)
        return True

    def frontier(self) -> tuple[bytes, ...] | None:
        """Return the tree's nodes so far, None where its beginning is not known."""
        self._grow()
        return tuple(self._tree.hashes) if self._tree.begin == 0 and self._known else None

    def _grow(self) -> None:
        leaves = self._leaves
        self._leaves = []
        while self._waiting and self._waiting[0].size <= self._tree.end + len(leaves):
            cut = max(0, self._waiting[0].size - self._tree.end)
            self._tree.extend(leaves[:cut])
            del leaves[:cut]
            self._compare(self._waiting.popleft())
        self._tree.extend(leaves)

    def _compare(self, expected: Expected) -> None:
        if self._known and expected.size == self._tree.end:
            root = self._tree.root()
            if root != expected.root:
                self._mismatched.append((expected, root))

    def saw(self, kind: str, mono_ns: int) -> None:
        """Take a record that holds."""
        if self._first_ns is None and kind != "checkpoint":
            self._first_ns = mono_ns
        self._last_ns = mono_ns

    def genesis(self, record: dict[str, Any], place: Place) -> None:
        """Take the chain's first record: who must sign, and how often."""
        try:
            self._required = [parse_key(line) for line in record["required_signers"]]
        except (NoteError, AttributeError, TypeError) as problem:
            self._find("malformed", 0, place, f"required_signers: {problem}")
            return
        self._bound = record["checkpoint_records"] + UNSIGNED_SLACK
        self._interval_ns = _UNSIGNED_INTERVALS * max(1, record["checkpoint_s"]) * 10**9
        pinned = self._pinned.of_kind(ED25519, SM2)
        unknown = [key.name for key in self._required if key not in self._pinned]
        self._signers_known = not unknown
        if pinned and unknown:
            self._find("key_unknown", 0, place, f"no public key given for signer {unknown[0]}")

    def checkpoint(self, record: dict[str, Any], seq: int, place: Place) -> None:
        """Take a `checkpoint` record, before its own line is added."""
        self._grow()
        self.note = record["note"]
        self.note_sha256 = hashlib.sha256(record["note"].encode()).hexdigest()
        self.note_seq = seq
        if not self._required or not self._known:
            return
        try:
            problem = self._problem(record, seq)
        except NoteError as fault:
            problem = f"note: {fault}"
        if problem:
            self._find("checkpoint_mismatch", seq, place, problem, self._evidence(record))
            # From here on the tree is another one than was signed; it is said once.
            self._known = False
            return
        self.signed_to, self.checkpoint_seq = seq - 1, seq
        self._first_ns = None
        self._roots.append((seq, self._tree.root()))
        cosigned = record.get("cosigned")
        if isinstance(cosigned, str):
            self._cosigned(cosigned, seq, place)

    def _evidence(self, record: dict[str, Any]) -> Evidence:
        """Return the root that was signed, and the one that the lines here have."""
        try:
            signed = parse_checkpoint(parse_note(record["note"]).text).root.hex()
        except NoteError:
            return Evidence(None, None, hashed(record["note"]))
        return Evidence(None, signed, self._tree.root().hex() if self._tree.begin == 0 else None)

    def _problem(self, record: dict[str, Any], seq: int) -> str:
        note = parse_note(record["note"])
        stated = parse_checkpoint(note.text)
        if stated.origin != record["origin"]:
            return "the checkpoint is of another chain"
        if stated.size != seq:
            return f"a checkpoint of {stated.size} records at seq {seq}"
        if self._tree.end != seq or self._tree.root() != stated.root:
            return "the records before it are not the ones that were signed"
        missing = set(self._required) - Keyset(self._required).signers(note)
        names = sorted(key.name for key in missing)
        return f"no valid signature of {names[0]}" if names else ""

    def _cosigned(self, text: str, seq: int, place: Place) -> None:
        try:
            note = parse_note(text)
            stated = parse_checkpoint(note.text)
        except NoteError as problem:
            self._find("checkpoint_mismatch", seq, place, f"cosigned: {problem}")
            return
        known = dict(self._roots).get(stated.size)
        if known is not None and known != stated.root:
            evidence = Evidence(None, stated.root.hex(), known.hex())
            note_text = "cosigned: another root of that size"
            self._find("checkpoint_mismatch", seq, place, note_text, evidence)
        witnesses = self._pinned.of_kind(COSIGNATURE)
        if known == stated.root and witnesses and Keyset(witnesses).signers(note):
            self.witnessed_to = max(self.witnessed_to, stated.size - 1)

    @property
    def signers(self) -> str:
        """Whose keys the signatures were checked with: pinned, declared or none."""
        if not self._required:
            return "none"
        return "pinned" if self._signers_known else "declared"

    def finish(self, next_seq: int, place: Place) -> None:
        """Take the end of the chain: what is unsigned, and what others hold of it."""
        self._grow()
        for expected, found in self._mismatched:
            signed_too = self._signers_known and self.signed_to >= expected.size - 1
            cls = "fork" if signed_too else "checkpoint_mismatch"
            note = f"another history than {expected.source} of {expected.size} records"
            evidence = Evidence(None, expected.root.hex(), found.hex())
            self._find(cls, expected.size - 1, place, note, evidence)
        for expected in self._waiting:
            note = f"{expected.source} is of {expected.size} records"
            evidence = Evidence(expected.size - 1, expected.root.hex())
            self._find("truncated", next_seq, place, note, evidence)
        pinned = self._pinned.of_kind(ED25519, SM2)
        if not self._known or not (self._required or pinned):
            return
        first = self.signed_to + 1
        quiet_ns = self._last_ns - self._first_ns if self._first_ns is not None else 0
        late = self._interval_ns and quiet_ns > self._interval_ns
        if next_seq - first > self._bound or late:
            seq = max(first, self.checkpoint_seq + 1)
            note = (
                f"{next_seq - first} records behind the last checkpoint, over {quiet_ns // 10**9} s"
            )
            self._find("unsigned_range", seq, place, note, Evidence(next_seq - 1))
