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
import itertools
import os
import time
import zlib
from typing import TYPE_CHECKING

import msgspec

from kernels import wire
from proxy.audit.layout import ESCROW_NAME, LOCK_NAME, ids_name, segment_name, sync_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class SegmentFile(msgspec.Struct, eq=False):
    """One segment on disk. The fields are the disk's; others read them between commits."""

    first_seq: int
    fd: int = -1
    ids_fd: int = -1
    size: int = 0
    ids_size: int = 0
    crc32: int = 0
    # With what is written and not durable yet.
    written: int = 0
    written_crc32: int = 0

    @property
    def name(self) -> str:
        """File name of the log."""
        return segment_name(self.first_seq)


class Part(msgspec.Struct, frozen=True):
    """Bytes for one segment, and how many records they are.

    `leaves` is all of `log` again, in order: leaf hashes (True), or lines that have none yet.
    """

    segment: SegmentFile
    log: bytes
    ids: bytes
    records: int
    leaves: Sequence[tuple[bool, bytes]]


class Sealed(msgspec.Struct, frozen=True):
    """A segment whose sync failed: it ends at `size`, and whether that much still reads back."""

    segment: SegmentFile
    size: int
    intact: bool


class Committed(msgspec.Struct, frozen=True):
    """How a commit went: records durable from the first on, and why no more."""

    records: int
    size: int
    syncs: int
    seconds: float
    error: OSError | None = None
    sealed: Sealed | None = None


_crc32 = wire.checksums(zlib.crc32)


def _begin_pure(fd: int, offset: int, size: int) -> int:
    del fd, offset, size
    return 0  # the sync writes it


_begin_write = wire.writes(_begin_pure)
# What writing may end with, as fdatasync does; any other error says that there is no such call.
_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


class _SyncFailed(Exception):  # noqa: N818 - carries a verdict between two methods
    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Process:
    """How many forks lie between the first process and this one. Cheaper to ask than its id."""

    forks = 0


_lock_fds: set[int] = set()


def _in_child() -> None:
    Process.forks += 1
    # A forked child shares our lock; were it to outlive us, the chain would look alive.
    for fd in _lock_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    _lock_fds.clear()


os.register_at_fork(after_in_child=_in_child)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Disk:
    """Files of one chain."""

    def __init__(
        self, chain: Path, escrow: str = "", written: Callable[[Part], None] | None = None
    ) -> None:
        """`escrow` lies beside the chain before its first record does.

        `written` is told of a part whose log is not durable yet, and may be so never.
        """
        self._chain = chain
        self._escrow = escrow
        self._tell_written = written
        self._lock_fd = -1
        self._open: SegmentFile | None = None
        self._unnamed = False  # a file's name is not durable yet, so nothing in it is
        self._ahead: list[Part] = []
        self._ahead_written = 0
        self._ahead_error: OSError | _SyncFailed | None = None
        self._syncs = 0

    def ahead(self, parts: list[Part]) -> None:
        """Take parts before the commit that syncs them and answers for them too.

        They are written where nothing stands against it, and the disk is told to begin on them, so
        that less is left for the sync.
        """
        before = len(self._ahead)
        self._ahead += parts
        if self._ahead_written != before or self._ahead_error is not None:
            return
        try:
            for part in parts:
                if part.ids or part.segment is not self._open:
                    return
                offset = part.segment.written
                self._put(part)
                self._ahead_written += 1
                self._begin(part.segment.fd, offset, len(part.log))
        except (OSError, _SyncFailed) as problem:
            self._ahead_error = problem

    def commit(self, parts: list[Part]) -> Committed:
        """Write and sync parts in order, those that were taken ahead first.

        Stops at the first segment that fails; never raises OSError.
        """
        begin = time.monotonic()
        self._syncs = records = size = 0
        error: OSError | None = None
        sealed: Sealed | None = None
        parts, self._ahead = self._ahead + parts, []
        written, self._ahead_written = self._ahead_written, 0
        problem, self._ahead_error = self._ahead_error, None
        try:
            if problem is not None:
                raise problem
            self._create_chain()
            for _, run in itertools.groupby(parts, lambda part: part.segment.first_seq):
                of_one = list(run)
                self._commit_segment(of_one, written)
                written = max(0, written - len(of_one))
                records += sum(part.records for part in of_one)
                size += sum(len(part.log) for part in of_one)
        except _SyncFailed as problem:
            error = problem.error
            assert self._open is not None
            sealed = self._seal(self._open)
        except OSError as problem:
            error = problem
            self._unwrite()
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

    def _commit_segment(self, parts: list[Part], written: int) -> None:
        """Make parts of one segment durable; the log of the first `written` is in the file."""
        segment = parts[0].segment
        if self._open is not None and self._open is not segment:
            self._close_files(self._open)
        self._open = segment
        ids = b"".join([part.ids for part in parts])
        if segment.fd < 0:
            segment.fd = self._create(segment.name)
        if ids and segment.ids_fd < 0:
            segment.ids_fd = self._create(ids_name(segment.first_seq))
        if self._unnamed:
            sync_dir(self._chain)
            self._unnamed = False
        if ids:
            self._write(segment.ids_fd, ids, segment.ids_size)
            self._sync(segment.ids_fd)
        try:
            for part in parts[written:]:
                self._put(part)
        except OSError:
            # Entries that no durable record points to yet.
            if ids:
                self._cut(segment.ids_fd, segment.ids_size)
            raise
        self._sync(segment.fd)
        segment.size, segment.crc32 = segment.written, segment.written_crc32
        segment.ids_size += len(ids)

    def _create(self, name: str) -> int:
        fd = os.open(self._chain / name, _CREATE, 0o600)
        self._unnamed = True
        return fd

    def _unwrite(self) -> None:
        """Let the file end where it is durable."""
        segment = self._open
        if segment is not None and segment.written != segment.size:
            self._cut(segment.fd, segment.size)
            segment.written, segment.written_crc32 = segment.size, segment.crc32

    def _put(self, part: Part) -> None:
        segment, log = part.segment, part.log
        self._write(segment.fd, log, segment.written)
        segment.written += len(log)
        # Against a disk that returns other bytes, not against people: those have MACs to get past.
        segment.written_crc32 = _crc32(log, segment.written_crc32)
        if self._tell_written is not None:
            self._tell_written(part)

    @staticmethod
    def _begin(fd: int, offset: int, size: int) -> None:
        """Have the disk begin on bytes of a file. It is a sync's beginning, and fails as one."""
        number = _begin_write(fd, offset, size)
        if number in _LOST:
            raise _SyncFailed(OSError(number, os.strerror(number)))

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
                crc32 = _crc32(block, crc32)
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
