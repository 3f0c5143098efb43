"""`tongguan up` as a person runs it, with a tiny random model in place of the default one."""

import hashlib
import hmac
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from agent import plan
from tests.blackbox import tiny_model
from tests.blackbox.node import OFFSETS, WAIT_S, environment, free_base

pytestmark = pytest.mark.slow


class Home:
    """One state directory and the environment of those who use it."""

    def __init__(self, folder):
        self.base = free_base()
        self.state = folder / "state"
        model = tiny_model.write(folder / "tiny.gguf")
        # The start fence is ten seconds of doing nothing; only one test waits for it.
        self.environ = environment(
            TONGGUAN_AGENT_MODEL=str(model),
            TONGGUAN_AGENT_THREADS="1",
            TONGGUAN_ENVELOPE_FENCE_S="0",
            TONGGUAN_UP_BASE_PORT=str(self.base),
        )

    def command(self, *arguments):
        return [sys.executable, "-m", "proxy.cli", *arguments]

    def run(self, *arguments, **variables):
        return subprocess.run(
            self.command(*arguments),
            env=self.environ | variables,
            capture_output=True,
            timeout=2 * WAIT_S,
            check=False,
        )

    def oneshot(self, *arguments, **variables):
        return self.run("up", "--oneshot", "--state", str(self.state), *arguments, **variables)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("up"))


def split(output):
    """Return (answer, facts) of what `up` printed."""
    answer, found, rest = output.rpartition(b"\n\ntrace_id ")
    assert found, output
    facts = dict(line.split(b" ", 1) for line in (b"trace_id " + rest).splitlines() if line)
    return answer, {k.decode(): v.decode() for k, v in facts.items()}


def test_the_answer_comes_and_its_record_verifies_twice(home):
    keys = []
    for question in ("the quick brown fox", "你好 \"$HOME\" 'x'"):
        done = home.oneshot("--ask", question, "--max-tokens", "5")
        assert done.returncode == 0, done.stderr.decode()
        answer, facts = split(done.stdout)
        assert int(facts["tokens"]) <= 5
        assert facts.get("finish", "length (5 tokens)") == "length (5 tokens)"
        assert (facts["outcome"], facts["audit"], facts["pool"]) == ("ok", "ok", "shared")
        assert facts["qos"] == "P1"
        assert float(facts["ttft"].removesuffix(" ms")) > 0
        assert done.stdout.endswith(b"outcome ok\naudit ok\n")
        heads = [json.loads(f.read_bytes()) for f in (home.state / "witness").glob("*.head")]
        assert all(head["closed"] and head["size"] >= 5 for head in heads)
        assert len(heads) == len(keys) + 1, "the agent witnessed each sidecar's log to its end"
        auditor = home.state / "keys" / "auditor.json"
        keys.append(auditor.read_bytes())
        key_file = json.loads(auditor.read_bytes())
        prompt_key = bytes.fromhex(key_file["prompt_keys"]["default"])
        shown = home.run(
            "audit", "show", str(home.state / "audit"), "--trace-id", facts["trace_id"],
            "--auditor-key", str(auditor), "--json",
        )  # fmt: skip
        record = json.loads(shown.stdout)["record"]
        expected = hmac.new(prompt_key, answer, hashlib.sha256).hexdigest()
        assert record["output_hash"] == facts["output_hash"] == expected
        assert len(json.loads(shown.stdout)["ids"]) == int(facts["tokens"])
    assert keys[0] == keys[1]
    check_seeded(home, chains=2)
    assert (home.state / "keys" / "client.json").stat().st_mode & 0o777 == 0o600


def geneses(home):
    files = sorted((home.state / "audit").glob("*/*0.log"))
    return [json.loads(file.read_bytes().partition(b"\t")[0]) for file in files]


def check_seeded(home, chains, before=0):
    """The agent seeded the last of these chains, leased their trace ids, and kept escrows."""
    seeded = geneses(home)[before:]
    assert len(seeded) == chains - before
    assert [row["machine_source"] for row in seeded] == ["agent_lease"] * len(seeded)
    agents = {row["key_id"].split(".")[0].rpartition("n")[0] for row in seeded}
    assert len(agents) == 1
    assert len(agents.pop()) == 8
    escrows = (home.state / "chains" / "escrow.notes").read_text()
    assert escrows.count("tongguan chain seed escrow v1") == len(seeded)
    done = home.run(
        "audit", "verify", str(home.state / "audit"), "--keys",
        str(home.state / "keys" / "auditor.json"), "--json",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert (result["verdict"], result["mac_checked"]) == ("ok", True)
    assert [chain["signers"] for chain in result["chains"]] == ["pinned"] * chains
    # Nobody else's file opens a seed.
    done = home.run(
        "audit", "verify", str(home.state / "audit"), "--keys",
        str(home.state / "keys" / "sidecar.json"), "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["verdict"] == "key_unknown"


def test_a_state_directory_of_before_is_used_and_may_be_written_anew(tmp_path):
    """Before, seeds were the key file's and trace ids the node's."""
    home = Home(tmp_path)
    home.state.mkdir(mode=0o700)
    settings = home.state / "tongguan.toml"
    settings.write_text(plan.settings_text(home.state, home.base))
    assert home.oneshot("--max-tokens", "3").returncode == 0
    assert [row["machine_source"] for row in geneses(home)] == ["node_name"]
    settings.unlink()  # as `up` says to do after a move
    done = home.oneshot("--max-tokens", "3")
    assert done.returncode == 0, done.stderr.decode()
    check_seeded(home, chains=2, before=1)
    auditor = home.state / "keys" / "auditor.json"
    text = settings.read_text()
    public = json.loads(auditor.read_bytes())["auditor_public"]
    settings.write_text(text.replace(public, "0" * 63 + "9"))
    done = home.oneshot()
    assert done.returncode == 2
    assert b"agent.auditor_public is not the key of" in done.stderr


def test_it_serves_until_ctrl_c_and_ends_cleanly(home):
    with subprocess.Popen(
        [*home.command("up", "--state", str(home.state))],
        env=home.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            text = b""
            while b"/metrics" not in text:
                line = process.stdout.readline()
                assert line, process.stderr.read().decode()
                text += line
            second = home.oneshot()
            assert second.returncode == 3
            assert f"pid {process.pid}".encode() in second.stderr
            process.send_signal(signal.SIGINT)
            errors = process.stderr.read()
            process.wait(WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, errors.decode()
    assert b"with the final record: audit ok" in errors
    assert f"http://127.0.0.1:{home.base + 80}/v1/chat/completions".encode() in text
    for offset in OFFSETS:
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", home.base + offset)) != 0


def test_killed_outright_it_leaves_no_servers(home):
    with subprocess.Popen(
        [*home.command("up", "--state", str(home.state))],
        env=home.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        while b"Serving until Ctrl-C" not in (line := process.stdout.readline()):
            assert line
        process.kill()
    end = time.monotonic() + WAIT_S
    for offset in OFFSETS:
        while True:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", home.base + offset)) != 0:
                    break
            assert time.monotonic() < end
    assert home.oneshot().returncode == 0


def test_a_taken_port_is_one_clear_line(home):
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", home.base + 81))
        holder.listen()
        done = home.oneshot()
    assert done.returncode == 3
    (line,) = done.stderr.decode().splitlines()
    for word in (f"port {home.base + 81} (SM4 door) taken", "ss -ltnp", "--base-port"):
        assert word in line


def test_a_child_that_cannot_start_shows_why(home, tmp_path):
    done = home.oneshot(TONGGUAN_AGENT_MODEL=str(tmp_path / "none.gguf"))
    assert done.returncode == 1
    text = done.stderr.decode()
    assert "the agent ended with code 1" in text
    assert "none.gguf" in text
    assert "agent.log" in text
    assert "Traceback" not in text


def test_a_flipped_byte_in_an_old_chain_fails_the_run(tmp_path):
    home = Home(tmp_path)
    assert home.oneshot().returncode == 0
    (segment, *_) = sorted((home.state / "audit").glob("*/*.log"))
    data = bytearray(segment.read_bytes())
    at = data.index(b'"output_hash":"') + 15
    data[at] = ord("1") if data[at] == ord("0") else ord("0")
    segment.chmod(0o600)
    segment.write_bytes(bytes(data))
    done = home.oneshot()
    assert done.returncode == 1
    assert b"do not verify" in done.stderr
    assert b"content_mismatch" in done.stderr
    assert b"audit ok" not in done.stdout
    (line,) = [line for line in done.stderr.decode().splitlines() if "; again: " in line]
    again = subprocess.run(
        line.partition("; again: ")[2], shell=True, capture_output=True, check=False
    )
    assert again.returncode == 13, again.stderr


def test_keys_others_can_read_stop_it(tmp_path):
    home = Home(tmp_path)
    assert home.run("keys", "new", "--dir", str(home.state / "keys")).returncode == 0
    os.chmod(home.state / "keys" / "client.json", 0o644)  # noqa: PTH101
    done = home.oneshot()
    assert done.returncode != 0
    assert b"client.json" in done.stderr


@pytest.mark.model
def test_the_default_model_names_paris_over_the_sm4_channel_with_the_fence(tmp_path):
    home = Home(tmp_path)
    for name in ("TONGGUAN_AGENT_MODEL", "TONGGUAN_ENVELOPE_FENCE_S"):
        del home.environ[name]
    done = home.oneshot()
    assert done.returncode == 0, done.stderr.decode()
    answer, facts = split(done.stdout)
    assert b"Paris" in answer
    assert facts["outcome"] == "ok"
