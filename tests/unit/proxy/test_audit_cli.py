"""`tongguan audit` as a person and a script use it."""

from __future__ import annotations

import json

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
    assert "signed to: none" in result.stdout


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
    assert set(finding) == {"class", "origin", "seq", "file", "offset", "note"}
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


def test_since_skips_chains_that_ended_before(directory, keys):
    result = _run("verify", directory, "--keys", keys, "--since", "2027-01-01T00:00:00+08:00")
    assert result.exit_code == 0
    assert "skipped" in result.stdout


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
