"""Crashes at any byte, full and failing disks: nothing is ever misread afterwards."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from proxy.audit import disk as disk_module
from proxy.audit import room as room_module
from proxy.audit import writer as writer_module
from proxy.audit.layout import segments
from proxy.audit.writer import AuditUnavailableError, AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy.audit_chains import (
    START_MS,
    classes,
    config,
    crash,
    request,
    run,
    verdict,
    verify,
    write_chain,
)

ROOT = Path(__file__).parents[3]


def _records(chain):
    return [
        json.loads(line.split(b"\t")[0])
        for _, path in segments(chain)
        for line in path.read_bytes().splitlines()
    ]


def _restart(directory, origin="next", start_ms=START_MS + 3_600_000):
    return write_chain(directory, 1, origin=origin, start_ms=start_ms)


def test_a_crash_is_truncated_until_a_restart_declares_it(tmp_path):
    old = write_chain(tmp_path, close=False)
    assert classes(tmp_path) == [("truncated", 6)]
    recovered = _records(_restart(tmp_path))[1]
    assert recovered["kind"] == "recovered"
    assert recovered["of_origin"] == "local/default/pod/uid/1"
    assert recovered["file"] == f"{old.name}/{0:020d}.log"
    assert (recovered["last_seq"], recovered["length"]) == (5, 0)
    result = verify(tmp_path)
    assert (result.verdict, [end.end for end in result.chains]) == ("ok", ["sealed", "closed"])


def test_a_tail_is_declared_once(tmp_path):
    write_chain(tmp_path, close=False)
    _restart(tmp_path)
    third = _restart(tmp_path, "third", START_MS + 7_200_000)
    assert [record["kind"] for record in _records(third)] == ["genesis", "request", "closed"]


def test_cut_at_any_byte_of_the_last_records_a_restart_makes_it_ok(tmp_path):
    whole = write_chain(tmp_path / "whole", 4, close=False)
    data = segments(whole)[0][1].read_bytes()
    lines = data.splitlines(keepends=True)
    start = len(data) - len(lines[-1]) - 3
    restarts = {*range(start, len(data), 31), *range(len(data) - 67, len(data), 6)}
    restarts |= {0, 1, len(lines[0]) - 1, len(lines[0]), len(lines[0]) + 1, len(data) - 1}
    for cut in sorted({*range(start, len(data)), *restarts}):
        directory = tmp_path / f"cut-{cut}"
        shutil.copytree(whole.parent, directory)
        (log,) = [path for _, path in segments(directory / whole.name)]
        log.write_bytes(data[:cut])
        kept = data[:cut].count(b"\n")
        half = [] if data[:cut].endswith(b"\n") or not cut else [("half_line", kept)]
        before = classes(directory)
        assert before == [*half, ("truncated", kept + len(half))], cut
        if cut in restarts:
            _restart(directory)
            assert verdict(directory) == ("ok", None), cut


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"\n\n", b'{"x":1}\n', b"\xff" * 90 + b"\n"])
def test_whatever_a_power_cut_leaves_behind_the_last_record_is_declared(tmp_path, tail):
    chain = write_chain(tmp_path, close=False)
    with segments(chain)[0][1].open("ab") as file:
        file.write(tail)
    assert verdict(tmp_path)[0] in ("half_line", "malformed")
    _restart(tmp_path)
    assert verdict(tmp_path) == ("ok", None)


def test_a_declared_tail_must_stay_as_it_was(tmp_path):
    chain = write_chain(tmp_path, close=False)
    log = segments(chain)[0][1]
    data = log.read_bytes()
    log.write_bytes(data + b'{"half')
    _restart(tmp_path)
    assert verdict(tmp_path) == ("ok", None)
    for changed, found in (
        (b'{"hald', "content_mismatch"),
        (b'{"hal', "content_mismatch"),
        (b"", "content_mismatch"),
        (b'{"half"', "fork"),
        (b'{"half\n', "fork"),
    ):
        log.write_bytes(data + changed)
        assert verdict(tmp_path) == (found, 6), changed


def test_a_declared_chain_may_neither_shrink_nor_grow(tmp_path):
    chain = write_chain(tmp_path, close=False)
    log = segments(chain)[0][1]
    data = log.read_bytes()
    _restart(tmp_path)
    log.write_bytes(b"".join(data.splitlines(keepends=True)[:-1]))
    assert verdict(tmp_path)[0] in ("truncated", "content_mismatch")
    log.write_bytes(data)
    (chain / f"{6:020d}.log").write_bytes(data)
    assert ("fork", 6) in classes(tmp_path)
    (chain / f"{6:020d}.log").unlink()
    log.unlink()
    assert verdict(tmp_path) == ("truncated", 0)
    shutil.rmtree(chain)
    assert verdict(tmp_path) == ("truncated", 0)


def test_a_chain_that_died_before_its_first_record_is_declared(tmp_path):
    (tmp_path / "1767225600000000000-00000000").mkdir()
    assert verdict(tmp_path) == ("truncated", 0)
    _restart(tmp_path)
    assert verdict(tmp_path) == ("ok", None)


def test_a_crash_between_segments_is_declared(tmp_path):
    chain = write_chain(tmp_path, 60, segment_bytes=8192, close=False)
    first, path = segments(chain)[-1]
    path.write_bytes(b"")
    assert verdict(tmp_path) == ("truncated", first)
    _restart(tmp_path)
    assert verdict(tmp_path) == ("ok", None)


def test_a_chain_killed_under_load_is_declared_after_the_restart(tmp_path):
    code = """
        import asyncio, sys
        from pathlib import Path
        from proxy.clock import SystemClock
        from proxy.audit.writer import AuditWriter
        from tests.unit.proxy.audit_chains import config, request

        async def main():
            loop = asyncio.get_running_loop()
            settings = config(
                Path(sys.argv[1]), origin=sys.argv[2], segment_bytes=1 << 16, token_ids="commit",
                rotate_records=7,
            )
            writer = AuditWriter.start(settings, SystemClock(), loop)
            n = 0
            while True:
                for _ in range(20):
                    n += 1
                    writer.append_request(request(n), [n])
                await asyncio.sleep(0)
                if n == 2000:
                    print("loaded", flush=True)

        asyncio.run(main())
    """
    for round_number in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(round_number)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        with child:
            assert child.stdout.readline() == b"loaded\n"
            alive = verify(tmp_path).public()
            child.kill()
        assert alive["verdict"] in ("ok", "truncated"), alive
        assert [chain["end"] for chain in alive["chains"]][-1] == "open"
        found = verify(tmp_path).public()
        assert found["verdict"] in ("truncated", "half_line")
        assert {f["class"] for f in found["findings"]} <= {"truncated", "half_line"}
        assert round_number == 0 or found["chains"][0]["end"] == "sealed"
    _restart(tmp_path, start_ms=4_000_000_000_000)
    assert verdict(tmp_path) == ("ok", None)


# Disks that fail. The seams are os.pwrite and os.fdatasync; the files are real.


class FailingDisk:
    """Lets `room` bytes through to the log files, then fails as a full disk does."""

    def __init__(self, monkeypatch, *, short=False):
        self.full = False
        self.sync_fails = 0
        self.short = short
        self._pwrite, self._fdatasync = os.pwrite, os.fdatasync
        monkeypatch.setattr(disk_module.os, "pwrite", self.pwrite)
        monkeypatch.setattr(disk_module.os, "fdatasync", self.fdatasync)
        monkeypatch.setattr(writer_module, "RETRY_S", 0.01)

    def pwrite(self, fd, data, offset):
        if not self.full:
            return self._pwrite(fd, data, offset)
        if self.short:
            return self._pwrite(fd, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    def fdatasync(self, fd):
        if self.sync_fails:
            self.sync_fails -= 1
            raise OSError(errno.EIO, "Input/output error")
        self._fdatasync(fd)


def test_a_name_that_could_not_be_made_durable_is_made_so_at_the_next_try(tmp_path, monkeypatch):
    """Before anything in the file is said to be: after a power cut it would have no name."""
    disk = disk_module.Disk(tmp_path / "chain")
    line = b"{}\n"
    part = disk_module.Part(disk_module.SegmentFile(0), line, b"", 1, [(False, line)])
    named = []

    def sync_dir(path):
        if path == tmp_path / "chain":
            named.append(path)
            if len(named) == 1:
                raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk_module, "sync_dir", sync_dir)
    assert disk.commit([part]).records == 0
    assert disk.commit([part]).records == 1
    assert len(named) == 2
    assert disk.commit([part]).records == 1
    assert len(named) == 2  # it has its name
    disk.close()


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("policy", ["block", "degrade"])
def test_a_full_disk_loses_nothing_that_fits_in_memory(
    tmp_path, monkeypatch, caplog, short, policy
):
    failing = FailingDisk(monkeypatch, short=short)

    async def scene():
        clock = ManualClock(START_MS)
        loop = asyncio.get_running_loop()
        writer = AuditWriter.start(config(tmp_path, on_failure=policy), clock, loop)
        await writer.durable(writer.append_request(request(1)))
        log = segments(writer.dir)[0][1]
        size = log.stat().st_size
        failing.full = True
        with pytest.raises(AuditUnavailableError):
            await writer.durable(writer.append_request(request(2)))
        assert not writer.available
        assert log.stat().st_size == size
        assert verdict(tmp_path) == ("ok", None)
        later = [writer.append_request(request(n)) for n in range(3, 50)]
        failing.full = False
        while not writer.available:  # noqa: ASYNC110 - the disk has its own thread
            await asyncio.sleep(0.005)
        await writer.durable(later[-1])
        assert writer.stats.failures >= 1
        await writer.close()
        return writer.dir

    records = _records(run(scene))
    assert [record["kind"] for record in records[1:-1]] == ["request"] * 49
    assert verdict(tmp_path) == ("ok", None)
    # Once each, however often it was tried.
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said[0][0] == "CRITICAL"
    assert "cannot be written" in said[0][1]
    assert said[1:] == [("WARNING", "audit records are written again")]


def test_what_a_full_disk_does_not_leave_room_for_is_told_later(tmp_path, monkeypatch):
    failing = FailingDisk(monkeypatch)
    monkeypatch.setattr(room_module, "PENDING_RECORDS", 10)

    async def scene():
        clock = ManualClock(START_MS)
        writer = AuditWriter.start(config(tmp_path), clock, asyncio.get_running_loop())
        failing.full = True
        with pytest.raises(AuditUnavailableError):
            await writer.durable(writer.append_request(request(1)))
        for number in range(2, 30):
            clock.advance_ms(10)
            writer.append_request(request(number))
        assert writer.stats.lost == 19
        failing.full = False
        while not writer.available or writer.stats.pending:  # noqa: ASYNC110 - the disk has its own thread
            await asyncio.sleep(0.005)
        await writer.close()
        return writer.dir

    records = _records(run(scene))
    lost = [record for record in records if record["kind"] == "lost"]
    assert [(record["count"], record["reason"]) for record in lost] == [(19, "ENOSPC")]
    assert int(lost[0]["to"]) - int(lost[0]["from"]) == 18 * 10 * 10**6
    assert verdict(tmp_path) == ("ok", None)


@pytest.mark.parametrize("ids", [False, True])
def test_a_failed_sync_seals_the_file_and_chains_again(tmp_path, monkeypatch, ids):
    failing = FailingDisk(monkeypatch)

    async def scene():
        clock = ManualClock(START_MS)
        settings = config(
            tmp_path,
            token_ids="sealed" if ids else "off",
            auditor_public=b"\x09" + bytes(31),
        )
        writer = AuditWriter.start(settings, clock, asyncio.get_running_loop())
        await writer.durable(writer.append_request(request(1), [1]))
        for fails in (1, 2):
            failing.sync_fails = fails
            tickets = [writer.append_request(request(n), [n]) for n in range(2, 5)]
            while not writer.available or writer.stats.pending or failing.sync_fails:  # noqa: ASYNC110 - the disk has its own thread
                await asyncio.sleep(0.005)
            await writer.durable(tickets[-1])
        assert writer.stats.failures == 3
        await writer.close()
        return writer.dir

    chain = run(scene)
    records = _records(chain)
    assert [record["seq"] for record in records] == list(range(len(records)))
    requests = [record["trace_id"][-4:] for record in records if record["kind"] == "request"]
    assert requests == ["0001", "0002", "0003", "0004", "0002", "0003", "0004"]
    starts = [record for record in records if record["kind"] == "segment_start"]
    assert [record["sealed"]["intact"] for record in starts] == [True, True]
    assert len(segments(chain)) == 3
    assert classes(tmp_path) == []
    # What stands behind a sealed end was never durable and was chained again: it does not count.
    with segments(chain)[0][1].open("ab") as file:
        file.write(b"stale")
    assert verdict(tmp_path) == ("ok", None)


def test_a_sync_that_fails_at_a_rollover_keeps_every_record(tmp_path, monkeypatch):
    failing = FailingDisk(monkeypatch)

    async def scene():
        clock = ManualClock(START_MS)
        settings = config(tmp_path, segment_bytes=4096)
        writer = AuditWriter.start(settings, clock, asyncio.get_running_loop())
        number = 0
        for _ in range(12):
            failing.sync_fails = 1
            for _ in range(7):
                number += 1
                clock.advance_ms(1)
                ticket = writer.append_request(request(number))
            while not writer.available or writer.stats.pending or failing.sync_fails:  # noqa: ASYNC110 - the disk has its own thread
                await asyncio.sleep(0.002)
            await writer.durable(ticket)
        await writer.close()
        return writer.dir

    records = _records(run(scene))
    requests = [int(record["trace_id"][-4:]) for record in records if record["kind"] == "request"]
    assert requests == list(range(1, 85))
    assert classes(tmp_path) == []


def test_a_disk_that_stays_full_ends_close_with_an_error(tmp_path, monkeypatch):
    failing = FailingDisk(monkeypatch)
    monkeypatch.setattr(writer_module, "CLOSE_S", 0.05)

    async def scene():
        clock = ManualClock(START_MS)
        writer = AuditWriter.start(config(tmp_path), clock, asyncio.get_running_loop())
        failing.full = True
        writer.append_request(request(1))
        with pytest.raises(AuditUnavailableError, match="2 audit records"):
            await writer.close()

    run(scene)
    assert classes(tmp_path) == [("truncated", 1)]


def test_a_chain_started_on_a_full_disk_heals(tmp_path, monkeypatch):
    failing = FailingDisk(monkeypatch)

    async def scene():
        failing.full = True
        clock = ManualClock(START_MS)
        writer = AuditWriter.start(config(tmp_path), clock, asyncio.get_running_loop())
        assert not writer.available
        writer.append_request(request(1))
        failing.full = False
        while not writer.available or writer.stats.pending:  # noqa: ASYNC110 - the disk has its own thread
            await asyncio.sleep(0.005)
        await crash(writer)

    run(scene)
    assert classes(tmp_path) == [("truncated", 2)]


def test_a_real_size_limit_is_survived(tmp_path):
    """RLIMIT_FSIZE stands in for a full disk: the kernel writes short, then refuses."""
    code = """
        import asyncio, resource, signal, sys
        from pathlib import Path
        from proxy.audit import writer as module
        from proxy.audit.writer import AuditWriter
        from proxy.clock import SystemClock
        from tests.unit.proxy.audit_chains import config, request

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        module.RETRY_S = 0.01

        async def main():
            loop = asyncio.get_running_loop()
            writer = AuditWriter.start(config(Path(sys.argv[1])), SystemClock(), loop)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
            for n in range(40):
                last = writer.append_request(request(n))
            while writer.available:
                await asyncio.sleep(0.001)
            assert writer.stats.failures
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            while not writer.available or writer.stats.pending:
                await asyncio.sleep(0.001)
            await writer.durable(last)
            await writer.close()

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000
    assert verify(tmp_path).records == 42
    assert verdict(tmp_path) == ("ok", None)
