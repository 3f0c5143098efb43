"""What a finding is built on, and one order of many chains' records."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.audit.chain import ZERO_MAC
from proxy.audit.cli import audit
from proxy.audit.findings import hashed
from proxy.audit.layout import segments
from proxy.audit.merge import merged
from proxy.audit.note import ED25519, Keyset
from proxy.audit.signing import NoteSigner
from proxy.audit.tree import Range, leaf_hash
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy.audit_chains import START_MS, config, request, run, verify, write_chain

SIGNER = NoteSigner("log", ED25519, b"\1" * 32)
PINNED = Keyset([SIGNER.key])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evidence")

    async def scene():
        loop, clock = asyncio.get_running_loop(), ManualClock(START_MS)
        values = config(directory, signers=(SIGNER,), checkpoint_records=10)
        writer = AuditWriter.start(values, clock, loop)
        for number in range(40):
            clock.advance_ms(100)
            await writer.durable(writer.append_request(request(number)))
        await writer.close()

    run(scene)
    return directory


@pytest.fixture
def log(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "audit"))


def _lines(log):
    ((_, path),) = segments(next(log.iterdir()))
    return path, path.read_bytes().splitlines(keepends=True)


def _first(log):
    result = verify(log, pinned=PINNED)
    finding = next(f for f in result.public()["findings"] if f["class"] == result.verdict)
    path, _ = _lines(log)
    assert finding["file"] == f"{path.parent.name}/{path.name}"
    return finding


def _kind(line):
    return json.loads(line.partition(b"\t")[0])["kind"]


def test_a_changed_record_tells_hashes_and_never_its_right_mac(log):
    path, lines = _lines(log)
    at = next(seq for seq in range(25, 40) if _kind(lines[seq]) == "request")
    changed = lines[at].replace(b'"status":200', b'"status":500')
    path.write_bytes(b"".join([*lines[:at], changed, *lines[at + 1 :]]))
    found = _first(log)
    assert (found["class"], found["seq"], found["last_seq"]) == ("content_mismatch", at, at)
    assert found["offset"] == sum(map(len, lines[:at]))
    assert found["found"] == hashed(lines[at][-65:-1])
    assert found["expected"] not in (None, found["found"])
    before = max(seq for seq in range(at) if _kind(lines[seq]) == "checkpoint")
    assert found["proved_to"] == before - 1


def test_a_gap_names_first_and_last(log):
    path, lines = _lines(log)
    path.write_bytes(b"".join(lines[:22] + lines[27:]))
    found = _first(log)
    assert (found["class"], found["seq"], found["last_seq"]) == ("gap", 22, 26)
    assert found["offset"] == sum(map(len, lines[:22]))


def test_a_broken_link_tells_both_macs_hashed(log):
    path, lines = _lines(log)
    broken = lines[20].replace(lines[19][-65:-1], ZERO_MAC.encode())
    path.write_bytes(b"".join([*lines[:20], broken, *lines[21:]]))
    found = next(f for f in verify(log, None).public()["findings"] if f["seq"] == 20)
    assert found["class"] == "link_mismatch"
    assert (found["expected"], found["found"]) == (hashed(lines[19][-65:-1]), hashed(ZERO_MAC))


def test_a_root_that_does_not_fit_is_told_beside_the_one_that_was_signed(log):
    path, lines = _lines(log)
    path.write_bytes(b"".join(lines).replace(b'"status":200', b'"status":500', 1))
    found = next(
        f
        for f in verify(log, None, pinned=PINNED).public()["findings"]
        if f["class"] == "checkpoint_mismatch"
    )
    tree, whole = Range(), Range()
    tree.extend(leaf_hash(line[:-1]) for line in _lines(log)[1][: found["seq"]])
    whole.extend(leaf_hash(line[:-1]) for line in lines[: found["seq"]])
    assert (found["expected"], found["found"]) == (whole.root().hex(), tree.root().hex())


@pytest.mark.parametrize("junk", [b"\0" * 50 + b"\n", b"{\n", b"\n"])
def test_what_is_no_line_is_told_by_its_hash(log, junk):
    path, lines = _lines(log)
    path.write_bytes(b"".join([*lines[:9], junk, *lines[10:]]))
    found = _first(log)
    assert (found["seq"], found["found"], found["expected"]) == (9, hashed(junk), None)


def test_joined_lines_are_of_all_their_records(log):
    path, lines = _lines(log)
    path.write_bytes(b"".join(lines[:9]) + lines[9][:-1] + lines[10][:-1] + b"".join(lines[11:]))
    found = _first(log)
    assert (found["class"], found["seq"], found["last_seq"]) == ("two_records_one_line", 9, 11)


def test_a_person_is_told_it_too(log):
    path, lines = _lines(log)
    path.write_bytes(b"".join(lines[:22] + lines[27:]))
    said = CliRunner().invoke(audit, ["verify", str(log)])
    assert "gap seq 22 to 26: 22 to 26 missing" in said.output
    assert "can still be proved" in said.output


# Many chains.


@pytest.fixture
def pods(tmp_path):
    for number, (start_ms, step_ms) in enumerate([(0, 1000), (500, 700), (3_600_000, 1), (20, 9)]):
        write_chain(
            tmp_path,
            12,
            origin=f"pod-{number}",
            start_ms=START_MS + start_ms,
            step_ms=step_ms,
            genesis={"config_sha256": "0" * 64, "image": "i", "clock_bound_ms": 100 + number},
            segment_bytes=4096,
        )
    return tmp_path


def test_the_records_of_many_chains_come_in_one_order(pods):
    rows = list(merged(pods))
    assert rows == sorted(rows)
    assert len(rows) == verify(pods).records
    turns = sum(a.origin != b.origin for a, b in itertools.pairwise(rows))
    assert turns > 8  # they really interleave
    for row in rows:
        assert row.clock_bound_ms == 100 + int(row.origin[-1])
        assert (row.kind == "request") == (row.trace_id is not None)


def test_what_is_no_record_has_no_place_in_it(pods):
    path = next(pods.rglob("*.log"))
    path.write_bytes(path.read_bytes() + b"\0noise\n")
    rows = list(merged(pods))
    assert rows == sorted(rows)


def test_verify_writes_the_list_beside_its_findings(pods, tmp_path):
    out = tmp_path / "merged.jsonl"
    arguments = ["verify", str(pods), "--merged", str(out), "--json"]
    said = json.loads(CliRunner().invoke(audit, arguments).output)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == said["records"]
    assert {chain["origin"] for chain in said["chains"]} == {row["origin"] for row in rows}
