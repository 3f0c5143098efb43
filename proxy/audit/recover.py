"""What earlier processes left on the volume: which chains ended, and where the others' tails lie.

Reads only; nothing of an old chain is ever cut. It trusts links, not MACs (the old keys may be
gone): what it declares is checked by the verifier, who has them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import orjson

from proxy.audit.chain import LINE_BYTES, ZERO_MAC
from proxy.audit.layout import chain_dirs, is_locked, open_regular, segments

if TYPE_CHECKING:
    from pathlib import Path

_HEX = frozenset(b"0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a chain: its last whole record, and what lies behind it."""

    file: str
    offset: int
    length: int
    sha256: str
    last_seq: int
    last_mac: str

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


@dataclass(frozen=True, slots=True)
class Survey:
    """What a starting writer must say of the volume."""

    undeclared: tuple[tuple[str, Tail], ...] = ()
    prev_origin: str | None = None
    prev_size: int = 0


def linked_part(file: BinaryIO) -> tuple[int, str, int]:
    """Return (records, last MAC, end offset) of the lines of a segment that link up.

    The first line is taken at its word; each later one must name the MAC before it.
    """
    count, mac, end = 0, "", 0
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
            return count, mac, end
        if count and line[at + 8 : at + 72] != mac.encode():
            return count, mac, end
        count, mac, end = count + 1, text.decode(), end + len(line)


def find_tail(chain: Path) -> Tail:
    """Return the tail of a chain; raises OSError."""
    found = segments(chain)
    if not found:
        return Tail(f"{chain.name}/", 0, 0, hashlib.sha256().hexdigest(), -1, ZERO_MAC)
    last_seq, last_mac, offset = -1, ZERO_MAC, 0
    for first, path in reversed(found):
        with open_regular(path) as file:
            count, mac, end = linked_part(file)
        if path == found[-1][1]:
            offset = end
        if count:
            last_seq, last_mac = first + count - 1, mac
            break
    path = found[-1][1]
    digest, length = hashlib.sha256(), 0
    with open_regular(path) as file:
        file.seek(offset)
        while block := file.read(1 << 16):
            digest.update(block)
            length += len(block)
    name = f"{chain.name}/{path.name}"
    return Tail(name, offset, length, digest.hexdigest(), last_seq, last_mac)


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
    return Survey(tuple(undeclared), origin, tail.last_seq + 1)
