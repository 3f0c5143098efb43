"""The witness's heads and key on disk: one file per origin, on disk before anybody is answered.

A file is replaced whole (temporary file, fsync, rename, fsync of the directory): after a crash the
old head or the new one is there, never half of one. Blocking; called by one thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from typing import TYPE_CHECKING

import orjson

from agent.witness import ORIGINS_MAX, Head
from proxy.audit.note import ED25519
from proxy.audit.signing import Cosigner, NoteSigner

if TYPE_CHECKING:
    from pathlib import Path

KEY_NAME = "witness.key"
# Logs are kept for half a year; the head of a closed one some weeks longer.
CLOSED_KEPT_S = 220 * 86400
_HEX = 64


class WitnessError(Exception):
    """The directory cannot be used; the text says why and what to do."""


class WitnessStore:
    """Heads by origin. `heads` is read by anybody; `keep` by one thread."""

    def __init__(self, directory: Path) -> None:
        """Read what is there, make a key where there is none; raises `WitnessError`."""
        self._dir = directory
        self.heads: dict[str, Head] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            name, private = self._load_key()
            self.cosigner = Cosigner(name, private)
            # The exported list is an ordinary note, signed with the same pair.
            self.list_signer = NoteSigner(name, ED25519, private)
            for path in directory.glob("*.head"):
                head = _read(path)
                self.heads[head.origin] = head
        except OSError as problem:
            where = problem.filename or directory
            raise WitnessError(f"agent.witness_dir: {where}: {problem.strerror}") from None

    def _load_key(self) -> tuple[str, bytes]:
        path = self._dir / KEY_NAME
        if not path.exists():
            name = f"witness-{secrets.token_hex(4)}"
            replace(path, f"{name} {secrets.token_hex(32)}\n".encode())
        if path.stat().st_mode & 0o077:
            raise WitnessError(f"agent.witness_dir: others may read {path}; run: chmod 600 {path}")
        name, _, private = path.read_text(encoding="ascii").strip().partition(" ")
        try:
            key = bytes.fromhex(private)
            if len(private) != _HEX or not name:
                raise ValueError(name)  # noqa: TRY301 - one message for all that is no key
            return name, key  # noqa: TRY300
        except ValueError:
            raise WitnessError(f"agent.witness_dir: {path} is no key of a witness") from None

    @property
    def room(self) -> bool:
        """Whether another origin may be kept."""
        return len(self.heads) < ORIGINS_MAX

    def keep(self, head: Head) -> None:
        """Make a head durable, then known; raises OSError, with the old one still known."""
        replace(self._path(head.origin), _encode(head))
        self.heads[head.origin] = head

    def forget(self, now_s: int) -> int:
        """Drop heads of logs that closed long ago; returns how many."""
        old = [h for h in self.heads.values() if h.closed and now_s - h.seen_s > CLOSED_KEPT_S]
        for head in old:
            with contextlib.suppress(OSError):
                self._path(head.origin).unlink()
                del self.heads[head.origin]
        return len(old)

    def _path(self, origin: str) -> Path:
        return self._dir / f"{hashlib.sha256(origin.encode()).hexdigest()[:32]}.head"


def _encode(head: Head) -> bytes:
    row = {
        "origin": head.origin,
        "size": head.size,
        "root": head.root.hex(),
        "keys": list(head.keys),
        "closed": head.closed,
        "seen_s": head.seen_s,
    }
    return orjson.dumps(row) + b"\n"


def _read(path: Path) -> Head:
    try:
        row = orjson.loads(path.read_bytes())
        return Head(
            row["origin"],
            row["size"],
            bytes.fromhex(row["root"]),
            tuple(row["keys"]),
            row["closed"],
            row["seen_s"],
        )
    except (ValueError, KeyError, TypeError):
        # To go on as if this log were new would let it be rewritten: a person must look.
        raise WitnessError(f"agent.witness_dir: {path} is damaged; bring it back") from None


def replace(path: Path, data: bytes) -> None:
    """Put `data` in the place of a file, whole or not at all, durably; raises OSError."""
    partial = path.with_suffix(".partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    partial.replace(path)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
