"""K(i) on disk, and every escrow: what must be there before a seed is given.

`hand_out` first replaces the state by that of K(i+1), and overwrites the old file's bytes; then
appends the escrow; both are synced before it returns. A crash in between loses a seed that nobody
was given. Blocking; called by one thread.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import orjson

from agent.seeds import RefusedError, Seed, State, first_state, hand_out
from agent.witness_store import replace
from proxy.audit.note import ED25519, write_note
from proxy.audit.signing import Cosigner, NoteSigner

if TYPE_CHECKING:
    from pathlib import Path

STATE_NAME, KEY_NAME, ESCROW_NAME = "seeds.state", "seeds.key", "escrow.notes"
# Some 400 000 chains; the auditor takes the file away when it grows large.
ESCROW_BYTES_MAX = 256 << 20


class ChainsError(Exception):
    """The directory cannot be used; the text says why and what to do."""


class SeedStore:
    """See the module."""

    def __init__(self, directory: Path, auditor_public: bytes) -> None:
        """Read what is there, begin where nothing is; raises `ChainsError`."""
        self._dir = directory
        self._auditor_public = auditor_public
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._state = self._load_state()
            name, private = self._load_key()
        except OSError as problem:
            where = problem.filename or directory
            raise ChainsError(f"agent.chains_dir: {where}: {problem.strerror}") from None
        # Published as a witness's key is, so that it can sign notes and never a log's checkpoint.
        self.key_line = Cosigner(name, private).key.line()
        self._signer = NoteSigner(name, ED25519, private)

    @property
    def index(self) -> int:
        """How many seeds were handed out, or lost in a crash."""
        return self._state.index

    def hand_out(self, origin: str) -> tuple[Seed, str]:
        """Return a seed and its signed escrow; raises OSError, `RefusedError`."""
        if self._escrow_bytes() >= ESCROW_BYTES_MAX:
            raise RefusedError(507, f"{self._dir / ESCROW_NAME} is full: move it to the auditor")
        seed, after = hand_out(self._state, origin, self._auditor_public, secrets.token_bytes)
        self._keep(after)
        self._state = after
        note = write_note(seed.escrow_text, [self._signer.sign(seed.escrow_text)])
        with (self._dir / ESCROW_NAME).open("ab") as file:
            file.write(note.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return seed, note

    def escrows(self) -> bytes:
        """Return every escrow there is, one behind another."""
        path = self._dir / ESCROW_NAME
        return path.read_bytes() if path.exists() else b""

    def _escrow_bytes(self) -> int:
        path = self._dir / ESCROW_NAME
        return path.stat().st_size if path.exists() else 0

    def _load_state(self) -> State:
        path = self._dir / STATE_NAME
        if not path.exists():
            state = first_state(secrets.token_bytes)
            self._keep(state)
            return state
        _demand_private(path)
        try:
            row = orjson.loads(path.read_bytes())
            return State(row["agent"], row["index"], bytes.fromhex(row["key"]))
        except (ValueError, KeyError, TypeError):
            # To begin anew is safe for what was written, but a person should know.
            raise ChainsError(
                f"agent.chains_dir: {path} is damaged; remove it to begin anew with fresh keys"
            ) from None

    def _keep(self, state: State) -> None:
        row = {"agent": state.agent_id, "index": state.index, "key": state.key.hex()}
        path = self._dir / STATE_NAME
        old = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if path.exists() else -1
        try:
            replace(path, orjson.dumps(row) + b"\n")
            if old >= 0:  # its name is gone; its blocks may be the old ones, or the file system's
                os.pwrite(old, bytes(os.fstat(old).st_size), 0)
                os.fsync(old)
        finally:
            if old >= 0:
                os.close(old)

    def _load_key(self) -> tuple[str, bytes]:
        path = self._dir / KEY_NAME
        if not path.exists():
            name = f"seeds-{secrets.token_hex(4)}"
            replace(path, f"{name} {secrets.token_hex(32)}\n".encode())
        _demand_private(path)
        name, _, private = path.read_text(encoding="ascii").strip().partition(" ")
        try:
            key = bytes.fromhex(private)
            if len(key) != 32 or not name:
                raise ValueError(name)  # noqa: TRY301 - one message for all that is no key
            return name, key  # noqa: TRY300
        except ValueError:
            raise ChainsError(f"agent.chains_dir: {path} is no key") from None


def _demand_private(path: Path) -> None:
    if path.stat().st_mode & 0o077:
        raise ChainsError(f"agent.chains_dir: others may read {path}; run: chmod 600 {path}")
