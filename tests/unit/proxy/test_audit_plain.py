"""The plain case of verification: in C as by the twin, and with several processes as with one."""

from __future__ import annotations

import random
import shutil

import pytest

from kernels import wire
from proxy.audit import ahead as ahead_module
from proxy.audit import plain, tree
from proxy.audit.chain import Hmac, chain_key, mac
from proxy.audit.epochs import MacKeys
from proxy.audit.layout import segments
from proxy.audit.plain import Before, Taken
from proxy.audit.reader import Lines, parse_line
from proxy.audit.tree import Range, leaf_hash
from tests.unit.proxy.audit_chains import KEYS, SEED, verify, write_chain

ORIGIN = "local/default/pod/uid/1"
K0 = chain_key(SEED, "s256", ORIGIN)
TAKEN = [
    plain.take_requests_pure,
    pytest.param(
        wire.requests(plain.take_requests_pure),
        marks=pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire: no extension built"),
        id="in C",
    ),
]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Genesis, requests of many forms (ids, names that are not ASCII), `closed`."""
    directory = tmp_path_factory.mktemp("plain")
    chain = write_chain(directory, 40, ids=True, token_ids="commit")
    return segments(chain)[0][1].read_bytes().splitlines(keepends=True)


def _before(line, quiet_ns=45 * 10**9):
    found = parse_line(line)
    record = found.record
    return Before(
        record["origin"],
        record["key_id"],
        found.mac,
        record["seq"] + 1,
        int(record["wall_ns"]),
        int(record["mono_ns"]),
        quiet_ns,
    )


def _taken(take, data, before, key=K0):
    return Taken(
        *take(
            data,
            0,
            len(data),
            mac("s256", key) if key else None,
            before.origin.encode(),
            before.key_id.encode(),
            before.prev.encode(),
            *before[3:],
            plain._OUTCOMES,
            plain._PHASES,
        )
    )


@pytest.mark.parametrize("take", TAKEN)
def test_requests_are_taken_and_the_first_other_record_is_not(lines, take):
    data = b"".join(lines[1:])
    taken = _taken(take, data, _before(lines[0]))
    assert taken.records == 40
    assert data[taken.end :] == lines[-1]
    last = _before(lines[40])
    assert (taken.prev.decode(), taken.wall_ns, taken.mono_ns) == last[2:3] + last[4:6]
    assert taken.leaves == b"".join(leaf_hash(line[:-1]) for line in lines[1:41])
    assert taken.first_mono_ns == _before(lines[1]).mono_ns


@pytest.mark.parametrize("take", TAKEN)
@pytest.mark.parametrize(
    "changed",
    [
        {"prev": "0" * 64},
        {"seq": 2},
        {"origin": "another"},
        {"key_id": "seed1.s256.1"},
        {"wall_ns": 1 << 62},
        {"mono_ns": 1 << 62},
        {"quiet_ns": 1},
    ],
)
def test_what_does_not_continue_is_left(lines, take, changed):
    before = _before(lines[0])._replace(**changed)
    taken = _taken(take, lines[1], before)
    assert (taken.records, taken.end, taken.leaves) == (0, 0, b"")


@pytest.mark.parametrize("take", TAKEN)
def test_a_record_under_another_key_is_left_and_taken_without_one(lines, take):
    assert _taken(take, lines[1], _before(lines[0]), bytes(32)).records == 0
    assert _taken(take, lines[1], _before(lines[0]), None).records == 1


def _damaged(rng, data):
    at, kind = rng.randrange(len(data)), rng.randrange(6)
    if kind == 0:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + data[at + rng.randrange(1, 9) :]
    if kind == 2:
        return data[:at] + rng.choice(WEDGES) + data[at:]
    if kind == 3:
        return data.replace(*rng.choice(SWAPS))
    if kind == 4:
        return data[:at]
    return data[:at] + data[max(0, at - rng.randrange(40)) :]


WEDGES = [b" ", b'"', b",", b"0", b"-", b"[", b"}", b"\t", b"\r", b"\0", b"\\u0041", "汉".encode(),
          b"\xff", b'"x":null,', b'"x":1.5,', b'"a":[1,{"b":true}],', b'"v":1,']  # fmt: skip
SWAPS = [(b'"m"', '"模型"'.encode()), (b'"ok"', b'"fine"'), (b'"status":200', b'"status":-0'),
         (b'"status":200', b'"status":9007199254740992'), (b'"t-1"', b'"t\\"1"'),
         (b'"m"', b'"' + b"m" * 257 + b'"'), (b'"m"', b'{"b":1,"a":2}'), (b"times_us", b"times_u"),
         (b'"m"', b'"' + "é".encode() * 129 + b'"'), (b'"m"', b'"\xed\xa0\x80"'),
         (b'"v":1', b'"v":2'), (b'"kind":"request"', b'"kind":"open"'), (b"ids_n", b"ids_\xc3\xa9"),
         (b'"m"', b"[" * 20 + b"]" * 20), (b'"m"', b"[]"), (b'"m"', b'{"a":false}')]  # fmt: skip


@pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire: no extension built")
@pytest.mark.parametrize("key", [K0, None])
def test_in_c_nothing_is_taken_that_the_twin_would_leave(lines, key):
    quick = wire.requests(plain.take_requests_pure)
    rng, before = random.Random(7), _before(lines[0])
    taken_of_damaged = 0
    for _ in range(1500):
        data = _damaged(rng, b"".join(lines[1:5]))
        mine, twin = (
            _taken(quick, data, before, key),
            _taken(plain.take_requests_pure, data, before, key),
        )
        assert mine.end <= twin.end, data
        assert mine == _taken(plain.take_requests_pure, data[: mine.end], before, key), data
        taken_of_damaged += mine.records
    assert taken_of_damaged > 1500  # else nothing was compared


@pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire: no extension built")
@pytest.mark.parametrize("arguments", [(), (b"",) * 13, (b"x", 0, 2, *[None] * 10)])
def test_wrong_use_is_an_error(arguments):
    with pytest.raises((TypeError, ValueError)):
        wire.requests(plain.take_requests_pure)(*arguments)


def test_sm3_is_checked_line_by_line(tmp_path):
    chain = write_chain(tmp_path, 30, alg="sm3")
    path = segments(chain)[0][1]
    data = path.read_bytes()
    first, rest = data.split(b"\n", 1)
    before, key = _before(first + b"\n"), Hmac("sm3", chain_key(SEED, "sm3", ORIGIN))
    assert plain.take(rest, 0, len(rest), key, before).records == 30
    rows = rest.splitlines(keepends=True)
    rows[12] = rows[12].replace(b'"status":200', b'"status":201')
    assert plain.take(b"".join(rows), 0, len(rest), key, before).records == 12
    path.write_bytes(first + b"\n" + b"".join(rows))
    found = verify(tmp_path)
    assert (found.verdict, found.first.seq) == ("content_mismatch", 13)


# The tree.


@pytest.mark.parametrize("grow", [tree._grow, tree._grow_pure])
def test_leaves_in_bulk_give_the_tree_of_single_ones(grow):
    rng = random.Random(3)
    for _ in range(40):
        begin = rng.choice((0, 0, rng.randrange(1, 5000)))
        one = Range(begin)
        sizes, hashes, end = [], [], begin
        for _ in range(rng.randrange(1, 5)):
            rows = [rng.randbytes(rng.randrange(1, 80)).replace(b"\n", b"") for _ in range(60)]
            one.extend(leaf_hash(row) for row in rows)
            if rng.random() < 0.5:
                end = grow(begin, end, sizes, hashes, b"\n".join(rows) + b"\n", 1)
            else:
                end = grow(begin, end, sizes, hashes, b"".join(map(leaf_hash, rows)), 0)
        assert (end, sizes, hashes) == (one.end, one.sizes, one.hashes)


# Blocks of a file.


@pytest.mark.parametrize("end", [None, 0, 10, 25, 3000, 400_000])
def test_blocks_and_lines_give_all_bytes_once(tmp_path, end, monkeypatch):
    monkeypatch.setattr("proxy.audit.reader.BLOCK_BYTES", 300)
    rows = [b"a" * n + b"\n" for n in (3, 0, 17, 290, 299, 300, 301, 900, 5)] * 40 + [b"tail"]
    path = tmp_path / "file"
    path.write_bytes(b"".join(rows))
    rng, got = random.Random(1), b""
    with path.open("rb") as file:
        lines = Lines(file, end)
        while True:
            data, start, stop = lines.block()
            to = stop if rng.random() < 0.5 else start
            got += data[start:to]
            lines.took(to)
            assert lines.offset == len(got)
            if start < to:
                continue
            found = lines.line()
            if found is None:
                break
            assert found[0] == len(got)
            got += found[1]
    assert got == b"".join(rows)[:end]


# Several processes.


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    directory = tmp_path_factory.mktemp("jobs")
    write_chain(directory, 300, segment_bytes=32768, origin="one", ids=True, token_ids="commit")
    write_chain(directory, 50, segment_bytes=16384, origin="two", start_ms=1_767_300_000_000)
    return directory


def _both(directory, keys=KEYS):
    return [verify(directory, keys, jobs=jobs).public() for jobs in (1, 3)]


def test_several_processes_say_what_one_says(log, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead_module, "_WORTH_BYTES", 1)
    used = []
    feed_run = ahead_module.Ahead.runs
    monkeypatch.setattr(
        ahead_module.Ahead, "runs", lambda self, path: used.append(feed_run(self, path)) or used[-1]
    )
    one, three = _both(log)
    assert one == three
    assert one["verdict"] == "ok"
    assert sum(run.taken.records for runs in used for run in runs.values()) >= 300
    rng = random.Random(5)
    for number in range(8):
        copy = tmp_path / str(number)
        shutil.copytree(log, copy)
        path = rng.choice(sorted(copy.rglob("*.log")))
        data = path.read_bytes()
        path.write_bytes(_damaged(rng, data))
        keys = rng.choice((KEYS, None, MacKeys({"another": SEED})))
        one, three = _both(copy, keys)
        assert one == three
        assert one["verdict"] != "ok" or path.read_bytes() == data
