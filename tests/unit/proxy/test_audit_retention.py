"""Retention: only what is old, whole and ended goes, and what is left verifies at every moment."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from proxy.audit import prune, pruned, retention
from proxy.audit.bundle import verify as bundle_verify
from proxy.audit.chain import sha256_hex
from proxy.audit.epochs import MacKeys
from proxy.audit.export import export_segments
from proxy.audit.layout import segments
from proxy.audit.note import ED25519, Keyset
from proxy.audit.prove import NoProofError, prove
from proxy.audit.prove import check as check_proof
from proxy.audit.retention import DAY_NS, Retention
from proxy.audit.signing import NoteSigner
from proxy.audit.verify import verify_directory
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy.audit_chains import SEED, START_MS, config, crash, request, run

SIGNER = NoteSigner("log", ED25519, b"\1" * 32)
PINNED = Keyset([SIGNER.key])
DAYS = 183
HOUR_MS = 3_600_000


def settings(directory, number, **changes):
    values = {"signers": (SIGNER,), "checkpoint_records": 20, "segment_bytes": 16384, **changes}
    return config(directory, origin=f"pod/{number}", **values)


async def _chain(directory, number, start_ms, records=60, *, close=True, **changes):
    clock = ManualClock(start_ms)
    loop = asyncio.get_running_loop()
    writer = AuditWriter.start(settings(directory, number, **changes), clock, loop)
    for record in range(records):
        clock.advance_ms(1000)
        ticket = writer.append_request(request(record), [1, 2])
        if record % 5 == 0:
            await writer.durable(ticket)
    if close:
        await writer.close()
    else:
        await writer.durable(ticket)
        await crash(writer)
    return writer.dir


@contextlib.asynccontextmanager
async def sidecar(directory, now_ms, number=9, **changes):
    """A living chain with its retention; (writer, retention, clock)."""
    clock = ManualClock(now_ms)
    loop = asyncio.get_running_loop()
    writer = AuditWriter.start(settings(directory, number, **changes), clock, loop)
    try:
        yield writer, Retention(writer, directory, DAYS, clock), clock
    finally:
        await writer.close()


def check(directory, **options):
    keys = MacKeys({"seed1": SEED})
    return verify_directory(directory, keys, pinned=PINNED, **options)


def theirs(directory):
    """Return the verdict of a bundle's verifier."""
    out = io.StringIO()
    keys = [bundle_verify.read_key(SIGNER.key.line())]
    with contextlib.redirect_stdout(out):
        log = bundle_verify.Log(directory, {"seed1": SEED}, keys)
        log.check({})
    first = min((f for f in log.findings if f[4] != "clock_backwards"), default=None)
    return first[4] if first else "ok"


def classes(directory):
    """Return the findings, for which the two verifiers agree on the first."""
    result = check(directory)
    living = any(chain.end == "open" for chain in result.chains)  # theirs knows no locks
    assert living or result.verdict == theirs(directory)
    return [(f.cls, f.origin, f.seq) for f in result.findings]


def records_of(directory, kind):
    return [
        record
        for path in sorted(directory.rglob("*.log"))
        for line in path.read_bytes().splitlines()
        if (record := json.loads(line.partition(b"\t")[0]))["kind"] == kind
    ]


def later_ms(days):
    return START_MS + days * 24 * HOUR_MS


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A closed chain, one that was killed (the next declares it), and that next one."""
    directory = tmp_path_factory.mktemp("old")

    async def scene():
        await _chain(directory, 1, START_MS)
        await _chain(directory, 2, START_MS + HOUR_MS, close=False, token_ids="commit")
        await _chain(directory, 3, later_ms(100), 10)

    run(scene)
    return directory


@pytest.fixture
def log(old, tmp_path):
    return Path(shutil.copytree(old, tmp_path / "audit"))


def test_what_is_old_goes_segment_by_segment_and_the_rest_verifies(log):
    first, second, third = sorted(log.iterdir())
    files = len(segments(first)) + len(segments(second))

    async def scene():
        async with sidecar(log, later_ms(DAYS + 1)) as (writer, keeping, _):
            assert await keeping.once() == files
            assert await keeping.once() == 0
            assert writer.stats.pruned_records > 120
            assert writer.stats.pruned_bytes > 60_000
            assert classes(log) == []

    run(scene)
    assert not first.exists()
    assert not second.exists()
    assert third.exists()
    result = check(log)
    assert (result.verdict, [f.cls for f in result.findings]) == ("ok", [])
    rows = records_of(log, "pruned")
    assert [row["of_origin"] for row in rows] == sorted(row["of_origin"] for row in rows)
    assert len(rows) == files


def test_nothing_goes_before_its_time(log):
    async def scene():
        async with sidecar(log, later_ms(DAYS)) as (_, keeping, _clock):
            assert await keeping.once() == 0

    run(scene)
    assert records_of(log, "pruned") == []


def test_a_living_chain_prunes_its_own_but_never_its_last_segment(tmp_path):
    async def scene():
        async with sidecar(tmp_path, START_MS) as (writer, keeping, clock):
            for number in range(90):
                clock.advance_ms(1000)
                ticket = writer.append_request(request(number))
                if number % 5 == 0:
                    await writer.durable(ticket)
            await writer.durable(ticket)
            before = segments(writer.dir)
            # By its own clock, which has run all that time.
            clock.advance_ms(later_ms(DAYS + 1) - START_MS)
            writer.append("heartbeat", {"in_flight": 0, "started_total": 0})
            assert len(before) >= 4
            assert await keeping.once() == len(before) - 1
            assert segments(writer.dir)[0] == before[-1]
            return before[-1][0], writer.origin

    first, origin = run(scene)
    result = check(tmp_path)
    assert {f.cls for f in result.findings} == {"heartbeat_missing"}  # of the clock's leap alone
    assert result.chains[0].signed_to > first
    assert "of_origin" not in records_of(tmp_path, "pruned")[0]
    # What is left can be proven, what went cannot; a proof from before still holds.
    proof = prove(tmp_path, origin, first + 2)
    assert check_proof(json.dumps(proof).encode(), PINNED).size > first
    with pytest.raises(NoProofError, match="pruned"):
        prove(tmp_path, origin, 3)


def test_an_old_proof_holds_when_its_record_is_gone(log):
    proof = json.dumps(prove(log, "pod/1", 30)).encode()

    async def scene():
        async with sidecar(log, later_ms(DAYS + 1)) as (_, keeping, _clock):
            await keeping.once()

    run(scene)
    assert check_proof(proof, PINNED).origin == "pod/1"
    row = next(r for r in reversed(records_of(log, "pruned")) if r["of_origin"] == "pod/1")
    assert row["upto"].bit_count() == len(row["frontier"])
    assert row["note"].startswith("pod/1\n")


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_crash_between_any_record_and_its_removal_leaves_a_log_that_verifies(
    log, stop, monkeypatch
):
    done, remove = [], prune.Step.remove

    def dying(self):
        done.append(self)
        if len(done) == stop:
            raise OSError(5, "died here")
        return remove(self)

    async def scene():
        monkeypatch.setattr(prune.Step, "remove", dying)
        async with sidecar(log, later_ms(DAYS + 1)) as (_, keeping, _clock):
            await keeping.once()
        monkeypatch.setattr(prune.Step, "remove", remove)

    run(scene)
    assert classes(log) == []

    async def again():
        async with sidecar(log, later_ms(DAYS + 1) + HOUR_MS, 10) as (_, keeping, _clock):
            assert await keeping.once() >= 1

    run(again)
    assert classes(log) == []
    assert not [path for path in log.iterdir() if path.name.startswith(".pruned")]


def test_a_chain_that_is_half_removed_is_removed_by_the_next_pass(log):
    first = min(log.iterdir())
    first.rename(log / f".pruned-{first.name}")

    async def scene():
        async with sidecar(log, later_ms(DAYS + 1)) as (_, keeping, _clock):
            await keeping.once()

    run(scene)
    assert not list(log.glob(".pruned-*"))


def _flip(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"status":200', b'"status":500', 1))


def test_what_was_tampered_with_is_kept_as_evidence_and_an_alarm_says_so(log):
    first = min(log.iterdir())
    files = segments(first)
    _flip(files[2][1])

    async def scene():
        async with sidecar(log, later_ms(DAYS + 1)) as (_, keeping, _clock):
            assert await keeping.once() == 1  # what is signed before it
            assert await keeping.once() == 0

    run(scene)
    assert segments(first) == files[1:]
    alarms = [row["what"] for row in records_of(log, "alarm")]
    assert len(alarms) == 1  # said once
    assert "is kept: checkpoint_mismatch" in alarms[0]


def test_a_chain_that_nobody_declared_ended_is_kept(tmp_path):
    run(lambda: _chain(tmp_path, 1, START_MS, close=False))
    (chain,) = tmp_path.iterdir()
    assert list(prune.steps(tmp_path, tmp_path / "none", 1 << 62)) == []
    assert segments(chain)


def test_another_processes_living_chain_is_left_alone(tmp_path):
    async def scene():
        async with sidecar(tmp_path, START_MS), sidecar(tmp_path, later_ms(366), 10) as other:
            assert await other[1].once() == 0
            with prune.turn(tmp_path) as first, prune.turn(tmp_path) as second:
                assert (first, second) == (True, False)

    run(scene)


def test_a_clock_that_jumps_a_year_takes_nothing_and_says_so(log):
    async def scene():
        async with sidecar(log, later_ms(101)) as (_, keeping, clock):
            clock._wall_ns += 365 * DAY_NS
            assert await keeping.once() == 0
            assert await keeping.once() == 0

    run(scene)
    assert len(list(log.glob("[0-9]*"))) == 4
    assert [row["what"][:12] for row in records_of(log, "alarm")] == ["clock_jumped"]


def test_far_behind_a_pass_takes_a_day_and_says_how_far(log):
    """As after a restart under a clock that is a year ahead: an operator has days to see it."""
    third = max(log.iterdir())

    async def scene():
        async with sidecar(log, later_ms(DAYS + 300)) as (_, keeping, _clock):
            assert await keeping.once() > 1
            assert third.exists()
            assert await keeping.once() >= 1
            assert not third.exists()

    run(scene)
    alarms = [row["what"] for row in records_of(log, "alarm")]
    assert alarms == ["retention_behind by 300 days: a day of log is removed an hour"]
    assert classes(log) == []


def test_a_full_disk_stops_a_pass_and_nothing_goes_without_its_record(log, monkeypatch):
    async def scene():
        async with sidecar(log, later_ms(DAYS + 1)) as (writer, keeping, _clock):
            append = writer.append
            monkeypatch.setattr(
                writer, "append", lambda k, m: -1 if k == "pruned" else append(k, m)
            )
            assert await keeping.once() == 0

    run(scene)
    assert len(list(log.glob("[0-9]*"))) == 4


def test_passes_come_by_themselves_and_end_with_the_process(log, monkeypatch):
    monkeypatch.setattr(retention, "FIRST_S", 0.01)

    async def scene():
        async with sidecar(log, later_ms(DAYS + 1)) as (writer, keeping, _clock):
            keeping.start()
            while not writer.stats.pruned_records:  # noqa: ASYNC110 - the pass is its own task
                await asyncio.sleep(0.01)
            await keeping.stop()
            await keeping.stop()

    run(scene)
    assert classes(log) == []


# What pruning must not hide.


@pytest.fixture
def cut(log):
    """A log whose first chain has lost two segments to retention, and who says so."""
    first = min(log.iterdir())

    async def scene():
        async with sidecar(log, later_ms(DAYS + 1)) as (writer, _, _clock):
            for step in prune.steps(log, writer.dir, 1 << 62):
                await writer.durable(writer.append("pruned", step.kept.members(writer.origin)))
                step.remove()
                if segments(first)[0][0] > 20:
                    break

    run(scene)
    assert classes(log) == []
    return first


def test_one_segment_more_is_a_gap(cut):
    segments(cut)[0][1].unlink()
    assert check(cut.parent).verdict == theirs(cut.parent) == "gap"


def test_the_rest_of_a_pruned_chain_is_missed(cut):
    shutil.rmtree(cut)
    assert check(cut.parent).verdict == theirs(cut.parent) == "truncated"


def test_what_follows_is_still_under_the_signed_roots(cut):
    path = segments(cut)[0][1]
    _flip(path)
    public = verify_directory(cut.parent, None, pinned=PINNED)
    assert public.verdict == "checkpoint_mismatch"
    assert check(cut.parent, jobs=2).verdict == theirs(cut.parent) == "content_mismatch"


def test_its_first_record_must_follow_the_last_that_went(cut, monkeypatch):
    kept_in = pruned.kept_in
    other = sha256_hex(b"another")

    def lying(chains):
        return {key: kept._replace(last_mac=other) for key, kept in kept_in(chains).items()}

    monkeypatch.setattr("proxy.audit.verify.kept_in", lying)
    assert check(cut.parent).verdict == "link_mismatch"


def test_a_bundle_begins_with_the_frontier_that_is_kept(cut, tmp_path):
    import subprocess
    import sys

    out = tmp_path / "bundle.tar"
    first_ns = START_MS * 10**6
    assert export_segments(cut.parent, out, PINNED, first_ns, first_ns + DAY_NS, "a day") >= 1
    folder = tmp_path / "bundle"
    folder.mkdir()
    shutil.unpack_archive(out, folder)
    command = [sys.executable, "-I", "-S", "verify.py", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False, env={})
    assert json.loads(done.stdout)["verdict"] == "ok_public", done.stdout
