"""Several workers behind the same doors: shared work, one admin door, restarts, drain."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Sidecar,
    chunk,
    get,
    ok,
    post,
    stop,
    tongguan,
    until,
)

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
WORKERS = 3


def children(pid):
    """Return the process ids of a process's children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Team(Sidecar):
    """A sidecar of several workers, started when all of them serve."""

    def __init__(self, folder, backend, **options):
        super().__init__(folder, backend.url, WORKERS=WORKERS, **options)

    def start(self):
        super().start()
        until(lambda: self.log_since.count("serving:") == WORKERS, "all workers")
        return self

    def pids(self):
        return children(self.process.pid)

    def streams(self, count):
        """Return open streams, so many that no worker is without one."""
        clients = [self.client() for _ in range(count)]
        for client in clients:
            client.send(post(b'{"stream":true}'))
            assert client.head().status == 200
        return clients


@pytest.fixture
def team(tmp_path, backend, keys):
    with Team(tmp_path / "s", backend, keys=keys) as sidecar:
        yield sidecar


class Standing:
    """Streams that stand until `go`; other requests are answered."""

    def __init__(self):
        self.go = False

    def __call__(self, seen):
        if b"stream" not in seen.body():
            ok(seen)
            return
        seen.reply(SSE_HEAD + chunk(b"data: 1\n\n"))
        until(lambda: self.go, "the go")
        seen.wire.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


def test_all_workers_serve_with_ids_and_chains_of_their_own(team, upstream, keys):
    answers = [team.ask(post(CHAT)) for _ in range(60)]
    assert {answer.status for answer in answers} == {200}
    ids = [answer.trace_id for answer in answers]
    assert len(set(ids)) == len(ids)
    assert len({trace_id.split("-")[1] for trace_id in ids}) > 1
    assert team.metric("tongguan_proxy_requests_total", outcome="ok") == 60
    assert team.metric("tongguan_proxy_workers_serving") == WORKERS
    sealed = Channel(keys / "client.json").seal(CHAT)
    for _ in range(4):  # one replay cache: the sealed door is one worker's
        with Client(team.sealed) as client:
            answer = client.send(sealed.request()).answer()
    assert answer.status == 400
    assert team.metric("tongguan_proxy_envelope_failures_total", reason="replayed") == 3
    team.signal(signal.SIGTERM)
    assert team.ended() == 0
    records = team.records()
    origins = {record["origin"] for record in records if record["kind"] == "genesis"}
    assert len(origins) == WORKERS
    done = {r["trace_id"] for r in records if r["kind"] == "request"}
    assert set(ids) <= done
    assert [r["kind"] for r in records].count("closed") == WORKERS
    check = tongguan("audit", "verify", team.audit_dir, "--keys", keys / "auditor.json")
    assert check.returncode == 0, check.stdout


def test_worker_that_dies_is_started_again_and_the_others_go_on(team, upstream):
    script = Standing()
    upstream.answering(script)
    clients = team.streams(32)
    victim = team.pids()[-1]
    os.kill(victim, signal.SIGKILL)
    until(lambda: team.metric("tongguan_proxy_worker_restarts_total") == 1, "a restart")
    until(lambda: team.metric("tongguan_proxy_workers_serving") == WORKERS, "all workers again")
    assert victim not in team.pids()
    assert len(team.pids()) == WORKERS
    script.go = True
    ended = []
    for client in clients:
        try:
            ended.append(client.chunked()[0])
        except (EOFError, ConnectionError):
            ended.append(b"cut")
        client.close()
    whole = b"data: 1\n\ndata: [DONE]\n\n"
    assert set(ended) == {whole, b"cut"}
    assert [team.ask(get()).status for _ in range(20)] == [200] * 20
    report = team.admin_ask("GET", "/livez")
    assert report.status == 200


def test_worker_that_is_stuck_makes_livez_fail(team):
    assert team.admin_ask("GET", "/livez").status == 200
    stuck = team.pids()[-1]
    stop(stuck)
    answer = team.admin_ask("GET", "/livez")
    os.kill(stuck, signal.SIGCONT)
    assert answer.status == 503
    assert json.loads(answer.body)["reasons"][0].endswith("_silent")
    until(lambda: team.admin_ask("GET", "/livez").status == 200, "it is well again")


def test_log_level_and_reload_reach_all_workers(team):
    assert team.admin_ask("POST", "/loglevel", b"debug").status == 200
    assert team.metric("tongguan_proxy_reload_total", result="ok") == 0
    name = "tongguan_proxy_reload_total"
    team.signal(signal.SIGHUP)  # no file has changed
    until(lambda: team.metric(name, result="ok") == WORKERS, "reloads of all")
    team.config.write_text("[limits]\nfields = 9\n")
    until(lambda: team.metric(name, result="ok") >= 2 * WORKERS, "reloads of all")
    fields = [b"X-%d: 1" % i for i in range(10)]
    assert {team.ask(get(b"/", *fields)).status for _ in range(20)} == {431}
    # One that is started again has the newest settings too, and the others' fixed ones.
    for pid in team.pids():
        os.kill(pid, signal.SIGKILL)
    until(lambda: team.log_since.count("serving:") == 2 * WORKERS, "all workers again")
    assert {team.ask(get(b"/", *fields)).status for _ in range(20)} == {431}


def test_drain_lets_the_streams_of_all_workers_end(team, upstream):
    script = Standing()
    upstream.answering(script)
    clients = team.streams(32)
    team.signal(signal.SIGTERM)
    until(lambda: team.log_since.count("draining:") == WORKERS, "the drain of all")
    assert team.admin_ask("GET", "/readyz").status == 503
    script.go = True
    for client in clients:
        assert client.chunked()[0] == b"data: 1\n\ndata: [DONE]\n\n"
        client.close()
    assert team.ended() == 0


def test_second_signal_ends_all_now(team, upstream):
    upstream.answering(Standing())
    clients = team.streams(6)
    workers = team.pids()
    team.signal(signal.SIGTERM)
    until(lambda: team.log_since.count("draining:") == WORKERS, "the drain of all")
    team.signal(signal.SIGTERM)
    assert team.ended(3) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    for client in clients:
        client.close()
    upstream.script.go = True


def test_workers_do_not_outlive_their_parent(team):
    workers = team.pids()
    team.process.kill()
    team.process.wait()

    def gone():
        states = [Path(f"/proc/{pid}/stat") for pid in workers]
        return not any(p.exists() and p.read_text().split()[2] != "Z" for p in states)

    until(gone, "the workers' end")


@pytest.mark.parametrize("door", ["app", "sealed", "admin"])
def test_taken_port_ends_the_start_with_one_clear_line(tmp_path, backend, keys, door):
    sidecar = Team(tmp_path / "s", backend, keys=keys)
    with socket.create_server(("127.0.0.1", getattr(sidecar, door))):
        assert sidecar.spawn().ended() == 3
    lines = [line for line in sidecar.log.splitlines() if "CRITICAL" in line]
    assert len(lines) == 1
    assert f"doors.{door}: cannot listen on" in lines[0]


def test_bad_settings_end_the_start_before_any_worker(tmp_path, backend):
    sidecar = Sidecar(tmp_path / "s", backend.url, WORKERS=99)
    assert sidecar.spawn().ended() == 2
    assert "WORKERS: must be at most 64" in sidecar.log
