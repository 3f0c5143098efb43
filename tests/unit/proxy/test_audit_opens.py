"""Requests that were begun and have no end: listed by both verifiers, against no verdict."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import shutil
from pathlib import Path

import pytest

from proxy.audit import opens
from proxy.audit.bundle import verify as bundle_verify
from proxy.audit.epochs import MacKeys
from proxy.audit.findings import Place
from proxy.audit.resume import Saved
from proxy.audit.verify import verify_directory
from proxy.audit.views.text import print_result
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy import test_audit_tampering as tampering
from tests.unit.proxy.audit_chains import KEYS, SEED, START_MS, config, crash, facts, request, run
from tests.unit.proxy.test_audit_tampering import PINNED, SIGNER, Log, key_files

LOST = {7, 41, 42}
TRICKY = 'x","trace_id":"1767225600000-00001-0007","y":"'


def opened(number):
    return {"trace_id": facts(number)["trace_id"], "tenant": "t-1", "qos": "P0"}


def write(directory, count=90, lost=LOST, *, close=True, live=None, number=1):
    """Write a chain that waits for `open`; requests of `lost` never end."""

    async def scene():
        clock = ManualClock(START_MS + number * 3_600_000)
        values = config(
            directory,
            origin=f"{tampering.ORIGIN}{number}",
            signers=(SIGNER,),
            checkpoint_records=40,
            segment_bytes=16384,
        )
        writer = AuditWriter.start(values, clock, asyncio.get_running_loop())
        for begin in range(0, count, 10):
            clock.advance_ms(100)
            for record in range(begin, begin + 10):
                if record in lost or record % 4 < 2:
                    ticket = writer.append("open", opened(record))
            await writer.durable(ticket)
            for record in range(begin, begin + 10):
                if record not in lost:
                    ticket = writer.append_request(request(record, model=TRICKY))
            await writer.durable(ticket)
        if live is not None:
            live(writer)
        await (writer.close() if close else crash(writer))
        return writer.dir

    return run(scene)


def seqs(chain, numbers=LOST):
    wanted = {facts(number)["trace_id"] for number in numbers}
    rows = [
        json.loads(line.partition(b"\t")[0])
        for path in sorted(chain.glob("*.log"))
        for line in path.read_bytes().splitlines()
    ]
    return [row["seq"] for row in rows if row["kind"] == "open" and row["trace_id"] in wanted]


def ours(directory, **options):
    result = verify_directory(directory, MacKeys({"seed1": SEED}), pinned=PINNED, **options)
    return result.verdict, sorted(notice.seq for notice in result.notices)


def theirs(directory):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        bundle_verify.main([str(directory), "--keys", str(key_files() / "auditor.json")])
    result = json.loads(out.getvalue())
    return result["verdict"], sorted(seq for row in result["chains"] for seq in row["unfinished"])


def test_both_list_what_has_no_end_and_call_it_ok(tmp_path):
    chain = write(tmp_path)
    expected = "ok", seqs(chain)
    assert len(expected[1]) == 3
    assert ours(tmp_path) == theirs(tmp_path) == ours(tmp_path, jobs=2) == expected
    result = verify_directory(tmp_path, KEYS, pinned=PINNED).public()
    assert [chain["unfinished"] for chain in result["chains"]] == [3]
    for notice, number in zip(result["notices"], sorted(LOST), strict=True):
        assert (notice["what"], notice["origin"]) == ("unfinished", f"{tampering.ORIGIN}1")
        assert notice["trace_id"] == facts(number)["trace_id"]
        with (tmp_path / notice["file"]).open("rb") as file:
            file.seek(notice["offset"])
            assert json.loads(file.readline().partition(b"\t")[0])["seq"] == notice["seq"]


def test_what_is_still_under_way_is_no_such_thing(tmp_path):
    seen = []
    write(tmp_path, live=lambda _writer: seen.append(ours(tmp_path)))
    assert seen == [("ok", [])]


def test_a_crash_leaves_some_and_a_successor_does_not_hide_them(tmp_path):
    chain = write(tmp_path, close=False)
    assert ours(tmp_path) == theirs(tmp_path) == ("truncated", seqs(chain))
    write(tmp_path, lost=(), number=2)
    assert ours(tmp_path) == theirs(tmp_path) == ("ok", seqs(chain))


def test_a_resumed_verification_lists_them_too(tmp_path):
    chain = write(tmp_path / "audit")
    for _ in range(2):
        saved = Saved(tmp_path / "state", "keys")
        assert ours(tmp_path / "audit", saved=saved) == ("ok", seqs(chain))


def test_a_person_is_told(tmp_path, capsys):
    write(tmp_path)
    print_result(verify_directory(tmp_path, KEYS, pinned=PINNED), (Path("keys"),))
    told = capsys.readouterr().out
    assert "3 requests begun, and no record of the end" in told
    assert facts(41)["trace_id"] in told


def test_they_are_bounded():
    held = opens.Opens()
    for number in range(opens.KEPT + 5):
        held.take({"kind": "open", "trace_id": str(number)}, number, Place("f", number))
    assert (len(held), held.omitted, len(list(held))) == (opens.KEPT + 5, 5, opens.KEPT)
    again = opens.Opens()
    again.restore(json.loads(json.dumps(held.state())))
    assert list(again) == list(held)
    assert again.omitted == 5
    held.take({"kind": "request", "trace_id": "17"}, 9999, Place("f", 0))
    assert len(held) == opens.KEPT + 4


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine-opens")
    write(directory)
    write(directory, 20, (3,), number=2)
    return directory


@pytest.mark.parametrize("seed", range(24))
def test_random_operations_leave_both_of_one_mind(pristine, tmp_path, seed):
    rng = random.Random(1000 + seed)
    log = Log(Path(shutil.copytree(pristine, tmp_path / "audit")))
    done = []
    for _ in range(rng.choice((1, 1, 2))):
        with contextlib.suppress(IndexError, ValueError):
            done.append(tampering._operate(log, rng))
    mine, other = ours(log.dir), theirs(log.dir)
    assert mine == other, done
    assert mine[0] not in ("ok", "ok_public"), done
