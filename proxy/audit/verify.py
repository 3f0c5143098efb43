"""Verification of a directory of chains, streaming: files in, a `Result` out.

The directory holds chains, or is one. Works while chains are being written: a chain whose lock is
held is `open`; its half-written last line is no finding. Of `recovered` records only the place is
read ahead (they stand behind genesis); what they declare is checked like everything else.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from proxy.audit.across import Directory, Seen, check_across
from proxy.audit.ahead import Ahead, Segment
from proxy.audit.chain import LINE_BYTES
from proxy.audit.check import HEARTBEAT_TOLERANCE, ChainCheck, Outside, quiet_ns
from proxy.audit.findings import (
    FINDINGS_KEPT,
    ChainEnd,
    Evidence,
    Finding,
    Notice,
    Place,
    Result,
    hashed,
)
from proxy.audit.layout import chain_dirs, first_seq_of, is_locked, open_regular, segments
from proxy.audit.note import Keyset
from proxy.audit.pruned import Kept, kept_in
from proxy.audit.reader import Fault, parse_line
from proxy.audit.recover import declarations
from proxy.audit.segment import Reading, check_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from proxy.audit.epochs import MacKeys
    from proxy.audit.resume import Saved
    from proxy.audit.signed import Expected

# Directories below one without chains that are looked into for a hint.
_LOOKED_AT = 64


@dataclass(slots=True)
class _Run:
    """One verification on its way."""

    result: Result
    keys: MacKeys | None
    live_ns: int | None
    since_ns: int | None
    progress: Callable[[int], None]
    outside: Outside
    directory: Directory
    ahead: Ahead | None = None
    saved: Saved | None = None

    def found(self, finding: Finding) -> None:
        """Take a finding of a chain."""
        self.result.add(finding)
        if self.saved is not None:
            self.saved.found(finding)


def verify_directory(
    directory: Path,
    keys: MacKeys | None,
    *,
    live_now_ns: int | None = None,
    since_ns: int | None = None,
    progress: Callable[[int], None] = lambda _done: None,
    pinned: Keyset | None = None,
    expected: Sequence[Expected] = (),
    jobs: int = 1,
    saved: Saved | None = None,
) -> Result:
    """Verify a directory of chains, or one chain.

    Without `keys` links and form are checked, MACs not: the best verdict is then `ok_public`.
    `live_now_ns`, the wall clock, demands that open chains have a fresh last record. `since_ns`
    skips segments that ended before, but for each chain's last one. `progress` is told of bytes
    read. `pinned` are public keys of signers and witnesses; `expected` what others hold of chains
    that must be here. `jobs`: processes that read ahead, if more than one; the findings are the
    same. `saved` is what a verification before had found, and gets what this one does; not together
    with `since_ns`. Raises nothing for what it finds on disk: that is a finding, `io_error`
    included.
    """
    by_origin: dict[str, list[Expected]] = {}
    for item in expected:
        by_origin.setdefault(item.origin, []).append(item)
    known = Directory(by_origin)
    kept: dict[tuple[str, int], Kept] = {}
    outside = Outside(pinned or Keyset(), by_origin, kept)
    run = _Run(Result(keys is not None), keys, live_now_ns, since_ns, progress, outside, known)
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
    kept.update(kept_in(chains))
    for chain in chains:
        for record in declarations(chain):
            name = str(record["file"]).partition("/")[0]
            run.directory.declared.setdefault(name, []).append(record)
    with contextlib.ExitStack() as stack:
        if jobs > 1:
            run.ahead = stack.enter_context(Ahead(jobs, keys, _ahead(run, chains, kept)))
        if saved is not None:
            run.saved = saved
            stack.callback(saved.write)
        for index, chain in enumerate(chains):
            _check_chain(run, chain, index)
    check_across(known, run.result.add, whole=not alone and since_ns is None)
    used = keys is not None and keys.used
    if saved is not None:
        saved.mac_used = used = used or saved.mac_used
        saved.write(whole=True)
    if keys is not None and not used:
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


def _check_chain(run: _Run, chain: Path, index: int) -> None:
    check = ChainCheck(run.keys, index, run.found, run.outside)
    declared = run.directory.declared.get(chain.name, [])
    place = Place(f"{chain.name}/", 0)
    end = "truncated"
    try:
        locked = is_locked(chain)
        files = segments(chain)
        skipped = _skip(run.since_ns, files)
        files = files[skipped:]
        if skipped:
            check.begin_at(files[0][0])
        _check_names(check, chain)
        # What a living chain writes from here on is not looked at: there would be no end to it.
        limit = files[-1][1].stat().st_size if locked and files else None
        reading = Reading(chain, files, declared, limit, run.progress, run.ahead)
        begin = _resumed(run, check, chain, index, files)
        if begin:
            place = Place(f"{chain.name}/{files[begin - 1][1].name}", 0)
        for number in range(begin, len(files)):
            place = check_segment(reading, check, number)
            # The last file is done with only where nothing can come behind.
            if run.saved is not None and (number + 1 < len(files) or (check.closed and not locked)):
                run.saved.done(check, chain.name, files[: number + 1])
        check.signed.finish(check.next_seq, place)
        end = _end(run, check, place, declared, locked=locked)
    except OSError as problem:
        check.find("io_error", check.next_seq, _place_of(problem, chain, place), _reason(problem))
        end = "unknown"
    if end != "open":
        for trace_id, seq, at in itertools.islice(
            check.opens, max(0, FINDINGS_KEPT - len(run.result.notices))
        ):
            run.result.notices.append(Notice(check.origin, seq, at, trace_id))
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
            len(check.opens) if end != "open" else 0,
        )
    )
    run.result.records += check.records
    for origin, upto in check.pruned:
        run.directory.pruned.setdefault(origin, set()).add(upto)
    gap = None
    if check.started_at is not None and run.since_ns is None:
        gap = check.started_at, check.start_place
    prev = check.genesis.get("prev_origin")
    run.directory.seen.append(
        Seen(
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


def _resumed(
    run: _Run, check: ChainCheck, chain: Path, index: int, files: list[tuple[int, Path]]
) -> int:
    """Go on where a verification before was; returns how many segments it has done."""
    if run.saved is None:
        return 0
    begin, findings = run.saved.begin(check, chain.name, index, files, run.outside.expected)
    for finding in findings:
        run.result.add(finding)
    run.progress(sum(path.stat().st_size for _, path in files[:begin]))
    return begin


def _wall_ns(line: bytes) -> int | None:
    try:
        return int(orjson.loads(line.partition(b"\t")[0])["wall_ns"])
    except (ValueError, KeyError, TypeError):
        return None


def _skip(since_ns: int | None, files: list[tuple[int, Path]]) -> int:
    """Return how many segments end before `since`; raises OSError.

    A time counts only where its MAC is checked too: a segment is skipped because the next one,
    which is verified from its first line, began before `since`. So the last one never is.
    """
    first = 0
    for number in range(1, len(files) if since_ns is not None else 0):
        with open_regular(files[number][1]) as file:
            wall = _wall_ns(file.readline(LINE_BYTES))
        if wall is None or (since_ns is not None and wall >= since_ns):
            break
        first = number
    return first


def _ahead(run: _Run, chains: list[Path], kept: dict[tuple[str, int], Kept]) -> Iterator[Segment]:
    """Yield the segments in the order in which they are checked."""
    for chain in chains:
        try:
            files = segments(chain)
            files = files[_skip(run.since_ns, files) :]
            quiet = _quiet_ns(files[0][1], kept) if files else 0
        except OSError:
            continue  # the check says what cannot be read
        done = run.saved.segments_done(chain.name, files) if run.saved is not None else 0
        for _, path in files[done:]:
            yield Segment(path, quiet)


def _quiet_ns(path: Path, kept: dict[tuple[str, int], Kept]) -> int:
    """Return what the check will know of heartbeats from a chain's first line."""
    with open_regular(path) as file:
        line = parse_line(file.readline(LINE_BYTES))
    if isinstance(line, Fault) or line.record["v"] != 1:
        return 0
    record, heartbeat_s = line.record, 0
    before = kept.get((record["origin"], record["seq"]))
    if record["kind"] == "genesis":
        heartbeat_s = record["heartbeat_s"]
    elif before is not None and before.promise:
        heartbeat_s = before.promise["heartbeat_s"]
    return quiet_ns(max(0, heartbeat_s) * 10**9)


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
            note = f"its successor saw it up to {tail['last_seq']}"
            evidence = Evidence(tail["last_seq"], hashed(tail["last_mac"]), hashed(check.last_mac))
            check.find("truncated", seq, place, note, evidence)
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
