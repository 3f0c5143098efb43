"""Checkpoints: when they come, what they state, what becomes of them when the disk fails."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random

import pytest

from proxy.audit import disk as disk_module
from proxy.audit import writer as writer_module
from proxy.audit.checkpoint import Answer
from proxy.audit.layout import segments
from proxy.audit.note import ED25519, SM2, Keyset, parse_checkpoint, parse_note, write_note
from proxy.audit.setup import AuditError, AuditUnavailableError
from proxy.audit.signed import Expected
from proxy.audit.signing import Cosigner, NoteSigner
from proxy.audit.tree import Range, check_consistency, leaf_hash
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from proxy.sm4.sm2 import available
from tests.unit.proxy.audit_chains import (
    KEYS,
    START_MS,
    config,
    crash,
    facts,
    request,
    run,
    verify,
)

SIGNER = NoteSigner("log", ED25519, b"\1" * 32)
SECOND = NoteSigner("second", SM2 if available() else ED25519, b"\3" * 32)
WITNESS = Cosigner("witness", b"\2" * 32)
PINNED = Keyset([SIGNER.key, WITNESS.key])
ORIGIN = "local/default/pod/uid/1"


def start(directory, clock=None, **changes):
    values = {"signers": (SIGNER,), "checkpoint_records": 10, **changes}
    clock = clock or ManualClock(START_MS)
    return AuditWriter.start(config(directory, **values), clock, asyncio.get_running_loop())


def records(chain):
    return [
        json.loads(line.split(b"\t")[0])
        for _, path in segments(chain)
        for line in path.read_bytes().splitlines()
    ]


def checkpoints(chain):
    return [record for record in records(chain) if record["kind"] == "checkpoint"]


def leaves(chain):
    return [
        leaf_hash(line) for _, path in segments(chain) for line in path.read_bytes().splitlines()
    ]


def ok(directory, pinned=PINNED):
    result = verify(directory, KEYS, pinned=pinned)
    assert result.verdict == "ok", result.findings
    return result


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the writer has no event for it
            await asyncio.sleep(0.01)


async def many(writer, count, pause=7):
    for number in range(count):
        ticket = writer.append_request(request(number % 10_000))
        if number % pause == 0:
            with contextlib.suppress(AuditUnavailableError):  # it is tried again
                await writer.durable(ticket)


def test_a_checkpoint_states_the_records_before_it(tmp_path):
    async def scene():
        writer = start(tmp_path)
        await many(writer, 100)
        await writer.close()
        return writer

    writer = run(scene)
    found, all_leaves = checkpoints(writer.dir), leaves(writer.dir)
    assert writer.stats.checkpoints == len(found) >= 5
    for record in found:
        stated = parse_checkpoint(parse_note(record["note"]).text)
        tree = Range()
        tree.extend(all_leaves[: record["seq"]])
        assert (stated.origin, stated.size, stated.root) == (ORIGIN, record["seq"], tree.root())
    kinds = [record["kind"] for record in records(writer.dir)]
    assert kinds[-2:] == ["closed", "checkpoint"]
    result = ok(tmp_path)
    assert result.public()["signed_to"] == len(kinds) - 2
    assert result.chains[0].signers == "pinned"


def test_times_and_order_hold_while_records_are_held(tmp_path):
    async def scene():
        clock = ManualClock(START_MS)
        writer = start(tmp_path, clock)
        for number in range(300):
            clock.advance_ms(1)
            ticket = writer.append_request(request(number))
            if number % 5 == 0:
                await asyncio.sleep(0)
            if number % 50 == 0:
                await writer.durable(ticket)
        await writer.close()
        return writer.dir

    chain = run(scene)
    traces = [r["trace_id"] for r in records(chain) if r["kind"] == "request"]
    assert traces == [facts(n)["trace_id"] for n in range(300)]
    assert ok(tmp_path).findings == []


def test_a_quiet_chain_is_signed_once_after_the_interval(tmp_path):
    async def scene():
        writer = start(tmp_path, checkpoint_s=1)
        await until(lambda: writer.stats.checkpoints == 1 and not writer._pending)
        assert writer._due.timer is None  # nothing is left to sign
        writer.append_request(request(1))
        await until(lambda: writer.stats.checkpoints == 2)
        await writer.close()
        return writer.dir

    chain = run(scene)
    kinds = [record["kind"] for record in records(chain)]
    assert kinds == ["genesis", "checkpoint", "request", "checkpoint", "closed", "checkpoint"]


def test_never_more_than_the_verifier_takes_lies_unsigned(tmp_path, monkeypatch):
    """However long one sync takes: what comes meanwhile is held."""
    real = os.fdatasync

    def slowly(fd):
        for _ in range(20):
            real(fd)

    monkeypatch.setattr(os, "fdatasync", slowly)

    async def scene():
        writer = start(tmp_path, checkpoint_records=20)
        for number in range(3000):
            writer.append_request(request(number))
            if number % 100 == 0:
                await asyncio.sleep(0)
        await writer.close()
        return writer.dir

    chain = run(scene)
    at = [record["seq"] for record in checkpoints(chain)]
    gaps = [after - before for before, after in zip([-1, *at], at, strict=False)]
    assert max(gaps) <= 20 + 200
    ok(tmp_path)


def test_every_required_signer_signs(tmp_path):
    async def scene():
        writer = start(tmp_path, signers=(SIGNER, SECOND))
        await many(writer, 30)
        await writer.close()

    run(scene)
    assert ok(tmp_path, Keyset([SIGNER.key, SECOND.key])).chains[0].signers == "pinned"
    result = verify(tmp_path, KEYS, pinned=PINNED)
    assert (result.verdict, result.first.seq) == ("key_unknown", 0)
    assert verify(tmp_path, KEYS).chains[0].signers == "declared"


def test_without_a_signer_there_are_no_checkpoints(tmp_path):
    async def scene():
        writer = start(tmp_path, signers=(), checkpoint_s=1)
        await many(writer, 50)
        assert writer._due.timer is None
        await writer.close()
        return writer.dir

    assert checkpoints(run(scene)) == []
    result = verify(tmp_path, KEYS)
    assert (result.verdict, result.public()["signed_to"]) == ("ok", None)


def test_many_segments_share_one_tree(tmp_path):
    async def scene():
        writer = start(tmp_path, segment_bytes=16384)
        await many(writer, 400)
        await writer.close()
        return writer.dir

    chain = run(scene)
    assert len(segments(chain)) > 8
    assert all(path.stat().st_size <= 16384 for _, path in segments(chain))
    ok(tmp_path)


@pytest.mark.parametrize("fail_at", range(1, 12, 2))
@pytest.mark.parametrize("short", [False, True])
def test_what_is_written_ahead_of_its_batch_is_written_again_where_that_fails(
    tmp_path, monkeypatch, fail_at, short
):
    """Behind a checkpoint what was held is written some at a time, and synced once."""
    monkeypatch.setattr(writer_module, "RETRY_S", 0.01)
    real, calls = os.pwrite, []

    def failing(fd, data, offset):
        calls.append(len(data))
        if len(calls) != 3 + fail_at:  # behind genesis and the first records
            return real(fd, data, offset)
        if short:
            return real(fd, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", failing)

    async def scene():
        writer = start(tmp_path, checkpoint_records=800)
        for number in range(0, 6000, 500):
            texts = [request(n % 10_000) for n in range(number, number + 500)]
            tickets = writer.append_requests(texts, [None] * 500)
            with contextlib.suppress(AuditUnavailableError):  # it is tried again
                await writer.durable(tickets[-1 if number % 1500 == 0 else 0])
        await until(lambda: writer.available and not writer.stats.pending)
        await writer.close()
        return writer

    writer = run(scene)
    requests = [r["trace_id"] for r in records(writer.dir) if r["kind"] == "request"]
    assert requests == [facts(n)["trace_id"] for n in range(6000)]
    assert writer.stats.failures == 1
    assert len(calls) > writer.stats.syncs  # some were written ahead
    ok(tmp_path)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSYS])
@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_a_disk_that_fails_before_it_is_asked_to_sync_has_failed(
    tmp_path, monkeypatch, fail_at, error
):
    monkeypatch.setattr(writer_module, "RETRY_S", 0.01)
    real, calls, tickets = disk_module._begin_write, [], []

    def failing(*args):
        calls.append(args)
        if len(calls) != fail_at:
            return real(*args)
        return error

    monkeypatch.setattr(disk_module, "_begin_write", failing)

    async def scene():
        writer = start(tmp_path, checkpoint_records=800)
        for first in range(0, 6000, 500):
            texts = [request(n % 10_000) for n in range(first, first + 500)]
            tickets.extend(writer.append_requests(texts, [None] * 500))
            await asyncio.sleep(0)
        await until(lambda: writer.available and not writer.stats.pending)
        await writer.close()
        return writer

    writer = run(scene)
    assert len(calls) >= fail_at
    found = records(writer.dir)
    requests = [record["trace_id"] for record in found if record["kind"] == "request"]
    assert requests == [facts(n)["trace_id"] for n in range(6000)]
    assert tickets == sorted(set(tickets))
    sealed = [record for record in found if "sealed" in record]
    assert (len(sealed), writer.stats.failures) == ((1, 1) if error == errno.EIO else (0, 0))
    ok(tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_records_of_every_form_keep_their_order_whatever_fails(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(writer_module, "RETRY_S", 0.002)
    rng = random.Random(seed)
    real = os.fdatasync

    def failing(fd):
        if rng.random() < 0.1:
            raise OSError(5, "I/O error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", failing)
    forms = ({}, {}, {}, {}, {"model": "\u5de7" * 80}, {"tenant": "\U0001f600" * 60})
    tickets = []

    async def scene():
        changes = {"segment_bytes": rng.choice((8192, 70_000, 1 << 20)), "token_ids": "commit"}
        writer = start(tmp_path, checkpoint_records=rng.choice((20, 300)), **changes)
        count = 0
        while count < 2500:
            size = rng.choice((1, 2, 30, 64, 300))
            texts = [request(n, **rng.choice(forms)) for n in range(count, count + size)]
            ids = [[n] if rng.random() < 0.02 else None for n in range(size)]
            if rng.random() < 0.3:
                tickets.extend(map(writer.append_request, texts, ids))
            else:
                tickets.extend(writer.append_requests(texts, ids))
            count += size
            if rng.random() < 0.6:
                await asyncio.sleep(rng.choice((0, 0, 0.002)))
            if rng.random() < 0.1:
                writer.rotate()
        await until(lambda: writer.available and not writer.stats.pending)
        assert (writer._pending.bytes, len(writer._pending)) == (0, 0)
        await writer.close()
        return writer.dir, count

    chain, count = run(scene)
    found = [record for record in records(chain) if record["kind"] == "request"]
    assert [record["trace_id"] for record in found] == [facts(n)["trace_id"] for n in range(count)]
    assert tickets == sorted(set(tickets))
    assert tickets[0] >= 1
    ok(tmp_path)


@pytest.mark.parametrize("fail_at", [2, 3, 4, 7])
def test_a_failed_sync_leaves_no_checkpoint_of_what_never_was(tmp_path, monkeypatch, fail_at):
    monkeypatch.setattr(writer_module, "RETRY_S", 0.01)
    real, calls = os.fdatasync, []

    def failing(fd):
        calls.append(fd)
        if len(calls) == fail_at:
            raise OSError(5, "I/O error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", failing)

    async def scene():
        writer = start(tmp_path)
        await many(writer, 120, pause=3)
        await writer.close()
        return writer.dir

    chain = run(scene)
    requests = [r["trace_id"] for r in records(chain) if r["kind"] == "request"]
    assert requests == [facts(n)["trace_id"] for n in range(120)]
    ok(tmp_path)


def test_an_origin_that_no_note_can_carry_is_refused(tmp_path):
    async def scene():
        with pytest.raises(AuditError, match="one line"):
            start(tmp_path, origin="two\nlines")

    run(scene)


def test_the_next_chain_names_the_last_note(tmp_path):
    async def scene(origin, ms):
        writer = start(tmp_path, ManualClock(ms), origin=origin)
        await many(writer, 25)
        await writer.close()
        return writer.dir

    first = run(lambda: scene("one", START_MS))
    second = run(lambda: scene("two", START_MS + 60_000))
    note = checkpoints(first)[-1]["note"]
    import hashlib

    assert records(second)[0]["prev_note_sha256"] == hashlib.sha256(note.encode()).hexdigest()
    ok(tmp_path)
    # Its last checkpoint is taken away: the successor remembers it.
    ((_, path),) = segments(first)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert verify(tmp_path, KEYS, pinned=PINNED).verdict == "truncated"


# What somebody else holds of a chain.


@pytest.fixture
def chain(tmp_path):
    async def scene():
        writer = start(tmp_path)
        await many(writer, 60)
        await writer.close()
        return writer.dir

    return run(scene)


def expect(chain, end, **changes):
    tree = Range()
    tree.extend(leaves(chain)[:end])
    values = {"origin": ORIGIN, "size": end, "root": tree.root(), "source": "x", **changes}
    return [Expected(**values)]


def found(directory, expected, keys=KEYS):
    result = verify(directory, keys, pinned=PINNED, expected=expected)
    return result.verdict, result.first.seq if result.first else None


@pytest.mark.parametrize("size", [0, 1, 5, 33, 64])
def test_a_checkpoint_from_outside_that_fits_is_fine(tmp_path, chain, size):
    assert found(tmp_path, expect(chain, size))[0] == "ok"


def test_a_chain_shorter_than_a_witness_saw_is_truncated(tmp_path, chain):
    length = len(leaves(chain))
    assert found(tmp_path, expect(chain, length, size=length + 5)) == ("truncated", length)


def test_a_chain_that_only_a_witness_knows_is_missing(tmp_path, chain):
    assert found(tmp_path, expect(chain, 5, origin="gone"))[0] == "truncated"


def test_another_history_under_the_same_signature_is_a_fork(tmp_path, chain):
    assert found(tmp_path, expect(chain, 30, root=b"x" * 32)) == ("fork", 29)
    # Nobody who is pinned signed this chain: it only does not fit.
    result = verify(tmp_path, KEYS, expected=expect(chain, 30, root=b"x" * 32))
    assert result.verdict == "checkpoint_mismatch"


def test_without_mac_keys_a_changed_record_is_found_by_the_next_checkpoint(tmp_path, chain):
    ((_, path),) = segments(chain)
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":201', 1))
    after = checkpoints(chain)[0]["seq"]
    result = verify(tmp_path, None, pinned=PINNED)
    assert (result.verdict, result.first.seq) == ("checkpoint_mismatch", after)
    result = verify(tmp_path, KEYS, pinned=PINNED)
    classes = [(f.cls, f.seq) for f in result.findings]
    assert classes == [("content_mismatch", 1), ("checkpoint_mismatch", after)]


# The witness, as the writer sees it.


class Obliging:
    """A witness in the same process: checks each step and cosigns, or does as it is told."""

    def __init__(self, *, silent=0, forget=None):
        self.size, self.root = 0, Range().root()
        self.asked, self.answer = [], None
        self.silent, self.forget = silent, forget
        self.stopped = False

    def submit(self, submission):
        self.asked.append(submission)
        note = parse_note(submission.note)
        stated = parse_checkpoint(note.text)
        if self.forget == len(self.asked):
            self.size, self.root = 0, Range().root()
            self.answer = Answer(submission.size, 0, "")
            return
        check_consistency(self.size, self.root, stated.size, stated.root, submission.proof)
        assert submission.old_size == self.size
        self.size, self.root = stated.size, stated.root
        line = WITNESS.sign(note.text, 1)
        cosigned = write_note(note.text, (*note.signatures, line))
        self.answer = Answer(stated.size, stated.size, cosigned)

    closing, trouble, name = False, "", "http://192.0.2.1:14100"
    cosigned = failures = 0

    def alarm(self):
        return ""

    def wait(self, _seconds):
        return self.poll()

    def stop(self):
        self.stopped = True

    def poll(self):
        if self.silent:
            self.silent -= 1
            return None
        answer, self.answer = self.answer, None
        return answer


@pytest.mark.parametrize("silent", [0, 3])
def test_what_the_witness_cosigned_is_in_the_next_checkpoint(tmp_path, silent):
    witness = Obliging(silent=silent)

    async def scene():
        writer = start(tmp_path, witnesses=(witness,))
        await many(writer, 200)
        await writer.close()
        return writer.dir

    chain = run(scene)
    carried = [record["cosigned"] for record in checkpoints(chain) if "cosigned" in record]
    assert len(carried) >= 3
    assert witness.stopped
    sizes = [parse_checkpoint(parse_note(note).text).size for note in carried]
    assert sizes == [submission.size for submission in witness.asked[: len(carried)]]
    # What was asked last, and the very end of the log, stand in no record any more.
    assert len(witness.asked) <= len(carried) + 2
    assert witness.size == len(leaves(chain))
    assert ok(tmp_path).public()["witnessed_to"] == sizes[-1] - 1
    assert verify(tmp_path, KEYS).public()["witnessed_to"] is None


@pytest.mark.parametrize("forget", [2, 4])
def test_a_witness_that_forgot_is_shown_everything_again(tmp_path, forget):
    witness = Obliging(forget=forget)

    async def scene():
        writer = start(tmp_path, witnesses=(witness,))
        await many(writer, 200)
        await writer.close()

    run(scene)
    assert witness.asked[forget].old_size == 0
    assert witness.asked[-1].old_size > 0
    ok(tmp_path)


def test_a_cosigned_note_of_another_root_is_found(tmp_path):
    class Lying(Obliging):
        def submit(self, submission):
            super().submit(submission)
            text = "\n".join([ORIGIN, str(submission.size), "A" * 43 + "=", ""])
            line = WITNESS.sign(text, 1)
            self.answer = Answer(submission.size, submission.size, write_note(text, [line]))

    async def scene():
        writer = start(tmp_path, witnesses=(Lying(),))
        await many(writer, 60)
        await writer.close()

    run(scene)
    assert verify(tmp_path, KEYS, pinned=PINNED).verdict == "checkpoint_mismatch"


def test_a_crash_leaves_a_chain_that_is_signed_as_far_as_it_was(tmp_path):
    async def scene():
        writer = start(tmp_path)
        await many(writer, 60)
        await crash(writer)

    run(scene)
    result = verify(tmp_path, KEYS, pinned=PINNED)
    assert result.verdict == "truncated"
    assert result.public()["signed_to"] > 30
