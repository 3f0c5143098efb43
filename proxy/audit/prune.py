"""Which segments retention may take away, and taking them away (docs/audit.md, "Retention").

A segment goes only if all of this holds: every record in it is older than the limit; it is whole,
well formed, linked, and under a root that was signed (else it is evidence); its chain is this
process's own, its current file excepted, or has ended as `closed` or declared by a successor, with
no living writer. Segments of a chain go from the oldest on, one `pruned` record each, written and
durable before its file is removed: a crash in between leaves a log that verifies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from proxy.audit.chain import LINE_BYTES
from proxy.audit.check import ChainCheck, Outside
from proxy.audit.findings import INFORMATION, Finding
from proxy.audit.layout import chain_dirs, ids_name, is_locked, open_regular, segments, sync_dir
from proxy.audit.note import Keyset
from proxy.audit.pruned import Kept, kept_for, promise_of
from proxy.audit.recover import declarations, is_closed
from proxy.audit.segment import Reading, check_segment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TURN = ".retention"
# What a machine that slept leaves; nothing of it is in the records.
_HARMLESS = INFORMATION | {"heartbeat_missing"}


class PruneRefusedError(Exception):
    """A segment that is old enough is not what was written; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Step:
    """One segment to take away, behind a record of `kept`; `last`: with it the whole chain."""

    kept: Kept
    chain: Path
    segment: Path
    records: int
    last: bool

    def remove(self) -> int:
        """Remove the files; returns their bytes. Raises OSError."""
        side = self.chain / ids_name(int(self.segment.stem))
        size = 0
        for path in (self.segment, side):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
        if self.last:
            # By one rename, so that nobody ever sees the chain without its records.
            gone = self.chain.with_name(f".pruned-{self.chain.name}")
            self.chain.rename(gone)
            sync_dir(self.chain.parent)
            _remove_gone(gone)
            return size
        self.segment.unlink(missing_ok=True)
        side.unlink(missing_ok=True)
        sync_dir(self.chain)
        return size


def _remove_gone(gone: Path) -> None:
    for path in gone.iterdir():
        path.unlink()
    gone.rmdir()


def oldest_ns(directory: Path) -> int | None:
    """Return the wall time of the oldest record, None where there is none; raises OSError."""
    for chain in chain_dirs(directory):
        for _, path in segments(chain)[:1]:
            found = _first_wall_ns(path)
            if found is not None:
                return found
    return None


def _first_wall_ns(path: Path) -> int | None:
    with open_regular(path) as file:
        line = file.readline(LINE_BYTES)
    try:
        return int(orjson.loads(line.partition(b"\t")[0])["wall_ns"])
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def turn(directory: Path) -> Iterator[bool]:
    """Say whether it is this process's turn to prune here; others are told no meanwhile."""
    fd = os.open(directory / _TURN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def steps(directory: Path, own: Path, before_ns: int) -> Iterator[Step]:
    """Yield the segments whose records are all older than `before_ns`, oldest chain first.

    To be gone on with only when the step before has been written down and carried out. Raises
    OSError, and `PruneRefusedError` at the first segment that is not as it was written.
    """
    for gone in directory.glob(".pruned-*"):
        _remove_gone(gone)  # of a crash in the middle of it
    chains = chain_dirs(directory)
    declared: dict[str, list[dict[str, Any]]] = {}
    for chain in chains:
        for record in declarations(chain):
            declared.setdefault(str(record["file"]).partition("/")[0], []).append(record)
    for chain in chains:
        yield from _of_chain(directory, chain, own, before_ns, declared.get(chain.name, []))


def _of_chain(
    directory: Path, chain: Path, own: Path, before_ns: int, declared: list[dict[str, Any]]
) -> Iterator[Step]:
    files = segments(chain)
    ended = chain != own and not is_locked(chain) and (bool(declared) or is_closed(chain))
    whole = len(files) if ended else len(files) - 1 if chain == own else 0
    # What begins too late need not be read: the next segment's first record is younger still.
    if not whole or (_first_wall_ns(files[0][1]) or 0) >= before_ns:
        return
    found: list[Finding] = []
    check, last = _begin(directory, chain, files[0][0], found)
    limit = files[-1][1].stat().st_size if chain == own else None
    reading = Reading(chain, files, declared, limit, lambda _size: None, None)
    waiting: list[Step] = []
    for number, (first, path) in enumerate(files):
        records = check.records
        check_segment(reading, check, number)
        faults = [finding for finding in found if finding.cls not in _HARMLESS]
        frontier = check.signed.frontier()
        if faults or frontier is None:
            why = f"{faults[0].cls} at seq {faults[0].seq}" if faults else "no frontier before it"
            raise PruneRefusedError(f"{chain.name}/{path.name} is kept: {why}; see audit verify")
        old = number < whole and check.last_wall_ns < before_ns and check.next_seq > first
        if old:
            kept = Kept(
                check.origin,
                check.next_seq,
                check.last_mac,
                check.last_wall_ns,
                check.signed.note or (last.note if last is not None else ""),
                frontier,
                promise_of(check.genesis) or (last.promise if last is not None else {}),
            )
            end = number + 1 == len(files)
            waiting.append(Step(kept, chain, path, check.records - records, end))
        # Only what a signed root has been computed over is known to be as it was written.
        signed = check.signed.signed_to + 1 if check.signed.required else check.next_seq
        signed = check.next_seq if number + 1 == len(files) else signed
        while waiting and waiting[0].kept.upto <= signed:
            yield waiting.pop(0)
        if not old:
            return


def _begin(
    directory: Path, chain: Path, first: int, found: list[Finding]
) -> tuple[ChainCheck, Kept | None]:
    """Return a check that stands where the chain's files begin, and what is kept from before."""
    last = None
    if first:
        with open_regular(segments(chain)[0][1]) as file:
            try:
                origin = str(orjson.loads(file.readline(LINE_BYTES).partition(b"\t")[0])["origin"])
            except (ValueError, KeyError, TypeError):
                origin = ""
        last = kept_for(directory, origin, first)
    frontiers = {} if last is None else {(last.origin, last.upto): last}
    return ChainCheck(None, 0, found.append, Outside(Keyset(), {}, frontiers)), last
