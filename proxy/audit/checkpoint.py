"""The tree of a chain as its writer keeps it: what is durable, signed, and shown to the witness.

Owned by the writer's sync thread. It is handed the lines that have become durable and nothing
else, so no record that a crash may undo is ever signed. The tree is kept as ranges that meet at the
sizes a witness knows or is asked for, so a consistency proof from there needs no look back:

    [0, known)  [known, asked)  [asked, size)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxy.audit.note import Checkpoint, NoteError, parse_note, write_note
from proxy.audit.tree import Range, consistency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.audit.disk import Part
    from proxy.audit.signing import NoteSigner


@dataclass(frozen=True, slots=True)
class Submission:
    """What the witness is asked to cosign."""

    note: str
    old_size: int
    size: int
    proof: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """How a submission ended. `cosigned` is the note with the witness's line, or empty.

    `known` is the size that the witness is known to hold now, -1 where nothing is known.
    """

    size: int
    known: int
    cosigned: str


class Witness(Protocol):
    """Who cosigns, off this thread: `submit` never blocks. `closing`: the log ends."""

    closing: bool

    @property
    def trouble(self) -> str:
        """Return what is wrong, as a word for readyz; "" if nothing is."""
        ...

    def alarm(self) -> str:
        """Return the text of an alarm record, once for each trouble; "" if none is due."""
        ...

    def submit(self, submission: Submission) -> None:
        """Ask; there is no other submission under way."""
        ...

    def poll(self) -> Answer | None:
        """Return the answer to what was submitted, once."""
        ...

    def wait(self, seconds: float) -> Answer | None:
        """As `poll`, but wait for it."""
        ...

    def stop(self) -> None:
        """Ask no more."""
        ...


@dataclass(frozen=True, slots=True)
class Signed:
    """A checkpoint of all that is durable, and what the witness cosigned since the last one."""

    size: int
    note: str
    cosigned: str

    def members(self, in_flight: int, started_total: int) -> dict[str, object]:
        """Return the members of the `checkpoint` record."""
        members: dict[str, object] = {
            "note": self.note,
            "in_flight": in_flight,
            "started_total": started_total,
        }
        if self.cosigned:
            members["cosigned"] = self.cosigned
        return members


class Checkpointer:
    """See the module."""

    def __init__(
        self, origin: str, signers: Sequence[NoteSigner], witness: Witness | None = None
    ) -> None:
        """Raise `NoteError` for an origin that no note can carry."""
        if any(c < " " for c in origin) or not origin:
            raise NoteError("an origin is one line without control characters")
        self._origin = origin
        self._signers = tuple(signers)
        self._witness = witness
        self._known = Range()
        self._asked: Range | None = None
        self._fresh = Range()

    @property
    def size(self) -> int:
        """Records in the tree: all that are durable."""
        return self._fresh.end

    def add(self, parts: Sequence[Part], records: int) -> None:
        """Take the first `records` records of a commit's parts: they are durable."""
        done = 0
        for part in parts:
            done += part.records
            if done > records:
                return
            self._fresh.extend_lines(part.log)

    def sign(self) -> Signed:
        """Sign the tree as it is, and ask the witness to cosign that, unless it is still busy."""
        cosigned = self._settle(self._witness.poll()) if self._witness is not None else ""
        whole = self._known.copy()
        if self._asked is not None:
            whole.join(self._asked)
        whole.join(self._fresh)
        text = Checkpoint(self._origin, whole.end, whole.root()).text()
        note = write_note(text, [signer.sign(text) for signer in self._signers])
        if self._witness is not None and self._asked is None:
            self._asked, self._fresh = self._fresh, Range(whole.end)
            proof = consistency(self._known, self._asked)
            old_size, size = self._known.end, whole.end
            self._witness.submit(Submission(note, old_size, size, tuple(proof)))
        return Signed(whole.end, note, cosigned)

    def farewell(self, seconds: float) -> None:
        """Show the witness the end of the log, if it answers in time; then ask it no more."""
        witness = self._witness
        if witness is None:
            return
        if self._asked is not None:
            self._settle(witness.wait(seconds / 2))
        if self._asked is None and self._fresh.end > self._fresh.begin:
            witness.closing = True
            self.sign()
            witness.wait(seconds / 2)
        witness.stop()

    def _settle(self, answer: Answer | None) -> str:
        """Take the witness's answer; return what it cosigned, or ""."""
        if answer is None or self._asked is None:
            return ""
        asked, self._asked = self._asked, None
        if answer.known == asked.end:
            self._known.join(asked)
            return answer.cosigned
        asked.join(self._fresh)
        self._fresh = asked
        if answer.known == 0:
            # It lost what it knew, or never knew this origin: everything is new to it.
            self._known.join(self._fresh)
            self._fresh, self._known = self._known, Range()
        return ""


def cosigned_note(note: str, lines: str) -> str:
    """Return the note with a witness's signature lines behind its own; raises `NoteError`."""
    base, more = parse_note(note), parse_note(f"\n\n{lines}")
    return write_note(base.text, (*base.signatures, *more.signatures))
