import os
import socket
import sys
import tomllib

import pytest

from agent import children, plan, up
from agent import config as agent_config
from agent.children import Child, ChildError, wait_ready
from proxy import config as sidecar_config
from proxy.ask import AskResult


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


def run(tmp_path, monkeypatch, **variables):
    for name in list(os.environ):
        if name.startswith("TONGGUAN_"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    handlers = {}
    monkeypatch.setattr(up.signal, "signal", handlers.__setitem__)
    return up.run(state=tmp_path / "s", base_port=1024, question="?", oneshot=True, ready_s=1)


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
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_long_log_is_put_aside(tmp_path):
    (tmp_path / "log").write_bytes(b"x" * (children.LOG_BYTES_MAX + 1))
    thing = child(tmp_path, "print('fresh')")
    thing.start()
    with pytest.raises(ChildError):
        wait_ready((thing,), 30, lambda _state: None)
    assert (tmp_path / "log").read_text() == "fresh\n"
    assert (tmp_path / "log.old").stat().st_size > children.LOG_BYTES_MAX
