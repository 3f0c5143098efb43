"""A directory of mounted secrets: every `*.json` in it is a key file, together they are the keys.

Kubernetes swaps a mounted volume whole, by the link `..data`: what that leads to is read, all of it
from one generation. Elsewhere files come and go one by one, so a directory that changed while it
was read is read again. Of a thousand secrets that were mounted anew few are new: contents that are
known by their digest are not parsed again, and the keys in them stay the objects that the ring has.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from proxy.keys.file import KeyFile, KeyFileError, encode, parse, read_bytes
from proxy.keys.issue import replace_file
from proxy.keys.local import wall_ms, without
from proxy.keys.merge import first_end_ms, in_grace, merged
from proxy.keys.pace import breathe, uncollected
from proxy.keys.provider import CannotDestroyError, KeySet, KeySourceError, Standing
from proxy.settings import file_mark

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proxy.keys.provider import State

GENERATION = "..data"
FILES_MAX = 4096
TOTAL_BYTES_MAX = 64 << 20
TRIES = 5


class DirectoryProvider:
    """See the module, and `KeyProvider`."""

    kind = "directory"

    def __init__(self, path: Path, clock_ms: Callable[[], int] = wall_ms) -> None:
        self._path = path
        self._clock_ms = clock_ms
        self._standing = Standing(clock_ms)
        self._known: dict[str, tuple[bytes, KeyFile]] = {}
        self._forget_at_ms: int | None = None

    def load(self) -> KeySet:
        """Raise `KeySourceError` naming the first file that is refused."""
        try:
            with uncollected():
                keys = KeySet(self._read())
        except OSError as problem:
            self._standing.degraded("directory_unreadable", problem)
            raise KeySourceError(str(problem)) from None
        except KeySourceError as problem:
            self._standing.degraded("directory_refused", problem)
            raise
        self._standing.good()
        return keys

    def _read(self) -> KeyFile:
        for _ in range(TRIES):
            mark = self.mark()
            try:
                files = self._files()
            except FileNotFoundError:
                if self.mark() == mark:
                    raise
                continue
            if self.mark() == mark:
                contents = merged({name: file for name, (_, file) in files.items()})
                breathe()
                self._known = files
                self._forget_at_ms = first_end_ms(contents.envelope_keys)
                return contents
        raise KeySourceError(f"{self._path}: changed {TRIES} times while it was read")

    def _files(self) -> dict[str, tuple[bytes, KeyFile]]:
        generation = self._path / GENERATION
        at = generation if generation.is_dir() else self._path
        directory = os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            names = _key_files(directory)
            if len(names) > FILES_MAX:
                raise KeyFileError(f"{self._path}: more than {FILES_MAX} key files")
            files, total = {}, 0
            for name in names:
                breathe()
                path = self._path / name
                data = read_bytes(path, directory=directory, mounted=True)
                total += len(data)
                if total > TOTAL_BYTES_MAX:
                    raise KeyFileError(f"{self._path}: more than {TOTAL_BYTES_MAX} bytes in all")
                files[name] = self._parsed(path, data)
        finally:
            os.close(directory)
        return files

    def _parsed(self, path: Path, data: bytes) -> tuple[bytes, KeyFile]:
        digest = hashlib.sha256(data).digest()
        known = self._known.get(path.name)
        return known if known is not None and known[0] == digest else (digest, parse(path, data))

    def mark(self) -> object:
        """Return what tells this state of the directory from another; forgets what has ended."""
        self._forget()
        generation = file_mark(self._path / GENERATION)
        if generation is not None:
            return generation
        rows: list[object] = [file_mark(self._path)]
        try:
            names = _key_files(self._path)
        except OSError:
            return None
        for name in names[: FILES_MAX + 1]:
            breathe()
            rows.append((name, file_mark(self._path / name)))
        return rows

    def _forget(self) -> None:
        now_ms = self._clock_ms()
        if self._forget_at_ms is not None and now_ms > self._forget_at_ms:
            kept = {
                n: (digest, in_grace(file, now_ms)) for n, (digest, file) in self._known.items()
            }
            self._known = kept
            ends = (first_end_ms(file.envelope_keys) for _, file in kept.values())
            self._forget_at_ms = min((end for end in ends if end is not None), default=None)

    def destroy(self, name: str) -> None:
        """Write each file that holds the secret again without it; not in a mounted volume."""
        if (self._path / GENERATION).is_dir():
            raise CannotDestroyError(
                f"{self._path}: mounted from a Secret; take {name} out of that one"
            )
        found = False
        for file_name in _key_files(self._path):
            path = self._path / file_name
            try:
                data = encode(without(parse(path, read_bytes(path, mounted=True)), name))
            except KeyFileError:
                raise
            except KeySourceError:
                continue
            try:
                replace_file(path, data, suffix=f"{wall_ms()}.{os.getpid()}")
            except OSError as problem:
                raise CannotDestroyError(f"{path}: {problem.strerror}") from None
            found = True
        if not found:
            raise KeySourceError(f"no secret of the name {name}")

    def state(self) -> State:
        """Say whether the directory was good when it was last read."""
        return self._standing.state()

    def close(self) -> None:
        """Nothing runs."""


def _key_files(directory: Path | int) -> list[str]:
    names = []
    with os.scandir(directory) as entries:
        for entry in entries:
            breathe()
            if entry.name.endswith(".json") and not entry.name.startswith("."):
                names.append(entry.name)
    return sorted(names)
