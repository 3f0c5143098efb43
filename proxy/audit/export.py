"""Bundles: what an auditor is handed, whole in itself (docs/audit.md, "Bundles").

    README.txt   what to type
    verify.py    the verifier, one file of Python's standard library
    public-keys.txt     public keys, a line each: compare them with what you were told
    bundle.json  what is in it, and where each chain begins and ends in it
    audit/       whole segments that cover the time asked for, with their side files
    proofs.jsonl instead of audit/: single lines, each with its path to a signed root

A chain may begin behind its first segments: `bundle.json` then has its tree's frontier there, and
the next checkpoint shows that the frontier is right.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from proxy.audit.chain import LINE_BYTES
from proxy.audit.layout import (
    ESCROW_NAME,
    chain_dirs,
    ids_name,
    is_locked,
    open_regular,
    segments,
)
from proxy.audit.prove import checkpoint_of, prove_many
from proxy.audit.pruned import kept_for
from proxy.audit.reader import stored_lines
from proxy.audit.tree import Range, from_frontier, leaf_hash

if TYPE_CHECKING:
    from proxy.audit.note import Keyset

FORMAT = "tongguan-audit-bundle/1"
_TAIL_BYTES = 2 * LINE_BYTES

_README = """\
A part of a tongguan audit log{period}, to be checked without trusting who made this bundle.

    env -i python3 -I -S verify.py .                   with the keys in public-keys.txt
    env -i python3 -I -S verify.py . --keys FILE       with keys that you were given another way

verify.py is one file of Python's standard library; read it first. Compare public-keys.txt with
what the log's owner gave you before: keys from this bundle alone show that it is of one piece, not
whose it is. Verdict ok_public means: nothing is altered and nothing is missing, as far as
signatures tell. With the chains' seeds every record's MAC is checked too, and the verdict is ok:
--keys auditor.json, or what `tongguan audit escrow` writes where an escrow.note lies by a chain.
Anything else names what is wrong, in which chain, at which record.
"""


class ExportError(Exception):
    """There is nothing to export, or it cannot be; the text says why."""


@dataclass(slots=True)
class _Part:
    """What of one chain goes in: segments [begin, end) of `files`."""

    chain: Path
    files: list[tuple[int, Path]]
    begin: int
    end: int
    genesis: dict[str, Any]
    prev: str = "0" * 64
    frontier: list[str] = field(default_factory=list)
    continues: bool = False

    def public(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "first": self.files[self.begin][0],
            "prev": self.prev,
            "frontier": self.frontier,
            "signers": self.genesis.get("required_signers", []),
            "continues": self.continues,
        }


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(line.partition(b"\t")[0])
    except ValueError:
        return {}
    return record if type(record) is dict else {}


def _wall_ns(record: dict[str, Any]) -> int:
    text = record.get("wall_ns")
    return int(text) if isinstance(text, str) and text.isdecimal() else 0


def _first_line(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return _record(file.readline(LINE_BYTES))


def _last_wall_ns(path: Path) -> int:
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    return max((_wall_ns(_record(line)) for line in lines[-3:]), default=0)


def _has_checkpoint(path: Path) -> bool:
    with open_regular(path) as file:
        return any(checkpoint_of(raw[:-1]) for _, raw in stored_lines(file))


def _choose(chain: Path, from_ns: int, to_ns: int) -> _Part | None:
    files = segments(chain)
    if not files:
        return None
    heads = [_wall_ns(_first_line(path)) for _, path in files]
    if heads[0] > to_ns or _last_wall_ns(files[-1][1]) < from_ns:
        return None
    begin = max((i for i, wall in enumerate(heads) if wall <= from_ns), default=0)
    end = max(i for i, wall in enumerate(heads) if wall <= to_ns) + 1
    # Its last records are signed by the next checkpoint, which may stand in a later segment.
    while end < len(files) and not _has_checkpoint(files[end][1]):
        end += 1
    end = min(end + 1, len(files))
    return _Part(chain, files, begin, end, _first_line(files[0][1]))


def _predecessor(part: _Part, chains: list[Path]) -> _Part | None:
    """Return the end of the chain that a chain's genesis names, if it is here."""
    origin = part.genesis.get("prev_origin")
    for chain in chains:
        files = segments(chain)
        if files and _first_line(files[0][1]).get("origin") == origin:
            return _Part(chain, files, len(files) - 1, len(files), _first_line(files[0][1]))
    return None


def choose(directory: Path, from_ns: int, to_ns: int) -> list[_Part]:
    """Return the parts of chains that cover a time; raises `ExportError`, OSError."""
    chains = [directory] if segments(directory) else chain_dirs(directory)
    parts = [part for chain in chains if (part := _choose(chain, from_ns, to_ns))]
    if not parts:
        raise ExportError(f"no record of that time in {directory}")
    # That nothing ran before the first chain within the time: the end of the one it follows.
    if _wall_ns(parts[0].genesis) > from_ns:
        before = _predecessor(parts[0], chains)
        if before is not None:
            parts.insert(0, before)
    named = {part.chain.name for part in parts}
    for part in parts:
        _find_frontier(part)
        whole = part.end == len(part.files)
        part.continues = not whole or is_locked(part.chain) or not _ends_here(part, parts, named)
    return parts


def _ends_here(part: _Part, parts: list[_Part], named: set[str]) -> bool:
    """Say whether the bundle itself shows how a chain ended."""
    with open_regular(part.files[-1][1]) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        kinds = [_record(line).get("kind") for line in file.read().split(b"\n")[-4:]]
    return "closed" in kinds or part.chain.name != max(named, key=_start) or len(parts) == 1


def _start(name: str) -> int:
    head = name.partition("-")[0]
    return int(head) if head.isdecimal() else 1 << 64


def _find_frontier(part: _Part) -> None:
    """Find the tree, and the MAC to go on from, where the part begins; raises `ExportError`."""
    if part.begin == 0 and part.files[0][0] == 0:
        return
    tree, last = Range(), b""
    if part.files[0][0] != 0:
        kept = kept_for(part.chain.parent, str(part.genesis.get("origin")), part.files[0][0])
        if kept is None:
            raise ExportError(
                f"{part.chain.name}: its first segments are missing, and no pruned record says how "
                "they ended: run verify first"
            )
        tree = from_frontier(kept.upto, kept.frontier)
        part.prev = kept.last_mac
        part.genesis = part.genesis | kept.promise
    for _, path in part.files[: part.begin]:
        with open_regular(path) as file:
            leaves = []
            for _, raw in stored_lines(file):
                last = raw
                leaves.append(leaf_hash(raw.removesuffix(b"\n")))
            tree.extend(leaves)
    if tree.end != part.files[part.begin][0]:
        raise ExportError(f"{part.chain.name}: lines are missing before the time: run verify first")
    if last:
        part.prev = last[-65:-1].decode("ascii", "replace")
    part.frontier = [node.hex() for node in tree.hashes]


class _Tar:
    def __init__(self, out: Path) -> None:
        self._tar = tarfile.open(out, "x", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - `close`

    def text(self, name: str, text: str) -> None:
        """Add a file of text."""
        data = text.encode()
        self._tar.addfile(_info(name, len(data)), io.BytesIO(data))

    def file(self, name: str, path: Path, size: int) -> None:
        """Add the first `size` bytes of a file."""
        with open_regular(path) as source:
            self._tar.addfile(_info(name, size), source)

    def close(self) -> None:
        """Finish."""
        self._tar.close()


def _info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info


def _whole_lines(path: Path) -> int:
    """Return where a file's last whole line ends: it may be being written."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
    at = tail.rfind(b"\n")
    return size if at < 0 else size - len(tail) + at + 1


def _begin(out: Path, keys: Keyset, period: str, manifest: dict[str, Any]) -> _Tar:
    tar = _Tar(out)
    tar.text("README.txt", _README.format(period=period))
    verifier = Path(__file__).with_name("bundle") / "verify.py"
    tar.text("verify.py", verifier.read_text(encoding="utf-8"))
    tar.text("public-keys.txt", "".join(f"{line}\n" for line in keys.lines()))
    tar.text("bundle.json", json.dumps({"format": FORMAT, "keys": keys.lines(), **manifest}))
    return tar


def export_segments(
    directory: Path, out: Path, keys: Keyset, from_ns: int, to_ns: int, period: str
) -> int:
    """Write a bundle of whole segments; returns how many chains. Raises `ExportError`, OSError."""
    parts = choose(directory, from_ns, to_ns)
    chains = {part.chain.name: part.public() for part in parts}
    tar = _begin(out, keys, period, {"from_ns": from_ns, "to_ns": to_ns, "chains": chains})
    for part in parts:
        escrow = part.chain / ESCROW_NAME
        if escrow.exists():
            tar.file(f"audit/{part.chain.name}/{ESCROW_NAME}", escrow, escrow.stat().st_size)
        for first, path in part.files[part.begin : part.end]:
            size = _whole_lines(path) if part.continues else path.stat().st_size
            tar.file(f"audit/{part.chain.name}/{path.name}", path, size)
            side = path.with_name(ids_name(first))
            if side.exists():
                tar.file(f"audit/{part.chain.name}/{side.name}", side, side.stat().st_size)
    tar.close()
    return len(parts)


def export_lines(
    directory: Path, out: Path, keys: Keyset, from_ns: int, to_ns: int, period: str, tenant: str
) -> int:
    """Write a bundle of one tenant's records with proofs; returns how many.

    Raises `ExportError`, `NoProofError` for a record that no checkpoint covers yet, OSError.
    """
    proofs = []
    for part in choose(directory, from_ns, to_ns):
        seqs = []
        for _, path in part.files[part.begin : part.end]:
            with open_regular(path) as file:
                for _, raw in stored_lines(file):
                    record = _record(raw)
                    mine = record.get("kind") == "request" and record.get("tenant") == tenant
                    if mine and from_ns <= _wall_ns(record) <= to_ns:
                        seqs.append(record["seq"])
        if seqs:
            proofs += prove_many(part.chain, part.genesis["origin"], seqs)
    if not proofs:
        raise ExportError(f"no record of tenant {tenant} in that time")
    manifest = {"from_ns": from_ns, "to_ns": to_ns, "proofs": len(proofs)}
    tar = _begin(out, keys, period, manifest)
    tar.text("proofs.jsonl", "".join(f"{json.dumps(proof)}\n" for proof in proofs))
    tar.close()
    return len(proofs)
