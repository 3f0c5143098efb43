"""One segment file under verification: its lines, its declared or sealed end, its side file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from proxy.audit.chain import LINE_BYTES
from proxy.audit.findings import Evidence, Place, hashed
from proxy.audit.ids import EMPTY_SHA256
from proxy.audit.layout import ids_name, open_regular
from proxy.audit.reader import Lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proxy.audit.ahead import Ahead
    from proxy.audit.check import ChainCheck

_BLOCK = 1 << 18


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


@dataclass(frozen=True, slots=True)
class Reading:
    """How the segments of a chain are read.

    `declared`: the `recovered` records of this chain. `limit` is set for a living one: where its
    last file ended when it was looked at. `progress` is told of bytes.
    """

    chain: Path
    files: list[tuple[int, Path]]
    declared: list[dict[str, Any]]
    limit: int | None
    progress: Callable[[int], None]
    ahead: Ahead | None


def check_segment(reading: Reading, check: ChainCheck, number: int) -> Place:
    """Check one segment file; returns where it ended."""
    chain, files, limit = reading.chain, reading.files, reading.limit
    first, path = files[number]
    name = f"{chain.name}/{path.name}"
    check.start_segment(first)
    end = _sealed_size(files, number)
    tails = [record for record in reading.declared if record["file"] == name]
    if tails:
        end = max(0, tails[0]["offset"])
    living = limit is not None and number == len(files) - 1
    end = limit if living else end
    with open_regular(path) as file:
        offset = _check_lines(reading, check, path, Lines(file, end), living=living)
        if tails and not check.closed:
            _check_tail(check, file, tails, Place(name, offset))
    if not living:
        _check_side_file(reading, check, first)
    return Place(name, offset)


def _check_lines(
    reading: Reading, check: ChainCheck, path: Path, lines: Lines, *, living: bool
) -> int:
    """Check the lines; returns where they end."""
    name, progress = f"{reading.chain.name}/{path.name}", reading.progress
    runs = reading.ahead.runs(path) if reading.ahead is not None else {}
    while True:
        offset = lines.offset
        run = runs.get(offset)
        if run is not None and lines.holds(run.taken.end) and check.feed_run(run):
            lines.go_to(run.taken.end)
            progress(run.taken.end - offset)
            continue
        data, start, stop = lines.block()
        to = check.feed_plain(data, start, stop) if start < stop else start
        lines.took(to)
        progress(to - start)
        if start < to == stop:
            continue
        offset = lines.offset
        found = lines.line()
        if found is None:
            return offset
        raw = found[1]
        progress(len(raw))
        if living and not raw.endswith(b"\n"):
            return offset  # being written just now
        check.feed(raw, Place(name, offset))


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
        evidence = Evidence(None, tail["sha256"], digest.hexdigest())
        check.find("fork", seq, place, "longer than the tail its successor declared", evidence)
    elif length < tail["length"] or digest.hexdigest() != tail["sha256"]:
        evidence = Evidence(None, tail["sha256"], digest.hexdigest())
        note = "not the tail its successor declared"
        check.find("content_mismatch", seq, place, note, evidence)
    if check.next_seq == seq and check.last_mac != tail["last_mac"]:
        evidence = Evidence(None, hashed(tail["last_mac"]), hashed(check.last_mac))
        check.find("content_mismatch", seq, place, "not the end its successor declared", evidence)
    for other in tails[1:]:
        if any(other[name] != tail[name] for name in ("offset", "length", "sha256", "last_mac")):
            check.find("fork", seq, place, "two successors declare different tails")


def _check_side_file(reading: Reading, check: ChainCheck, first: int) -> None:
    chain, name = reading.chain, ids_name(first)
    digest, size = hashlib.sha256(), 0
    try:
        with open_regular(chain / name) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
                reading.progress(len(block))
    except FileNotFoundError:
        pass
    ids, place = check.ids, Place(f"{chain.name}/{name}", size)
    evidence = Evidence(None, ids.sha256, digest.hexdigest())
    if size < ids.end:
        note = "the side file of token ids is cut"
        check.find("content_mismatch", ids.last_seq, place, note, evidence)
    elif ids.sha256 is not None and ids.sha256 != (digest.hexdigest() if size else EMPTY_SHA256):
        note = "the side file is not of ids_sha256"
        check.find("content_mismatch", ids.sha256_seq, place, note, evidence)
