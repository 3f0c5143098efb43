"""A batch that nobody waits for: synced at once, its answer taken when the loop comes by."""

from __future__ import annotations

import asyncio

import pytest

from proxy.audit import syncer as syncer_module
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy.audit_chains import START_MS, classes, config, request, run

LATE_S = 30.0


async def _synced(writer: AuditWriter) -> None:
    """Wait until the disk has answered; nothing of the writer is asked."""
    while writer._syncer._kept is None:  # noqa: ASYNC110 - no event: nobody is told
        await asyncio.sleep(0.001)


async def _written(writer: AuditWriter, records: int) -> None:
    """Wait until so many records are in the chain's file."""
    while sum(f.read_bytes().count(b"\n") for f in writer.dir.glob("*.log")) < records:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def _start(directory):
    loop = asyncio.get_running_loop()
    return AuditWriter.start(config(directory, flush_ms=1), ManualClock(START_MS), loop)


@pytest.fixture
def never_collected(monkeypatch):
    """Leave answers where they are until somebody comes by."""
    monkeypatch.setattr(syncer_module, "COLLECT_S", LATE_S)


@pytest.mark.usefixtures("never_collected")
def test_the_next_record_takes_the_answer(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        writer.append_request(request(1))
        await _synced(writer)
        assert writer.stats.records == 1  # genesis: the loop was not woken for the other
        writer.append_request(request(2))
        assert writer.stats.records == 2
        await _synced(writer)
        await writer.close()
        assert (writer.stats.records, writer.stats.pending) == (4, 0)
        return writer.dir

    assert classes(run(scene)) == []


@pytest.mark.usefixtures("never_collected")
@pytest.mark.parametrize("synced", [False, True])
def test_who_waits_is_told_whenever_they_begin_to(tmp_path, synced):
    async def scene():
        writer = _start(tmp_path)
        seq = writer.append_request(request(1))
        if synced:
            await _synced(writer)
        else:
            await asyncio.sleep(0)  # handed to the disk, and no answer yet
        async with asyncio.timeout(LATE_S / 3):
            await writer.durable(seq)
        assert writer.stats.records == 2
        await writer.close()

    run(scene)


@pytest.mark.usefixtures("never_collected")
def test_what_comes_while_it_is_synced_goes_behind_it_at_once(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        for number in range(200):
            writer.append_request(request(number))
            await asyncio.sleep(0)
        await _written(writer, 201)  # although nobody asks for an answer
        await writer.close()
        assert writer.stats.records == 202

    run(scene)


def test_an_idle_chain_takes_it_by_itself(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        writer.append_request(request(1))
        async with asyncio.timeout(LATE_S / 3):
            while writer.stats.records < 2:  # noqa: ASYNC110 - no event: nobody is told
                await asyncio.sleep(0.01)
        assert writer.stats.pending == 0
        await writer.close()

    run(scene)
