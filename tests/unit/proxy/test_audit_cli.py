"""`tongguan audit` as a person and a script use it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from proxy.audit.cli import audit
from proxy.audit.layout import segments
from tests.unit.proxy.audit_chains import SEED, START_MS, write_chain

PRIVATE = b"\x07" * 32
PUBLIC = X25519PrivateKey.from_private_bytes(PRIVATE).public_key().public_bytes_raw()
TRACE = f"{START_MS}-00001-0002"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "auditor.json"
    document = {
        "format": "tongguan-keys/1",
        "role": "auditor",
        "chain_seeds": [{"id": "seed1", "seed": SEED.hex()}],
        "auditor_public": PUBLIC.hex(),
        "auditor_private": PRIVATE.hex(),
    }
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "audit"
    write_chain(path, 4, ids=True, token_ids="sealed", auditor_public=PUBLIC)
    return path


def _run(*arguments):
    return CliRunner().invoke(audit, [str(argument) for argument in arguments])


def test_verify_says_ok_and_where_each_chain_ended(directory, keys):
    result = _run("verify", directory, "--keys", keys)
    assert result.exit_code == 0
    assert result.stdout.startswith("audit ok\n")
    assert "6 records, closed" in result.stdout
    assert "  1 chain, 6 records; MACs checked\n" in result.stdout
    assert "6 records, closed, not signed\n" in result.stdout
    assert json.loads(_run("verify", directory, "--json").stdout)["signed_to"] is None


def test_verify_without_keys_is_ok_public_and_says_what_to_give(directory):
    result = _run("verify", directory)
    assert (result.exit_code, result.stdout.split("\n")[0]) == (0, "audit ok_public")
    assert "--keys" in result.stdout


def test_a_flipped_byte_is_named_by_class_and_seq(directory, keys):
    (chain,) = directory.iterdir()
    log = segments(chain)[0][1]
    log.write_bytes(log.read_bytes().replace(b'"total":1001', b'"total":1009'))
    result = _run("verify", directory, "--keys", keys, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 13
    assert (found["verdict"], found["seq"]) == ("content_mismatch", 2)
    assert found["origin"] == "local/default/pod/uid/1"
    (finding,) = found["findings"]
    named = {"class", "origin", "seq", "last_seq", "file", "offset", "note"}
    assert set(finding) == named | {"expected", "found", "proved_to"}
    raw = log.read_bytes()[finding["offset"] :]
    assert b'"seq":2' in raw.split(b"\n")[0]
    text = _run("verify", directory, "--keys", keys).stdout
    assert text.startswith("audit content_mismatch\n  first at seq 2 of local/default/pod/uid/1\n")


def test_show_prints_the_record_and_opens_ids_for_the_auditor(directory, keys):
    plain = _run("show", directory, "--trace-id", TRACE)
    assert plain.exit_code == 0
    assert "--auditor-key" in plain.stdout
    opened = _run("show", directory, "--trace-id", TRACE, "--auditor-key", keys)
    assert "token ids: 2 7 2" in opened.stdout
    assert "MAC ok" in opened.stdout
    shown = json.loads(
        _run("show", directory, "--trace-id", TRACE, "--auditor-key", keys, "--json").stdout
    )
    assert (shown["ids"], shown["mac"], shown["record"]["seq"]) == ([2, 7, 2], "ok", 3)


def test_show_fails_where_the_record_was_changed(directory, keys):
    (chain,) = directory.iterdir()
    log = segments(chain)[0][1]
    log.write_bytes(log.read_bytes().replace(b'"total":1002', b'"total":1009'))
    result = _run("show", directory, "--trace-id", TRACE, "--auditor-key", keys)
    assert result.exit_code == 13
    assert "MAC mismatch" in result.stdout


@pytest.mark.parametrize("trace", ["nothing", '"', "\x00", "x" * 10_000, ""])
def test_show_says_so_when_there_is_no_such_record(directory, trace):
    result = _run("show", directory, "--trace-id", trace)
    assert result.exit_code == 1
    assert "no request with trace id" in result.stderr


def test_a_directory_that_is_not_there_is_exit_3(tmp_path):
    assert _run("verify", tmp_path / "none").exit_code == 3
    assert _run("show", tmp_path / "none", "--trace-id", "x").exit_code == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("verify", "DIR", "--since", "yesterday"),
        ("verify", "DIR", "--since", "2026-01-01T00:00:00"),
        ("verify", "DIR", "--keys", "none.json"),
        ("verify", "DIR", "--unheard"),
        ("show", "DIR"),
        ("show", "DIR", "--trace-id", "x", "--auditor-key", "none.json"),
        ("unheard",),
    ],
)
def test_wrong_use_is_exit_2(directory, arguments):
    given = [str(directory) if argument == "DIR" else argument for argument in arguments]
    result = _run(*given)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_key_file_that_others_can_read_is_refused(directory, keys):
    keys.chmod(0o644)
    result = _run("verify", directory, "--keys", keys)
    assert result.exit_code == 2
    assert "chmod 600" in result.stderr


def test_a_key_file_without_the_private_key_cannot_open_ids(directory, keys):
    document = json.loads(keys.read_text())
    document["role"] = "sidecar"
    del document["auditor_private"]
    keys.write_text(json.dumps(document))
    result = _run("show", directory, "--trace-id", TRACE, "--auditor-key", keys)
    assert result.exit_code == 2
    assert "auditor.json" in result.stderr


def test_since_still_checks_the_last_segment_of_every_chain(directory, keys):
    later = "2027-01-01T00:00:00+08:00"
    assert _run("verify", directory, "--keys", keys, "--since", later).exit_code == 0
    (chain,) = directory.iterdir()
    log = segments(chain)[0][1]
    # A changed record, and a last line that claims to be ancient.
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"v":1', b'"v":2', 1)
    lines[-1] = re.sub(rb'"wall_ns":"[0-9]+"', b'"wall_ns":"1"', lines[-1])
    log.write_bytes(b"".join(lines))
    assert _run("verify", directory, "--keys", keys, "--since", later).exit_code != 0


def test_a_segment_that_cannot_be_read_is_io_error(directory, keys):
    (chain,) = directory.iterdir()
    log = segments(chain)[0][1]
    log.unlink()
    log.mkdir()
    assert _run("verify", directory, "--keys", keys).exit_code == 3


@pytest.mark.parametrize("command", [(), ("verify",), ("show",)])
def test_help_teaches(command):
    result = _run(*command, "--help")
    assert result.exit_code == 0
    assert "audit" in result.stdout
    assert not command or "Exit codes" in result.stdout


# --- hints: what a person got wrong


def _with(keys, **changes):
    """Write a key file beside `keys` with other members; None takes one away."""
    document = json.loads(keys.read_text()) | changes
    path = keys.with_name("other.json")
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
    path.chmod(0o600)
    return path


def test_a_key_file_without_chain_seeds_is_wrong_use(directory, keys):
    client = _with(keys, role="client", chain_seeds=None, auditor_public=None, auditor_private=None)
    result = _run("verify", directory, "--keys", client)
    assert result.exit_code == 2
    assert "chain seeds; they are in auditor.json" in " ".join(result.stderr.split())


def test_seeds_of_other_chains_are_said_to_check_nothing(directory, keys):
    strange = _with(keys, chain_seeds=[{"id": "other", "seed": "11" * 32}])
    (chain,) = directory.iterdir()
    result = _run("verify", directory, "--keys", strange)
    assert result.exit_code == 16
    assert f"first at seq 0 of chain {chain.name}\n" in result.stdout
    assert f"MACs not checked: no record here is of a seed in {strange}" in result.stdout
    found = json.loads(_run("verify", directory, "--keys", strange, "--json").stdout)
    assert (found["verdict"], found["mac_checked"]) == ("key_unknown", False)


def test_a_seed_that_fits_some_chains_is_said_to_check_those(directory, keys):
    write_chain(directory, 2, seed_id="seed2", origin="local/default/pod/uid/2")
    result = _run("verify", directory, "--keys", keys)
    assert result.exit_code == 16
    assert "2 chains, 10 records; MACs checked, but for records whose seed is not" in result.stdout


@pytest.mark.parametrize("below", ["audit", "elsewhere"])
def test_the_directory_above_is_told_where_the_chains_are(directory, keys, tmp_path, below):
    above = tmp_path / "state"
    above.mkdir()
    (above / "a file").write_text("")
    directory.rename(above / below)
    result = _run("verify", above, "--keys", keys)
    assert result.exit_code == 10
    assert result.stdout == (
        f"audit truncated\n  truncated: no chain in {above}; did you mean {above / below}?\n"
    )


def test_an_empty_directory_is_said_to_hold_no_chain(tmp_path):
    result = _run("verify", tmp_path)
    assert result.exit_code == 10
    assert result.stdout == f"audit truncated\n  truncated: no chain in {tmp_path}\n"


def test_a_directory_that_is_not_there_is_named_once(tmp_path):
    path = tmp_path / "none"
    result = _run("verify", path)
    assert result.stdout == f"audit io_error\n  io_error: {path}: No such file or directory\n"


def test_a_segment_that_cannot_be_read_is_named_once(directory, keys):
    (chain,) = directory.iterdir()
    log = segments(chain)[0][1]
    log.unlink()
    log.mkdir()
    said = _run("verify", directory, "--keys", keys).stdout
    assert said.count(log.name) == 1
    assert f"({chain.name}/{log.name} byte 0)" in said


def test_a_missing_chain_is_named(directory, keys):
    (first,) = directory.iterdir()
    second = write_chain(
        directory, 2, origin="local/default/pod/uid/2", start_ms=START_MS + 3_600_000
    )
    assert _run("verify", directory, "--keys", keys).exit_code == 0
    shutil.rmtree(first)
    result = _run("verify", directory, "--keys", keys)
    assert result.exit_code == 10
    line = f"the chain before {second.name} is missing (local/default/pod/uid/1)"
    assert line in result.stdout


def test_a_missing_chain_that_was_declared_is_named(tmp_path, keys):
    directory = tmp_path / "audit"
    first = write_chain(directory, 2, close=False)
    write_chain(directory, 2, origin="local/default/pod/uid/2", start_ms=START_MS + 3_600_000)
    shutil.rmtree(first)
    result = _run("verify", directory, "--keys", keys)
    assert result.exit_code == 10
    assert f"chain {first.name} is missing (local/default/pod/uid/1)" in result.stdout


def test_the_key_of_another_auditor_is_wrong_use(directory, keys):
    other = _with(keys, auditor_private="08" * 32)
    result = _run("show", directory, "--trace-id", TRACE, "--auditor-key", other)
    assert result.exit_code == 2
    assert "not the auditor's key of this chain" in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_without_ids_another_auditor_is_told_by_the_seeds(tmp_path, keys):
    directory = tmp_path / "audit"
    write_chain(directory, 4)
    other = _with(keys, chain_seeds=[{"id": "other", "seed": "11" * 32}])
    result = _run("show", directory, "--trace-id", TRACE, "--auditor-key", other)
    assert result.exit_code == 2
    assert "not the auditor's key of this chain" in " ".join(result.stderr.split())


def test_the_right_key_opens_ids_though_the_seed_is_not_there(directory, keys):
    other = _with(keys, chain_seeds=None)
    result = _run("show", directory, "--trace-id", TRACE, "--auditor-key", other)
    assert result.exit_code == 0
    assert "MAC not checked" in result.stdout
    assert "token ids: 2 7 2" in result.stdout


def test_an_sm2_key_where_there_is_no_sm2_is_said_at_once(directory, tmp_path, monkeypatch):
    from proxy.audit.note import SM2, PublicKey
    from proxy.sm4 import sm2

    public = bytes.fromhex(
        "09f9df311e5421a150dd7d161e4bc5c672179fad1833fc076bb08ff356f35020"
        "ccea490ce26775a52dc6ea718cc1aa600aed05fbf35e084a6632f6072da9ad13"
    )
    path = tmp_path / "public.txt"
    path.write_text(PublicKey("log", SM2, public).line())
    monkeypatch.setattr(sm2, "available", lambda: False)
    result = _run("verify", directory, "--keys", path)
    assert result.exit_code == 2
    assert "SM2 needs OpenSSL 3" in " ".join(result.stderr.split())
