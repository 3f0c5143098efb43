"""Where the bytes of `tongguan seal` and `open` come from and go to.

A file is written beside its name and gets the name when it is whole: nothing half written ever
stands under it, whatever ends the process. A pipe or terminal takes what it is given at once.
Bounds: one piece of `PIECE_BYTES` at a time.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import secrets
import stat
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 256 << 10
_TEXT_CONTROLS = "\t\n\r"
# What turns the direction of text round, so that it reads as something else (Unicode TR 36).
_BIDI = {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}


class EndError(Exception):
    """A file or pipe cannot be read or written; the text is for the operator."""


class UsageError(ValueError):
    """What was asked for cannot be done as asked."""


class Source:
    """Bytes of a file, or of standard input for None. `size_bytes` is None where unknown."""

    def __init__(self, path: Path | None) -> None:
        self.name = "standard input" if path is None else str(path)
        self.path = path
        try:
            self._fd = 0 if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(self._fd)
            if stat.S_ISDIR(found.st_mode):
                raise EndError(f"{self.name}: is a directory; pack it first, as with tar")
        except OSError as problem:
            raise EndError(f"{self.name}: {problem.strerror}") from None
        self.size_bytes = found.st_size if stat.S_ISREG(found.st_mode) else None
        self.read_bytes = 0

    def is_terminal(self) -> bool:
        """Say whether somebody types this."""
        return os.isatty(self._fd)

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, less only at the end."""
        parts, left = [], size
        try:
            while left and (data := os.read(self._fd, left)):
                parts.append(data)
                left -= len(data)
        except OSError as problem:
            raise EndError(f"{self.name}: {problem.strerror}") from None
        self.read_bytes += size - left
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pieces(self) -> Iterator[bytes]:
        """Yield what there is as it comes: a frame in a pipe does not wait for the next one."""
        while True:
            try:
                data = os.read(self._fd, PIECE_BYTES)
            except OSError as problem:
                raise EndError(f"{self.name}: {problem.strerror}") from None
            if not data:
                return
            self.read_bytes += len(data)
            yield data

    def close(self) -> None:
        """Close a file."""
        if self.path is not None:
            os.close(self._fd)


class Sink(Protocol):
    """Takes bytes; `commit` once they are whole, `close` in any case."""

    name: str
    # Whether what was written is out of our hands already.
    straight: bool

    def write(self, data: bytes) -> None:
        """Take bytes; raises `EndError`."""
        ...

    def commit(self) -> None:
        """All is there and good; raises `EndError`."""
        ...

    def close(self) -> None:
        """Give everything back; what was not committed and can be taken back is gone."""
        ...


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Straight:
    """A pipe, a device, a terminal: what is written is gone."""

    straight = True

    def __init__(self, fd: int, name: str, *, text_only: bool = False) -> None:
        self.name = name
        self._fd = fd
        self._guard = _Text() if text_only else None

    def write(self, data: bytes) -> None:
        """See `Sink.write`."""
        if self._guard is not None and not self._guard.shows(data):
            raise UsageError(
                "what is inside is no text and would go to a terminal; give -o FILE, a pipe, "
                "or -o - to have it there all the same"
            )
        try:
            _write_all(self._fd, data)
        except BrokenPipeError:
            raise EndError(f"{self.name}: its reader is gone") from None
        except OSError as problem:
            raise EndError(f"{self.name}: {problem.strerror}") from None

    def commit(self) -> None:
        """See `Sink.commit`."""

    def close(self) -> None:
        """See `Sink.close`."""


class _Text:
    """Whether bytes are text that a terminal can be given: no control of it, no broken UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def shows(self, data: bytes) -> bool:
        try:
            text = self._decoder.decode(data)
        except UnicodeDecodeError:
            return False
        return not any(
            (unicodedata.category(c) == "Cc" and c not in _TEXT_CONTROLS) or c in _BIDI
            for c in text
        )


class AtomicFile:
    """A regular file that appears whole, synced, or not at all."""

    straight = False

    def __init__(self, path: Path, *, mode: int, force: bool) -> None:
        self.name = str(path)
        self._path = path
        self._force = force
        self._beside = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.part")
        if not force and os.path.lexists(path):
            raise UsageError(f"{path} is there already; --force replaces it")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(self._beside, flags, mode)
        except OSError as problem:
            raise EndError(f"{path.parent}: {problem.strerror}") from None

    def write(self, data: bytes) -> None:
        """See `Sink.write`."""
        try:
            _write_all(self._fd, data)
        except OSError as problem:
            raise self._problem(problem) from None

    def commit(self) -> None:
        """See `Sink.commit`."""
        try:
            os.fsync(self._fd)
            if self._force:
                self._beside.replace(self._path)
            else:
                self._name_it()
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as problem:
            raise self._problem(problem) from None

    def _name_it(self) -> None:
        """Take the name unless somebody took it meanwhile: a link never replaces."""
        try:
            self._path.hardlink_to(self._beside)
        except FileExistsError:
            raise EndError(f"{self.name} came into being meanwhile; it was left alone") from None
        except OSError:  # a file system without hard links
            self._beside.replace(self._path)
        else:
            self._beside.unlink()

    def close(self) -> None:
        """See `Sink.close`."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
        with contextlib.suppress(OSError):
            self._beside.unlink()

    def _problem(self, problem: OSError) -> EndError:
        return EndError(f"{self.name}: {problem.strerror}; nothing is kept under that name")


def sink_for(output: str | None, *, force: bool, private: bool, binary: bool) -> Sink:
    """Return where to write: None is standard output unless that is a terminal, `-` in any case.

    `private`: a file that only its owner may read. `binary`: never for a terminal.
    """
    if output is None and sys.stdout.isatty():
        if binary:
            raise UsageError("an envelope is no text for a terminal; give -o FILE, or a pipe")
        return Straight(1, "the terminal", text_only=True)
    if output in {None, "-"}:
        return Straight(1, "standard output")
    assert output is not None
    path = Path(output)
    if path.is_dir():
        raise UsageError(f"{path} is a directory; give -o the name of a file")
    if path.exists() and not path.is_file():  # a device, a named pipe
        try:
            return Straight(os.open(path, os.O_WRONLY | os.O_CLOEXEC), str(path))
        except OSError as problem:
            raise EndError(f"{path}: {problem.strerror}") from None
    return AtomicFile(path, mode=0o600 if private else 0o666, force=force)
