"""Keys of a running sidecar's chain: they move on, a tenant is erased, both verifiers follow."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.audit.rekeying import key_ref
from tests.blackbox.harness import Sidecar, Upstream, new_keys, ok, post, tongguan, until

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
VERIFIER = Path(__file__).parents[2] / "proxy" / "audit" / "bundle" / "verify.py"
AUDIENCE = "local/default/keys-test"


@pytest.fixture(scope="module")
def backend():
    with Upstream() as backend:
        yield backend.answering(ok)


@pytest.fixture
def keys(tmp_path):
    return new_keys(tmp_path / "keys", "--audience", AUDIENCE, "--tenant", "default")


@pytest.fixture
def live(tmp_path, backend, keys):
    with Sidecar(tmp_path / "sidecar", backend.url, keys=keys, AUDIT_FLUSH_MS=1) as sidecar:
        yield sidecar


def verdicts(sidecar, keys):
    """Return what `audit verify` and the verifier that bundles hold say."""
    auditor = keys / "auditor.json"
    mine = tongguan("audit", "verify", sidecar.audit_dir, "--keys", auditor, "--json")
    command = [sys.executable, "-I", "-S", VERIFIER, sidecar.audit_dir, "--keys", auditor]
    theirs = subprocess.run(command, env={}, capture_output=True, check=False)
    return json.loads(mine.stdout)["verdict"], json.loads(theirs.stdout)["verdict"]


def rotations(sidecar):
    return [r["new_key_id"] for r in sidecar.records() if r["kind"] == "rotate"]


def stop(sidecar):
    sidecar.signal(signal.SIGTERM)
    assert sidecar.ended() == 0


def test_an_operator_turns_the_key_and_then_there_is_another(live, keys):
    live.ask(post(CHAT))
    for count in (1, 2):
        done = tongguan("audit", "rotate", "--admin", f"127.0.0.1:{live.admin}")
        assert done.returncode == 0, done.stderr
        until(lambda count=count: len(rotations(live)) == count)
        live.ask(post(CHAT))
    assert live.metric("tongguan_proxy_audit_rotations_total") == 2
    stop(live)
    seed_id = json.loads((keys / "sidecar.json").read_text())["chain_seeds"][-1]["id"]
    assert rotations(live) == [f"{seed_id}.s256.1", f"{seed_id}.s256.2"]
    assert live.records()[-1]["key_id"] == f"{seed_id}.s256.2"
    assert verdicts(live, keys) == ("ok", "ok")


def test_nobody_to_ask_is_an_error_that_says_so():
    done = tongguan("audit", "rotate", "--admin", "127.0.0.1:1")
    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stderr


def test_a_sidecar_without_a_chain_has_no_key_to_turn(tmp_path, backend):
    with Sidecar(tmp_path / "bare", backend.url) as bare:
        done = tongguan("audit", "rotate", "--admin", f"127.0.0.1:{bare.admin}")
    assert done.returncode == 3
    assert "no chain" in done.stderr


def test_a_new_chain_seed_is_gone_on_to_in_the_living_chain(live, keys):
    live.ask(post(CHAT))
    before = json.loads((keys / "sidecar.json").read_text())["chain_seeds"][-1]["id"]
    new_keys(keys, "--audience", AUDIENCE, "--tenant", "default", "--force")
    after = json.loads((keys / "sidecar.json").read_text())["chain_seeds"][-1]["id"]
    live.signal(signal.SIGHUP)
    until(lambda: rotations(live) == [f"{after}.s256.0"])
    live.ask(post(CHAT))
    stop(live)
    assert {r["key_id"] for r in live.records()} == {f"{before}.s256.0", f"{after}.s256.0"}
    assert "Traceback" not in live.log
    assert verdicts(live, keys) == ("ok", "ok")


def say(keys, word):
    """Have the source of keys say a word: the key file stands for a secret of a key service."""
    path = keys / "sidecar.json"
    fresh = path.with_name("fresh")
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps(json.loads(path.read_text()) | {"chain_turn": word}))
    fresh.replace(path)


def test_the_source_of_keys_says_when_to_go_on(live, keys):
    seed_id = json.loads((keys / "sidecar.json").read_text())["chain_seeds"][-1]["id"]
    for count, word in enumerate(("monday", "tuesday"), 1):
        say(keys, word)
        until(lambda count=count: len(rotations(live)) == count)
    say(keys, "")  # no word is none to go on for
    reloads = "tongguan_proxy_reload_total"
    until(lambda: live.metric(reloads, result="ok") >= 3)
    say(keys, "not a word!")
    until(lambda: live.metric(reloads, result="failed") >= 1)
    stop(live)
    assert rotations(live) == [f"{seed_id}.s256.1", f"{seed_id}.s256.2"]
    assert verdicts(live, keys) == ("ok", "ok")


def test_a_chain_killed_while_it_rotates_survives_its_end(tmp_path, backend, keys):
    """Killed around a rotation: what is there verifies, and the next start declares the rest."""
    folder = tmp_path / "sidecar"
    settings = {"AUDIT_FLUSH_MS": 1, "AUDIT_ROTATE_S": 1}
    for _ in range(2):
        with Sidecar(folder, backend.url, keys=keys, **settings) as sidecar:
            begun = len(rotations(sidecar))
            until(lambda sidecar=sidecar, begun=begun: len(rotations(sidecar)) > begun)
            command = ("audit", "rotate", "--admin", f"127.0.0.1:{sidecar.admin}")
            assert tongguan(*command).returncode == 0
            sidecar.kill()
            sidecar.ended()
    with Sidecar(folder, backend.url, keys=keys, **settings) as sidecar:
        stop(sidecar)
        assert verdicts(sidecar, keys) == ("ok", "ok")


def test_a_key_is_not_in_a_core_dump_nor_readable_by_others_of_this_user(live):
    limits = Path(f"/proc/{live.process.pid}/limits").read_text()
    (row,) = [row for row in limits.splitlines() if row.startswith("Max core file size")]
    assert row.split()[4:6] == ["0", "0"]
    # proc(5): what belongs to a process that may not be dumped is root's.
    assert Path(f"/proc/{live.process.pid}/environ").stat().st_uid == 0
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            Path(f"/proc/{live.process.pid}/environ").read_bytes()


# Erasing a tenant.


def config(tmp_path, keys):
    path = tmp_path / "erase.toml"
    path.write_text(f'[keys]\nfile = "{keys}/sidecar.json"\n')
    return path


def erase(tmp_path, keys, directory, tenant="default", *arguments):
    return tongguan(
        "audit", "erase", "--tenant", tenant, "--config", config(tmp_path, keys),
        "--dir", directory, "--keys", keys / "auditor.json", "--json", *arguments,
    )  # fmt: skip


def erased(sidecar):
    return [r for r in sidecar.records() if r["kind"] == "erased"]


def prompt_key(keys, role):
    return json.loads((keys / f"{role}.json").read_text()).get("prompt_keys", {}).get("default")


def test_the_running_sidecar_says_that_a_tenant_was_erased(tmp_path, live, keys):
    trace_id = live.ask(post(CHAT)).trace_id
    until(lambda: any("prompt_hash" in r for r in live.records()))
    ref = key_ref(bytes.fromhex(prompt_key(keys, "sidecar")))
    done = erase(tmp_path, keys, live.audit_dir)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["erased"]
    (record,) = erased(live)
    assert (row["origin"], row["seq"], row["key_ref"]) == (record["origin"], record["seq"], ref)
    assert (record["key_ref"], record["tenant"]) == (ref, "default")
    assert prompt_key(keys, "sidecar") is prompt_key(keys, "auditor") is None
    # From here on nothing is hashed for the tenant: there is no key to do it with.
    later = live.ask(post(CHAT)).trace_id
    until(lambda: any(r.get("trace_id") == later for r in live.records()))
    (after,) = [r for r in live.records() if r.get("trace_id") == later]
    assert not {"prompt_hash", "params_hash", "body_hash", "output_hash"} & after.keys()
    stop(live)
    assert verdicts(live, keys) == ("ok", "ok")
    shown = tongguan("audit", "show", live.audit_dir, "--trace-id", trace_id)
    assert shown.returncode == 0
    assert f"erased: {ref}" in shown.stdout
    again = tongguan("audit", "show", live.audit_dir, "--trace-id", later, "--json")
    assert json.loads(again.stdout)["erased"] == []
    assert erase(tmp_path, keys, live.audit_dir).returncode == 1


def test_without_a_sidecar_a_chain_of_its_own_says_it(tmp_path, live, keys):
    live.ask(post(CHAT))
    stop(live)
    ref = key_ref(bytes.fromhex(prompt_key(keys, "sidecar")))
    done = erase(tmp_path, keys, live.audit_dir)
    assert done.returncode == 0, done.stderr
    (record,) = erased(live)
    assert record["key_ref"] == ref
    kinds = [r["kind"] for r in live.records() if r["origin"] == record["origin"]]
    assert kinds == ["genesis", "erased", "closed", "checkpoint"]
    assert verdicts(live, keys) == ("ok", "ok")
    assert [path.name for path in live.audit_dir.iterdir() if path.name.startswith(".era")] == []


def test_an_erasing_that_was_cut_off_goes_on(tmp_path, live, keys):
    stop(live)
    ref = key_ref(bytes.fromhex(prompt_key(keys, "sidecar")))
    document = json.loads((keys / "sidecar.json").read_text())
    seeds = document.pop("chain_seeds")
    (keys / "sidecar.json").write_text(json.dumps(document))
    cut = erase(tmp_path, keys, live.audit_dir)
    assert (cut.returncode, erased(live)) == (3, [])
    assert f"{ref} is destroyed, and no chain says so yet" in cut.stderr
    document = json.loads((keys / "sidecar.json").read_text()) | {"chain_seeds": seeds}
    assert "prompt_keys" not in document
    (keys / "sidecar.json").write_text(json.dumps(document))
    assert erase(tmp_path, keys, live.audit_dir).returncode == 0
    assert [r["key_ref"] for r in erased(live)] == [ref]
    assert verdicts(live, keys) == ("ok", "ok")


def test_an_unknown_tenant_and_no_directory_are_refused(tmp_path, live, keys):
    done = erase(tmp_path, keys, live.audit_dir, "nobody")
    assert (done.returncode, erased(live)) == (1, [])
    done = tongguan("audit", "erase", "--tenant", "x", "--config", config(tmp_path, keys))
    assert done.returncode == 2
