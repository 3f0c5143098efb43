"""What only a whole directory of chains can say: which are missing, twice, or shorter than known.

Pure: chains after their own check in, findings out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.audit.findings import Evidence, Finding, Place, hashed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.audit.signed import Expected


@dataclass(slots=True)
class Seen:
    """A chain after its check."""

    index: int
    origin: str
    name: str
    size: int
    last_mac: str
    truncated: bool
    start_gap: tuple[int, Place] | None
    prev: tuple[str, int] | None
    prev_note: str | None
    note: str | None
    note_seq: int
    flawed: bool


@dataclass(slots=True)
class Directory:
    """What is known of a directory's chains.

    `declared`: `recovered` records by the name of the chain they are of; `pruned`: by origin, every
    first seq kept that a record speaks of; `expected`: what others hold, by origin.
    """

    expected: Mapping[str, Sequence[Expected]]
    declared: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    pruned: dict[str, set[int]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)


def check_across(directory: Directory, add: Callable[[Finding], None], *, whole: bool) -> None:
    """Check what only the directory can say; `whole`: all of it was looked at."""
    nowhere = Place("", 0)
    by_origin: dict[str, Seen] = {}
    for seen in directory.seen:
        pruned = directory.pruned.get(seen.origin, ())
        if seen.start_gap is not None and seen.start_gap[0] not in pruned:
            first, place = seen.start_gap
            note = f"0 to {first - 1} missing"
            add(Finding("gap", seen.origin, 0, place, note, seen.index, Evidence(first - 1)))
        twin = by_origin.setdefault(seen.origin, seen)
        if twin is not seen and seen.origin:
            same = (twin.size, twin.last_mac) == (seen.size, seen.last_mac)
            place = Place(f"{seen.name}/", 0)
            note = f"the same origin as {twin.name}"
            cls = "duplicate_seq" if same else "fork"
            evidence = Evidence(seen.size - 1, hashed(twin.last_mac), hashed(seen.last_mac))
            add(Finding(cls, seen.origin, 0, place, note, seen.index, evidence))
    if not whole:
        return
    names = {seen.name for seen in directory.seen}
    # By origin: (place in the order, note, how many records it is known to have had).
    missing: dict[str, tuple[int, str, int]] = {}
    for name, records in directory.declared.items():
        if name not in names:
            origin = str(records[0]["of_origin"])
            note, size = f"chain {name} is missing ({origin})", records[0]["last_seq"] + 1
            _miss(missing, origin, len(directory.seen), note, size)
    for seen in directory.seen:
        if seen.prev is None:
            continue
        origin, size = seen.prev
        before = by_origin.get(origin)
        if before is None:
            note = f"the chain before {seen.name} is missing ({origin})"
            _miss(missing, origin, seen.index, note, size)
        elif before.size < size and not before.truncated:
            note = f"its successor {seen.name} saw {size} records"
            place = Place(f"{before.name}/", 0)
            evidence = Evidence(size - 1)
            add(Finding("truncated", origin, before.size, place, note, before.index, evidence))
        elif seen.prev_note not in (None, before.note) and before.note and not before.flawed:
            note = f"its last checkpoint is not the one its successor {seen.name} saw"
            place = Place(f"{before.name}/", 0)
            seq = before.note_seq
            evidence = Evidence(None, seen.prev_note, before.note)
            add(Finding("checkpoint_mismatch", origin, seq, place, note, before.index, evidence))
    for origin, held in directory.expected.items():
        size, source = max((item.size, item.source) for item in held)
        if size and origin not in by_origin:
            note = f"{source} is of {size} records ({origin})"
            _miss(missing, origin, len(directory.seen), note, size)
    for origin, (index, note, size) in missing.items():
        if max(directory.pruned.get(origin, {-1})) < size:
            evidence = Evidence(max(0, size - 1))
            add(Finding("truncated", origin, 0, nowhere, note, index, evidence))


def _miss(
    missing: dict[str, tuple[int, str, int]], origin: str, index: int, note: str, size: int
) -> None:
    """Note that a chain is missing; the first to say so is named, the largest size counts."""
    index, note, known = missing.get(origin, (index, note, size))
    missing[origin] = index, note, max(known, size)
