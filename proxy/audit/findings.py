"""What a verifier can find: classes, their order, exit codes, and the result.

Pure. The exit codes are API (docs/audit.md, "Exit codes").
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FINDINGS_KEPT = 1000

# Classes with their exit codes; ok_public is the verdict where no MAC key was given.
EXIT_CODES = {
    "ok": 0,
    "ok_public": 0,
    "clock_backwards": 0,
    "io_error": 3,
    "truncated": 10,
    "gap": 11,
    "duplicate_seq": 12,
    "content_mismatch": 13,
    "link_mismatch": 14,
    "unsigned_range": 15,
    "key_unknown": 16,
    "malformed": 17,
    "half_line": 18,
    "two_records_one_line": 19,
    "version_unknown": 20,
    "checkpoint_mismatch": 21,
    "fork": 22,
    "heartbeat_missing": 23,
}
INFORMATION = frozenset({"clock_backwards"})


def printable(name: str) -> str:
    """Return a file's name as JSON can hold it: bytes that are no UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


class Place(NamedTuple):
    """Where in the directory: file (relative), byte offset of the line."""

    file: str
    offset: int


class Evidence(NamedTuple):
    """What a finding is built on: the last record it is of, and hashes of what was expected.

    Of MACs it is the SHA-256 that is told: the right MAC of a changed record would be a present to
    whoever changed it. None: the finding's own record; nothing of its kind is known.
    """

    last_seq: int | None = None
    expected: str | None = None
    found: str | None = None


NO_EVIDENCE = Evidence()


def hashed(text: str | bytes) -> str:
    """Return SHA-256 in hex, as evidence shows what it must not or need not show whole."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `chain` is the chain's place in the order of the directory.

    `proved_to`: the last seq of this chain that a signed root covered when it was found, -1: none.
    """

    cls: str
    origin: str
    seq: int
    place: Place
    note: str
    chain: int
    evidence: Evidence = NO_EVIDENCE
    proved_to: int = -1

    def public(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "class": self.cls,
            "origin": self.origin,
            "seq": self.seq,
            "file": printable(self.place.file),
            "offset": self.place.offset,
            "note": self.note,
            "last_seq": self.seq if self.evidence.last_seq is None else self.evidence.last_seq,
            "expected": self.evidence.expected,
            "found": self.evidence.found,
            "proved_to": _or_null(self.proved_to),
        }


@dataclass(frozen=True, slots=True)
class Notice:
    """What speaks against nothing and is worth knowing: a request that began and has no end."""

    origin: str
    seq: int
    place: Place
    trace_id: str

    def public(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "what": "unfinished",
            "origin": self.origin,
            "seq": self.seq,
            "file": printable(self.place.file),
            "offset": self.place.offset,
            "trace_id": self.trace_id,
        }


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """One chain as it was seen: `end` is closed, sealed, open, truncated or unknown.

    `signed_to` and `witnessed_to` are the last seq that is, -1 for none; `signers` says whose keys
    that was checked with: pinned, declared (by the chain itself) or none. `unfinished` is how many
    requests it says were begun and not how they ended, 0 for a chain that goes on.
    """

    dir: str
    origin: str
    records: int
    end: str
    signed_to: int = -1
    witnessed_to: int = -1
    signers: str = "none"
    unfinished: int = 0

    def public(self) -> dict[str, Any]:
        """Return the JSON form."""
        name = printable(self.dir)
        return {
            "dir": name,
            "origin": self.origin,
            "records": self.records,
            "end": self.end,
            "signed_to": _or_null(self.signed_to),
            "witnessed_to": _or_null(self.witnessed_to),
            "signers": self.signers,
            "unfinished": self.unfinished,
        }


def _or_null(seq: int) -> int | None:
    return None if seq < 0 else seq


@dataclass(slots=True)
class Result:
    """What a verification gives: the first `FINDINGS_KEPT` findings, and all of the verdict."""

    mac_checked: bool
    findings: list[Finding] = field(default_factory=list)
    omitted: int = 0
    chains: list[ChainEnd] = field(default_factory=list)
    records: int = 0
    notices: list[Notice] = field(default_factory=list)
    _first: tuple[tuple[bool, int, int], Finding] | None = None

    def add(self, finding: Finding) -> None:
        """Take a finding."""
        if finding.cls not in INFORMATION:
            rank = (finding.cls == "truncated", finding.chain, finding.seq)
            if self._first is None or rank < self._first[0]:
                self._first = rank, finding
        if len(self.findings) < FINDINGS_KEPT:
            self.findings.append(finding)
        else:
            self.omitted += 1

    @property
    def first(self) -> Finding | None:
        """The finding the verdict is of: first by (chain, seq), truncated behind all others."""
        return self._first[1] if self._first else None

    @property
    def verdict(self) -> str:
        """The class of the verdict."""
        if self._first:
            return self._first[1].cls
        return "ok" if self.mac_checked else "ok_public"

    @property
    def exit_code(self) -> int:
        """The exit code of the verdict."""
        return EXIT_CODES[self.verdict]

    def public(self) -> dict[str, Any]:
        """Return the JSON form: findings by (chain, seq), truncated last."""
        first = self.first
        newest = self.chains[-1] if self.chains else None
        ordered = sorted(self.findings, key=lambda f: (f.cls == "truncated", f.chain, f.seq))
        return {
            "verdict": self.verdict,
            "origin": first.origin if first else None,
            "seq": first.seq if first else None,
            "findings": [finding.public() for finding in ordered],
            "findings_omitted": self.omitted,
            "notices": [notice.public() for notice in self.notices],
            "mac_checked": self.mac_checked,
            "signed_to": _or_null(newest.signed_to) if newest else None,
            "witnessed_to": _or_null(newest.witnessed_to) if newest else None,
            "records": self.records,
            "chains": [chain.public() for chain in self.chains],
        }
