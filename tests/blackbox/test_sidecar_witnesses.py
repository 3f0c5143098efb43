"""Witnesses of a sidecar's log as real processes: the node's agent, a peer, and one that is silent.

The first checkpoint comes 10 s after the start, so all sidecars wait for it together.
"""

import contextlib
import json
import signal
import socket

import pytest

from tests.blackbox import tiny_model
from tests.blackbox.harness import Sidecar, Upstream, ok, post, tongguan, until
from tests.blackbox.node import AgentProcess

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
TOKEN = "a-token-for-other-nodes"
COSIGNED = "tongguan_proxy_audit_witness_cosigned_total"


@pytest.fixture(scope="module")
def silent():
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """The node's own agent, at its unix socket, and a peer, over TCP with the token for peers."""
    folder = tmp_path_factory.mktemp("agents")
    token = folder / "token"
    token.write_text(f"Bearer {TOKEN}\n")
    token.chmod(0o600)
    model = tiny_model.write(folder / "tiny.gguf")
    with contextlib.ExitStack() as running:
        found = []
        for name in ("near", "peer"):
            settings = {
                "socket": folder / name,
                "witness_dir": folder / f"{name}.heads",
                "witness_token_file": token,
            }
            process = running.enter_context(
                AgentProcess(folder / f"{name}.log", model=model, **settings)
            )
            process.token, process.socket = token, f"unix:{folder / name}"
            found.append(process)
        given = {"authorization": f"Bearer {TOKEN}"}
        for process in found:
            answer = process.until(lambda p=process: p.client.get("/witness/keys", headers=given))
            process.key = answer.text.strip()
            assert answer.status_code == 200
        yield found


def ready(sidecar):
    answer = sidecar.admin_ask("GET", "/readyz")
    return answer.status, json.loads(answer.body)


def alarms(sidecar):
    return [record["what"] for record in sidecar.records() if record["kind"] == "alarm"]


def test_each_witness_goes_its_own_way_and_a_silent_one_is_an_alarm(tmp_path, keys, silent, agents):
    near, peer = agents
    addresses = (silent, near.socket, peer.url)
    with contextlib.ExitStack() as running:
        backend = running.enter_context(Upstream()).answering(ok)

        def sidecar(name, witnesses, policy, **settings):
            made = Sidecar(
                tmp_path / name,
                backend.url,
                keys=keys,
                AUDIT_WITNESS=",".join(witnesses),
                AUDIT_WITNESS_LATE_S=1,
                AUDIT_ON_FAILURE=policy,
                **settings,
            )
            running.callback(made.kill)
            return made.start()

        going_on = sidecar("degrade", [silent], "degrade")
        stopped = sidecar("block", [silent], "block")
        three = sidecar(
            "three",
            addresses,
            "block",
            AUDIT_WITNESS_AUTHORIZATION_FILE=f"-,-,{peer.token}",
            AUDIT_WITNESS_KEYS=f"{near.key},{peer.key}",
        )
        everybody = (going_on, stopped, three)
        assert [one.ask(post(CHAT)).status for one in everybody] == [200] * 3
        assert [ready(one)[0] for one in everybody] == [200] * 3

        told = f"witness_unreachable: {silent}"
        until(lambda: all(alarms(one) for one in everybody), "an alarm of each")
        assert [alarms(one) for one in everybody] == [[told]] * 3
        status, body = ready(going_on)
        assert (status, told in json.dumps(body)) == (200, True)
        status, body = ready(stopped)
        assert (status, told in json.dumps(body)) == (503, True)
        # Two of three have cosigned: known, and no reason to stop.
        until(lambda: three.metric(COSIGNED) == 2, "two cosignatures")
        status, body = ready(three)
        assert (status, told in json.dumps(body)) == (200, True)
        trouble = "tongguan_proxy_audit_witness_trouble"
        assert [three.metric(trouble, witness=one) for one in addresses] == [1, 0, 0]
        assert going_on.ask(post(CHAT)).status == 200

        for one in everybody:
            one.signal(signal.SIGTERM)
        assert [one.ended() for one in everybody] == [0] * 3

    carried = [r["cosigned"] for r in three.records() if "cosigned" in r]
    names = [line.split()[1] for line in carried[-1].splitlines() if line.startswith("\u2014")]
    assert names[-2:] == [near.key.split("+")[0], peer.key.split("+")[0]]
    for agent in agents:
        file = tmp_path / "witness.keys"
        file.write_text(agent.key + "\n")
        arguments = ("--keys", keys / "auditor.json", "--keys", file, "--json")
        result = json.loads(tongguan("audit", "verify", three.audit_dir, *arguments).stdout)
        assert (result["verdict"], result["witnessed_to"] > 0) == ("ok", True)
