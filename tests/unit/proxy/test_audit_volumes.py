"""A volume that changes hands, or is shared; a disk that turns read-only."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from proxy.audit import disk as disk_module
from proxy.audit import writer as writer_module
from proxy.audit.setup import AuditUnavailableError
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy.audit_chains import START_MS, config, request, run, verify, write_chain
from tests.unit.proxy.test_audit_tampering import theirs

ROOT = Path(__file__).parents[3]
POD = "prod/llm/sidecar-{0}/uid-{0}/{0}"


def records(chain):
    return [
        json.loads(line.partition(b"\t")[0])
        for path in sorted(chain.glob("*.log"))
        for line in path.read_bytes().splitlines()
    ]


@pytest.mark.parametrize("closed", [True, False])
def test_a_volume_reused_by_a_new_pod_ties_the_two_together(tmp_path, closed):
    old = write_chain(tmp_path, 5, origin=POD.format(1), close=closed)
    last = records(old)[-1]
    new = write_chain(tmp_path, 3, origin=POD.format(2), start_ms=START_MS + 60_000)
    genesis, second = records(new)[:2]
    assert (genesis["prev_origin"], genesis["prev_size"]) == (POD.format(1), last["seq"] + 1)
    if closed:
        assert second["kind"] == "request"
    else:
        assert (second["kind"], second["of_origin"]) == ("recovered", POD.format(1))
        assert (second["last_seq"], second["length"]) == (last["seq"], 0)
    result = verify(tmp_path)
    ends = {chain.origin: chain.end for chain in result.chains}
    assert ends == {POD.format(1): "closed" if closed else "sealed", POD.format(2): "closed"}
    assert result.verdict == theirs(tmp_path, file="seeds.json")[0] == "ok"
    # What the pod before left cannot be taken away: its successor names it.
    for path in old.iterdir():
        path.unlink()
    old.rmdir()
    assert verify(tmp_path).verdict == theirs(tmp_path, file="seeds.json")[0] == "truncated"


_ONE_OF_TWO = """
    import asyncio, sys
    from pathlib import Path
    from proxy.audit.writer import AuditWriter
    from proxy.clock import SystemClock
    from tests.unit.proxy.audit_chains import config, request

    async def main():
        values = config(Path(sys.argv[1]), origin=f"host/{sys.argv[2]}/1")
        writer = AuditWriter.start(values, SystemClock(), asyncio.get_running_loop())
        print("started", flush=True)
        sys.stdin.readline()
        for number in range(300):
            await writer.durable(writer.append_request(request(number)))
        print("written", flush=True)
        sys.stdin.readline()
        await writer.close()

    asyncio.run(main())
"""


def test_two_processes_on_one_directory_keep_out_of_each_others_way(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(_ONE_OF_TWO), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with (
        subprocess.Popen([*command, "1"], **pipes) as one,
        subprocess.Popen([*command, "2"], **pipes) as two,
    ):
        for said in ("started", "written"):
            for process in (one, two):
                assert process.stdout.readline().strip() == said
            if said == "written":
                break
            for process in (one, two):
                process.stdin.write("go\n")
                process.stdin.flush()
        # Both live: whoever starts now declares neither as left behind.
        third = write_chain(tmp_path, 2, origin="host/3/1", start_ms=4_000_000_000_000)
        assert [record["kind"] for record in records(third)].count("recovered") == 0
        found = verify(tmp_path)
        assert (found.verdict, [c.end for c in found.chains]) == ("ok", ["open", "open", "closed"])
        for process in (one, two):
            process.stdin.write("end\n")
            process.stdin.flush()
            assert process.wait(30) == 0
    found = verify(tmp_path)
    assert (found.verdict, [chain.end for chain in found.chains]) == ("ok", ["closed"] * 3)
    assert [chain.records for chain in found.chains] == [302, 302, 4]


@pytest.mark.parametrize("policy", ["block", "degrade"])
@pytest.mark.parametrize("reason", ["EROFS", "EIO"])
def test_a_disk_that_turns_read_only_is_unavailable_until_it_is_writable(
    tmp_path, monkeypatch, policy, reason
):
    """As a file system does that found an error in itself: open files are there, no write is."""
    real, broken = os.pwrite, []

    def write(fd, data, offset):
        if broken:
            raise OSError(getattr(errno, reason), os.strerror(getattr(errno, reason)))
        return real(fd, data, offset)

    monkeypatch.setattr(disk_module.os, "pwrite", write)
    monkeypatch.setattr(writer_module, "RETRY_S", 0.01)

    async def scene():
        values = config(tmp_path, on_failure=policy)
        writer = AuditWriter.start(values, ManualClock(START_MS), asyncio.get_running_loop())
        await writer.durable(writer.append_request(request(1)))
        broken.append(True)
        with pytest.raises(AuditUnavailableError):
            await writer.durable(writer.append_request(request(2)))
        assert not writer.available  # `block` answers 503 by this word
        for number in range(3, 20):
            writer.append_request(request(number))
        broken.clear()
        async with asyncio.timeout(20):
            while not writer.available or writer.stats.pending:  # noqa: ASYNC110 - its own thread
                await asyncio.sleep(0.01)
        await writer.close()
        return writer

    writer = run(scene)
    assert writer.stats.lost == 0
    kinds = [record["kind"] for record in records(writer.dir)]
    assert kinds == ["genesis", *["request"] * 19, "closed"]
    assert verify(tmp_path).verdict == "ok"
