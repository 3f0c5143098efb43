"""Every tampering a file allows, each by its class and seq."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from proxy.audit import canonical
from proxy.audit.chain import Chain, Hmac, chain_key
from proxy.audit.epochs import MacKeys
from proxy.audit.findings import EXIT_CODES
from proxy.audit.layout import segments
from tests.unit.proxy.audit_chains import (
    KEYS,
    SEED,
    START_MS,
    as_table,
    classes,
    config,
    verdict,
    verify,
    write_chain,
)


def _log(chain):
    (found,) = segments(chain)
    return found[1]


def _lines(chain):
    return _log(chain).read_bytes().splitlines(keepends=True)


def _rewrite(chain, lines):
    _log(chain).write_bytes(b"".join(lines))


@pytest.fixture
def chain(tmp_path):
    return write_chain(tmp_path)


def test_an_untouched_chain_is_ok(tmp_path, chain):
    result = verify(tmp_path)
    assert (result.verdict, result.exit_code, result.records) == ("ok", 0, 7)
    assert [end.end for end in result.chains] == ["closed"]
    assert result.public()["signed_to"] is None
    assert verify(chain).verdict == "ok"


def test_hmac_sm3_chains_verify_too(tmp_path):
    write_chain(tmp_path, alg="sm3")
    assert verdict(tmp_path) == ("ok", None)
    assert b'"key_id":"seed1.sm3.0"' in _lines(next(tmp_path.iterdir()))[0]


def test_without_keys_the_best_verdict_is_ok_public(tmp_path, chain):
    result = verify(tmp_path, None)
    assert (result.verdict, result.exit_code) == ("ok_public", 0)
    assert result.public()["mac_checked"] is False


def test_the_mac_is_as_the_format_says(chain):
    first, second = (line[:-1].split(b"\t") for line in _lines(chain)[:2])
    hmac = Hmac("s256", chain_key(SEED, "s256", "local/default/pod/uid/1"))
    assert first[1].decode() == hmac.hex(bytes(32) + first[0])
    assert second[1].decode() == hmac.hex(bytes.fromhex(first[1].decode()) + second[0])


def test_a_bit_flipped_anywhere_is_found_at_its_record(tmp_path, chain):
    lines = _lines(chain)
    line = lines[3]
    # One byte of each member's value, of the MAC, and of every separator.
    places = {match.end() for match in re.finditer(rb'[:\[{,"\t]', line[:-1])} - {len(line) - 1}
    for at in sorted(places):
        changed = bytearray(line)
        changed[at] ^= 1
        if changed[at] in b"\n":
            continue
        _rewrite(chain, [*lines[:3], bytes(changed), *lines[4:]])
        found = verdict(tmp_path)
        assert found[1] == 3, (at, found)
        assert found[0] in ("content_mismatch", "malformed", "half_line", "key_unknown"), at


def test_a_changed_value_is_content_mismatch(tmp_path, chain):
    lines = _lines(chain)
    lines[3] = lines[3].replace(b'"status":200', b'"status":500')
    _rewrite(chain, lines)
    assert classes(tmp_path) == [("content_mismatch", 3)]
    assert verdict(tmp_path, None)[0] == "ok_public"


def test_a_changed_mac_lists_the_broken_link_behind_it(tmp_path, chain):
    lines = _lines(chain)
    lines[3] = lines[3][:-2] + (b"0" if lines[3][-2:-1] != b"0" else b"1") + b"\n"
    _rewrite(chain, lines)
    assert classes(tmp_path) == [("content_mismatch", 3), ("link_mismatch", 4)]


def test_a_wrong_seed_is_content_mismatch_and_an_unknown_one_key_unknown(tmp_path, chain):
    assert verdict(tmp_path, MacKeys({"seed1": bytes(32)})) == ("content_mismatch", 0)
    assert classes(tmp_path, MacKeys({"other": SEED})) == [("key_unknown", 0)]


def test_a_deleted_line_is_a_gap_at_the_missing_seq(tmp_path, chain):
    lines = _lines(chain)
    _rewrite(chain, lines[:3] + lines[4:])
    assert classes(tmp_path) == [("gap", 3), ("link_mismatch", 4)]


def test_deleted_genesis_is_a_gap_at_0(tmp_path, chain):
    _rewrite(chain, _lines(chain)[1:])
    assert verdict(tmp_path) == ("gap", 0)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_deleted_tail_is_truncated(tmp_path, chain, cut):
    _rewrite(chain, _lines(chain)[:-cut])
    assert classes(tmp_path) == [("truncated", 7 - cut)]


def test_a_directory_without_a_record_is_not_ok(tmp_path, chain):
    _rewrite(chain, [])
    assert verdict(tmp_path) == ("truncated", 0)
    shutil.rmtree(chain)
    assert verdict(tmp_path) == ("truncated", 0)


def test_a_line_written_twice_is_duplicate_seq(tmp_path, chain):
    lines = _lines(chain)
    _rewrite(chain, [*lines[:4], lines[3], *lines[4:]])
    assert classes(tmp_path) == [("duplicate_seq", 3), ("link_mismatch", 3)]


def test_swapped_lines_are_found_at_the_first(tmp_path, chain):
    lines = _lines(chain)
    lines[3], lines[4] = lines[4], lines[3]
    _rewrite(chain, lines)
    assert verdict(tmp_path) == ("gap", 3)


def test_an_invented_line_is_content_mismatch_and_its_neighbours_hold(tmp_path, chain):
    lines = _lines(chain)
    forged = Chain("local/default/pod/uid/1", "seed1", "s256", bytes(32))
    line = forged.line("request", as_table(9), START_MS * 10**6, 0)
    _rewrite(chain, [*lines[:3], line, *lines[3:]])
    assert classes(tmp_path) == [("content_mismatch", 3)]


def test_two_joined_lines_are_named_so(tmp_path, chain):
    lines = _lines(chain)
    lines[3] = lines[3][:-1]
    _rewrite(chain, lines)
    assert classes(tmp_path) == [("two_records_one_line", 3)]


@pytest.mark.parametrize("keep", [1, 20, 400, -66, -65, -64, -2])
def test_a_cut_line_is_half_line(tmp_path, chain, keep):
    lines = _lines(chain)
    _rewrite(chain, [*lines[:3], lines[3][:keep] + b"\n", *lines[4:]])
    assert verdict(tmp_path) == ("half_line", 3)


def test_no_final_newline_is_half_line_with_truncated_listed(tmp_path):
    chain = write_chain(tmp_path, close=False)
    _log(chain).write_bytes(_log(chain).read_bytes()[:-1])
    assert classes(tmp_path) == [("half_line", 5), ("truncated", 6)]


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line[:-1] + b"\r\n",
        lambda line: b"\xef\xbb\xbf" + line,
        lambda line: b" " + line,
        lambda line: line[:-1] + b" \n",
        lambda line: line.replace(b"}\t", b"} \t"),
        lambda line: line.replace(b":", b": "),
        lambda line: line.replace(b"\t", b"\t\t"),
        lambda line: line[:-65] + line[-65:].upper(),
        lambda line: b"\0" * (len(line) - 1) + b"\n",
        lambda line: line.replace(b'"ok"', b'"o\0k"'),
        lambda _line: b"\n",
        lambda line: b'{"a":"' + b"x" * (1 << 20) + b'"}\t' + line[-65:],
        lambda line: line.replace(b'"kind":"request"', b'"kind":"unheard"'),
        lambda line: line.replace(b'"tenant":"t-1",', b""),
        lambda line: line.replace(b'"status":200', b'"status":200.0'),
        lambda line: line.replace(b'"status":200', b'"status":null'),
        lambda line: line.replace(b'"status":200', b'"status":200,"status":200'),
        lambda line: line.replace(b'"v":1', b'"v":"1"'),
    ],
)
def test_what_is_no_line_of_the_format_is_malformed(tmp_path, chain, change):
    lines = _lines(chain)
    lines[3] = change(lines[3])
    _rewrite(chain, lines)
    assert verdict(tmp_path) == ("malformed", 3)


def test_a_reserialised_record_is_malformed_though_it_means_the_same(tmp_path, chain):
    lines = _lines(chain)
    data, _, mac = lines[3].partition(b"\t")
    lines[3] = json.dumps(json.loads(data)).encode() + b"\t" + mac
    _rewrite(chain, lines)
    assert verdict(tmp_path) == ("malformed", 3)


def _chained(*records, origin="o"):
    """Lines as a key holder writes them: any member may be set."""
    hmac = Hmac("s256", chain_key(SEED, "s256", origin))
    prev, lines = "0" * 64, []
    for seq, (kind, members) in enumerate(records):
        record = {
            "v": 1,
            "kind": kind,
            "seq": seq,
            "origin": origin,
            "wall_ns": str(seq),
            "mono_ns": str(seq),
            "prev": prev,
            "key_id": "seed1.s256.0",
            **members,
        }
        data = canonical.encode(record)
        prev = hmac.hex(bytes.fromhex(record["prev"]) + data)
        lines.append(data + b"\t" + prev.encode() + b"\n")
    return lines


GENESIS = (
    "genesis",
    {
        "config_sha256": "",
        "image": "",
        "checkpoint_records": 1000,
        "checkpoint_s": 10,
        "heartbeat_s": 30,
        "required_signers": [],
        "clock_source": "",
        "clock_bound_ms": 1,
        "prev_size": 0,
    },
)
LOAD = {"in_flight": 0, "started_total": 0}
BEAT = ("heartbeat", LOAD)
CLOSED = (
    "closed",
    {
        **LOAD,
        "ids_sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    },
)
HASH = "a" * 64


def _place(tmp_path, lines, name="1-00000000", first=0):
    chain = tmp_path / name
    chain.mkdir(exist_ok=True)
    (chain / f"{first:020d}.log").write_bytes(b"".join(lines))
    return chain


def test_later_kinds_are_known(tmp_path):
    later = [
        ("checkpoint", {"note": "n" * 1000, **LOAD}),
        ("pruned", {"upto": 5, "last_mac": HASH, "youngest_wall": "1", "note": "", "frontier": []}),
        ("erased", {"key_ref": "t"}),
        ("decision", {"what": "hold"}),
        ("alarm", {"what": "x"}),
        ("rejected", {"second": 1, "counts": {"bad_tag": 2}}),
        ("open", {"trace_id": "t", "tenant": "t", "qos": "P1"}),
        ("lost", {"from": "1", "to": "2", "count": 3, "reason": "ENOSPC", "outcomes": {}}),
    ]
    _place(tmp_path, _chained(GENESIS, *later, CLOSED, later[0]))
    assert verdict(tmp_path) == ("ok", None)


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([GENESIS, ("heartbeat", {**LOAD, "v": 2}), CLOSED], ("version_unknown", 1)),
        ([GENESIS, ("heartbeat", {**LOAD, "prev": HASH}), CLOSED], ("link_mismatch", 1)),
        ([GENESIS, ("heartbeat", {**LOAD, "seq": 2}), CLOSED], ("gap", 1)),
        ([GENESIS, BEAT, ("heartbeat", {**LOAD, "seq": 1}), CLOSED], ("fork", 1)),
        ([GENESIS, BEAT, CLOSED, BEAT], ("malformed", 3)),
        ([BEAT, BEAT, CLOSED], ("malformed", 0)),
        ([GENESIS, GENESIS, CLOSED], ("malformed", 1)),
        ([GENESIS, ("segment_start", {"prev_file": "x"}), CLOSED], ("malformed", 1)),
        ([GENESIS, ("segment_end", {"ids_sha256": HASH}), CLOSED], ("malformed", 2)),
        ([GENESIS, (CLOSED[0], {**CLOSED[1], "ids_sha256": HASH})], ("content_mismatch", 1)),
        ([GENESIS, (BEAT[0], {**LOAD, "mono_ns": str(46 * 10**9)})], ("heartbeat_missing", 1)),
        ([GENESIS, (BEAT[0], {**LOAD, "key_id": "seed1.s256.1"})], ("content_mismatch", 1)),
        ([GENESIS, (BEAT[0], {**LOAD, "key_id": "seed1.md5.0"})], ("key_unknown", 1)),
        ([GENESIS, (BEAT[0], {**LOAD, "key_id": "seed9.s256.0"})], ("key_unknown", 1)),
        (
            [GENESIS, ("rotate", {"new_key_id": "seed1.s256.1", "new_key_mac": HASH})],
            ("content_mismatch", 1),
        ),
    ],
)
def test_what_only_a_key_holder_can_write_is_found(tmp_path, records, found):
    _place(tmp_path, _chained(*records))
    assert verdict(tmp_path) == found


def test_a_lost_record_explains_a_silence(tmp_path):
    lost = {"from": "1", "to": "2", "count": 3, "reason": "ENOSPC", "outcomes": {}}
    late = {"wall_ns": str(10**12), "mono_ns": str(10**12)}
    records = (GENESIS, ("lost", {**lost, **late}), (CLOSED[0], {**CLOSED[1], **late}))
    _place(tmp_path, _chained(*records))
    assert verdict(tmp_path) == ("ok", None)


def test_a_clock_set_back_is_information(tmp_path):
    _place(tmp_path, _chained(GENESIS, ("heartbeat", {**LOAD, "wall_ns": "9"}), CLOSED))
    result = verify(tmp_path)
    assert (result.verdict, result.exit_code) == ("ok", 0)
    assert classes(tmp_path) == [("clock_backwards", 2)]


def test_a_rotation_under_both_keys_holds(tmp_path):
    lines = _chained(GENESIS)
    prev = lines[0][-65:-1].decode()
    old = chain_key(SEED, "s256", "o")
    from proxy.audit.chain import next_key

    new = Hmac("s256", next_key(old))
    record = {
        "v": 1, "kind": "rotate", "seq": 1, "origin": "o", "wall_ns": "1", "mono_ns": "1",
        "prev": prev, "key_id": "seed1.s256.0", "new_key_id": "seed1.s256.1",
    }  # fmt: skip
    record["new_key_mac"] = new.hex(bytes.fromhex(prev) + canonical.encode(record))
    data = canonical.encode(record)
    mac = Hmac("s256", old).hex(bytes.fromhex(prev) + data)
    lines.append(data + b"\t" + mac.encode() + b"\n")
    closed = {
        "v": 1, "kind": "closed", "seq": 2, "origin": "o", "wall_ns": "2", "mono_ns": "2",
        "prev": mac, "key_id": "seed1.s256.1", **CLOSED[1],
    }  # fmt: skip
    data = canonical.encode(closed)
    lines.append(data + b"\t" + new.hex(bytes.fromhex(mac) + data).encode() + b"\n")
    _place(tmp_path, lines)
    assert verdict(tmp_path) == ("ok", None)


# Segments.


@pytest.fixture
def long_chain(tmp_path):
    return write_chain(tmp_path, 60, segment_bytes=8192)


def test_a_chain_of_many_segments_is_ok(tmp_path, long_chain):
    found = segments(long_chain)
    assert len(found) > 5
    assert all(path.stat().st_size <= 8192 for _, path in found)
    assert verdict(tmp_path) == ("ok", None)
    assert classes(tmp_path) == []


def test_a_deleted_segment_in_the_middle_is_a_gap(tmp_path, long_chain):
    first, path = segments(long_chain)[2]
    path.unlink()
    assert verdict(tmp_path) == ("gap", first)


def test_a_deleted_first_segment_is_a_gap_at_0(tmp_path, long_chain):
    segments(long_chain)[0][1].unlink()
    assert verdict(tmp_path) == ("gap", 0)


def test_deleted_last_segments_are_truncated(tmp_path, long_chain):
    *_, (first, path), (_, last) = segments(long_chain)
    path.unlink()
    last.unlink()
    assert verdict(tmp_path) == ("truncated", first)


def test_a_renamed_segment_is_malformed(tmp_path, long_chain):
    first, path = segments(long_chain)[2]
    path.rename(path.with_name(f"{first + 1:020d}.log"))
    assert verdict(tmp_path) == ("malformed", first)


def test_a_file_name_outside_the_pattern_is_malformed(tmp_path, long_chain):
    first, path = segments(long_chain)[2]
    path.rename(path.with_name("copy.log"))
    assert classes(tmp_path)[:2] == [("malformed", first), ("gap", first)]


def test_a_segment_without_its_first_or_last_record_is_a_gap(tmp_path, long_chain):
    (_, before), (first, path) = segments(long_chain)[1:3]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]))
    assert verdict(tmp_path) == ("gap", first)
    path.write_bytes(b"".join(lines))
    before.write_bytes(b"".join(before.read_bytes().splitlines(keepends=True)[:-1]))
    assert verdict(tmp_path) == ("gap", first - 1)


def test_a_pruned_record_explains_missing_first_segments(tmp_path):
    first, second = tmp_path / "1-00000000", tmp_path / "2-00000000"
    lines = _chained(
        GENESIS,
        ("segment_end", {"ids_sha256": CLOSED[1]["ids_sha256"]}),
        ("segment_start", {"prev_file": f"{0:020d}.log"}),
        CLOSED,
    )
    _place(tmp_path, lines[2:], first.name, 2)
    assert verdict(tmp_path) == ("gap", 0)
    pruned = {"upto": 2, "last_mac": HASH, "youngest_wall": "1", "note": "", "frontier": []}
    later = (GENESIS, ("pruned", {**pruned, "of_origin": "o"}), CLOSED)
    _place(tmp_path, _chained(*later, origin="p"), second.name)
    assert verdict(tmp_path) == ("ok", None)


# The whole directory.


def test_a_deleted_chain_is_missed_by_its_successor(tmp_path):
    old = write_chain(tmp_path)
    write_chain(tmp_path, origin="local/default/pod/uid/2", start_ms=START_MS + 60_000)
    assert verdict(tmp_path) == ("ok", None)
    shutil.rmtree(old)
    result = verify(tmp_path)
    assert (result.verdict, result.first.origin) == ("truncated", "local/default/pod/uid/1")


def test_a_copied_chain_is_duplicate_and_a_divergent_one_a_fork(tmp_path, chain):
    copy = tmp_path / "9-00000000"
    shutil.copytree(chain, copy)
    assert verdict(tmp_path) == ("duplicate_seq", 0)
    shutil.rmtree(copy)
    other = write_chain(tmp_path, 9, start_ms=START_MS + 1)
    assert other != chain
    assert verdict(tmp_path) == ("fork", 0)


def test_a_missing_directory_is_io_error(tmp_path):
    result = verify(tmp_path / "nothing")
    assert (result.verdict, result.exit_code) == ("io_error", 3)


def test_since_skips_what_ended_before(tmp_path):
    old = write_chain(tmp_path, 60, segment_bytes=8192)
    write_chain(tmp_path, origin="2", start_ms=START_MS + 3_600_000)
    third, path = segments(old)[3]
    segments(old)[0][1].write_bytes(b"gone wrong\n")
    assert verdict(tmp_path)[0] == "malformed"
    after = verify(tmp_path, since_ns=(START_MS + 3_000_000) * 10**6)
    assert (after.verdict, [c.end for c in after.chains]) == ("ok", ["closed", "closed"])
    wall_ns = int(json.loads(path.read_bytes().split(b"\t")[0])["wall_ns"])
    assert verify(tmp_path, since_ns=wall_ns).verdict == "ok"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    result = verify(tmp_path, since_ns=wall_ns)
    assert (result.verdict, result.first.seq) == ("gap", third + 2)


def test_findings_are_bounded_and_the_rest_counted(tmp_path, chain):
    lines = _lines(chain)
    _rewrite(chain, [*lines, *([b"junk\n"] * 1500)])
    result = verify(tmp_path)
    assert result.verdict == "malformed"
    assert (len(result.findings), result.omitted) == (1000, 500)


def test_truncated_comes_behind_any_other_class_of_any_chain(tmp_path):
    first = write_chain(tmp_path, close=False)
    second = write_chain(tmp_path, origin="2", start_ms=START_MS + 60_000)
    lines = _lines(second)
    assert b'"recovered"' in lines[1]
    _log(first).write_bytes(b"".join(_log(first).read_bytes().splitlines(keepends=True)[:-1]))
    _rewrite(second, [*lines[:3], lines[3].replace(b'"ok"', b'"shed"'), *lines[4:]])
    assert classes(tmp_path) == [("content_mismatch", 3), ("truncated", 5)]


def test_every_class_has_an_exit_code_of_its_own():
    good = {"ok", "ok_public", "clock_backwards"}
    codes = [code for name, code in EXIT_CODES.items() if name not in good | {"io_error"}]
    assert sorted(codes) == list(range(10, 10 + len(codes)))
    assert {EXIT_CODES[name] for name in good} == {0}
    assert EXIT_CODES["io_error"] == 3


def test_keys_are_derived_as_the_format_says():
    import hashlib
    import hmac as standard

    prk = standard.new(bytes(32), SEED, hashlib.sha256).digest()
    info = b"tongguan audit v1\0s256\0o"
    assert chain_key(SEED, "s256", "o") == standard.new(prk, info + b"\1", "sha256").digest()
    assert KEYS.hmac("seed1.s256.0", "o") is not None
    for bad in (
        "seed1.s256.00",
        "seed1.s256.-1",
        "seed1.s256",
        ".s256.0",
        "seed1.s256.99999999",
    ):
        assert KEYS.hmac(bad, "o") is None
    assert config(None).seed not in repr(config(None)).encode()
