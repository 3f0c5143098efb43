"""A file system that is really full, or really read-only: a tmpfs of our own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.proxy.audit_chains import verify

ROOT = Path(__file__).parents[3]


def _may_mount():
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


mounts = pytest.mark.skipif(
    not _may_mount(), reason="CAP_SYS_ADMIN: no mount namespace of our own here"
)

PREAMBLE = """
    import asyncio, json, subprocess, sys
    from pathlib import Path
    from proxy.audit import room
    from proxy.audit import writer as module
    from proxy.audit.setup import AuditError, AuditUnavailableError
    from proxy.audit.writer import AuditWriter
    from proxy.clock import SystemClock
    from tests.unit.proxy.audit_chains import config, request

    disk = Path(sys.argv[1])
    policy = sys.argv[2]
    module.RETRY_S = 0.01

    def mount(options, *more):
        subprocess.run(["mount", *more, "-o", options, "none", str(disk)], check=True)

    async def start():
        loop = asyncio.get_running_loop()
        values = config(disk / "audit", on_failure=policy, heartbeat_s=300)
        return AuditWriter.start(values, SystemClock(), loop)
"""


def _on_a_disk(tmp_path, scene, policy):
    """Run a scene in a mount namespace; returns (what it printed, the log it left)."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(scene)
    code += f"\nimport shutil\nshutil.copytree(disk / 'audit', {str(kept)!r})\n"
    command = ["unshare", "--mount", sys.executable, "-c", code, str(disk), policy]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout), kept


@mounts
@pytest.mark.parametrize("policy", ["block", "degrade"])
def test_a_full_file_system_loses_what_memory_cannot_hold_and_says_so(tmp_path, policy):
    scene = """
        mount("size=96k", "-t", "tmpfs")
        room.PENDING_RECORDS = 400

        async def main():
            writer = await start()
            number = 0
            while writer.available:
                writer.append_request(request(number))
                number += 1
                await asyncio.sleep(0.0005)
            for _ in range(600):
                writer.append_request(request(number))
                number += 1
            lost, failures = writer.stats.lost, writer.stats.failures
            try:
                await writer.durable(writer.append_request(request(number)))
                raise SystemExit("durable on a full disk")
            except AuditUnavailableError:
                pass
            mount("remount,size=8m")
            while not writer.available or writer.stats.pending:
                await asyncio.sleep(0.002)
            await writer.close()
            print(json.dumps([number + 1, writer.stats.lost, lost, failures]))

        asyncio.run(main())
    """
    (asked, lost, lost_while_full, failures), log = _on_a_disk(tmp_path, scene, policy)
    assert failures >= 1
    assert 0 < lost_while_full <= lost < asked
    records = [
        json.loads(line.partition(b"\t")[0])
        for path in sorted(log.rglob("*.log"))
        for line in path.read_bytes().splitlines()
    ]
    kinds = [record["kind"] for record in records]
    told = [record for record in records if record["kind"] == "lost"]
    assert sum(record["count"] for record in told) == lost
    assert {record["reason"] for record in told} <= {"ENOSPC", "queue_full"}
    assert kinds.count("request") + lost == asked
    assert verify(log).verdict == "ok"


@mounts
@pytest.mark.parametrize("policy", ["block", "degrade"])
def test_a_chain_begun_on_a_full_file_system_heals(tmp_path, policy):
    scene = """
        mount("size=64k", "-t", "tmpfs")
        (disk / "audit").mkdir()
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass

        async def main():
            writer = await start()
            before = writer.available
            ticket = writer.append_request(request(1))
            ballast.unlink()
            while not writer.available or writer.stats.pending:
                await asyncio.sleep(0.002)
            await writer.durable(ticket)
            await writer.close()
            print(json.dumps(before))

        asyncio.run(main())
    """
    available, log = _on_a_disk(tmp_path, scene, policy)
    assert available is False
    result = verify(log)
    assert (result.verdict, result.records) == ("ok", 3)


@mounts
@pytest.mark.parametrize("policy", ["block", "degrade"])
def test_a_read_only_file_system_refuses_a_start_and_says_where(tmp_path, policy):
    scene = """
        mount("size=256k", "-t", "tmpfs")

        async def main():
            writer = await start()
            await writer.close()
            mount("remount,ro")
            try:
                await start()
                raise SystemExit("started on a read-only disk")
            except AuditError as problem:
                print(json.dumps(str(problem)))

        asyncio.run(main())
    """
    said, log = _on_a_disk(tmp_path, scene, policy)
    assert "Read-only file system" in said
    assert f"{tmp_path / 'disk' / 'audit'}" in said
    assert verify(log).verdict == "ok"
    shutil.rmtree(log)
