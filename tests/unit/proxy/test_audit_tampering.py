"""What can be done to a log on disk: `audit verify` and a bundle's verifier name each rightly.

The two share no code, so each is the other's oracle: same verdict, same seq, on every case here and
on seeded random operations.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import shutil
from functools import cache
from pathlib import Path

import pytest

from proxy.audit import canonical
from proxy.audit.bundle import verify as bundle_verify
from proxy.audit.chain import Hmac, chain_key, next_key
from proxy.audit.epochs import MacKeys
from proxy.audit.findings import EXIT_CODES
from proxy.audit.layout import segments
from proxy.audit.note import ED25519, Keyset
from proxy.audit.signing import NoteSigner
from proxy.audit.verify import verify_directory
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy.audit_chains import SEED, START_MS, config, request

SIGNER = NoteSigner("log", ED25519, b"\1" * 32)
PINNED = Keyset([SIGNER.key])
ORIGIN = "local/default/pod/uid/"


async def _write(directory, number, records):
    clock = ManualClock(START_MS + number * 3_600_000)
    values = config(
        directory,
        origin=f"{ORIGIN}{number}",
        signers=(SIGNER,),
        checkpoint_records=20,
        segment_bytes=16384,
    )
    writer = AuditWriter.start(values, clock, asyncio.get_running_loop())
    for record in range(records):
        clock.advance_ms(100)
        ticket = writer.append_request(request(record))
        if record % 5 == 0:
            await writer.durable(ticket)
    await writer.close()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine")
    asyncio.run(_write(directory, 1, 90))
    asyncio.run(_write(directory, 2, 10))
    return directory


@pytest.fixture
def log(pristine, tmp_path):
    return Log(Path(shutil.copytree(pristine, tmp_path / "audit")))


@cache
def key_files():
    """Write the keys as a key file and as public lines; one folder a process."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="audit-keys-"))
    document = {
        "format": "tongguan-keys/1",
        "role": "auditor",
        "chain_seeds": [{"id": "seed1", "seed": SEED.hex()}],
        "verify_keys": [SIGNER.key.line()],
    }
    (folder / "auditor.json").write_text(json.dumps(document))
    (folder / "seeds.json").write_text(json.dumps(document | {"verify_keys": []}))
    (folder / "public.txt").write_text(SIGNER.key.line() + "\n")
    return folder


class Log:
    """A log on disk; lines of the first chain are addressed by seq."""

    def __init__(self, directory):
        self.dir = directory
        self.first, self.second = sorted(directory.iterdir())
        self.files = [path for _, path in segments(self.first)]
        self.lines = [path.read_bytes().splitlines(keepends=True) for path in self.files]

    @property
    def length(self):
        return sum(map(len, self.lines))

    def at(self, seq):
        for number, lines in enumerate(self.lines):
            if seq < len(lines):
                return number, seq
            seq -= len(lines)
        raise IndexError

    def get(self, seq):
        number, row = self.at(seq)
        return self.lines[number][row]

    def splice(self, seq, count, *new):
        """Put lines in place of `count` lines at `seq`."""
        number, row = self.at(seq)
        self.lines[number][row : row + count] = new
        self.files[number].write_bytes(b"".join(self.lines[number]))

    def record(self, seq):
        return json.loads(self.get(seq).partition(b"\t")[0])

    def seqs(self, kind):
        return [seq for seq in range(self.length) if self.record(seq)["kind"] == kind]


def ours(directory, *, public=False):
    keys = None if public else MacKeys({"seed1": SEED})
    result = verify_directory(directory, keys, pinned=PINNED)
    return result.verdict, result.first.seq if result.first else None


def theirs(directory, *, public=False, file=None):
    file = key_files() / (file or ("public.txt" if public else "auditor.json"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = bundle_verify.main([str(directory), "--keys", str(file)])
    result = json.loads(out.getvalue())
    assert code == EXIT_CODES[result["verdict"]]
    return result["verdict"], result["seq"]


def assert_both(log, expected):
    assert ours(log.dir) == expected
    assert theirs(log.dir) == expected


def test_an_untouched_log_is_ok(log):
    assert_both(log, ("ok", None))
    assert ours(log.dir, public=True) == theirs(log.dir, public=True) == ("ok_public", None)
    assert len(log.files) >= 4
    assert len(log.seqs("checkpoint")) >= 4


# One line.

FIELDS = ["v", "kind", "seq", "origin", "wall_ns", "mono_ns", "prev", "key_id", "trace_id",
          "tenant", "qos", "status", "outcome", "phase", "times_us", "usage"]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_bit_flipped_in_any_field_is_found_at_its_record(log, field):
    line = log.get(30)
    at = line.index(f'"{field}":'.encode()) + len(field) + 3
    at += line[at : at + 1] in b'"{'
    for bit in (0, 2, 5):
        changed = bytearray(line)
        changed[at] ^= 1 << bit
        if changed[at] in b"\n":
            continue
        log.splice(30, 1, bytes(changed))
        found = ours(log.dir)
        assert found == theirs(log.dir)
        assert found[1] == 30
        assert found[0] in {"content_mismatch", "malformed", "half_line", "key_unknown"}


def test_a_changed_value_is_found_with_public_keys_alone(log):
    log.splice(30, 1, log.get(30).replace(b'"status":200', b'"status":500'))
    assert_both(log, ("content_mismatch", 30))
    after = min(seq for seq in log.seqs("checkpoint") if seq > 30)
    expected = ("checkpoint_mismatch", after)
    assert ours(log.dir, public=True) == theirs(log.dir, public=True) == expected


def reserialised(line):
    return json.dumps(json.loads(line.split(b"\t")[0])).encode() + line[-66:]


def _resealed(log, seq, key, **changes):
    """A line of that place with other members and a MAC under `key`."""
    record = log.record(seq) | changes
    data = canonical.encode(record)
    mac = Hmac("s256", key).hex(bytes.fromhex(record["prev"]) + data)
    return data + b"\t" + mac.encode() + b"\n"


K0 = chain_key(SEED, "s256", ORIGIN + "1")


@pytest.mark.parametrize(
    ("key", "changes", "expected"),
    [
        (bytes(32), {"status": 500}, "content_mismatch"),
        (next_key(K0), {"status": 500}, "content_mismatch"),
        (next_key(K0), {"status": 500, "key_id": "seed1.s256.1"}, "content_mismatch"),
        (K0, {"key_id": "seed2.s256.0"}, "key_unknown"),
        (K0, {"key_id": "seed1.s257.0"}, "key_unknown"),
        (K0, {"v": 2}, "version_unknown"),
        (K0, {"kind": "unheard"}, "malformed"),
    ],
)
def test_a_record_sealed_again(log, key, changes, expected):
    log.splice(30, 1, _resealed(log, 30, key, **changes))
    assert_both(log, (expected, 30))


def test_the_seed_holders_own_rewriting_is_found_by_the_signature(log):
    """Every MAC is right from there on; only who signs checkpoints could have done it."""
    hmac = Hmac("s256", K0)
    prev = None
    for seq in range(30, log.length):
        record = log.record(seq)
        record |= {"status": 500} if seq == 30 else {"prev": prev}
        data = canonical.encode(record)
        prev = hmac.hex(bytes.fromhex(record["prev"]) + data)
        log.splice(seq, 1, data + b"\t" + prev.encode() + b"\n")
    after = min(seq for seq in log.seqs("checkpoint") if seq > 30)
    assert_both(log, ("checkpoint_mismatch", after))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda line: line[:-1] + b"\r\n", "malformed"),
        (lambda line: b"\xef\xbb\xbf" + line, "malformed"),
        (lambda line: line[:-1] + b"  \n", "malformed"),
        (lambda line: line.replace(b"}\t", b"} \t"), "malformed"),
        (lambda line: b" " + line, "malformed"),
        (reserialised, "malformed"),
        (lambda line: line.replace(b'"ok"', b'"\0k"'), "malformed"),
        (lambda line: line.replace(b'"ok"', b'"\\u006fk"'), "malformed"),
        (lambda _line: b"\0" * 4096 + b"\n", "malformed"),
        (lambda _line: b"\n", "malformed"),
        (lambda line: line.replace(b'"v":1', b'"v":1,"v":1'), "malformed"),
        (lambda line: line.replace(b'"status":200', b'"status":2e2'), "malformed"),
        (lambda line: line.replace(b'"status":200', b'"status":null'), "malformed"),
        (lambda line: line.replace(b'"status":200', b'"status":NaN'), "malformed"),
        (lambda line: line.replace(b'"tenant":"t-1",', b""), "malformed"),
        (lambda line: line.replace(b'"outcome":"ok"', b'"outcome":"good"'), "malformed"),
        (lambda line: b"[" * 5000 + b"]" * 5000 + line[-66:], "malformed"),
        (lambda line: b'{"a":"' + b"x" * (2 << 20) + b'"}' + line[-66:], "malformed"),
        (lambda line: line[:50] + b"\n", "half_line"),
        (lambda line: line[:-30] + b"\n", "half_line"),
        (lambda line: line[:-66] + b"\n", "half_line"),
        (lambda line: line[:300] + line[-66:], "half_line"),
        (lambda line: line[:-1], "two_records_one_line"),
    ],
)
def test_what_is_no_line(log, change, expected):
    log.splice(30, 1, change(log.get(30)))
    assert_both(log, (expected, 30))


# Several lines.


@pytest.mark.parametrize("seq", [1, 30, 50])
def test_a_deleted_line_is_a_gap(log, seq):
    log.splice(seq, 1)
    assert_both(log, ("gap", seq))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_deleted_tail(log, cut):
    length = log.length
    log.splice(length - cut, cut)
    # The last checkpoint stands behind closed: the next chain remembers that it was there.
    assert_both(log, ("truncated", length - cut))


def test_no_newline_at_the_end(log):
    last = log.length - 1
    log.splice(last, 1, log.get(last)[:-1])
    assert_both(log, ("half_line", last))


def test_a_repeated_line(log):
    log.splice(30, 1, log.get(30), log.get(30))
    assert_both(log, ("duplicate_seq", 30))


def test_an_old_line_again(log):
    log.splice(30, 0, log.get(7))
    assert_both(log, ("duplicate_seq", 7))


def test_swapped_lines(log):
    log.splice(30, 2, log.get(31), log.get(30))
    assert_both(log, ("gap", 30))


def test_an_inserted_line(log):
    log.splice(30, 0, _resealed(log, 29, bytes(32)))
    assert_both(log, ("content_mismatch", 30))


def test_two_chains_spliced(log):
    ((_, path),) = segments(log.second)
    log.splice(30, 1, path.read_bytes().splitlines(keepends=True)[1])
    # A good record, but of a place behind: it is judged by its seq first.
    assert_both(log, ("duplicate_seq", 1))
    assert "link_mismatch" in {f.cls for f in verify_directory(log.dir, None).findings}


def test_two_chains_spliced_at_the_same_seq(log):
    ((_, path),) = segments(log.second)
    log.splice(5, 1, path.read_bytes().splitlines(keepends=True)[5])
    assert_both(log, ("link_mismatch", 5))


# Segments, chains, the directory.


def _first_seq(path):
    return int(path.stem)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_deleted_segment(log, number):
    log.files[number].unlink()
    assert_both(log, ("gap", _first_seq(log.files[number])))


def test_the_newest_segment_deleted(log):
    log.files[-1].unlink()
    assert_both(log, ("truncated", _first_seq(log.files[-1])))


def test_an_old_segment_in_place_of_a_later_one(log):
    shutil.copyfile(log.files[1], log.files[2])
    expected = ours(log.dir)
    assert expected == theirs(log.dir)
    assert expected == ("duplicate_seq", _first_seq(log.files[1]))


def test_an_old_segment_under_a_new_name(log):
    target = log.files[-1].with_name(f"{log.length:020d}.log")
    shutil.copyfile(log.files[1], target)
    assert_both(log, ("duplicate_seq", _first_seq(log.files[1])))


@pytest.mark.parametrize("name", ["copy.log", "1.log", f"{3:020d}.LOG.log"])
def test_a_wrong_file_name(log, name):
    first = _first_seq(log.files[1])
    log.files[1].rename(log.files[1].with_name(name))
    assert_both(log, ("malformed", first))


def test_a_segment_under_the_wrong_number(log):
    first = _first_seq(log.files[1])
    log.files[1].rename(log.files[1].with_name(f"{first + 1:020d}.log"))
    assert_both(log, ("malformed", first))


def test_a_deleted_chain(log):
    shutil.rmtree(log.first)
    assert_both(log, ("truncated", 0))


def test_a_copied_chain(log):
    shutil.copytree(log.first, log.dir / "9999999999999999999-00000000")
    assert_both(log, ("duplicate_seq", 0))


def test_times_of_files_mean_nothing(log):
    for path in log.dir.rglob("*.log"):
        os.utime(path, (0, 0))
    assert_both(log, ("ok", None))


def test_an_older_copy_of_a_chain(log):
    """The log rolled back to an earlier checkpoint, with what came later gone."""
    early = log.seqs("checkpoint")[2]
    for path in log.files:
        if _first_seq(path) > early:
            path.unlink()
    log.splice(early + 1, len(log.lines[log.at(early)[0]]))
    shutil.rmtree(log.second)
    assert_both(log, ("truncated", early + 1))


def test_a_line_of_a_quarter_gigabyte_is_read_in_bounded_memory(log):
    import resource

    with log.files[-1].open("r+b") as file:
        file.seek(0, 2)
        file.truncate(file.tell() + (1 << 28))  # sparse: zeros without a newline
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_both(log, ("malformed", log.length))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10  # KiB


# Time, by who holds all keys.


def _rewritten(log, change):
    """Write the first chain anew from a changed list of records, MACs right, signatures gone."""
    hmac, prev, seq, rows = Hmac("s256", K0), "0" * 64, 0, []
    for number in range(log.length):
        record = change(log.record(number))
        if record is None or record["kind"] in ("checkpoint", "segment_end", "segment_start"):
            continue
        record |= {"seq": seq, "prev": prev}
        if record["kind"] == "genesis":
            record["required_signers"] = []
        data = canonical.encode(record)
        prev = hmac.hex(bytes.fromhex(prev) + data)
        rows.append(data + b"\t" + prev.encode() + b"\n")
        seq += 1
    for path in log.files[1:]:
        path.unlink()
    log.files[0].write_bytes(b"".join(rows))
    shutil.rmtree(log.second)


def test_a_missing_heartbeat_hour(log):
    def change(record):
        if record["seq"] > 40:
            record["mono_ns"] = str(int(record["mono_ns"]) + 3_600_000_000_000)
        return record

    _rewritten(log, change)
    result = verify_directory(log.dir, MacKeys({"seed1": SEED}))
    assert (result.verdict, result.first.seq) == theirs(log.dir, file="seeds.json")
    assert result.verdict == "heartbeat_missing"


def test_a_clock_stepped_back_is_information(log):
    def change(record):
        if record["seq"] > 40:
            record["wall_ns"] = str(int(record["wall_ns"]) - 60_000_000_000)
        return record

    _rewritten(log, change)
    result = verify_directory(log.dir, MacKeys({"seed1": SEED}))
    assert (result.verdict, None) == theirs(log.dir, file="seeds.json") == ("ok", None)
    assert [finding.cls for finding in result.findings] == ["clock_backwards"]


def test_a_long_chain_whose_signers_were_struck_out_is_unsigned(log):
    def slow(record):
        record["mono_ns"] = str(record["seq"] * 1_000_000_000)
        return record

    _rewritten(log, slow)
    assert_both(log, ("unsigned_range", 0))
    assert theirs(log.dir, file="seeds.json") == ("ok", None)


# Random operations: the two verifiers agree, and nothing but mtime is ever ok.

OPERATIONS = (
    "flip", "delete", "duplicate", "swap", "cut", "join", "move", "truncate", "noise", "reseal",
    "respell",
)  # fmt: skip
RESEALED = (
    {"v": 2},
    {"v": 7, "kind": "unheard"},
    {"key_id": "seed2.s256.0"},
    {"key_id": "seed1.s256.3"},
    {"wall_ns": "1"},
    {"mono_ns": "9000000000000000"},
    {"kind": "unheard"},
    {"origin": ORIGIN + "9"},
    {"tenant": "t-2"},
)
RESPELLED = (
    reserialised,
    lambda line: line[:-1] + b"\r\n",
    lambda line: b"\xef\xbb\xbf" + line,
    lambda line: line[:-1] + b" \n",
    lambda line: line.replace(b'":', b'": ', 1),
    lambda line: b"\0" + line,
)


def _operate(log, rng):
    seq = rng.randrange(1, log.length - 3)
    line = log.get(seq)
    operation = rng.choice(OPERATIONS)
    if operation == "flip":
        changed = bytearray(line)
        changed[rng.randrange(len(line))] ^= 1 << rng.randrange(8)
        log.splice(seq, 1, bytes(changed))
    elif operation == "delete":
        log.splice(seq, rng.randrange(1, 4))
    elif operation == "duplicate":
        log.splice(seq, 1, line, line)
    elif operation == "swap":
        log.splice(seq, 1, log.get(seq + 1))
        log.splice(seq + 1, 1, line)
    elif operation == "cut":
        log.splice(seq, 1, line[: rng.randrange(1, len(line) - 1)] + b"\n")
    elif operation == "join":
        log.splice(seq, 1, line[:-1])
    elif operation == "reseal":
        key = rng.choice((K0, next_key(K0), bytes(32)))
        log.splice(seq, 1, _resealed(log, seq, key, **rng.choice(RESEALED)))
    elif operation == "respell":
        log.splice(seq, 1, rng.choice(RESPELLED)(line))
    elif operation == "move":
        log.splice(rng.randrange(1, log.length - 1), 0, line)
    elif operation == "truncate":
        path = rng.choice(log.files)
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    else:
        log.splice(seq, 0, rng.randbytes(rng.randrange(1, 200)).replace(b"\n", b"") + b"\n")
    return operation


@pytest.mark.parametrize("seed", range(64))
def test_random_operations_are_seen_alike(pristine, tmp_path, seed):
    rng = random.Random(seed)
    log = Log(Path(shutil.copytree(pristine, tmp_path / "audit")))
    done = []
    for _ in range(rng.choice((1, 1, 2))):
        with contextlib.suppress(IndexError, ValueError):
            done.append(_operate(log, rng))
    mine, other = ours(log.dir), theirs(log.dir)
    assert mine == other, done
    assert mine[0] not in ("ok", "ok_public"), done
