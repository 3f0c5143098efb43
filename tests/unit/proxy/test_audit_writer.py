"""The writer: order, bounds, losses, heartbeats, token ids, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from proxy.audit import ids as token_ids
from proxy.audit import room as room_module
from proxy.audit import wrap
from proxy.audit.ids import IdsError, SegmentIds, make_head, open_head
from proxy.audit.layout import filesystem_type, ids_name, is_locked, segments
from proxy.audit.show import find_record
from proxy.audit.wrap import usable_public
from proxy.audit.writer import LOST, AuditError, AuditUnavailableError, AuditWriter
from proxy.clock import ManualClock
from proxy.sm4 import sm2_cipher
from tests.unit.proxy.audit_chains import (
    KEYS,
    START_MS,
    as_table,
    classes,
    config,
    request,
    run,
    verdict,
    verify,
    write_chain,
)

AUDITOR = X25519PrivateKey.from_private_bytes(b"\x07" * 32)
PRIVATE = AUDITOR.private_bytes_raw()
PUBLIC = AUDITOR.public_key().public_bytes_raw()
SM2_PUBLIC = wrap.public_of(PRIVATE, wrap.SM2_BYTES)


def _records(chain):
    return [
        json.loads(line.split(b"\t")[0])
        for _, path in segments(chain)
        for line in path.read_bytes().splitlines()
    ]


def _start(directory, clock=None, **changes):
    clock = clock or ManualClock(START_MS)
    return AuditWriter.start(config(directory, **changes), clock, asyncio.get_running_loop())


def test_records_are_in_order_of_append_with_no_gaps(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        assert [writer.append_request(request(n)) for n in range(600)] == list(range(1, 601))
        await writer.durable(600)
        assert writer.stats.head_seq == 600
        await writer.close()
        assert writer.stats.records == 602
        assert (writer.stats.pending, writer.stats.lost, writer.stats.failures) == (0, 0, 0)
        return writer.dir

    records = _records(run(scene))
    assert [record["seq"] for record in records] == list(range(602))
    assert [record["kind"] for record in records[:2]] == ["genesis", "request"]
    assert records[-1]["kind"] == "closed"


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_no_record_is_missing_where_a_segment_fills_up(tmp_path, batch):
    async def scene():
        writer = _start(tmp_path, segment_bytes=300_000, flush_ms=1)
        for first in range(0, 1344, batch):
            numbers = range(first, first + batch)
            tickets = writer.append_requests([request(n) for n in numbers], [None] * batch)
            assert LOST not in tickets
            if first % 3:
                await writer.durable(tickets[-1])
        await writer.close()
        assert (writer.stats.lost, writer.stats.failures) == (0, 0)
        return writer.dir

    records = _records(run(scene))
    assert sum(record["kind"] == "segment_end" for record in records) >= 2
    asked = [record["trace_id"] for record in records if record["kind"] == "request"]
    assert asked == [as_table(n)["trace_id"] for n in range(1344)]


def test_genesis_names_the_chain_before(tmp_path):
    write_chain(tmp_path, 3, origin="first")
    second = _records(write_chain(tmp_path, origin="second", start_ms=START_MS + 60_000))[0]
    assert (second["prev_origin"], second["prev_size"]) == ("first", 5)
    assert "prev_note_sha256" not in second
    first = _records(min(tmp_path.iterdir()))[0]
    assert first["prev_size"] == 0
    assert "prev_origin" not in first


def test_durable_waits_for_the_disk_and_wakes_everybody(tmp_path):
    async def scene():
        writer = _start(tmp_path, flush_ms=1)
        seqs = [writer.append_request(request(n)) for n in range(3)]
        await asyncio.gather(*(writer.durable(seq) for seq in seqs))
        assert len(_records(writer.dir)) == 4
        await writer.durable(seqs[0])
        with pytest.raises(AuditUnavailableError):
            await writer.durable(LOST)
        await writer.close()

    run(scene)


def test_one_who_no_longer_waits_for_the_disk_is_left_out(tmp_path):
    async def scene():
        writer = _start(tmp_path, flush_ms=1)
        members = {"trace_id": "1-1-1", "tenant": "t\ud800", "qos": "P0"}
        left, stays = (writer.when_durable(writer.append("open", dict(members))) for _ in "ab")
        left.cancel()
        await stays
        assert [r["kind"] for r in _records(writer.dir)][-2:] == ["open", "open"]
        with pytest.raises(AuditUnavailableError):
            writer.when_durable(LOST)
        with pytest.raises(AuditError):
            writer.append("open", {"trace_id": "1-1-1", "tenant": "t"})
        await writer.close()

    run(scene)
    assert verdict(tmp_path) == ("ok", None)


def test_two_writers_on_one_directory_are_two_chains(tmp_path):
    async def scene():
        one = _start(tmp_path, origin="one")
        two = _start(tmp_path, ManualClock(START_MS + 5), origin="two")
        assert one.dir != two.dir
        assert is_locked(one.dir)
        one.append_request(request(1))
        two.append_request(request(2))
        ends = [end.end for end in verify(tmp_path).chains]
        assert (verify(tmp_path).verdict, ends) == ("ok", ["open", "open"])
        await one.close()
        await two.close()
        assert not is_locked(one.dir)
        return two.dir

    # The one that lives is not declared dead by the other.
    kinds = [record["kind"] for record in _records(run(scene))]
    assert kinds == ["genesis", "request", "closed"]
    assert verdict(tmp_path) == ("ok", None)


def test_a_living_chain_with_a_half_written_line_is_open(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        with segments(writer.dir)[0][1].open("ab") as file:
            file.write(b'{"being":"wri')
        assert [end.end for end in verify(tmp_path).chains] == ["open"]
        assert verdict(tmp_path) == ("ok", None)
        writer.append_request(request(1))
        await writer.close()

    run(scene)
    assert verdict(tmp_path) == ("ok", None)


def test_live_demands_a_fresh_last_record(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        now_ns = START_MS * 10**6
        assert verify(tmp_path, live_now_ns=now_ns + 44 * 10**9).verdict == "ok"
        assert verify(tmp_path, live_now_ns=now_ns + 46 * 10**9).verdict == "heartbeat_missing"
        await writer.close()

    run(scene)


def test_a_quiet_chain_beats(tmp_path):
    async def scene():
        clock = ManualClock(START_MS)
        loop = asyncio.get_running_loop()
        writer = AuditWriter.start(config(tmp_path), clock, loop, lambda: (2, 9))
        clock.advance_ms(29_000)
        writer._heartbeat.check()
        clock.advance_ms(1_000)
        writer._heartbeat.check()
        await writer.close()
        return writer.dir

    records = _records(run(scene))
    assert [record["kind"] for record in records] == ["genesis", "heartbeat", "closed"]
    assert (records[1]["in_flight"], records[1]["started_total"]) == (2, 9)
    assert verdict(tmp_path) == ("ok", None)


def test_a_fork_is_refused(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        child = os.fork()
        if child == 0:
            try:
                writer.append_request(request(1))
            except AuditError:
                os._exit(7)
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        await writer.close()

    run(scene)
    assert verdict(tmp_path) == ("ok", None)


@pytest.mark.parametrize(
    ("kind", "members"),
    [("unheard", {}), ("request", {}), ("heartbeat", {"in_flight": 1}), ("", {})],
)
def test_a_record_without_its_members_is_refused(tmp_path, kind, members):
    async def scene():
        writer = _start(tmp_path)
        with pytest.raises(AuditError):
            writer.append(kind, members)
        await writer.close()

    run(scene)
    assert verdict(tmp_path) == ("ok", None)


def test_hostile_strings_do_not_make_a_record_unwritable(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        bad = "\ud800" + "\x01" * 70_000
        writer.append_request(request(1, model=bad, tenant=bad, served_model=bad, traceparent=bad))
        writer.append("alarm", {"what": bad, "usage": {"prompt": 1.5, "\ud800": None}})
        await writer.close()
        return writer.dir

    records = _records(run(scene))
    assert records[1]["model"] == "\ufffd" + "\x01" * 253
    assert records[2]["usage"] == {"prompt": "1.5"}
    assert verdict(tmp_path) == ("ok", None)


def test_a_record_no_line_holds_leaves_the_chain_where_it_was(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        with pytest.raises(AuditError, match="a line holds"):
            writer.append("alarm", {"what": "x", "note": "n" * 70_000})
        writer.append("alarm", {"what": "x"})
        await writer.close()

    run(scene)
    assert verdict(tmp_path) == ("ok", None)


def test_what_overflows_the_queue_is_counted_and_told_later(tmp_path, monkeypatch):
    monkeypatch.setattr(room_module, "PENDING_RECORDS", 8)

    async def scene():
        writer = _start(tmp_path)
        seqs = [writer.append_request(request(n)) for n in range(8)]
        assert LOST not in seqs
        assert writer.append_request(request(8)) == LOST
        assert writer.append_request(request(9, outcome="timeout")) == LOST
        assert not writer.available
        await writer.durable(seqs[-1])
        assert writer.append_request(request(10)) == 10
        assert writer.available
        assert writer.stats.lost == 2
        await writer.close()
        return writer.dir

    lost = _records(run(scene))[9]
    assert (lost["kind"], lost["count"], lost["reason"]) == ("lost", 2, "queue_full")
    assert lost["outcomes"] == {"ok": 1, "timeout": 1}
    assert verdict(tmp_path) == ("ok", None)


def test_after_close_records_are_lost_and_close_may_come_twice(tmp_path):
    async def scene():
        writer = _start(tmp_path)
        await writer.close()
        await writer.close()
        assert writer.append_request(request(1)) == LOST
        assert not writer.available

    run(scene)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"token_ids": "sealed"}, ("auditor", "audit.token_ids")),
        ({"token_ids": "sealed", "auditor_public": bytes(32)}, ("auditor",)),
        ({"token_ids": "sealed", "auditor_public": b"x" * 31}, ("auditor",)),
        ({"seed": b"short"}, ("seed",)),
        ({"genesis": {"image": "x"}}, ("config_sha256",)),
    ],
)
def test_a_chain_that_cannot_keep_its_promise_does_not_start(tmp_path, changes, names):
    async def scene():
        with pytest.raises(AuditError) as caught:
            _start(tmp_path, **changes)
        assert all(name in str(caught.value) for name in names)

    run(scene)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")

    async def scene():
        with pytest.raises(AuditError, match="file"):
            _start(tmp_path / "file")

    run(scene)


def test_the_file_system_is_that_of_the_longest_mount_point():
    text = (
        "21 1 8:1 / / rw - ext4 /dev/a rw\n"
        "22 21 0:5 / /var/audit rw shared:1 - nfs4 host:/x rw\n"
        "23 21 0:6 / /var/au\\040dit rw - tmpfs none rw\n"
        "junk\n"
    )
    assert filesystem_type(text, "/var/audit/a") == "nfs4"
    assert filesystem_type(text, "/var/audit2") == "ext4"
    assert filesystem_type(text, "/var/au dit") == "tmpfs"
    assert filesystem_type("", "/") is None


# Token ids.


def _sealed(tmp_path, **changes):
    return write_chain(tmp_path, 40, ids=True, token_ids="sealed", auditor_public=PUBLIC, **changes)


def _shown(directory, number, private=PRIVATE):
    return find_record(directory, f"{START_MS}-00001-{number:04d}", KEYS, private)


@pytest.mark.parametrize("segment_bytes", [64 << 20, 8192])
def test_sealed_ids_open_for_the_auditor_alone(tmp_path, segment_bytes):
    _sealed(tmp_path, segment_bytes=segment_bytes)
    assert verdict(tmp_path) == ("ok", None)
    for number in (0, 17, 39):
        shown = _shown(tmp_path, number)
        assert (shown.ids, shown.mac, shown.ids_hold) == ([number, 7, 2], "ok", True)
    assert _shown(tmp_path, 3, None).ids is None
    other = _shown(tmp_path, 3, bytes(31) + b"\x01")
    assert (other.ids, other.ids_hold) == (None, False)
    assert "another auditor" in other.ids_note


def test_ids_are_not_in_the_files_in_clear(tmp_path):
    chain = _sealed(tmp_path)
    packed = token_ids.pack([11, 7, 2])
    assert all(packed not in path.read_bytes() for path in chain.iterdir())


def test_a_changed_side_file_is_found_by_verify_and_by_show(tmp_path):
    chain = _sealed(tmp_path)
    side = chain / ids_name(0)
    whole = side.read_bytes()
    for at in (0, 9, 30, 107, len(whole) - 1):
        side.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert verdict(tmp_path) == ("content_mismatch", 41)
        assert not _shown(tmp_path, 39).ids_hold
    side.write_bytes(whole[:-1])
    assert verdict(tmp_path) == ("content_mismatch", 40)
    side.unlink()
    assert verdict(tmp_path) == ("content_mismatch", 40)
    assert "missing" in _shown(tmp_path, 39).ids_note


def test_an_entry_moved_to_another_record_does_not_open():
    segment = SegmentIds(bytes(32))
    _, entry = segment.seal(5, token_ids.pack([1, 2]))
    assert segment.open(5, entry) == token_ids.pack([1, 2])
    for seq, changed in ((6, entry), (5, entry[:-1]), (5, b""), (5, b"\xff" * 4 + entry[4:])):
        with pytest.raises(IdsError):
            segment.open(seq, changed)


@pytest.mark.parametrize(("public", "size"), [(PUBLIC, 108), (SM2_PUBLIC, 204)])
def test_a_head_is_bound_to_its_chain_and_segment(public, size):
    head = make_head(public, "o", 7, b"s" * 32, b"e" * 32)
    assert len(head) == size
    assert open_head(head + b"more", "o", 7, PRIVATE) == b"s" * 32
    for origin, first in (("p", 7), ("o", 8)):
        with pytest.raises(IdsError):
            open_head(head, origin, first, PRIVATE)
    for at in range(len(head)):
        changed = head[:at] + bytes([head[at] ^ 0x40]) + head[at + 1 :]
        with pytest.raises(IdsError):
            open_head(changed, "o", 7, PRIVATE)
    with pytest.raises(IdsError):
        open_head(head[:-1], "o", 7, PRIVATE)


def test_ids_are_sealed_to_an_auditors_sm2_key(tmp_path):
    write_chain(tmp_path, 3, ids=True, token_ids="sealed", auditor_public=SM2_PUBLIC)
    assert verdict(tmp_path) == ("ok", None)
    shown = _shown(tmp_path, 2)
    assert (shown.ids, shown.ids_hold) == ([2, 7, 2], True)
    assert "another auditor" in _shown(tmp_path, 2, bytes(31) + b"\x01").ids_note


def test_sm2_ciphertexts_are_those_of_another_implementation():
    gmssl = pytest.importorskip("gmssl.sm2")
    theirs = gmssl.CryptSM2(private_key=PRIVATE.hex(), public_key=SM2_PUBLIC.hex(), mode=1)
    plain = bytes(range(32))
    assert sm2_cipher.decrypt(PRIVATE, theirs.encrypt(plain)) == plain
    sealed = sm2_cipher.encrypt(SM2_PUBLIC, plain)
    assert len(sealed) == 128
    assert theirs.decrypt(sealed) == plain
    for changed in (sealed[:-1], sealed + b"x", bytes(128), sealed[:-1] + bytes([sealed[-1] ^ 1])):
        with pytest.raises(ValueError, match="SM2"):
            sm2_cipher.decrypt(PRIVATE, changed)
    with pytest.raises(ValueError, match="curve"):
        sm2_cipher.encrypt(bytes(64), plain)


def test_the_refused_public_keys_are_those_that_give_no_secret():
    for point in wrap._LOW_ORDER:
        data = point.to_bytes(32, "little")
        assert not usable_public(data)
        with pytest.raises(ValueError, match=r"shared|exchange"):
            AUDITOR.exchange(X25519PublicKey.from_public_bytes(data))
    assert usable_public(PUBLIC)
    assert usable_public(SM2_PUBLIC)
    assert not usable_public(bytes(64))
    assert not usable_public(PUBLIC[:31])


def test_plain_ids_are_in_the_record_and_checked(tmp_path):
    write_chain(tmp_path, 3, ids=True, token_ids="plain")
    shown = _shown(tmp_path, 2)
    assert shown.ids == [2, 7, 2]
    assert "fit" in shown.ids_note
    assert verdict(tmp_path) == ("ok", None)


def test_a_commitment_holds_no_ids_and_off_holds_nothing(tmp_path):
    write_chain(tmp_path, 1, ids=True, token_ids="commit")
    record = _shown(tmp_path, 0).record
    assert (record["ids_n"], len(record["ids_commit"])) == (3, 64)
    assert "ids" not in record
    write_chain(tmp_path, 2, ids=True, origin="2", start_ms=START_MS + 60_000)
    assert not [name for name in _shown(tmp_path, 1).record if name.startswith("ids")]


def test_a_very_long_plain_list_is_cut_and_counted(tmp_path):
    async def scene():
        writer = _start(tmp_path, token_ids="plain")
        writer.append_request(request(1), [4_294_967_295] * 20_000)
        writer.append_request(request(2), [-1])
        await writer.close()
        return writer.dir

    records = _records(run(scene))
    assert (records[1]["ids_n"], len(records[1]["ids"])) == (20_000, token_ids.PLAIN_LIMIT)
    assert records[2]["ids_n"] == 1
    assert "ids" not in records[2]
    assert classes(tmp_path) == []
