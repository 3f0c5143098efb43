"""Providers of keys that lie on this machine: one file.

Read whole each time; what is refused changes nothing. A secret is destroyed by writing the file
again without it: the old one's blocks are the file system's, so where that matters let the file lie
on a volume that forgets (tmpfs), or keep the root in a token.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from proxy.keys.file import FILE_BYTES_MAX, KeyFile, KeyFileError, encode, read
from proxy.keys.provider import CannotDestroyError, KeySet, KeySourceError, Standing
from proxy.settings import file_mark

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proxy.keys.provider import State


def wall_ms() -> int:
    """Return the time in unix ms."""
    return time.time_ns() // 1_000_000


def without(contents: KeyFile, name: str) -> KeyFile:
    """Return a file's contents without a secret; raises `KeySourceError` if it is not there."""
    kind, _, rest = name.partition("/")
    left = contents
    if kind == "envelope":
        rows = tuple(key for key in contents.envelope_keys if key.kid.hex() != rest)
        left = replace(contents, envelope_keys=rows)
    elif kind == "prompt":
        keys = {tenant: key for tenant, key in contents.prompt_keys.items() if tenant != rest}
        left = replace(contents, prompt_keys=keys)
    elif kind == "chain":
        left = replace(contents, chain_seeds=tuple(r for r in contents.chain_seeds if r[0] != rest))
    elif kind == "checkpoint":
        signs = tuple(r for r in contents.checkpoint_keys if f"{r[0]}/{r[1]}" != rest)
        left = replace(contents, checkpoint_keys=signs)
    if left == contents:
        raise KeySourceError(f"no secret of the name {name}")
    return left


class FileProvider:
    """One key file of the role sidecar: `keys.file`. See `KeyProvider`."""

    kind = "file"

    def __init__(self, path: Path, clock_ms: Callable[[], int] = wall_ms) -> None:
        self._path = path
        self._standing = Standing(clock_ms)

    def load(self) -> KeySet:
        """Raise `KeyFileError` for a file that is refused, also for one that is not there."""
        try:
            contents = self._read()
        except KeySourceError as problem:
            self._standing.degraded("file_refused", problem)
            raise
        self._standing.good()
        return KeySet(contents)

    def _read(self) -> KeyFile:
        try:
            contents = read(self._path)
        except OSError as problem:
            raise KeyFileError(str(problem)) from None
        if contents.role != "sidecar":
            raise KeyFileError(f"{self._path}: made for the {contents.role}, not for a sidecar")
        return contents

    def mark(self) -> object:
        """Return what the file's status says of it."""
        return file_mark(self._path)

    def destroy(self, name: str) -> None:
        """Write the file again without the secret."""
        data = encode(without(self._read(), name))
        assert len(data) <= FILE_BYTES_MAX
        try:
            from proxy.keys.issue import replace_file  # noqa: PLC0415 - hardly ever

            replace_file(self._path, data, suffix=f"{wall_ms()}.{os.getpid()}")
        except OSError as problem:
            raise CannotDestroyError(f"{self._path}: {problem.strerror}") from None

    def state(self) -> State:
        """Say whether the file was good when it was last read."""
        return self._standing.state()

    def close(self) -> None:
        """Nothing runs."""
