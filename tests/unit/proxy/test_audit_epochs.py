"""Epochs of a chain's key: the ratchet, `rotate` records, what is erased when, what is named."""

from __future__ import annotations

import asyncio
import contextlib
import hmac as standard
import json
import shutil
from pathlib import Path

import pytest

from proxy.audit import canonical, rekeying
from proxy.audit.chain import EPOCH_LIMIT, Chain, Hmac, chain_key, follows, next_key
from proxy.audit.epochs import MacKeys
from proxy.audit.layout import segments
from proxy.audit.rotation import Rotation
from proxy.audit.show import find_record
from proxy.audit.writer import LOST, AuditError, AuditWriter
from proxy.clock import ManualClock
from proxy.keys.file import KeyFile
from proxy.keys.memory import Secret
from proxy.keys.provider import KeySet
from tests.unit.proxy import test_audit_tampering as tampering
from tests.unit.proxy.audit_chains import SEED, START_MS, config, request, run, verify
from tests.unit.proxy.test_audit_crash import FailingDisk

OTHER = bytes(range(32, 64))
SEEDS = {"seed1": SEED, "seed2": OTHER}
ORIGIN = f"{tampering.ORIGIN}1"


def records(chain):
    return [
        json.loads(line.split(b"\t")[0])
        for _, path in segments(chain)
        for line in path.read_bytes().splitlines()
    ]


def extract_expand(ikm, info):
    prk = standard.new(bytes(32), ikm, "sha256").digest()
    return standard.new(prk, info + b"\1", "sha256").digest()


# The ratchet.


def test_keys_are_as_the_format_says():
    k0 = extract_expand(SEED, b"tongguan audit v1\0sm3\0o")
    k1 = extract_expand(k0, b"audit epoch")
    assert chain_key(SEED, "sm3", "o") == k0
    assert next_key(k0) == k1
    # Fixed here, so that no change of both sides can pass unseen.
    assert k1.hex() == "5d503729d62c9492df33f1ba0244db3c79af3e903d04239b5839fcc074907abe"


@pytest.mark.parametrize("alg", ["s256", "sm3"])
def test_a_rotate_record_is_under_the_old_key_and_proves_the_new_one(alg):
    chain = Chain("o", "seed1", alg, SEED)
    chain.line("genesis", {}, 1, 1)
    prev = chain.prev
    assert chain.prepare()
    data, _, mac = chain.rotate_line(2, 2).rstrip(b"\n").partition(b"\t")
    record = json.loads(data)
    k0 = chain_key(SEED, alg, "o")
    raw = bytes.fromhex(prev)
    digest = "sha256" if alg == "s256" else "sm3"
    assert (record["key_id"], record["new_key_id"]) == (f"seed1.{alg}.0", f"seed1.{alg}.1")
    assert mac.decode() == standard.new(k0, raw + data, digest).hexdigest()
    claimed = record.pop("new_key_mac")
    rest = raw + canonical.encode(record)
    assert claimed == standard.new(next_key(k0), rest, digest).hexdigest()
    after = json.loads(chain.line("heartbeat", {}, 3, 3).partition(b"\t")[0])
    assert after["key_id"] == chain.key_id == f"seed1.{alg}.1"


def test_a_chain_set_back_writes_the_same_again_until_the_old_key_is_erased():
    chain = Chain("o", "seed1", "s256", SEED)
    chain.line("genesis", {}, 1, 1)
    at = chain.head
    chain.prepare()
    lines = [chain.rotate_line(2, 2), chain.line("heartbeat", {}, 3, 3)]
    chain.back_to(at)
    assert chain.key_id == "seed1.s256.0"
    assert [chain.rotate_line(2, 2), chain.line("heartbeat", {}, 3, 3)] == lines
    first = chain._turns[0]
    chain.forget_before(1)
    assert first.key.value() == b""
    assert (chain.head.seq, chain.head.prev, chain.head.turn) == (3, chain.prev, 1)
    assert chain._turns[0].key.value() == next_key(chain_key(SEED, "s256", "o"))
    chain.erase()
    assert chain._turns[0].key.value() == b""


def test_a_chain_goes_on_to_another_seed():
    chain = Chain("o", "seed1", "s256", SEED)
    chain.prepare(("seed1", SEED))  # the same seed: the next epoch, never its first key again
    chain.prepare(("seed2", OTHER))
    chain.rotate_line(1, 1)
    assert chain.key_id == "seed1.s256.1"
    chain.rotate_line(2, 2)
    assert chain.key_id == "seed2.s256.0"
    assert chain._turns[-1].key.value() == chain_key(OTHER, "s256", "o")


@pytest.mark.parametrize(
    ("new", "good"),
    [
        ("seed1.s256.5", True), ("seed2.s256.0", True), ("seed1.s256.4", False),
        ("seed1.s256.6", False), ("seed1.s256.3", False), ("seed1.s256.0", False),
        ("seed2.s256.1", False), ("seed1.sm3.5", False), ("seed2.sm3.0", False),
        ("seed1.s256.05", False), ("seed1.s256", False), ("", False),
    ],
)  # fmt: skip
def test_what_may_follow_a_key(new, good):
    assert follows(new, "seed1.s256.4") is good


def test_epochs_are_used_up_one_day():
    chain = Chain("o", "seed1", "s256", SEED)
    chain._turns[-1].epoch = EPOCH_LIMIT
    assert not chain.prepare()
    assert chain.prepare(("seed2", OTHER))


def test_a_secret_is_wiped():
    secret = Secret(b"\7" * 32)
    assert secret.value() == b"\7" * 32
    secret.erase()
    assert secret.value() == b""
    assert bytes(secret._page) == bytes(len(secret._page))
    secret.erase()


def test_keys_of_any_epoch_are_reached_from_either_side():
    keys = MacKeys({"seed1": SEED})
    key, expected = chain_key(SEED, "s256", "o"), {}
    for epoch in range(9001):
        if epoch in {0, 1, 4095, 4096, 4097, 9000}:
            expected[epoch] = Hmac("s256", key).hex(b"x")
        key = next_key(key)
    for epoch in (9000, 4097, 1, 4096, 0, 4095, 9000):
        assert keys.hmac(f"seed1.s256.{epoch}", "o").hex(b"x") == expected[epoch]
    assert keys.hmac("seed2.s256.0", "o") is None


# When.


def test_due_by_count_by_time_or_not_at_all():
    rotation = Rotation(100, 60, 0)
    assert not rotation.due(99, 59 * 10**9)
    assert rotation.due(100, 0)
    assert rotation.due(0, 60 * 10**9)
    rotation.done(101, 60 * 10**9)
    assert not rotation.due(200, 119 * 10**9)
    assert rotation.due(201, 61 * 10**9)
    rotation.exhausted = True
    assert not rotation.due(201, 10**15)
    assert not Rotation(0, 0, 0).due(1 << 50, 1 << 60)


async def _writer(directory, clock=None, **changes):
    values = config(directory, **{"origin": ORIGIN, **changes})
    return AuditWriter.start(values, clock or ManualClock(START_MS), asyncio.get_running_loop())


def test_a_chain_rotates_by_count_by_time_and_on_demand(tmp_path):
    async def scene():
        clock = ManualClock(START_MS)
        writer = await _writer(tmp_path, clock, rotate_records=50, rotate_s=40)
        for number in range(120):
            await writer.durable(writer.append_request(request(number)))
        clock.advance_ms(39_000)
        writer.watch()
        clock.advance_ms(1_000)
        writer.watch()
        assert writer.rotate() != LOST
        assert writer.rotate_to(("seed2", OTHER)) is None
        with pytest.raises(AuditError):
            writer.append("rotate", {"new_key_id": "a.s256.1", "new_key_mac": "0" * 64})
        assert writer.key_id == "seed2.s256.0"
        writer.append_request(request(1))
        await writer.close()
        assert writer.stats.rotations == 5
        assert len(writer._pending._chain._turns) == 1  # every earlier key is erased and gone
        assert writer._config.seed == b""
        return writer.dir

    found = records(run(scene))
    turns = [record["new_key_id"] for record in found if record["kind"] == "rotate"]
    assert turns == [*(f"seed1.s256.{n}" for n in range(1, 5)), "seed2.s256.0"]
    assert found[-1]["key_id"] == "seed2.s256.0"
    result = verify(tmp_path, MacKeys(SEEDS))
    assert (result.verdict, result.findings) == ("ok", [])
    assert verify(tmp_path, MacKeys({"seed1": SEED})).verdict == "key_unknown"
    assert verify(tmp_path, None).verdict == "ok_public"


@pytest.mark.parametrize(
    ("before", "now", "own", "expected"),
    [
        (("a", "w1"), ("a", "w2"), True, ["seed1.s256.1"]),
        (("a", "w1"), ("a", "w2"), False, ["seed1.s256.1"]),  # the seed is the agent's
        (("a", ""), ("a", "w1"), True, ["seed1.s256.1"]),
        (("a", "w1"), ("a", "w1"), True, []),
        (("a", "w1"), ("a", ""), True, []),
        (("a", "w1"), ("seed2", "w2"), True, ["seed2.s256.0"]),
        (("a", "w1"), ("seed2", "w1"), True, ["seed2.s256.0"]),
        (("a", "w1"), ("seed2", "w2"), False, ["seed1.s256.1"]),
        (("a", "w1"), ("seed2", "w1"), False, []),
    ],
)
def test_a_word_of_the_source_of_keys_turns_the_key_once(tmp_path, before, now, own, expected):
    def held(seed_id, word):
        seeds = ((seed_id, OTHER),)
        return KeySet(KeyFile("sidecar", (), {}, seeds, None, None, chain_turn=word))

    async def scene():
        writer = await _writer(tmp_path)
        await writer.durable(writer.append_request(request(1)))
        rekeying.follow(writer, rekeying.changes(held(*before), held(*now)), own_seed=own)
        writer.watch()
        await writer.close()
        return writer.dir

    found = records(run(scene))
    assert [r["new_key_id"] for r in found if r["kind"] == "rotate"] == expected
    assert verify(tmp_path, MacKeys(SEEDS)).verdict == "ok"


def test_a_demand_waits_until_it_can_be_written(tmp_path, monkeypatch):
    failing = FailingDisk(monkeypatch)

    async def scene():
        writer = await _writer(tmp_path)
        failing.full = True
        writer.append_request(request(1))
        async with asyncio.timeout(20):
            while writer.available:  # noqa: ASYNC110 - the disk has its own thread
                await asyncio.sleep(0.01)
            writer.rotate_to(None)
            assert writer.key_id == "seed1.s256.0"
            failing.full = False
            while not writer.available:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for _ in range(3):
            writer.watch()
        await writer.close()
        return writer.dir

    found = records(run(scene))
    assert [r["new_key_id"] for r in found if r["kind"] == "rotate"] == ["seed1.s256.1"]


def test_ids_committed_to_under_two_seeds_are_both_checked(tmp_path):
    async def scene():
        writer = await _writer(tmp_path, token_ids="plain")
        writer.append_request(request(1), [1, 2, 3])
        writer.rotate_to(("seed2", OTHER))
        writer.append_request(request(2), [4, 5, 6])
        await writer.close()

    run(scene)
    for number in (1, 2):
        trace_id = f"{START_MS}-00001-{number:04d}"
        shown = find_record(tmp_path, trace_id, MacKeys(SEEDS), None)
        assert (shown.mac, shown.ids_note) == ("ok", "in the record; they fit the commitment")


def test_no_rotation_where_nothing_can_be_written(tmp_path):
    async def scene():
        writer = await _writer(tmp_path)
        writer._available = False
        assert writer.rotate() == LOST
        writer._available = True
        await writer.close()
        assert writer.rotate() == LOST
        assert writer.stats.lost == 0

    run(scene)


def test_used_up_epochs_are_said_once(tmp_path):
    async def scene():
        clock = ManualClock(START_MS)
        writer = await _writer(tmp_path, clock, rotate_s=60)
        writer._pending._chain._turns[-1].epoch = EPOCH_LIMIT
        for _ in range(3):
            clock.advance_ms(61_000)
            writer.watch()
        await writer.close()
        return writer.dir

    kinds = [record["kind"] for record in records(run(scene))]
    assert kinds == ["genesis", "alarm", "closed"]


@pytest.mark.parametrize("segment_bytes", [1 << 16, 64 << 20])
def test_a_failed_sync_chains_rotations_again_under_the_same_keys(
    tmp_path, monkeypatch, segment_bytes
):
    failing = FailingDisk(monkeypatch)

    async def scene():
        writer = await _writer(tmp_path, flush_ms=1000, segment_bytes=segment_bytes)
        await writer.durable(writer.append_request(request(0)))
        failing.sync_fails = 1
        for number in range(1, 100):
            writer.append_request(request(number))
            if number % 9 == 0:
                writer.rotate()
        # Nothing of it was durable: the first key is still there to write it again with.
        assert len(writer._pending._chain._turns) == 12
        writer._flush()
        while writer.stats.failures < 1 or not writer.available:  # noqa: ASYNC110 - its own thread
            await asyncio.sleep(0.005)
        await writer.close()
        return writer.dir

    found = records(run(scene))
    assert any("sealed" in record for record in found)
    assert [r["new_key_id"] for r in found if r["kind"] == "rotate"][-1] == "seed1.s256.11"
    assert len([r for r in found if r["kind"] == "request"]) == 100
    assert verify(tmp_path, MacKeys(SEEDS)).verdict == "ok"


# What is done to such a log: both verifiers, the same class.


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two chains; the first rotates every 20 records, then to another seed."""
    directory = tmp_path_factory.mktemp("pristine")

    async def scene(number, count):
        clock = ManualClock(START_MS + number * 3_600_000)
        writer = await _writer(
            directory,
            clock,
            origin=f"{tampering.ORIGIN}{number}",
            signers=(tampering.SIGNER,),
            checkpoint_records=20,
            segment_bytes=16384,
            rotate_records=20,
        )
        for record in range(count):
            clock.advance_ms(100)
            if record == 70:
                writer.rotate_to(("seed2", OTHER))
            ticket = writer.append_request(request(record))
            if record % 5 == 0:
                await writer.durable(ticket)
        await writer.close()

    asyncio.run(scene(1, 90))
    asyncio.run(scene(2, 10))
    return directory


@pytest.fixture
def log(pristine, tmp_path):
    return tampering.Log(Path(shutil.copytree(pristine, tmp_path / "audit")))


@pytest.fixture(scope="module")
def auditor(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "auditor.json"
    document = {
        "chain_seeds": [{"id": name, "seed": seed.hex()} for name, seed in SEEDS.items()],
        "verify_keys": [tampering.SIGNER.key.line()],
    }
    path.write_text(json.dumps(document))
    return path


def key_of(log, seq):
    """The key of the epoch of a record: seed and epoch as its key id says."""
    seed_id, _, epoch = log.record(seq)["key_id"].split(".")
    key = chain_key(SEEDS[seed_id], "s256", ORIGIN)
    for _ in range(int(epoch)):
        key = next_key(key)
    return key


@pytest.fixture
def assert_both(auditor):
    def check(log, expected):
        mine = verify(log.dir, MacKeys(SEEDS), pinned=tampering.PINNED)
        assert (mine.verdict, mine.first.seq if mine.first else None) == expected
        assert tampering.theirs(log.dir, file=auditor) == expected

    return check


def test_an_untouched_log_of_many_epochs(log, assert_both):
    assert_both(log, ("ok", None))
    public = ("ok_public", None)
    assert tampering.ours(log.dir, public=True) == tampering.theirs(log.dir, public=True) == public
    assert len(log.seqs("rotate")) >= 4
    assert {row["key_id"] for row in map(log.record, range(log.length))} >= {
        "seed1.s256.0", "seed1.s256.1", "seed1.s256.2", "seed2.s256.0",
    }  # fmt: skip


@pytest.mark.parametrize("rename", [False, True])
@pytest.mark.parametrize("later", [1, 3])
def test_an_old_record_sealed_with_a_later_epochs_right_key(log, assert_both, rename, later):
    """Who took the process at a later epoch has that key, and none before it."""
    thief = log.seqs("rotate")[later] + 1
    changes = {"status": 500} | ({"key_id": log.record(thief)["key_id"]} if rename else {})
    log.splice(10, 1, tampering._resealed(log, 10, key_of(log, thief), **changes))
    assert_both(log, ("content_mismatch", 10))


def test_all_from_an_old_record_on_sealed_with_a_later_epochs_key(log, assert_both):
    """Links and MACs are right from there on; the first has a key that nothing led to."""
    thief = log.seqs("rotate")[0] + 1
    key, key_id, prev = key_of(log, thief), log.record(thief)["key_id"], None
    for seq in range(10, thief):
        record = log.record(seq) | {"key_id": key_id} | ({"prev": prev} if prev else {})
        data = canonical.encode(record)
        prev = Hmac("s256", key).hex(bytes.fromhex(record["prev"]) + data)
        log.splice(seq, 1, data + b"\t" + prev.encode() + b"\n")
    assert_both(log, ("content_mismatch", 10))


def test_an_epoch_back_is_no_way_on(log, assert_both):
    seq = log.seqs("rotate")[1] + 1
    key_id = log.record(10)["key_id"]
    log.splice(seq, 1, tampering._resealed(log, seq, key_of(log, 10), key_id=key_id))
    assert_both(log, ("content_mismatch", seq))


@pytest.mark.parametrize("key_id", ["seed1.s256.2", "seed1.s256.0", "seed2.s256.1", "seed1.sm3.1"])
def test_a_rotation_that_leads_astray(log, assert_both, key_id):
    seq = log.seqs("rotate")[0]
    changes = {"new_key_id": key_id}
    log.splice(seq, 1, tampering._resealed(log, seq, key_of(log, seq), **changes))
    assert_both(log, ("malformed", seq))


def test_a_new_key_that_its_holder_did_not_have(log, assert_both):
    seq = log.seqs("rotate")[0]
    line = tampering._resealed(log, seq, key_of(log, seq), new_key_mac="0" * 64)
    log.splice(seq, 1, line)
    assert_both(log, ("content_mismatch", seq))


def test_a_rotation_struck_out(log, assert_both):
    seq = log.seqs("rotate")[1]
    log.splice(seq, 1)
    assert_both(log, ("gap", seq))


def test_a_rotation_written_again_by_who_has_no_key_of_that_epoch(log, assert_both):
    seq = log.seqs("rotate")[1]
    thief = key_of(log, log.seqs("rotate")[3] + 1)
    log.splice(seq, 1, tampering._resealed(log, seq, thief))
    assert_both(log, ("content_mismatch", seq))


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_on_epochs_are_seen_alike(pristine, auditor, tmp_path, seed):
    import random

    rng = random.Random(seed)
    log = tampering.Log(Path(shutil.copytree(pristine, tmp_path / "audit")))
    done = []
    with contextlib.suppress(IndexError, ValueError):
        done.append(tampering._operate(log, rng))
    mine = verify(log.dir, MacKeys(SEEDS), pinned=tampering.PINNED)
    found = mine.verdict, mine.first.seq if mine.first else None
    assert found == tampering.theirs(log.dir, file=auditor), done
    assert found[0] != "ok", done
