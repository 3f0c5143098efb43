"""A verification that goes on where one before it was: what it had found, in a file.

The file holds for each chain the state behind its last whole segment, the findings up to there, and
the names and sizes of the files it is of. Who resumes takes that part at its word, as he takes his
own file: what was changed since in a segment of the same size is not seen. A chain whose files are
not those any more is verified from its start.

It must be kept where nobody else writes. It holds no key, but names those it was made with (by a
hash): with other keys it is refused.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import orjson

from proxy.audit.findings import Evidence, Finding, Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from proxy.audit.check import ChainCheck
    from proxy.audit.note import Keyset
    from proxy.audit.signed import Expected

FORMAT = "tongguan-verify/2"
_EVERY_S = 5.0


class ResumeError(Exception):
    """The file is no state of this verification; the text says what to do."""


def fingerprint(seeds: Mapping[str, bytes], public: Keyset) -> str:
    """Return what names the keys of a verification."""
    digest = hashlib.sha256()
    for seed_id in sorted(seeds):
        digest.update(f"{seed_id} {hashlib.sha256(seeds[seed_id]).hexdigest()}\n".encode())
    for line in sorted(public.lines()):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


class Saved:
    """What was found before, and what is found now, in one file."""

    def __init__(self, path: Path, keys: str) -> None:
        """Read the file if there is one. Raises `ResumeError`, OSError."""
        self._path = path
        self._keys = keys
        self._chains: dict[str, dict[str, Any]] = {}
        self._named: set[str] = set()
        self._findings: list[Finding] = []
        self._written_s = time.monotonic()
        self.mac_used = False
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        try:
            state = orjson.loads(data)
            known = state["format"] == FORMAT
            digest = state.pop("sha256")
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ResumeError(f"{path} is no state of a verification: give another file")
        if digest != _digest(state):
            raise ResumeError(f"{path} was damaged: remove it to begin anew")
        if state["keys"] != keys:
            raise ResumeError(f"{path} was made with other keys: remove it to begin anew")
        self._chains, self.mac_used = state["chains"], state["mac_used"]

    def begin(
        self,
        check: ChainCheck,
        name: str,
        index: int,
        files: Sequence[tuple[int, Path]],
        expected: Mapping[str, Sequence[Expected]],
    ) -> tuple[int, list[Finding]]:
        """Set a chain's check to where it was; returns (segments done, findings up to there)."""
        self._named.add(name)
        self._findings = []
        row = self._chains.get(name)
        if row is None or row["files"] != _named(files[: len(row["files"])]):
            return 0, []
        ahead = expected.get(row["check"]["origin"], ())
        if any(item.size <= row["signed"]["tree"][1] for item in ahead):
            return 0, []  # the tree of that size is behind us
        check.restore(row["check"])
        check.signed.restore(row["signed"], ahead)
        self._findings = [_finding(found, index) for found in row["findings"]]
        return len(row["files"]), self._findings[:]

    def segments_done(self, name: str, files: Sequence[tuple[int, Path]]) -> int:
        """Return how many segments of a chain need not be read, but for what others expect."""
        row = self._chains.get(name)
        same = row is not None and row["files"] == _named(files[: len(row["files"])])
        return len(row["files"]) if row is not None and same else 0

    def found(self, finding: Finding) -> None:
        """Take a finding of the chain under way."""
        self._findings.append(finding)

    def done(self, check: ChainCheck, name: str, files: Sequence[tuple[int, Path]]) -> None:
        """Take a chain's state behind these files, which will not change."""
        self._chains[name] = {
            "files": _named(files),
            "check": check.state(),
            "signed": check.signed.state(),
            "findings": [_row(finding) for finding in self._findings],
        }
        if time.monotonic() - self._written_s >= _EVERY_S:
            self.write()

    def write(self, *, whole: bool = False) -> None:
        """Write the file, at once or not at all; `whole`: what was not named is gone."""
        self._written_s = time.monotonic()
        chains = self._chains
        if whole:
            chains = {name: row for name, row in chains.items() if name in self._named}
        state = {
            "format": FORMAT,
            "keys": self._keys,
            "mac_used": self.mac_used,
            "chains": chains,
        }
        fresh = self._path.with_name(f".{self._path.name}.new")
        fresh.write_bytes(orjson.dumps({**state, "sha256": _digest(state)}))
        fresh.replace(self._path)


def _digest(state: dict[str, Any]) -> str:
    """Return what tells a state as it was written from a damaged one; not from a forged one."""
    return hashlib.sha256(orjson.dumps(state)).hexdigest()


def _named(files: Sequence[tuple[int, Path]]) -> list[list[int]] | None:
    try:
        return [[first, path.stat().st_size] for first, path in files]
    except OSError:
        return None


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "cls": finding.cls,
        "origin": finding.origin,
        "seq": finding.seq,
        "place": list(finding.place),
        "note": finding.note,
        "evidence": list(finding.evidence),
        "proved_to": finding.proved_to,
    }


def _finding(row: dict[str, Any], index: int) -> Finding:
    return Finding(
        row["cls"],
        row["origin"],
        row["seq"],
        Place(*row["place"]),
        row["note"],
        index,
        Evidence(*row["evidence"]),
        row["proved_to"],
    )
