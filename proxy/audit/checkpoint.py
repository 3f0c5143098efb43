"""The tree of a chain as its writer keeps it: what is durable, signed, and shown to witnesses.

Owned by the writer's sync thread. It is handed the lines that have become durable and nothing
else, so no record that a crash may undo is ever signed. The tree is kept as ranges that meet at the
sizes that a witness knows or is asked for, so a consistency proof from there needs no look back.
With one witness:

    [0, known)  [known, asked)  [asked, size)

Each witness has its own two: one that is silent keeps none of the others from cosigning.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from proxy.audit.note import Checkpoint, NoteError, SignedNote, parse_note, write_note
from proxy.audit.tree import Range, consistency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.audit.disk import Part
    from proxy.audit.note import Keyset
    from proxy.audit.signing import NoteSigner

# Four witnesses (`audit.witness`) at their most stay within what a reader takes of a note, 16 lines
# and 16 KiB.
LINES_MAX = 3
LINES_BYTES_MAX = 2 << 10


class Submission(msgspec.Struct, frozen=True):
    """What the witness is asked to cosign."""

    note: str
    old_size: int
    size: int
    proof: tuple[bytes, ...]


class Answer(msgspec.Struct, frozen=True):
    """How a submission ended. `cosigned` is the note with the witness's line, or empty.

    `known` is the size that the witness is known to hold now, -1 where nothing is known.
    """

    size: int
    known: int
    cosigned: str


class Witness(Protocol):
    """Who cosigns, off this thread: `submit` never blocks. `closing`: the log ends."""

    closing: bool
    name: str
    cosigned: int
    failures: int

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


class Signed(msgspec.Struct, frozen=True):
    """A checkpoint of all that is durable, and an earlier note that witnesses have cosigned."""

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


class _Asked(msgspec.Struct):
    """Where one witness is: the size that it is known to hold, and the one it is asked for."""

    witness: Witness
    known: int = 0
    size: int | None = None

    def settle(self, answer: Answer | None) -> str:
        """Take its answer; return what it cosigned, or ""."""
        if answer is None or self.size is None:
            return ""
        asked, self.size = self.size, None
        if answer.known == asked:
            self.known = asked
            return answer.cosigned
        if answer.known == 0:
            # It lost what it knew, or never knew this origin: everything is new to it.
            self.known = 0
        return ""


def _extend(leaves: Range, part: Part) -> None:
    for hashed, data in part.leaves:
        if hashed:
            leaves.extend_packed(data)
        else:
            leaves.extend_lines(data)


class Checkpointer:
    """See the module."""

    def __init__(
        self, origin: str, signers: Sequence[NoteSigner], witnesses: Sequence[Witness] = ()
    ) -> None:
        """Raise `NoteError` for an origin that no note can carry."""
        if any(c < " " for c in origin) or not origin:
            raise NoteError("an origin is one line without control characters")
        self._origin = origin
        self._signers = tuple(signers)
        self._asked = [_Asked(witness) for witness in witnesses]
        self._ranges = [Range()]
        self._expected: list[Range] = []
        self._carried = Carried()

    @property
    def size(self) -> int:
        """Records in the tree: all that are durable."""
        return self._ranges[-1].end

    def expect(self, part: Part) -> None:
        """Make ready for a part's lines, which are written and not durable yet."""
        ready = (self._expected or self._ranges)[-1].copy()
        _extend(ready, part)
        self._expected.append(ready)

    def add(self, parts: Sequence[Part], records: int) -> None:
        """Take the first `records` records of a commit's parts: they are durable.

        What was expected beyond them is forgotten.
        """
        expected, self._expected = self._expected, []
        done = 0
        for number, part in enumerate(parts):
            done += part.records
            if done > records:
                return
            if number < len(expected):
                self._ranges[-1] = expected[number]
            else:
                _extend(self._ranges[-1], part)

    def sign(self) -> Signed:
        """Sign the tree as it is, and ask each witness to cosign that, unless it is still busy."""
        for number, asked in enumerate(self._asked):
            self._carried.put(number, asked.settle(asked.witness.poll()))
        whole = self._joined(0, self.size)
        text = Checkpoint(self._origin, whole.end, whole.root()).text()
        note = write_note(text, [signer.sign(text) for signer in self._signers])
        free = [asked for asked in self._asked if asked.size is None]
        for asked in free:
            before, after = self._joined(0, asked.known), self._joined(asked.known, whole.end)
            proof = tuple(consistency(before, after))
            asked.size = whole.end
            asked.witness.submit(Submission(note, asked.known, whole.end, proof))
        self._cut()
        return Signed(whole.end, note, self._carried.take())

    def farewell(self, seconds: float) -> None:
        """Show the witnesses the end of the log, if they answer in time; then ask no more."""
        self._wait(self._asked, seconds / 2)
        last = [asked for asked in self._asked if asked.size is None and asked.known < self.size]
        if last:
            for asked in last:
                asked.witness.closing = True
            self.sign()
            self._wait(last, seconds / 2)
        for asked in self._asked:
            asked.witness.stop()

    @staticmethod
    def _wait(those: Sequence[_Asked], seconds: float) -> None:
        """Wait for answers under way, all of them together at most so long."""
        end = time.monotonic() + seconds
        for asked in those:
            if asked.size is not None:
                asked.settle(asked.witness.wait(max(0.0, end - time.monotonic())))

    def _joined(self, begin: int, end: int) -> Range:
        """Return the leaves between two sizes at which ranges meet."""
        whole = Range(begin)
        for one in self._ranges:
            if begin <= one.begin < end:
                whole.join(one)
        assert whole.end == end
        return whole

    def _cut(self) -> None:
        """Let ranges meet at the sizes that are needed, and nowhere else."""
        sizes = {size for asked in self._asked for size in (asked.known, asked.size)}
        ends = sorted({0, self.size, *(size for size in sizes if size is not None)})
        cut = itertools.pairwise(ends)
        # What comes next starts a range of its own where somebody may know this size.
        fresh = [Range(self.size)] if self._asked else []
        self._ranges = [*(self._joined(begin, end) for begin, end in cut), *fresh] or [Range()]


class Carried:
    """What witnesses have cosigned and no record carries yet: one note a record, oldest first.

    A note that each of its witnesses has cosigned a newer one behind is dropped: the newer says all
    that it said. So there are never more notes than witnesses.
    """

    def __init__(self) -> None:
        self._notes: dict[int, dict[int, str]] = {}  # by size, by witness

    def put(self, number: int, cosigned: str) -> None:
        """Take a note with the lines of witness `number`; "" is nothing."""
        if not cosigned:
            return
        size = int(cosigned.split("\n", 2)[1])
        self._notes.setdefault(size, {})[number] = cosigned
        newest = {by: at for at in sorted(self._notes) for by in self._notes[at]}
        kept = set(newest.values())
        self._notes = {at: notes for at, notes in self._notes.items() if at in kept}

    def take(self) -> str:
        """Return the oldest note with the lines of all who cosigned it; "" if there is none."""
        if not self._notes:
            return ""
        notes = self._notes.pop(min(self._notes))
        parsed = [parse_note(note) for _, note in sorted(notes.items())]
        lines = dict.fromkeys(line for note in parsed for line in note.signatures)
        return write_note(parsed[0].text, lines)


def cosigned_note(note: str, lines: str, trusted: Keyset | None = None) -> str:
    """Return the note with a witness's signature lines behind its own; raises `NoteError`.

    With `trusted`, only lines of these keys that hold are taken; "" if there are none.
    """
    if len(lines) > LINES_BYTES_MAX:
        raise NoteError(f"cosignatures of more than {LINES_BYTES_MAX} bytes")
    base, more = parse_note(note), parse_note(f"\n\n{lines}")
    if len(more.signatures) > LINES_MAX:
        raise NoteError(f"more than {LINES_MAX} cosignatures")
    found = more.signatures
    if trusted is not None:
        found = tuple(line for line in found if trusted.signers(SignedNote(base.text, (line,))))
        if not found:
            return ""
    return write_note(base.text, (*base.signatures, *found))
