"""The disk under a chain: whole batches, group sync, and what to do when either fails.

Blocking; called by the writer's one sync thread (and by its start). It owns file descriptors and
durable offsets and knows nothing of records: bytes are written at the durable offset, so that the
same bytes can be written again after a short write or ENOSPC. Side files are synced before the
lines that point into them. A file whose fdatasync failed is never written or synced again: the
kernel may have dropped its dirty pages and forgotten the error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.audit.layout import ESCROW_NAME, LOCK_NAME, ids_name, segment_name, sync_dir

if TYPE_CHECKING:
    from pathlib import Path

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@dataclass(slots=True, eq=False)
class SegmentFile:
    """One segment on disk. The fields are the disk's; others read them between commits."""

    first_seq: int
    fd: int = -1
    ids_fd: int = -1
    size: int = 0
    ids_size: int = 0
    crc32: int = 0

    @property
    def name(self) -> str:
        """File name of the log."""
        return segment_name(self.first_seq)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes for one segment, and how many records they are."""

    segment: SegmentFile
    log: bytes
    ids: bytes
    records: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """A segment whose sync failed: it ends at `size`, and whether that much still reads back."""

    segment: SegmentFile
    size: int
    intact: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """How a commit went: records durable from the first on, and why no more."""

    records: int
    size: int
    syncs: int
    seconds: float
    error: OSError | None = None
    sealed: Sealed | None = None


class _SyncFailed(Exception):  # noqa: N818 - carries a verdict between two methods
    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


_lock_fds: set[int] = set()


def _drop_locks_in_child() -> None:
    # A forked child shares our lock; were it to outlive us, the chain would look alive.
    for fd in _lock_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    _lock_fds.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Disk:
    """Files of one chain."""

    def __init__(self, chain: Path, escrow: str = "") -> None:
        """`escrow` lies beside the chain before its first record does."""
        self._chain = chain
        self._escrow = escrow
        self._lock_fd = -1
        self._open: SegmentFile | None = None
        self._syncs = 0

    def commit(self, parts: list[Part]) -> Committed:
        """Write and sync parts in order; stops at the first that fails, never raises OSError."""
        begin = time.monotonic()
        self._syncs = records = size = 0
        error: OSError | None = None
        sealed: Sealed | None = None
        try:
            self._create_chain()
            for part in parts:
                self._commit_part(part)
                records += part.records
                size += len(part.log)
        except _SyncFailed as problem:
            error = problem.error
            assert self._open is not None
            sealed = self._seal(self._open)
        except OSError as problem:
            error = problem
        return Committed(records, size, self._syncs, time.monotonic() - begin, error, sealed)

    def close(self) -> None:
        """Close files and let go of the lock."""
        if self._open is not None:
            self._close_files(self._open)
            self._open = None
        if self._lock_fd >= 0:
            _lock_fds.discard(self._lock_fd)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _create_chain(self) -> None:
        if self._lock_fd >= 0:
            return
        # Locked before it gets its name: nobody ever sees a chain of ours without its lock.
        fresh = self._chain.with_name(f".new-{self._chain.name}")
        fresh.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(fresh / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._escrow:
                _write_synced(fresh / ESCROW_NAME, self._escrow.encode())
                sync_dir(fresh)
            fresh.rename(self._chain)
            sync_dir(self._chain.parent)
        except OSError:
            os.close(fd)
            if self._chain.exists():
                self._chain.rename(fresh)
            raise
        self._lock_fd = fd
        _lock_fds.add(fd)

    def _commit_part(self, part: Part) -> None:
        segment = part.segment
        if self._open is not None and self._open is not segment:
            self._close_files(self._open)
        self._open = segment
        if segment.fd < 0:
            segment.fd = os.open(self._chain / segment.name, _CREATE, 0o600)
            sync_dir(self._chain)
        if part.ids:
            if segment.ids_fd < 0:
                path = self._chain / ids_name(segment.first_seq)
                segment.ids_fd = os.open(path, _CREATE, 0o600)
                sync_dir(self._chain)
            self._write(segment.ids_fd, part.ids, segment.ids_size)
            self._sync(segment.ids_fd)
        try:
            self._write(segment.fd, part.log, segment.size)
        except OSError:
            # Entries that no durable record points to yet.
            if part.ids:
                self._cut(segment.ids_fd, segment.ids_size)
            raise
        self._sync(segment.fd)
        segment.size += len(part.log)
        segment.ids_size += len(part.ids)
        # Against a disk that returns other bytes, not against people: those have MACs to get past.
        segment.crc32 = zlib.crc32(part.log, segment.crc32)

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        try:
            written = os.pwrite(fd, data, offset)
        except OSError:
            self._cut(fd, offset)
            raise
        if written != len(data):
            self._cut(fd, offset)
            raise OSError(errno.ENOSPC, f"short write: {written} of {len(data)} bytes")

    @staticmethod
    def _cut(fd: int, size: int) -> None:
        # Best effort: the next try writes at the same offset, and a reader knows a half line.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)

    def _sync(self, fd: int) -> None:
        self._syncs += 1
        try:
            os.fdatasync(fd)
            if os.fstat(fd).st_nlink == 0:
                raise OSError(errno.ENOENT, "the segment file was removed")  # noqa: TRY301
        except OSError as problem:
            raise _SyncFailed(problem) from problem

    def _seal(self, segment: SegmentFile) -> Sealed:
        """End a segment at its durable size and read that much back from disk."""
        self._open = None
        for fd, size in ((segment.fd, segment.size), (segment.ids_fd, segment.ids_size)):
            if fd >= 0:
                self._cut(fd, size)
        intact = self._reads_back(segment)
        self._close_files(segment)
        if segment.size == 0:
            # Nothing in it was ever durable: its name goes to its successor, its inode does not.
            for name in (segment.name, ids_name(segment.first_seq)):
                with contextlib.suppress(OSError):
                    (self._chain / name).unlink()
        return Sealed(segment, segment.size, intact)

    def _reads_back(self, segment: SegmentFile) -> bool:
        crc32 = offset = 0
        try:
            # Ask the disk, not the cache.
            os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            while offset < segment.size:
                block = os.pread(segment.fd, min(1 << 20, segment.size - offset), offset)
                if not block:
                    return False
                crc32 = zlib.crc32(block, crc32)
                offset += len(block)
        except OSError:
            return False
        return crc32 == segment.crc32

    def _close_files(self, segment: SegmentFile) -> None:
        for fd in (segment.fd, segment.ids_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        segment.fd = segment.ids_fd = -1
