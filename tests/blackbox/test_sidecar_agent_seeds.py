"""A sidecar whose chain seed and trace ids are the agent's: real processes, and the auditor's view.

The agent's key moves on with every seed and is nowhere on disk afterwards; the auditor has the
escrow, and with the agent's public key the log verifies as with a seed from a file.
"""

import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import httpx
import pytest

from tests.blackbox import tiny_model
from tests.blackbox.harness import Sidecar, Upstream, new_keys, ok, post, tongguan, until
from tests.blackbox.node import AgentProcess

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
VERIFIER = Path(__file__).parents[2] / "proxy" / "audit" / "bundle" / "verify.py"


@pytest.fixture(scope="module")
def backend():
    with Upstream() as backend:
        yield backend.answering(ok)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("keys"), "--auditor", "sm2")


@pytest.fixture(scope="module")
def agent(tmp_path_factory, keys):
    folder = tmp_path_factory.mktemp("agent")
    model = tiny_model.write(folder / "tiny.gguf")
    public = json.loads((keys / "auditor.json").read_text())["auditor_public"]
    settings = {"socket": folder / "s", "chains_dir": folder / "chains", "auditor_public": public}
    with AgentProcess(folder / "log", model=model, machine=4242, **settings) as process:
        process.folder = folder
        transport = httpx.HTTPTransport(uds=str(folder / "s"))
        with httpx.Client(transport=transport, base_url="http://agent") as near:
            # It hands out what a chain needs while its model still loads.
            process.until((folder / "s").exists)
            line = process.until(lambda: near.get("/chains/keys").text)
            process.near = near
            (folder / "agent.keys").write_text(line)
            yield process


def sidecar_of(folder, backend, keys, agent, **settings):
    values = {"AUDIT_AGENT": f"unix:{agent.folder}/s", "AUDIT_SEEDS": "agent"}
    return Sidecar(folder, backend.url, keys=keys, AUDIT_FLUSH_MS=1, **values, **settings)


def stop(sidecar):
    sidecar.signal(signal.SIGTERM)
    assert sidecar.ended() == 0


def verify(sidecar, *files, escrow=()):
    more = [argument for path in files for argument in ("--keys", path)]
    more += [argument for path in escrow for argument in ("--escrow", path)]
    done = tongguan("audit", "verify", sidecar.audit_dir, *more, "--json")
    return json.loads(done.stdout), done.stderr


def test_the_auditor_verifies_what_only_the_agent_could_have_seeded(tmp_path, backend, keys, agent):
    folder, auditor = tmp_path / "sidecar", keys / "auditor.json"
    with sidecar_of(folder, backend, keys, agent) as sidecar:
        trace_id = sidecar.ask(post(CHAT)).trace_id
        assert trace_id.split("-")[1] == "04242"
        sidecar.record(trace_id)
        assert tongguan("audit", "rotate", "--admin", f"127.0.0.1:{sidecar.admin}").returncode == 0
        until(lambda: any(r["kind"] == "rotate" for r in sidecar.records()))
        sidecar.kill()
        sidecar.ended()
    with sidecar_of(folder, backend, keys, agent) as sidecar:
        stop(sidecar)
    genesis = [r for r in sidecar.records() if r["kind"] == "genesis"]
    assert [r["machine_source"] for r in genesis] == ["agent_lease"] * 2
    first, second = (r["key_id"].rpartition("n") for r in genesis)
    assert first[0] == second[0]  # one agent, two of its steps
    assert first[2] != second[2]

    result, errors = verify(sidecar, auditor, agent.folder / "agent.keys")
    assert (result["verdict"], result["mac_checked"], errors) == ("ok", True, "")
    # Whoever holds sidecar.json has none of these chains' keys.
    result, _ = verify(sidecar, keys / "sidecar.json")
    assert (result["verdict"], result["mac_checked"]) == ("key_unknown", False)
    # An escrow that no known agent signed is not believed.
    result, errors = verify(sidecar, auditor)
    assert (result["verdict"], result["mac_checked"]) == ("key_unknown", False)
    assert "not signed by an agent whose key was given" in errors

    # For the verifier that knows no ciphers: seeds in a file.
    seeds = tmp_path / "seeds.json"
    keyed = ("--keys", auditor, "--keys", agent.folder / "agent.keys")
    done = tongguan("audit", "escrow", sidecar.audit_dir, *keyed, "-o", seeds)
    assert (done.returncode, done.stdout) == (0, "opened 2 of 2\n"), done.stderr
    assert seeds.stat().st_mode & 0o077 == 0
    command = [sys.executable, "-I", "-S", VERIFIER, sidecar.audit_dir, "--keys", seeds]
    theirs = subprocess.run(command, env={}, capture_output=True, check=False)
    assert json.loads(theirs.stdout)["verdict"] == "ok"
    # A bundle of them says what to give its verifier, and that is enough for it.
    done = tongguan(
        "audit", "export", sidecar.audit_dir, "--from", "2000-01-01T00:00:00Z",
        "--to", "2100-01-01T00:00:00Z", "-o", tmp_path / "bundle.tar",
        "--keys", keys / "auditor.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "bundle.tar") as tar:
        tar.extractall(tmp_path / "bundle", filter="data")
    assert "`tongguan audit escrow`" in (tmp_path / "bundle" / "README.txt").read_text()
    command = [sys.executable, "-I", "-S", "verify.py", ".", "--keys"]
    for file, verdict in ((auditor, "key_unknown"), (seeds, "ok")):
        theirs = subprocess.run(
            [*command, file], cwd=tmp_path / "bundle", env={}, capture_output=True, check=False
        )
        assert json.loads(theirs.stdout)["verdict"] == verdict, file

    # Escrows lost with the pod's volume are still with the agent.
    for note in sidecar.audit_dir.glob("*/escrow.note"):
        note.unlink()
    kept = tmp_path / "kept"
    kept.write_text(agent.near.get("/chains/escrow").text)
    result, errors = verify(sidecar, auditor, agent.folder / "agent.keys", escrow=[kept])
    assert (result["verdict"], errors) == ("ok", "")


def test_no_seed_is_left_on_the_agents_disk(tmp_path, backend, keys, agent):
    with sidecar_of(tmp_path / "sidecar", backend, keys, agent) as sidecar:
        stop(sidecar)
    done = tongguan(
        "audit", "escrow", sidecar.audit_dir, "--keys", keys / "auditor.json",
        "--keys", agent.folder / "agent.keys", "-o", tmp_path / "seeds.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = [
        row
        for row in json.loads((tmp_path / "seeds.json").read_text())["chain_seeds"]
        if "n" in row["id"]
    ]
    seed = row["seed"]
    for path in agent.folder.rglob("*"):
        if path.is_file() and path.suffix != ".gguf":
            data = path.read_bytes()
            assert seed.encode() not in data
            assert bytes.fromhex(seed) not in data


def test_a_sidecar_without_its_agent_does_not_start_unseeded(tmp_path, backend, keys):
    settings = {"AUDIT_AGENT": f"unix:{tmp_path}/nobody", "AUDIT_SEEDS": "agent"}
    sidecar = Sidecar(tmp_path / "sidecar", backend.url, keys=keys, **settings).spawn()
    try:
        assert sidecar.ended(30) == 3
        assert "gives no seed" in sidecar.log
        assert "serving:" not in sidecar.log
    finally:
        sidecar.kill()
