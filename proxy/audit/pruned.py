"""What stands for records that are no longer there: `pruned` records, found and read.

A `pruned` record says of a chain's first records how many they were, the last one's MAC and the
tree's frontier, so that who begins behind them can check everything from there on. It stands in a
later chain, or later in the same one; where a chain begins behind 0 it is looked for before that
chain is checked. What is found is believed only so far: the record itself is checked where it
stands, and the frontier by the next signed root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from proxy.audit.layout import chain_dirs, first_seq_of, open_regular, segments
from proxy.audit.reader import READ_LINE_BYTES, Line, parse_line
from proxy.audit.tree import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PROMISE = ("required_signers", "checkpoint_records", "checkpoint_s", "heartbeat_s")
_MARK = b'"kind":"pruned"'
_BLOCK = 1 << 20
# One is written for each segment that goes; more are not kept in memory.
_KEPT_MAX = 1 << 16


class Kept(NamedTuple):
    """What is kept of the records [0, upto) of a chain.

    `note` is the last checkpoint of at most that size, empty where there was none; `promise` what
    genesis promised of the records that follow (`PROMISE`).
    """

    origin: str
    upto: int
    last_mac: str
    youngest_wall_ns: int
    note: str
    frontier: tuple[bytes, ...]
    promise: dict[str, Any]

    def members(self, own: str) -> dict[str, Any]:
        """Return the members of the `pruned` record in the chain of `own`."""
        members: dict[str, Any] = {
            "upto": self.upto,
            "last_mac": self.last_mac,
            "youngest_wall": str(self.youngest_wall_ns),
            "note": self.note,
            "frontier": [node.hex() for node in self.frontier],
            **self.promise,
        }
        return members if self.origin == own else members | {"of_origin": self.origin}


def promise_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a genesis record, or a `pruned` one in its place, promises; empty: nothing."""
    found = {name: record.get(name) for name in PROMISE}
    signers = found["required_signers"]
    numbers = (found["checkpoint_records"], found["checkpoint_s"], found["heartbeat_s"])
    if type(signers) is not list or any(type(number) is not int for number in numbers):
        return {}
    return found


def kept_of(record: dict[str, Any]) -> Kept | None:
    """Return what a `pruned` record says, or None if its frontier is none."""
    try:
        frontier = tuple(bytes.fromhex(node) for node in record["frontier"])
    except (ValueError, TypeError):
        return None
    upto: int = record["upto"]
    right = upto >= 0 and len(frontier) == upto.bit_count()
    if not right or any(len(node) != HASH_BYTES for node in frontier):
        return None
    return Kept(
        str(record.get("of_origin", record["origin"])),
        upto,
        record["last_mac"],
        int(record["youngest_wall"]),
        record["note"],
        frontier,
        promise_of(record),
    )


def _marked(file: BinaryIO) -> Iterator[bytes]:
    """Yield the whole lines that may be `pruned` records."""
    rest = b""
    while block := file.read(_BLOCK):
        data = rest + block
        end = data.rfind(b"\n") + 1
        at = data.find(_MARK, 0, end)
        while at >= 0:
            stop = data.index(b"\n", at) + 1
            yield data[data.rfind(b"\n", 0, at) + 1 : stop]
            at = data.find(_MARK, stop, end)
        rest = data[end:] if len(data) - end <= READ_LINE_BYTES else b""


def pruned_records(chains: Sequence[Path]) -> Iterator[Kept]:
    """Yield what the `pruned` records of chains say, newest file first; passes over what fails."""
    for chain in reversed(chains):
        try:
            for _, path in reversed(segments(chain)):
                with open_regular(path) as file:
                    for raw in _marked(file):
                        line = parse_line(raw)
                        if isinstance(line, Line) and line.record.get("kind") == "pruned":
                            kept = kept_of(line.record) if line.record["v"] == 1 else None
                            if kept is not None:
                                yield kept
        except OSError:
            continue  # who checks the chain says so


def begins_late(chain: Path) -> bool:
    """Say whether a chain's first segments are not there; False where it cannot be read."""
    try:
        found = segments(chain)
    except OSError:
        return False
    return bool(found) and first_seq_of(found[0][1].name) != 0


def kept_in(chains: Sequence[Path]) -> dict[tuple[str, int], Kept]:
    """Return what is kept, by (origin, first seq kept), if a chain begins late; else nothing."""
    found: dict[tuple[str, int], Kept] = {}
    if any(begins_late(chain) for chain in chains):
        for kept in pruned_records(chains):
            if len(found) >= _KEPT_MAX:
                break
            found.setdefault((kept.origin, kept.upto), kept)
    return found


def kept_for(directory: Path, origin: str, upto: int) -> Kept | None:
    """Return what is kept of one chain, looking from the newest record back; raises OSError."""
    for kept in pruned_records(chain_dirs(directory)):
        if (kept.origin, kept.upto) == (origin, upto):
            return kept
    return None
