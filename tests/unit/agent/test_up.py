import dataclasses
import io
import os
import socket
import subprocess
import sys
import textwrap
import tomllib

import msgspec
import pytest
from click.testing import CliRunner

from agent import acquaint, children, cli, plan, up
from agent import config as agent_config
from agent.children import Child, ChildError, wait_ready
from proxy import config as sidecar_config
from proxy.ask import AskResult
from proxy.audit.signing import Cosigner
from proxy.keys.file import read


def test_the_written_settings_are_right_for_both_rooms(tmp_path):
    text = plan.settings_text(tmp_path, 15000)
    sidecar = sidecar_config.load(text, {})
    agent = agent_config.load(text, {})
    assert sidecar.doors.app == "127.0.0.1:15080"
    assert sidecar.doors.sealed == "127.0.0.1:15081"
    assert sidecar.doors.admin == "127.0.0.1:15090"
    assert agent.listen == "127.0.0.1:15100"
    assert agent.admin == "127.0.0.1:15190"
    for pool in (sidecar.pools.dedicated, sidecar.pools.shared, sidecar.pools.best_effort):
        assert pool.endpoints == (f"unix:{agent.socket}",)
        assert pool.token_ids
    for path in (sidecar.keys.file, sidecar.audit.dir, sidecar.envelope.state_dir, agent.socket):
        assert path.startswith(str(tmp_path))


def test_with_an_auditor_the_agent_seeds_the_chains(tmp_path):
    text = plan.settings_text(tmp_path, 15000, "ab" * 32)
    sidecar, agent = sidecar_config.load(text, {}), agent_config.load(text, {})
    assert (sidecar.audit.seeds, sidecar.audit.agent) == ("agent", f"unix:{agent.socket}")
    assert sidecar.audit.witness == (sidecar.audit.agent,)
    assert (agent.auditor_public, agent.chains_dir) == ("ab" * 32, str(tmp_path / "chains"))
    # Without one, or where no socket fits, seeds are the key file's.
    far = tmp_path / ("x" * 100)
    for text in (plan.settings_text(tmp_path, 15000), plan.settings_text(far, 15000, "ab" * 32)):
        sidecar, agent = sidecar_config.load(text, {}), agent_config.load(text, {})
        assert (sidecar.audit.seeds, sidecar.audit.agent, agent.chains_dir) == ("keys", "", "")


def test_the_auditor_is_taught_a_key_once(tmp_path):
    command = (sys.executable, "-m", "proxy.cli", "keys", "new", "--dir", str(tmp_path / "keys"))
    subprocess.run(command, check=True, capture_output=True)
    path = tmp_path / "keys" / "auditor.json"
    before = read(path)
    line = Cosigner("witness-1", b"\1" * 32).key.line()
    assert acquaint.teach(path, [line])
    assert not acquaint.teach(path, [line])
    assert read(path) == msgspec.structs.replace(before, verify_keys=(*before.verify_keys, line))
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "auditor.json", "client.json", "sidecar.json"
    ]  # fmt: skip


def test_a_path_with_quotes_is_still_toml(tmp_path):
    state = tmp_path / 'a "b" \\c'
    text = plan.settings_text(state, 15000)
    assert tomllib.loads(text)["audit"]["dir"] == str(state / "audit")


def test_where_a_socket_path_is_too_long_the_pools_use_tcp(tmp_path):
    text = plan.settings_text(tmp_path / ("x" * 100), 15000)
    assert agent_config.load(text, {}).socket == ""
    sidecar = sidecar_config.load(text, {})
    assert sidecar.pools.shared.endpoints == ("http://127.0.0.1:15100",)
    moved = sidecar_config.load(text, plan.port_variables(16000, sidecar))
    assert moved.pools.shared.endpoints == ("http://127.0.0.1:16100",)


def test_a_base_port_moves_all_five_ports_and_leaves_sockets(tmp_path):
    text = plan.settings_text(tmp_path, 15000)
    variables = plan.port_variables(16000, sidecar_config.load(text, {}))
    sidecar = sidecar_config.load(text, variables)
    agent = agent_config.load(text, variables)
    addresses = (
        sidecar.doors.app, sidecar.doors.sealed, sidecar.doors.admin, agent.listen, agent.admin
    )  # fmt: skip
    assert [a.rpartition(":")[2] for a in addresses] == [
        "16080", "16081", "16090", "16100", "16190"
    ]  # fmt: skip
    assert sidecar.pools.shared.endpoints == (f"unix:{agent.socket}",)


def run(tmp_path, monkeypatch, question="?", **variables):
    for name in list(os.environ):
        if name.startswith("TONGGUAN_"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    handlers = {}
    monkeypatch.setattr(up.signal, "signal", handlers.__setitem__)
    return up.run(
        state=tmp_path / "s",
        base_port=1024,
        question=question,
        max_tokens=8,
        oneshot=True,
        ready_s=1,
    )


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused_before_anything_is_made(
    question, tmp_path, monkeypatch, capfd
):
    assert run(tmp_path, monkeypatch, question) == 2
    assert "the question is empty" in capfd.readouterr().err
    assert not (tmp_path / "s").exists()


def test_the_command_does_not_replace_an_empty_question(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(up.signal, "signal", lambda *_: None)
    done = CliRunner().invoke(cli.up, ["--ask", "", "--state", str(tmp_path / "s")])
    assert done.exit_code == 2
    assert "the question is empty" in done.output + capfd.readouterr().err
    assert not (tmp_path / "s").exists()


def test_an_unknown_variable_is_named(tmp_path, monkeypatch, capfd):
    assert run(tmp_path, monkeypatch, TONGGUAN_UP_PORT_BASE="1") == 2
    assert "TONGGUAN_UP_PORT_BASE: unknown variable" in capfd.readouterr().err


def test_wrong_settings_are_all_listed(tmp_path, monkeypatch, capfd):
    variables = {"TONGGUAN_DOORS_BACKLOG": "x", "TONGGUAN_QOS_SHAPE": "round"}
    assert run(tmp_path, monkeypatch, **variables) == 2
    shown = capfd.readouterr().err
    assert "TONGGUAN_DOORS_BACKLOG" in shown
    assert "TONGGUAN_QOS_SHAPE" in shown


def test_a_state_directory_in_use_is_refused(tmp_path, monkeypatch, capfd):
    held = plan.lock(tmp_path / "s")
    try:
        assert run(tmp_path, monkeypatch) == 3
    finally:
        os.close(held)
    assert f"pid {os.getpid()}" in capfd.readouterr().err


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path, monkeypatch, capfd):
    (tmp_path / "s").write_text("a file")
    assert run(tmp_path, monkeypatch) == 3
    assert str(tmp_path / "s") in capfd.readouterr().err


def copied(tmp_path, keys):
    """A state directory whose settings were written for another one."""
    state = tmp_path / "s"
    state.mkdir()
    (state / plan.FILE_NAME).write_text(plan.settings_text(tmp_path / "first", 15000))
    if keys:
        (state / "keys").mkdir()
        (state / "keys" / "sidecar.json").write_text("{}")
    return state


@pytest.mark.parametrize(
    ("keys", "comes"), [(True, "are used again"), (False, "and keys are made in")]
)
def test_the_settings_of_another_state_directory_are_refused(
    keys, comes, tmp_path, monkeypatch, capfd
):
    state = copied(tmp_path, keys)
    assert run(tmp_path, monkeypatch) == 2
    shown = capfd.readouterr().err
    for word in (f"{state}/tongguan.toml", "Remove it", comes, "TONGGUAN_AUDIT_DIR",
                 f"keys.file is {tmp_path}/first/keys/sidecar.json",
                 f"audit.dir is {tmp_path}/first/audit"):  # fmt: skip
        assert word in shown
    assert not (tmp_path / "first").exists()


def test_a_place_elsewhere_is_taken_from_a_variable_only(tmp_path):
    state = copied(tmp_path, keys=False)
    elsewhere = {
        "TONGGUAN_KEYS_FILE": str(state / "keys" / "sidecar.json"),
        "TONGGUAN_ENVELOPE_STATE_DIR": "",
        "TONGGUAN_AGENT_SOCKET": "",
        "TONGGUAN_AGENT_WITNESS_DIR": "",
    }
    with pytest.raises(plan.UpError) as caught:
        plan.make(state, None, elsewhere)
    assert caught.value.lines == (f"audit.dir is {tmp_path}/first/audit",)
    elsewhere["TONGGUAN_AUDIT_DIR"] = str(tmp_path / "disk")
    assert plan.make(state, None, elsewhere).sidecar.audit.dir == str(tmp_path / "disk")


def test_keys_that_are_gone_are_not_promised_anew_where_old_ones_lie(tmp_path):
    state = tmp_path / "s"
    (state / "keys").mkdir(parents=True)
    (state / "keys" / "sidecar.json").write_text("{}")
    gone = {"TONGGUAN_KEYS_FILE": str(state / "gone" / "sidecar.json")}
    with pytest.raises(plan.UpError, match=r"unset TONGGUAN_KEYS_FILE .* are used again"):
        plan.check_keys(plan.make(state, None, gone))
    text = (state / plan.FILE_NAME).read_text().replace("/keys/", "/gone/")
    (state / plan.FILE_NAME).write_text(text)
    with pytest.raises(plan.UpError, match=r"remove .*tongguan\.toml and run again .* again\)"):
        plan.check_keys(plan.make(state, None, {}))


def test_an_auditors_file_that_is_kept_elsewhere_is_asked_for(tmp_path):
    state = tmp_path / "s"
    made = plan.make(state, None, {})
    acquaint.check_auditor(made)
    made.auditor_keys.unlink()
    with pytest.raises(plan.UpError, match=r"auditor\.json is not there; bring it back") as caught:
        acquaint.check_auditor(made)
    assert caught.value.code == plan.EXIT_IO


def test_printed_commands_run_where_they_are_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a state").mkdir()
    made = plan.make(tmp_path / "a state", 15000, {})
    text = up.how_to_call("a:1", "s:1", "m:1", made)
    commands = [line.strip() for line in text.splitlines() if " audit verify " in line]
    command = commands[0]
    assert "--keys 'a state/keys/auditor.json' --live" in command
    help_of = command.partition(" audit ")[0] + " audit verify --help"
    done = subprocess.run(help_of, shell=True, capture_output=True, timeout=60, check=True)
    assert b"chains" in done.stdout
    start = text.index("  import httpx")
    compile(textwrap.dedent(text[start:]), "printed", "exec")


def test_programs_beside_the_interpreter_are_named_from_here(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tongguan").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert plan.installed("tongguan", "proxy.cli") == "bin/tongguan"
    assert plan.installed("pip", "pip") == "bin/python -m pip"
    monkeypatch.chdir("/")
    assert plan.installed("tongguan", "proxy.cli").endswith("/bin/tongguan")


def test_a_taken_port_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert plan.listen_problem("127.0.0.1", port) != 0
    assert plan.listen_problem("127.0.0.1", port) == 0


RESULT = AskResult(
    text="Paris", model="m", finish_reason="stop", tokens=3, prompt_tokens=1, ttft_ms=12.4,
    total_ms=20, tokens_per_s=31.25, trace_id="1-2-3", qos_class="P1", pool="shared", sealed=True,
)  # fmt: skip


def test_facts_are_one_a_line():
    lines = up.facts(RESULT, {"outcome": "ok", "seq": 2, "output_hash": "ab", "other": 1})
    for line in ("trace_id 1-2-3", "qos P1", "pool shared", "ttft 12 ms", "tokens/s 31.2",
                 "seq 2", "output_hash ab", "outcome ok"):  # fmt: skip
        assert line in lines
    assert not any(line.startswith("other") for line in lines)


def test_only_a_cut_answer_says_how_it_ended():
    assert not any(line.startswith("finish") for line in up.facts(RESULT, {}))
    cut = dataclasses.replace(RESULT, finish_reason="length")
    assert "finish length (3 tokens)" in up.facts(cut, {})


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("start_fence_ms=8001", "start fence, 9 s left"),
        ("start_fence_ms=0", "start fence, 0 s left"),
        ("model loading: weights 40%", "loading the model, 40 %"),
        ("clock_behind_ms=6100", "the clock is 6 s behind"),
        ("no_live_kid", "no key is valid now"),
        ("start_fence_ms=soon", "start fence ms"),
        ("some_new_reason", "some new reason"),
        ("", ""),
    ],
)
def test_reasons_are_in_words(reason, words):
    assert children.in_words(reason) == words


def test_the_progress_line_is_drawn_twice_a_second_at_most():
    now_s, terminal = [0.0], io.StringIO()
    progress = up.Progress(terminal, lambda: now_s[0])
    for step in range(21):  # two seconds of polls
        now_s[0] = step / 10
        progress.show({"sidecar": f"start fence, {step} s left"})
    assert terminal.getvalue().count("start fence") == 5
    progress.show({"sidecar": None})
    assert "ready" not in terminal.getvalue()
    for _ in range(2):
        now_s[0] += 1
        progress.show({"sidecar": None})
    assert terminal.getvalue().count("sidecar: ready") == 1


def test_without_a_terminal_there_is_no_progress_line(capfd):
    progress = up.Progress(None, lambda: 0.0)
    progress.show({"sidecar": "starting"})
    progress.clear()
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_a_model_gives_no_orders():
    assert up.printable("a\x1b[2Jb\rc\u202ed\n\te你🙂") == "a[2Jbcd\n\te你🙂"


def child(tmp_path, code, port=1):
    argv = (sys.executable, "-c", code)
    return Child("thing", argv, ("127.0.0.1", port), tmp_path / "log", 10, os.environ)


def test_a_child_that_dies_shows_its_last_lines_of_this_run(tmp_path):
    (tmp_path / "log").write_text("an older run\n")
    thing = child(tmp_path, "print('first'); print('cannot'); raise SystemExit(3)")
    thing.start()
    with pytest.raises(ChildError, match="thing ended with code 3") as caught:
        wait_ready((thing,), 30, lambda _state: None)
    assert caught.value.lines == ("first", "cannot")


def test_a_child_that_is_never_ready_is_named(tmp_path):
    thing = child(tmp_path, "import time; time.sleep(60)")
    thing.start()
    try:
        with pytest.raises(ChildError, match="thing is not ready after 0 s"):
            wait_ready((thing,), 0, lambda _state: None)
    finally:
        assert thing.stop() == -15


READY = """
import http.server, json, sys
class H(http.server.BaseHTTPRequestHandler):
    n = 0
    def do_GET(self):
        H.n += 1
        body = json.dumps({"reasons": ["loading"]}).encode()
        self.send_response(200 if H.n > 2 else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


def test_reasons_are_shown_until_it_is_ready(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    thing = child(tmp_path, READY, port)
    thing.argv = (*thing.argv, str(port))
    seen = []
    thing.start()
    try:
        wait_ready((thing,), 30, lambda state: seen.append(state["thing"]))
    finally:
        thing.stop()
    assert "loading" in seen
    assert seen[-1] is None


def test_a_child_that_will_not_end_is_killed(tmp_path):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    thing = child(tmp_path, code + "time.sleep(60)")
    thing.grace_s = 0.2
    thing.start()
    while not thing.last_lines():
        thing.check()
    assert thing.stop() == -9
    with pytest.raises(ChildError, match="killed by SIGKILL"):
        thing.check()


def test_up_loads_without_torch():
    code = "import agent.up, agent.cli, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_long_log_is_put_aside(tmp_path):
    (tmp_path / "log").write_bytes(b"x" * (children.LOG_BYTES_MAX + 1))
    thing = child(tmp_path, "print('fresh')")
    thing.start()
    with pytest.raises(ChildError):
        wait_ready((thing,), 30, lambda _state: None)
    assert (tmp_path / "log").read_text() == "fresh\n"
    assert (tmp_path / "log.old").stat().st_size > children.LOG_BYTES_MAX


@pytest.mark.parametrize("command", [cli.agent, cli.up])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_each_command_has_both_forms_of_help(command, option):
    done = CliRunner().invoke(command, [option])
    assert done.exit_code == 0
    assert "Exit codes" in done.output


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"TONGGUAN_AGENT_LISTEN": "nowhere"}, 2),
        ({"TONGGUAN_AGENT_TOKEN_FILE": "/no/such/file"}, 3),
    ],
)
def test_the_agents_mistakes_have_one_prefix(variables, code):
    environ = {n: v for n, v in os.environ.items() if not n.startswith("TONGGUAN_")}
    done = subprocess.run(
        [sys.executable, "-m", "agent"],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.startswith("tongguan agent: agent.")
    assert len(done.stderr.splitlines()) == 1
