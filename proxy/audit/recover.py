"""What earlier processes left on the volume: which chains ended, and where the others' tails lie.

Reads only; nothing of an old chain is ever cut. It trusts links, not MACs (the old keys may be
gone): what it declares is checked by the verifier, who has them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import orjson

from proxy.audit.chain import LINE_BYTES, ZERO_MAC
from proxy.audit.layout import chain_dirs, is_locked, open_regular, segments
from proxy.audit.reader import stored_lines
from proxy.audit.record import problem_with

if TYPE_CHECKING:
    from pathlib import Path

# How far back a note is looked for: a segment holds many checkpoints, or the chain has none.
_SEGMENTS_FOR_A_NOTE = 2
_HEX = frozenset(b"0123456789abcdef")


class Tail(msgspec.Struct, frozen=True):
    """The end of a chain: its last whole record, and what lies behind it."""

    file: str
    offset: int
    length: int
    sha256: str
    last_seq: int
    last_mac: str
    note_sha256: str | None = None

    def members(self, origin: str) -> dict[str, object]:
        """Return the members of the `recovered` record that declares this tail."""
        return {
            "of_origin": origin,
            "file": self.file,
            "offset": self.offset,
            "length": self.length,
            "sha256": self.sha256,
            "last_seq": self.last_seq,
            "last_mac": self.last_mac,
        }


class Survey(msgspec.Struct, frozen=True):
    """What a starting writer must say of the volume."""

    undeclared: tuple[tuple[str, Tail], ...] = ()
    prev_origin: str | None = None
    prev_size: int = 0
    prev_note_sha256: str | None = None


class Linked(msgspec.Struct):
    """The lines of a segment that link up: how many, the last MAC, where they end.

    `checkpoint` is the last of them that is one.
    """

    count: int = 0
    mac: str = ""
    end: int = 0
    checkpoint: bytes = b""


def linked_part(file: BinaryIO) -> Linked:
    """Return the lines that link up.

    The first line is taken at its word; each later one must name the MAC before it.
    """
    part = Linked()
    while True:
        line = file.readline(LINE_BYTES + 1)
        # `"prev":"` with bare quotes occurs nowhere else: inside a string they are escaped.
        at = line.find(b'"prev":"')
        text = line[-65:-1]
        if (
            not line.endswith(b"\n")
            or line[-66:-65] != b"\t"
            or at < 0
            or not _HEX.issuperset(text)
        ):
            return part
        if part.count and line[at + 8 : at + 72] != part.mac.encode():
            return part
        part.count += 1
        part.mac = text.decode()
        part.end += len(line)
        if b'"kind":"checkpoint"' in line:
            part.checkpoint = line


def _note_sha256(line: bytes) -> str | None:
    """Return the hash of a checkpoint record's note."""
    try:
        record = orjson.loads(line.partition(b"\t")[0])
        return hashlib.sha256(record["note"].encode()).hexdigest()
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def find_tail(chain: Path) -> Tail:
    """Return the tail of a chain; raises OSError."""
    found = segments(chain)
    if not found:
        return Tail(f"{chain.name}/", 0, 0, hashlib.sha256().hexdigest(), -1, ZERO_MAC)
    last_seq, last_mac, offset, note = -1, ZERO_MAC, 0, None
    for behind, (first, path) in enumerate(reversed(found)):
        if last_seq >= 0 and behind >= _SEGMENTS_FOR_A_NOTE:
            break
        with open_regular(path) as file:
            part = linked_part(file)
        if path == found[-1][1]:
            offset = part.end
        if part.count and last_seq < 0:
            last_seq, last_mac = first + part.count - 1, part.mac
        note = _note_sha256(part.checkpoint)
        if note is not None:
            break
    path = found[-1][1]
    digest, length = hashlib.sha256(), 0
    with open_regular(path) as file:
        file.seek(offset)
        while block := file.read(1 << 16):
            digest.update(block)
            length += len(block)
    name = f"{chain.name}/{path.name}"
    return Tail(name, offset, length, digest.hexdigest(), last_seq, last_mac, note)


def _head(chain: Path) -> tuple[str, list[str]]:
    """Return (origin, names of chains its `recovered` records declare)."""
    declared: list[str] = []
    origin = ""
    found = segments(chain)
    if not found:
        return origin, declared
    with open_regular(found[0][1]) as file:
        while (line := file.readline(LINE_BYTES + 1)).endswith(b"\n"):
            try:
                record = orjson.loads(line.partition(b"\t")[0])
                origin = origin or str(record["origin"])
                kind = record["kind"]
                if kind == "recovered":
                    declared.append(str(record["file"]).partition("/")[0])
            except (orjson.JSONDecodeError, KeyError, TypeError):
                break
            if kind not in ("genesis", "recovered", "segment_start"):
                break
    return origin, declared


def declarations(chain: Path) -> list[dict[str, Any]]:
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


def is_closed(chain: Path) -> bool:
    """Say whether a chain's last line is a whole `closed` record, or its checkpoint."""
    found = segments(chain)
    if not found:
        return False
    with open_regular(found[-1][1]) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 2 * LINE_BYTES))
        lines = file.read().split(b"\n")
    if lines[-1] or len(lines) < 2:
        return False
    kinds = []
    for line in lines[-3:-1]:
        try:
            record = orjson.loads(line[:-65])
            kinds.append(record.get("kind") if isinstance(record, dict) else None)
        except orjson.JSONDecodeError:
            kinds.append(None)
    return kinds[-1] == "closed" or kinds == ["closed", "checkpoint"]


def survey(parent: Path) -> Survey:
    """Look over the chains of a volume; raises OSError."""
    chains = chain_dirs(parent)
    heads = {chain: _head(chain) for chain in chains}
    declared = {name for _, names in heads.values() for name in names}
    undeclared: list[tuple[str, Tail]] = []
    last: tuple[str, Path] | None = None
    tails: dict[Path, Tail] = {}
    for chain in chains:
        origin, _ = heads[chain]
        if is_locked(chain):
            continue
        if origin:
            last = origin, chain
        if chain.name not in declared and not is_closed(chain):
            tails[chain] = find_tail(chain)
            undeclared.append((origin, tails[chain]))
    if last is None:
        return Survey(tuple(undeclared))
    origin, chain = last
    tail = tails.get(chain) or find_tail(chain)
    return Survey(tuple(undeclared), origin, tail.last_seq + 1, tail.note_sha256)
