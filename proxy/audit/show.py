"""One record by its trace id, and its token ids for who holds the auditor's key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from proxy.audit import ids as token_ids
from proxy.audit.canonical import clean_text
from proxy.audit.chain import ids_root, parse_key_id
from proxy.audit.erase import erased_keys
from proxy.audit.ids import IdsError, SegmentIds
from proxy.audit.layout import chain_dirs, ids_name, open_regular, segments
from proxy.audit.reader import Line, parse_line, stored_lines

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.audit.epochs import MacKeys

MacState = Literal["ok", "mismatch", "not checked"]


@dataclass(frozen=True, slots=True)
class Shown:
    """A record where it stands. `ids` is None where they cannot be read; `ids_note` says why.

    `ids_hold` is False when ids are there and are not what the record committed to. `erased` are
    the records that say that a prompt key of the tenant was destroyed since: without it nobody can
    check the hashes.
    """

    record: dict[str, Any]
    file: str
    offset: int
    mac: MacState
    ids: list[int] | None
    ids_note: str
    ids_hold: bool
    erased: tuple[dict[str, Any], ...] = ()

    def public(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "record": self.record,
            "file": self.file,
            "offset": self.offset,
            "mac": self.mac,
            "ids": self.ids,
            "ids_note": self.ids_note,
            "erased": [
                {name: record[name] for name in ("origin", "seq", "wall_ns", "key_ref")}
                for record in self.erased
            ],
        }


def find_record(
    directory: Path, trace_id: str, keys: MacKeys | None, auditor_private: bytes | None
) -> Shown | None:
    """Return the `request` record of a trace id, newest chain first; raises OSError.

    Of a request without one, because the process ended before it did, its `open` record.
    """
    opened: tuple[Path, Path, int, int, Line] | None = None
    wanted = b'"trace_id":' + orjson.dumps(clean_text(trace_id))
    chains = [directory] if segments(directory) else chain_dirs(directory)
    for chain in reversed(chains):
        for first, path in reversed(segments(chain)):
            with open_regular(path) as file:
                for offset, raw in stored_lines(file):
                    if wanted not in raw:
                        continue
                    line = parse_line(raw)
                    if not isinstance(line, Line):
                        continue
                    found = chain, path, first, offset, line
                    if line.record["kind"] == "request":
                        return _found(directory, found, keys, auditor_private)
                    if line.record["kind"] == "open":
                        opened = found
    return _found(directory, opened, keys, auditor_private) if opened is not None else None


def _found(
    directory: Path,
    found: tuple[Path, Path, int, int, Line],
    keys: MacKeys | None,
    auditor_private: bytes | None,
) -> Shown:
    chain, path, first, offset, line = found
    name, alone = f"{chain.name}/{path.name}", chain == directory
    return _shown(line, path, name, first, offset, keys, auditor_private, alone=alone)


def _shown(
    line: Line,
    path: Path,
    name: str,
    first: int,
    offset: int,
    keys: MacKeys | None,
    auditor_private: bytes | None,
    *,
    alone: bool,
) -> Shown:
    record = line.record
    mac: MacState = "not checked"
    hmac = keys.hmac(record["key_id"], record["origin"]) if keys else None
    if hmac is not None:
        mac = (
            "ok" if hmac.hex(bytes.fromhex(record["prev"]) + line.data) == line.mac else "mismatch"
        )
    ids: list[int] | None = None
    hold = True
    try:
        ids, note = _read_ids(record, path, first, keys, auditor_private)
    except IdsError as problem:
        hold, note = False, str(problem)
    gone = tuple(
        row
        for row in erased_keys(path.parent if alone else path.parent.parent).get(
            str(record["tenant"]), []
        )
        if int(row["wall_ns"]) >= int(record["wall_ns"])
    )
    return Shown(record, name, offset, mac, ids, note, hold, gone)


def _read_ids(
    record: dict[str, Any],
    path: Path,
    first: int,
    keys: MacKeys | None,
    auditor_private: bytes | None,
) -> tuple[list[int] | None, str]:
    commit = record.get("ids_commit")
    if type(commit) is not str:
        return None, "the record has no token ids"
    at, count = record.get("ids_at"), record.get("ids_n")
    if type(at) is int:
        if auditor_private is None:
            return None, "sealed: give the auditor's key with --auditor-key"
        return _open_sealed(record, path, first, auditor_private)
    listed = record.get("ids")
    if not isinstance(listed, list):
        return None, "the record holds a commitment to the ids, not the ids"
    if len(listed) != count:
        return listed, f"the first {len(listed)} of {count}; the commitment is over all"
    parsed = parse_key_id(record["key_id"])
    seed = keys.seed(parsed[0]) if keys and parsed else None
    if seed is None:
        return listed, "in the record; the commitment needs --auditor-key"
    segment = SegmentIds(token_ids.commit_key(ids_root(seed, record["origin"]), first))
    _demand(segment, record, token_ids.pack(listed))
    return listed, "in the record; they fit the commitment"


def _open_sealed(
    record: dict[str, Any], path: Path, first: int, auditor_private: bytes
) -> tuple[list[int], str]:
    try:
        with open_regular(path.with_name(ids_name(first))) as file:
            head = file.read(token_ids.HEAD_BYTES_MAX)
            file.seek(max(0, record["ids_at"]))
            size = file.read(4)
            length = int.from_bytes(size, "little")
            if length > token_ids.entry_bytes(token_ids.IDS_LIMIT):
                raise IdsError("the entry is too long: the side file was changed")
            entry = size + file.read(length)
    except FileNotFoundError:
        raise IdsError("the side file is missing") from None
    key = token_ids.open_head(head, record["origin"], first, auditor_private)
    segment = SegmentIds(key)
    packed = segment.open(record["seq"], entry)
    _demand(segment, record, packed)
    ids = token_ids.unpack(packed)
    if len(ids) != min(record.get("ids_n", -1), token_ids.IDS_LIMIT):
        raise IdsError("the entry holds another number of ids than the record says")
    return ids, "opened; they fit the commitment"


def _demand(segment: SegmentIds, record: dict[str, Any], packed: bytes) -> None:
    if token_ids.commitment(segment.data_key(record["seq"]), packed) != record["ids_commit"]:
        raise IdsError("the ids are not what the record committed to")
