"""Verification of a directory of chains, streaming: files in, a `Result` out.

The directory holds chains, or is one. Works while chains are being written: a chain whose lock is
held is `open`; its half-written last line is no finding. Of `recovered` records only the place is
read ahead (they stand behind genesis); what they declare is checked like everything else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from proxy.audit.chain import LINE_BYTES
from proxy.audit.check import HEARTBEAT_TOLERANCE, ChainCheck, MacKeys, Outside
from proxy.audit.findings import ChainEnd, Finding, Place, Result
from proxy.audit.ids import EMPTY_SHA256
from proxy.audit.layout import chain_dirs, first_seq_of, ids_name, is_locked, open_regular, segments
from proxy.audit.note import Keyset
from proxy.audit.reader import stored_lines
from proxy.audit.record import problem_with

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.audit.signed import Expected

_BLOCK = 1 << 18
# Directories below one without chains that are looked into for a hint.
_LOOKED_AT = 64


@dataclass(slots=True)
class _Seen:
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
class _Run:
    """One verification on its way."""

    result: Result
    keys: MacKeys | None
    live_ns: int | None
    since_ns: int | None
    progress: Callable[[int], None]
    outside: Outside
    declared: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    pruned: dict[str, int] = field(default_factory=dict)
    seen: list[_Seen] = field(default_factory=list)


def verify_directory(
    directory: Path,
    keys: MacKeys | None,
    *,
    live_now_ns: int | None = None,
    since_ns: int | None = None,
    progress: Callable[[int], None] = lambda _done: None,
    pinned: Keyset | None = None,
    expected: Sequence[Expected] = (),
) -> Result:
    """Verify a directory of chains, or one chain.

    Without `keys` links and form are checked, MACs not: the best verdict is then `ok_public`.
    `live_now_ns`, the wall clock, demands that open chains have a fresh last record. `since_ns`
    skips segments that ended before, but for each chain's last one. `progress` is told of bytes
    read. `pinned` are public keys of signers and witnesses; `expected` what others hold of chains
    that must be here. Raises nothing for what it finds on disk: that is a finding, `io_error`
    included.
    """
    by_origin: dict[str, list[Expected]] = {}
    for item in expected:
        by_origin.setdefault(item.origin, []).append(item)
    outside = Outside(pinned or Keyset(), by_origin, {})
    run = _Run(Result(keys is not None), keys, live_now_ns, since_ns, progress, outside)
    try:
        alone = bool(segments(directory))
        chains = [directory] if alone else chain_dirs(directory)
    except OSError as problem:
        note = f"{directory}: {_reason(problem)}"
        run.result.add(Finding("io_error", "", 0, Place("", 0), note, 0))
        return run.result
    if not chains:
        note = f"no chain in {directory}{_elsewhere(directory)}"
        run.result.add(Finding("truncated", "", 0, Place("", 0), note, 0))
        return run.result
    for chain in chains:
        for record in _declarations(chain):
            name = str(record["file"]).partition("/")[0]
            run.declared.setdefault(name, []).append(record)
    for index, chain in enumerate(chains):
        _check_chain(run, chain, index)
    _check_across(run, alone=alone)
    if keys is not None and not keys.used:
        # Where there is no chain at all nothing was found, and nothing is said either.
        run.result.mac_checked = run.result.first is None
    return run.result


def _elsewhere(directory: Path) -> str:
    """Return a hint at a directory below that holds chains, or ""."""
    try:
        below = sorted(directory.iterdir(), key=lambda path: (path.name != "audit", path.name))
        for path in below[:_LOOKED_AT]:
            if path.is_dir() and chain_dirs(path):
                return f"; did you mean {path}?"
    except OSError:
        pass  # a hint, no finding
    return ""


def _reason(problem: OSError) -> str:
    return problem.strerror or type(problem).__name__


def _place_of(problem: OSError, chain: Path, place: Place) -> Place:
    """Return the file of this chain that could not be read, or `place` where it is not known."""
    name = problem.filename
    if isinstance(name, (str, Path)) and Path(name).parent == chain:
        return Place(f"{chain.name}/{Path(name).name}", 0)
    return place


def _declarations(chain: Path) -> list[dict[str, Any]]:
    """Return the `recovered` records behind a chain's genesis."""
    found = []
    try:
        files = segments(chain)
        if not files:
            return []
        with open_regular(files[0][1]) as file:
            for _, raw in stored_lines(file):
                record = orjson.loads(raw.partition(b"\t")[0])
                kind = record["kind"]
                if kind == "recovered" and problem_with(record) is None:
                    found.append(record)
                elif kind not in ("genesis", "segment_end", "segment_start"):
                    break
    except (OSError, ValueError, KeyError, TypeError):
        return found  # the check itself says what is wrong
    return found


def _check_chain(run: _Run, chain: Path, index: int) -> None:
    check = ChainCheck(run.keys, index, run.result.add, run.outside)
    declared = run.declared.get(chain.name, [])
    place = Place(f"{chain.name}/", 0)
    end = "truncated"
    try:
        locked = is_locked(chain)
        files = segments(chain)
        files = files[_skip(run, check, files) :]
        _check_names(check, chain)
        # What a living chain writes from here on is not looked at: there would be no end to it.
        limit = files[-1][1].stat().st_size if locked and files else None
        for number in range(len(files)):
            place = _check_segment(run, check, chain, files, number, declared, limit)
        check.signed.finish(check.next_seq, place)
        end = _end(run, check, place, declared, locked=locked)
    except OSError as problem:
        check.find("io_error", check.next_seq, _place_of(problem, chain, place), _reason(problem))
        end = "unknown"
    signed = check.signed
    run.result.chains.append(
        ChainEnd(
            chain.name,
            check.origin,
            check.records,
            end,
            signed.signed_to,
            signed.witnessed_to,
            signed.signers,
        )
    )
    run.result.records += check.records
    for origin, upto in check.pruned:
        run.pruned[origin] = max(upto, run.pruned.get(origin, 0))
    gap = None
    if check.started_at is not None and run.since_ns is None:
        gap = check.started_at, check.start_place
    prev = check.genesis.get("prev_origin")
    run.seen.append(
        _Seen(
            index,
            check.origin,
            chain.name,
            check.next_seq,
            check.last_mac,
            end in ("truncated", "unknown"),
            gap,
            (prev, check.genesis["prev_size"]) if isinstance(prev, str) else None,
            check.genesis.get("prev_note_sha256"),
            signed.note_sha256,
            signed.note_seq,
            check.flawed,
        )
    )


def _wall_ns(line: bytes) -> int | None:
    try:
        return int(orjson.loads(line.partition(b"\t")[0])["wall_ns"])
    except (ValueError, KeyError, TypeError):
        return None


def _skip(run: _Run, check: ChainCheck, files: list[tuple[int, Path]]) -> int:
    """Return how many segments end before `since`.

    A time counts only where its MAC is checked too: a segment is skipped because the next one,
    which is verified from its first line, began before `since`. So the last one never is.
    """
    if run.since_ns is None or not files:
        return 0
    first = 0
    for number in range(1, len(files)):
        with open_regular(files[number][1]) as file:
            wall = _wall_ns(file.readline(LINE_BYTES))
        if wall is None or wall >= run.since_ns:
            break
        first = number
    if first:
        check.begin_at(files[first][0])
    return first


def _check_names(check: ChainCheck, chain: Path) -> None:
    for path in sorted(chain.iterdir()):
        if path.suffix == ".log" and first_seq_of(path.name) is None:
            with open_regular(path) as file:
                try:
                    line = orjson.loads(file.readline(LINE_BYTES).partition(b"\t")[0])
                    seq = line["seq"] if type(line["seq"]) is int else 0
                except (ValueError, KeyError, TypeError):
                    seq = 0
            place = Place(f"{chain.name}/{path.name}", 0)
            check.find("malformed", seq, place, "a wrong file name")


def _sealed_size(files: list[tuple[int, Path]], number: int) -> int | None:
    """Return where a segment ends by word of its successor, if its sync had failed."""
    if number + 1 >= len(files):
        return None
    with open_regular(files[number + 1][1]) as file:
        try:
            record = orjson.loads(file.readline(LINE_BYTES).partition(b"\t")[0])
            size = record["sealed"]["size"]
        except (ValueError, KeyError, TypeError):
            return None
    return size if type(size) is int and size >= 0 else None


def _check_segment(
    run: _Run,
    check: ChainCheck,
    chain: Path,
    files: list[tuple[int, Path]],
    number: int,
    declared: list[dict[str, Any]],
    limit: int | None,
) -> Place:
    """Check one segment file; returns where it ended.

    `limit` is set for a living chain: where its last file ended when it was looked at.
    """
    first, path = files[number]
    name = f"{chain.name}/{path.name}"
    check.start_segment(first)
    end = _sealed_size(files, number)
    tails = [record for record in declared if record["file"] == name]
    if tails:
        end = max(0, tails[0]["offset"])
    living = limit is not None and number == len(files) - 1
    end = limit if living else end
    offset = 0
    with open_regular(path) as file:
        for at, raw in stored_lines(file, end):
            run.progress(len(raw))
            offset = at
            if living and not raw.endswith(b"\n"):
                break  # being written just now
            check.feed(raw, Place(name, at))
            offset = at + len(raw)
        if tails and not check.closed:
            _check_tail(check, file, tails, Place(name, offset))
    if not living:
        _check_side_file(run, check, chain, first)
    return Place(name, offset)


def _check_tail(check: ChainCheck, file: Any, tails: list[dict[str, Any]], place: Place) -> None:
    tail = tails[0]
    file.seek(max(0, tail["offset"]))
    digest, length = hashlib.sha256(), 0
    while length <= tail["length"]:
        block = file.read(min(_BLOCK, tail["length"] + 1 - length))
        if not block:
            break
        length += len(block)
        digest.update(block)
    seq = tail["last_seq"] + 1
    if length > tail["length"]:
        check.find("fork", seq, place, "longer than the tail its successor declared")
    elif length < tail["length"] or digest.hexdigest() != tail["sha256"]:
        check.find("content_mismatch", seq, place, "not the tail its successor declared")
    if check.next_seq == seq and check.last_mac != tail["last_mac"]:
        check.find("content_mismatch", seq, place, "not the end its successor declared")
    for other in tails[1:]:
        if any(other[name] != tail[name] for name in ("offset", "length", "sha256", "last_mac")):
            check.find("fork", seq, place, "two successors declare different tails")


def _check_side_file(run: _Run, check: ChainCheck, chain: Path, first: int) -> None:
    name = ids_name(first)
    digest, size = hashlib.sha256(), 0
    try:
        with open_regular(chain / name) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
                run.progress(len(block))
    except FileNotFoundError:
        pass
    ids, place = check.ids, Place(f"{chain.name}/{name}", size)
    if size < ids.end:
        check.find("content_mismatch", ids.last_seq, place, "the side file of token ids is cut")
    elif ids.sha256 is not None and ids.sha256 != (digest.hexdigest() if size else EMPTY_SHA256):
        check.find("content_mismatch", ids.sha256_seq, place, "the side file is not of ids_sha256")


def _end(
    run: _Run,
    check: ChainCheck,
    place: Place,
    declared: list[dict[str, Any]],
    *,
    locked: bool,
) -> str:
    """Say how a chain ended, and report what its end lacks."""
    if check.closed:
        return "closed"
    seq = check.next_seq
    if declared:
        tail = declared[0]
        after = tail["last_seq"] + 1
        if seq >= after and tail["file"] != place.file:
            check.find("fork", after, place, "longer than its successor declared")
        if seq < after:
            check.find("truncated", seq, place, f"its successor saw it up to {tail['last_seq']}")
            return "truncated"
        return "sealed"
    if locked:
        fresh_ns = check.heartbeat_ns * HEARTBEAT_TOLERANCE
        if run.live_ns is not None and fresh_ns and run.live_ns - check.last_wall_ns > fresh_ns:
            quiet_s = (run.live_ns - check.last_wall_ns) // 10**9
            check.find("heartbeat_missing", seq, place, f"open, and nothing for {quiet_s} s")
        return "open"
    check.find("truncated", seq, place, "not closed, not open, and no successor names it")
    return "truncated"


def _check_across(run: _Run, *, alone: bool) -> None:
    """Check what only the whole directory can say."""
    add, nowhere = run.result.add, Place("", 0)
    by_origin: dict[str, _Seen] = {}
    for seen in run.seen:
        if seen.start_gap is not None and run.pruned.get(seen.origin) != seen.start_gap[0]:
            first, place = seen.start_gap
            note = f"0 to {first - 1} missing"
            add(Finding("gap", seen.origin, 0, place, note, seen.index))
        twin = by_origin.setdefault(seen.origin, seen)
        if twin is not seen and seen.origin:
            same = (twin.size, twin.last_mac) == (seen.size, seen.last_mac)
            place = Place(f"{seen.name}/", 0)
            note = f"the same origin as {twin.name}"
            cls = "duplicate_seq" if same else "fork"
            add(Finding(cls, seen.origin, 0, place, note, seen.index))
    if alone or run.since_ns is not None:
        return
    names = {seen.name for seen in run.seen}
    missing: dict[str, tuple[int, str]] = {}
    for name, records in run.declared.items():
        if name not in names:
            origin = str(records[0]["of_origin"])
            missing.setdefault(origin, (len(run.seen), f"chain {name} is missing ({origin})"))
    for seen in run.seen:
        if seen.prev is None:
            continue
        origin, size = seen.prev
        before = by_origin.get(origin)
        if before is None:
            note = f"the chain before {seen.name} is missing ({origin})"
            missing.setdefault(origin, (seen.index, note))
        elif before.size < size and not before.truncated:
            note = f"its successor {seen.name} saw {size} records"
            place = Place(f"{before.name}/", 0)
            add(Finding("truncated", origin, before.size, place, note, before.index))
        elif seen.prev_note not in (None, before.note) and before.note and not before.flawed:
            note = f"its last checkpoint is not the one its successor {seen.name} saw"
            place = Place(f"{before.name}/", 0)
            seq = before.note_seq
            add(Finding("checkpoint_mismatch", origin, seq, place, note, before.index))
    for origin, held in run.outside.expected.items():
        size, source = max((item.size, item.source) for item in held)
        if size and origin not in by_origin:
            missing.setdefault(origin, (len(run.seen), f"{source} is of {size} records ({origin})"))
    for origin, (index, note) in missing.items():
        if origin not in run.pruned:
            add(Finding("truncated", origin, 0, nowhere, note, index))
