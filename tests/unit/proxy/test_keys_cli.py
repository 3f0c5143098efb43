"""`tongguan keys`: revoke, rotate at once, export-public, check, wrap."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from proxy.keys.cli import keys
from proxy.keys.file import read
from tests.unit.proxy.key_sources import TOKEN, key, kv2, put, sidecar
from tests.unit.proxy.softhsm import needs_softhsm, token  # noqa: F401 - a fixture


def run(*arguments, **environ):
    done = CliRunner().invoke(keys, [str(part) for part in arguments], env=environ)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.output


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "keys"
    assert run("new", "--dir", made, "--audience", "a/b/c")[0] == 0
    return made


def only_kid(folder):
    (found,) = read(folder / "sidecar.json").envelope_keys
    return found.kid.hex()


# --- revoke


def test_a_revoked_kid_leaves_both_files_and_is_named(folder):
    kid = only_kid(folder)
    assert run("rotate", "--dir", folder, "--now")[0] == 0
    code, output = run("revoke", "--dir", folder, kid)
    assert (code, f"kid {kid} is revoked" in output) == (0, True)
    assert "no live key is left" not in output
    receiver, client = read(folder / "sidecar.json"), read(folder / "client.json")
    assert receiver.revoked == (bytes.fromhex(kid),)
    assert client.revoked == ()
    fresh = receiver.envelope_keys[0].kid
    assert fresh.hex() != kid
    assert [found.kid for found in (*receiver.envelope_keys, *client.envelope_keys)] == [fresh] * 2
    assert (folder / "sidecar.json").stat().st_mode & 0o777 == 0o600
    code, output = run("show", folder / "sidecar.json")
    assert f"kid             {kid}  revoked" in output


def test_rotate_now_begins_at_once_and_is_sealed_with_at_once(folder):
    code, output = run("rotate", "--dir", folder, "--now")
    assert code == 0
    old, fresh = read(folder / "client.json").envelope_keys
    assert fresh.not_before_ms > old.not_before_ms
    assert f"kid {fresh.kid.hex()} begins " in output


def test_the_last_key_may_be_revoked_and_that_is_said(folder):
    code, output = run("revoke", "--dir", folder, only_kid(folder))
    assert (code, "no live key is left" in output) == (0, True)
    assert read(folder / "sidecar.json").envelope_keys == ()


def test_a_kid_that_is_revoked_twice_is_not_there(folder):
    kid = only_kid(folder)
    assert run("revoke", "--dir", folder, kid)[0] == 0
    before = (folder / "sidecar.json").read_bytes()
    code, output = run("revoke", "--dir", folder, kid)
    assert (code, f"no key {kid}" in output) == (2, True)
    assert (folder / "sidecar.json").read_bytes() == before


@pytest.mark.parametrize("kid", ["", "zz" * 8, "00" * 7, "00" * 9, " " + "00" * 8, "../sidecar"])
def test_what_is_no_kid_is_refused(folder, kid):
    code, output = run("revoke", "--dir", folder, kid)
    assert (code, "expected a kid" in output) == (2, True)


def test_revoking_without_the_client_s_file_is_for_whoever_holds_the_receiver_s(folder):
    kid = only_kid(folder)
    (folder / "client.json").unlink()
    assert run("revoke", "--dir", folder, kid)[0] == 0
    assert not (folder / "client.json").exists()


def test_a_file_that_is_missing_is_an_io_error(tmp_path):
    assert run("revoke", "--dir", tmp_path, "00" * 8)[0] == 3


# --- export-public


@pytest.mark.parametrize("name", ["export-public", "public"])
def test_public_keys_have_their_name_and_the_one_of_before(folder, name):
    code, output = run(name, folder / "auditor.json")
    assert code == 0
    assert output.splitlines() == list(read(folder / "auditor.json").verify_keys)


# --- check


def test_a_good_file_is_ok_and_shows_no_secret(folder):
    code, output = run("check", folder / "sidecar.json")
    assert code == 0
    assert output.endswith("ok\n")
    assert "envelope keys   1 live, 0 not yet, 0 expired, 0 revoked" in output
    contents = read(folder / "sidecar.json")
    secrets = [contents.envelope_keys[0].root, contents.chain_seeds[0][1]]
    assert not [s for s in (*secrets, *contents.prompt_keys.values()) if s.hex() in output]


def test_the_same_as_json(folder):
    code, output = run("check", folder / "sidecar.json", "--json")
    found = json.loads(output)
    assert code == 0
    assert found["provider"] == "file"
    assert found["problems"] == found["notes"] == []
    assert found["prompt_keys_for"] == ["default"]
    assert [(row["kid"], row["state"]) for row in found["keys"]] == [(only_kid(folder), "live")]


def test_a_directory_is_checked_as_one(tmp_path):
    now_ms = 2**52
    put(tmp_path / "a.json", sidecar(key(1, not_before_ms=1, not_after_ms=now_ms)))
    put(tmp_path / "b.json", sidecar(key(2, not_before_ms=1, not_after_ms=2)))
    code, output = run("check", tmp_path, "--json")
    found = json.loads(output)
    assert code == 0
    assert found["provider"] == "directory"
    assert found["counts"] == {"live": 1, "not yet": 0, "expired": 1, "revoked": 0}
    assert len(found["notes"]) == 4


def test_what_makes_a_sidecar_useless_is_a_problem(tmp_path):
    put(tmp_path / "a.json", sidecar(key(2, not_before_ms=1, not_after_ms=2)))
    code, output = run("check", tmp_path / "a.json")
    assert code == 1
    assert "problem: no envelope key is live" in output
    put(tmp_path / "a.json", sidecar(key(1, audience="one"), key(2, audience="two")))
    code, output = run("check", tmp_path / "a.json")
    assert (code, "one receiver has one audience, these keys name: one, two" in output) == (1, True)


def test_a_key_that_ends_with_nothing_to_follow_is_a_problem(folder):
    assert run("new", "--dir", folder, "--days", "1", "--force")[0] == 0
    environ = {"TONGGUAN_KEYS_FILE": str(folder / "sidecar.json")}
    assert run("check", **environ)[0] == 0
    contents = read(folder / "sidecar.json")
    (found,) = contents.envelope_keys
    soon = key(5, not_before_ms=1, not_after_ms=found.not_after_ms - 23 * 3_600_000)
    put(folder / "sidecar.json", sidecar(soon))
    code, output = run("check", **environ)
    assert (code, f"kid {soon.kid.hex()} of client-5 ends in" in output) == (1, True)
    assert "nothing follows it" in output
    assert run("check", **environ, TONGGUAN_KEYS_EXPIRY_ALARM_S="60")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "no keys are set"),
        (("client.json",), 2, "made for the client"),
        (("nowhere.json",), 3, "No such file"),
    ],
)
def test_a_source_that_is_none_says_why(folder, arguments, code, text):
    found, output = run("check", *(folder / name for name in arguments))
    assert (found, text in output) == (code, True)


def test_a_key_service_is_checked_through_the_settings(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with kv2() as server:
        server.put("pods/one", sidecar(key(1, not_before_ms=1, not_after_ms=2**52)))
        environ = {
            "TONGGUAN_KEYS_PROVIDER": "http",
            "TONGGUAN_KEYS_HTTP_ADDRESS": server.address,
            "TONGGUAN_KEYS_HTTP_TOKEN_FILE": str(file),
            "TONGGUAN_KEYS_HTTP_PATH": "pods/",
        }
        code, output = run("check", **environ)
        assert (code, "provider        http" in output) == (0, True)
        assert TOKEN not in output
        server.status = 403
        code, output = run("check", **environ)
        assert (code, "403 (forbidden)" in output) == (3, True)


# --- wrap


@needs_softhsm
def test_a_file_is_wrapped_checked_rotated_and_revoked(folder, token):  # noqa: F811
    before = read(folder / "sidecar.json")
    environ = {
        "TONGGUAN_KEYS_PKCS11_MODULE": token.module,
        "TONGGUAN_KEYS_PKCS11_TOKEN": token.label,
        "TONGGUAN_KEYS_PKCS11_PIN_FILE": token.pin_file,
    }
    code, output = run("wrap", folder / "sidecar.json", **environ)
    assert (code, output) == (0, f"wrote {folder / 'sidecar.json'}: 4 secrets, wrapped\n")
    served = environ | {
        "TONGGUAN_KEYS_PROVIDER": "pkcs11",
        "TONGGUAN_KEYS_FILE": str(folder / "sidecar.json"),
    }
    assert run("check", **served)[0] == 0
    assert run("rotate", "--dir", folder)[0] == 2
    assert run("rotate", "--dir", folder, "--now", **environ)[0] == 0
    kid = before.envelope_keys[0].kid.hex()
    code, output = run("revoke", "--dir", folder, kid)
    assert (code, "no live key" in output) == (0, False)
    code, output = run("check", "--json", **served)
    found = json.loads(output)
    assert (code, found["counts"]["live"], found["counts"]["revoked"]) == (0, 1, 1)
    assert found["chain_seed_id"] == before.chain_seeds[0][0]
    text = (folder / "sidecar.json").read_text()
    assert text.count("pkcs11:") == 4
    assert not [s for s in before.prompt_keys.values() if s.hex() in text]


@needs_softhsm
@pytest.mark.parametrize("role", ["client", "auditor"])
def test_only_a_sidecar_s_file_is_wrapped(folder, token, role):  # noqa: F811
    code, output = run(
        "wrap", folder / f"{role}.json", "--module", token.module, "--token", token.label,
        "--pin-file", token.pin_file,
    )  # fmt: skip
    assert (code, f"made for the {role}" in output) == (2, True)


@needs_softhsm
def test_a_token_that_cannot_be_reached_is_io(folder, token):  # noqa: F811
    arguments = ("--module", token.module, "--token", "none", "--pin-file", token.pin_file)
    code, output = run("wrap", folder / "sidecar.json", *arguments)
    assert (code, "NoSuchToken" in output) == (3, True)
    assert run("wrap", folder / "sidecar.json")[0] == 2
    assert os.path.exists(folder / "sidecar.json")  # noqa: PTH110
