"""`tongguan keys new --force`: the set is carried on, or refused with nothing written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from proxy.audit.cli import audit
from proxy.keys.cli import keys
from proxy.keys.file import read
from tests.unit.proxy.audit_chains import START_MS, write_chain

if TYPE_CHECKING:
    from pathlib import Path

ROLES = ("sidecar", "client", "auditor")


def new(directory: Path, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(keys, ["new", "--dir", str(directory), *options])
    assert result.exit_code == code, result.output
    return result.output


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def chain(directory: Path, key_dir: Path, number: int) -> None:
    """Write a chain with sealed ids as a sidecar with these keys does."""
    file = read(key_dir / "sidecar.json")
    seed_id, seed = file.chain_seeds[-1]
    write_chain(
        directory,
        3,
        ids=True,
        token_ids="sealed",
        origin=f"local/default/pod/uid/{number}",
        start_ms=START_MS + number * 3_600_000,
        seed_id=seed_id,
        seed=seed,
        auditor_public=file.auditor_public,
    )


def test_chains_from_before_and_after_verify_with_the_new_file_and_old_ids_open(
    tmp_path: Path,
) -> None:
    key_dir, log = tmp_path / "keys", tmp_path / "audit"
    for number in range(3):
        new(key_dir, "--force")
        chain(log, key_dir, number)
    auditor = str(key_dir / "auditor.json")

    verified = CliRunner().invoke(audit, ["verify", str(log), "--keys", auditor, "--json"])
    shown = CliRunner().invoke(
        audit,
        ["show", str(log), "--trace-id", f"{START_MS}-00001-0002", "--auditor-key", auditor],
    )

    assert verified.exit_code == 0, verified.output
    assert json.loads(verified.output)["verdict"] == "ok"
    assert len(json.loads(verified.output)["chains"]) == 3
    assert shown.exit_code == 0, shown.output
    assert "token ids: 2 7 2" in shown.output


def test_force_keeps_what_is_long_lived_and_makes_the_rest_anew(tmp_path: Path) -> None:
    new(tmp_path, "--tenant", "a")
    old = {role: read(tmp_path / f"{role}.json") for role in ROLES}

    said = new(tmp_path, "--tenant", "b", "--force")

    now = {role: read(tmp_path / f"{role}.json") for role in ROLES}
    assert "kept" in said
    assert now["auditor"].chain_seeds[:-1] == old["auditor"].chain_seeds
    assert now["sidecar"].chain_seeds == now["auditor"].chain_seeds[-1:]
    assert now["sidecar"].chain_seeds != old["sidecar"].chain_seeds
    assert now["auditor"].auditor_private == old["auditor"].auditor_private
    assert now["sidecar"].auditor_public == old["auditor"].auditor_public
    assert now["sidecar"].prompt_keys == now["auditor"].prompt_keys
    assert now["sidecar"].prompt_keys.keys() == {"a", "b"}
    assert now["sidecar"].prompt_keys["a"] == old["sidecar"].prompt_keys["a"]
    assert now["client"].envelope_keys == now["sidecar"].envelope_keys
    assert now["client"].envelope_keys[0].kid != old["client"].envelope_keys[0].kid
    assert now["client"].envelope_keys[0].root != old["client"].envelope_keys[0].root


def test_force_in_an_empty_directory_is_a_first_issue(tmp_path: Path) -> None:
    assert "kept" not in new(tmp_path / "new", "--force")


def test_the_auditor_s_file_alone_is_enough(tmp_path: Path) -> None:
    new(tmp_path)
    old = read(tmp_path / "auditor.json")
    (tmp_path / "sidecar.json").unlink()
    (tmp_path / "client.json").unlink()

    new(tmp_path, "--force")

    assert read(tmp_path / "auditor.json").chain_seeds[:-1] == old.chain_seeds


@pytest.mark.parametrize("name", [f"{role}.json" for role in ROLES])
@pytest.mark.parametrize("fault", ["junk", "mode", "role"])
def test_a_file_that_cannot_be_read_stops_it_and_nothing_is_written(
    tmp_path: Path, name: str, fault: str
) -> None:
    new(tmp_path)
    path = tmp_path / name
    if fault == "junk":
        path.write_text("{")
    elif fault == "mode":
        path.chmod(0o644)
    else:
        other = "client" if name != "client.json" else "sidecar"
        path.write_text(json.dumps({"format": "tongguan-keys/1", "role": other}))
    before = files(tmp_path)

    said = new(tmp_path, "--force", code=2)

    assert name in said
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", [f"{role}.json" for role in ROLES])
def test_files_of_different_sets_are_refused_and_nothing_is_written(
    tmp_path: Path, name: str
) -> None:
    new(tmp_path / "one")
    new(tmp_path / "two")
    (tmp_path / "two" / name).replace(tmp_path / "one" / name)
    before = files(tmp_path / "one")

    said = new(tmp_path / "one", "--force", code=2)

    assert "of different sets" in said
    assert "another --dir" in said
    assert files(tmp_path / "one") == before


def test_without_the_auditor_s_file_it_is_refused(tmp_path: Path) -> None:
    new(tmp_path)
    (tmp_path / "auditor.json").unlink()
    before = files(tmp_path)

    said = new(tmp_path, "--force", code=2)

    assert "auditor.json is not there" in said
    assert files(tmp_path) == before


@pytest.mark.parametrize("member", ["auditor_private", "chain_seeds"])
def test_an_auditor_s_file_that_lacks_what_matters_is_refused(tmp_path: Path, member: str) -> None:
    new(tmp_path)
    path = tmp_path / "auditor.json"
    document = json.loads(path.read_text())
    del document[member]
    path.write_text(json.dumps(document))

    assert "lacks the auditor's private key or chain seeds" in new(tmp_path, "--force", code=2)
    assert json.loads(path.read_text()) == document
