"""Where chains lie on a volume: names, order, locks, and file systems that will not do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import BinaryIO

LOCK_NAME = ".lock"
# The chain's seed under the auditor's key (`escrow`), where an agent gave it.
ESCROW_NAME = "escrow.note"
_CHAIN = re.compile(r"(\d{1,20})-[0-9a-f]{8}")
_SEGMENT = re.compile(r"(\d{20})\.log")
# Neither their locks nor their syncs mean what a chain needs them to mean.
REMOTE_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs"})


def chain_name(start_ns: int, token: str) -> str:
    """Return the directory name of a chain; `token` is 8 hex characters."""
    return f"{start_ns}-{token}"


def segment_name(first_seq: int) -> str:
    """Return the name of a segment file."""
    return f"{first_seq:020d}.log"


def ids_name(first_seq: int) -> str:
    """Return the name of a segment's side file of token ids."""
    return f"{first_seq:020d}.ids"


def first_seq_of(name: str) -> int | None:
    """Return the first seq that a segment's name states, or None."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match else None


def segments(chain: Path) -> list[tuple[int, Path]]:
    """Return (first seq, path) of a chain's well-named segments, in order; raises OSError."""
    found = []
    for name in os.listdir(chain):  # noqa: PTH208 - names are what we judge
        first = first_seq_of(name)
        if first is not None:
            found.append((first, chain / name))
    return sorted(found)


def chain_dirs(parent: Path) -> list[Path]:
    """Return the chains in a directory, oldest first; raises OSError.

    A directory of another name that holds segments is a chain too (someone renamed a copy); it
    comes after the others.
    """
    found: list[tuple[int, int, str, Path]] = []
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            match = _CHAIN.fullmatch(entry.name)
            path = Path(entry.path)
            if match:
                found.append((0, int(match[1]), entry.name, path))
            elif segments(path):
                found.append((1, 0, entry.name, path))
    return [path for *_, path in sorted(found)]


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises OSError for anything else.

    A handed-over directory is not trusted: a pipe or a device in it would be read for ever, and a
    link could lead out of it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb")


def filesystem_type(mountinfo: str, path: str) -> str | None:
    """Return the file system type under an absolute, resolved path (text of /proc/self/mountinfo).

    None if the text does not say.
    """
    best, kind = "", None
    for line in mountinfo.splitlines():
        left, found, right = line.partition(" - ")
        fields = left.split(" ")
        if not found or len(fields) < 5:
            continue
        # proc(5): space, tab, newline and backslash are octal escapes there.
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split(" ")[0]
    return kind


def remote_filesystem(path: Path) -> str | None:
    """Return the type of the file system under `path` if chains must not be written there."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    kind = filesystem_type(mountinfo, str(path.resolve()))
    return kind if kind in REMOTE_FILESYSTEMS else None


def is_locked(chain: Path) -> bool:
    """Say whether a living writer holds the chain.

    The probe takes the lock for an instant; another probe at that instant is told apart from a
    writer by asking again. Raises OSError other than for a missing file.
    """
    try:
        fd = os.open(chain / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        for attempt in range(4):
            if attempt:
                time.sleep(0.002)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        return True
    finally:
        os.close(fd)


def sync_dir(path: Path) -> None:
    """Make names in a directory durable; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
