"""Proofs of single records, and bundles that are checked without any of our packages."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.audit.bundle import verify as bundle_verify
from proxy.audit.cli import audit
from proxy.audit.layout import segments
from proxy.audit.note import ED25519
from proxy.audit.signing import Cosigner, NoteSigner
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy.audit_chains import SEED, START_MS, config, crash, request

SIGNER = NoteSigner("log", ED25519, b"\1" * 32)
OTHER = NoteSigner("other", ED25519, b"\2" * 32)
WITNESS = Cosigner("witness", b"\3" * 32)
HOUR_MS = 3_600_000
ORIGIN = "local/default/pod/uid/"


async def _write(directory, number, *, close=True, witnesses=()):
    clock = ManualClock(START_MS + number * HOUR_MS)
    values = config(
        directory,
        origin=f"{ORIGIN}{number}",
        signers=(SIGNER,),
        checkpoint_records=20,
        segment_bytes=16384,
        witnesses=witnesses,
        token_ids="commit",
    )
    writer = AuditWriter.start(values, clock, asyncio.get_running_loop())
    for record in range(120):
        clock.advance_ms(1000)
        tenant = "blue" if record % 3 else "red"
        ticket = writer.append_request(request(record, tenant=tenant), [record])
        if record % 5 == 0:
            await writer.durable(ticket)
    await (writer.close() if close else crash(writer))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundle") / "audit"
    for number in range(3):
        asyncio.run(_write(directory, number, close=number != 1))
    return directory


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "public.txt"
    path.write_text(SIGNER.key.line() + "\n")
    return path


def run(*arguments):
    return CliRunner().invoke(audit, list(map(str, arguments)))


# One record.


def proof_of(directory, origin, seq):
    result = run("prove", directory, origin, seq)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("seq", [0, 1, 17, 64, 99])
def test_a_proof_of_any_record_holds_with_public_keys_alone(pristine, keys, tmp_path, seq):
    proof = proof_of(pristine, f"{ORIGIN}0", seq)
    assert set(proof) == {"line_b64", "index", "size", "path", "note"}
    file = tmp_path / "proof.json"
    file.write_text(json.dumps(proof))
    result = run("check", file, "--keys", keys)
    assert result.exit_code == 0, result.output
    assert f"record {seq} of {ORIGIN}0 is in the log" in result.stdout
    found = json.loads(run("check", file, "--keys", keys, "--json").stdout)
    assert found["record"]["seq"] == seq
    assert found["signed_by"] == ["log"]


def changed(proof, **members):
    return {**proof, **members}


def _line(proof, old, new):
    line = base64.b64decode(proof["line_b64"]).replace(old, new, 1)
    return changed(proof, line_b64=base64.b64encode(line).decode())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda p: _line(p, b'"status":200', b'"status":500'), 21),
        (lambda p: _line(p, b'"seq":17', b'"seq":18'), 21),
        (lambda p: _line(p, b'"v":1', b'"v": 1'), 17),
        (lambda p: changed(p, index=18), 21),
        (lambda p: changed(p, size=p["size"] - 1), 21),
        (lambda p: changed(p, path=p["path"][1:]), 21),
        (lambda p: changed(p, path=[*p["path"], "00" * 32]), 21),
        (lambda p: changed(p, path=p["path"][::-1]), 21),
        (lambda p: changed(p, path=["00"]), 17),
        (lambda p: changed(p, path=["00" * 32] * 500), 17),
        (lambda p: changed(p, note=p["note"].replace(ORIGIN, "x/")), 21),
        (lambda p: changed(p, note=p["note"][:-5] + "AAA=\n"), 21),
        (lambda p: changed(p, note=""), 21),
        (lambda p: changed(p, index="17"), 17),
        (lambda p: changed(p, line_b64="!"), 17),
        (lambda p: {"note": p["note"]}, 17),
        (lambda p: [p], 17),
    ],
)
def test_a_changed_proof_is_refused(pristine, keys, tmp_path, change, code):
    file = tmp_path / "proof.json"
    file.write_text(json.dumps(change(proof_of(pristine, f"{ORIGIN}0", 17))))
    result = run("check", file, "--keys", keys)
    assert result.exit_code == code, result.output


def test_a_proof_needs_a_key_that_signed(pristine, tmp_path):
    file, other = tmp_path / "proof.json", tmp_path / "other.txt"
    file.write_text(json.dumps(proof_of(pristine, f"{ORIGIN}0", 17)))
    other.write_text(OTHER.key.line())
    assert run("check", file, "--keys", other).exit_code == 16
    assert run("check", file).exit_code == 2
    other.write_text("no key")
    assert run("check", file, "--keys", other).exit_code == 2


@pytest.mark.parametrize(
    ("origin", "seq", "code"),
    [(f"{ORIGIN}0", 9999, 10), ("nobody", 1, 10), (f"{ORIGIN}1", 121, 15)],
)
def test_what_has_no_proof_is_said(pristine, origin, seq, code):
    assert run("prove", pristine, origin, seq).exit_code == code


def test_no_proof_is_made_of_a_changed_log(pristine, tmp_path):
    directory = Path(shutil.copytree(pristine, tmp_path / "audit"))
    _, path = segments(min(directory.iterdir()))[1]
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":201', 1))
    assert run("prove", directory, f"{ORIGIN}0", 17).exit_code == 21


def test_a_proof_prefers_what_a_witness_cosigned(tmp_path, keys):
    from tests.unit.proxy.test_audit_checkpoints import Obliging

    asyncio.run(_write(tmp_path / "w", 0, witnesses=(Obliging(),)))
    file = tmp_path / "proof.json"
    file.write_text(json.dumps(proof_of(tmp_path / "w", f"{ORIGIN}0", 30)))
    from tests.unit.proxy.test_audit_checkpoints import WITNESS as ITS_KEY

    keys.write_text(f"{SIGNER.key.line()}\n{ITS_KEY.key.line()}\n")
    found = json.loads(run("check", file, "--keys", keys, "--json").stdout)
    assert found["cosigned_by"] == [["witness", 1]]


# Bundles.

ALL = ("2000-01-01T00:00:00Z", "2100-01-01T00:00:00Z")


def exported(directory, keys, tmp_path, begin=ALL[0], end=ALL[1], *more):
    bundle = tmp_path / "bundle.tar"
    arguments = ("--from", begin, "--to", end, "-o", bundle, "--keys", keys, *more)
    result = run("export", directory, *arguments)
    assert result.exit_code == 0, result.output
    there = tmp_path / "there"
    with tarfile.open(bundle) as tar:
        tar.extractall(there, filter="data")
    return there


def verified(there, *arguments):
    """Run the bundle's own verifier with nothing of ours within its reach."""
    command = [sys.executable, "-I", "-S", str(there / "verify.py"), str(there), *arguments]
    done = subprocess.run(command, capture_output=True, env={}, cwd="/", check=False)
    assert done.stderr == b"", done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def seeds(tmp_path):
    path = tmp_path / "auditor.json"
    rows = [{"id": "seed1", "seed": SEED.hex()}]
    path.write_text(json.dumps({"chain_seeds": rows, "verify_keys": [SIGNER.key.line()]}))
    return path


def test_a_whole_bundle_verifies_by_itself(pristine, keys, tmp_path):
    there = exported(pristine, keys, tmp_path)
    code, result = verified(there)
    assert (code, result["verdict"], result["keys"]) == (0, "ok_public", "its own")
    assert len(result["chains"]) == 3
    code, result = verified(there, "--keys", str(seeds(tmp_path)))
    assert (code, result["verdict"], result["keys"]) == (0, "ok", "given")
    assert "verify.py" in (there / "README.txt").read_text()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("bundle.json", '"chains"', '"chains": 0, "c"'),
        ("bundle.json", '"frontier": []', '"frontier": [7]'),
        ("bundle.json", '"first": 0', '"first": "0"'),
        ("bundle.json", '"from_ns": ', '"from_ns": ' + "9" * 5_000),
        ("bundle.json", '"keys": [', '"keys": [true, '),
        ("bundle.json", '"keys": [', '"keys": ["a+b+c", '),
        ("bundle.json", "{", "{" + "[" * 50_000),
    ],
)
def test_a_bundle_whose_form_is_damaged_has_a_verdict_too(pristine, keys, tmp_path, name, old, new):
    there = exported(pristine, keys, tmp_path)
    text = (there / name).read_text()
    assert old in text
    (there / name).write_text(text.replace(old, new, 1))
    code, result = verified(there)
    assert (code, result["verdict"]) == (17, "malformed")


@pytest.mark.parametrize("note", ["true", '"a"', "[" * 5_000, '{"a": 1}'])
def test_a_proof_of_another_form_does_not_hold(pristine, keys, tmp_path, note):
    there = exported(pristine, keys, tmp_path, ALL[0], moment(0.5), "--tenant", "red")
    proofs = there / "proofs.jsonl"
    first, *others = proofs.read_text().splitlines()
    proof = json.loads(first) | {"note": 0}
    first = json.dumps(proof).replace('"note": 0', f'"note": {note}')
    proofs.write_text("\n".join([first, *others]))
    assert verified(there)[1]["verdict"] == "checkpoint_mismatch"


def moment(hours):
    """The time of an hour's chain: it ran for two minutes."""
    from datetime import UTC, datetime

    whole, part = divmod(hours, 1)
    ms = START_MS + whole * HOUR_MS + part * 120_000
    return datetime.fromtimestamp(ms / 1000, tz=UTC).isoformat()


def test_a_part_of_a_chain_begins_at_its_frontier(pristine, keys, tmp_path):
    there = exported(pristine, keys, tmp_path, moment(0.4), moment(0.5))
    manifest = json.loads((there / "bundle.json").read_text())
    ((_, part),) = manifest["chains"].items()
    assert part["first"] > 0
    assert part["continues"]
    code, result = verified(there)
    assert (code, result["verdict"]) == (0, "ok_public"), result
    assert result["chains"][0]["records"] < 123
    assert verified(there, "--keys", str(seeds(tmp_path)))[1]["verdict"] == "ok"


def test_the_chain_before_the_time_shows_that_nothing_ran_between(pristine, keys, tmp_path):
    there = exported(pristine, keys, tmp_path, moment(1.9), moment(2.1))
    code, result = verified(there)
    assert (code, len(result["chains"])) == (0, 2), result
    shutil.rmtree(there / "audit" / result["chains"][0]["dir"])
    assert verified(there)[1]["verdict"] == "truncated"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("segment", {"gap", "truncated"}),
        ("chain", {"truncated"}),
        ("byte", {"checkpoint_mismatch"}),
        ("frontier", {"checkpoint_mismatch"}),
        ("key", {"key_unknown", "checkpoint_mismatch"}),
    ],
)
def test_a_bundle_that_was_changed_is_refused(pristine, keys, tmp_path, what, expected):
    there = exported(pristine, keys, tmp_path, moment(0.4), moment(2.1))
    chain = min((there / "audit").iterdir())
    manifest = json.loads((there / "bundle.json").read_text())
    if what == "segment":
        segments(chain)[1][1].unlink()
    elif what == "chain":
        shutil.rmtree(sorted((there / "audit").iterdir())[1])
    elif what == "byte":
        _, path = segments(chain)[1]
        path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":201', 1))
    elif what == "frontier":
        manifest["chains"][chain.name]["frontier"][0] = "00" * 32
    else:
        manifest["keys"] = [OTHER.key.line()]
    (there / "bundle.json").write_text(json.dumps(manifest))
    code, result = verified(there)
    assert code != 0
    assert result["verdict"] in expected, result


def test_one_tenants_records_go_without_the_others(pristine, keys, tmp_path):
    there = exported(pristine, keys, tmp_path, moment(0), moment(0.9), "--tenant", "red")
    assert not (there / "audit").exists()
    rows = (there / "proofs.jsonl").read_text().splitlines()
    records = [
        json.loads(base64.b64decode(json.loads(r)["line_b64"]).split(b"\t")[0]) for r in rows
    ]
    assert len(records) == 36
    assert {record["tenant"] for record in records} == {"red"}
    code, result = verified(there)
    assert (code, result["verdict"], result["proofs"]) == (0, "ok_public", 36)
    rows[3] = json.dumps(_line(json.loads(rows[3]), b'"status":200', b'"status":500'))
    (there / "proofs.jsonl").write_text("\n".join(rows))
    code, result = verified(there)
    assert (code, result["verdict"], result["seq"]) == (21, "checkpoint_mismatch", 4)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--from", "1999-01-01T00:00:00Z", "--to", "1999-02-01T00:00:00Z"), 1),
        (("--from", "yesterday", "--to", "2100-01-01T00:00:00Z"), 2),
        (("--from", "2000-01-01T00:00:00Z"), 2),
        (("--from", ALL[0], "--to", ALL[1], "--tenant", "nobody"), 1),
        (("--from", ALL[0], "--to", ALL[1], "--tenant", "blue"), 15),
    ],
)
def test_what_cannot_be_exported_is_said(pristine, keys, tmp_path, arguments, code):
    bundle = tmp_path / "bundle.tar"
    result = run("export", pristine, "-o", bundle, "--keys", keys, *arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output


def test_nothing_is_overwritten(pristine, keys, tmp_path):
    (tmp_path / "bundle.tar").write_text("mine")
    arguments = ("--from", ALL[0], "--to", ALL[1], "-o", tmp_path / "bundle.tar", "--keys", keys)
    assert run("export", pristine, *arguments).exit_code == 3
    assert (tmp_path / "bundle.tar").read_text() == "mine"


def test_the_verifier_can_be_read_in_one_sitting():
    source = Path(bundle_verify.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    assert max(map(len, source.splitlines())) <= 100
    imported = {line.split()[1].partition(".")[0].strip(",") for line in source.splitlines()
                if line.startswith(("import ", "from "))}  # fmt: skip
    assert imported <= {"__future__", "base64", "functools", "pathlib", "typing"}


def test_the_verifiers_ed25519_is_the_librarys(pristine):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for number in range(8):
        private = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        public, message = private.public_key().public_bytes_raw(), bytes([number]) * number
        signature = private.sign(message)
        assert bundle_verify.ed25519_holds(public, signature, message)
        for at in (0, 31, 32, 63):
            broken = bytearray(signature)
            broken[at] ^= 1
            assert not bundle_verify.ed25519_holds(public, bytes(broken), message)
        assert not bundle_verify.ed25519_holds(public, signature, message + b".")
        assert not bundle_verify.ed25519_holds(public, signature[:-1], message)
        # RFC 8032, 5.1.7: s must be below the order, or a signature has a second spelling.
        s = int.from_bytes(signature[32:], "little") + bundle_verify.L
        second = signature[:32] + s.to_bytes(32, "little")
        assert not bundle_verify.ed25519_holds(public, second, message)
