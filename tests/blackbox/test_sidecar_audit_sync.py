"""`audit.sync`: a request that is sent on only when its `open` record is on disk.

A disk that is slow is made of a long group interval: what comes soon after a sync waits for it.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.harness import (
    OK,
    Client,
    Sidecar,
    get,
    ok,
    post,
    tongguan,
    until,
)

ROOT = Path(__file__).parents[2]
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
LARGE = b'{"messages":[{"role":"user","content":"' + b"x" * (2 << 20) + b'"}]}'
P0_ASKED = b"X-QoS-Class: P0"
P0 = '[tenants.default]\nmax_class = "P0"\n'
ALL = {"AUDIT_SYNC_P0": "request", "AUDIT_SYNC_P1": "request", "AUDIT_SYNC_P2": "request"}
OPEN = "tongguan_proxy_audit_open_total"


@pytest.fixture
def upstream(backend):
    backend.seen.clear()
    yield backend.answering(ok)
    assert backend.problems == []


def verify(sidecar):
    done = tongguan(
        "audit", "verify", sidecar.audit_dir, "--keys", sidecar.keys / "auditor.json", "--json"
    )
    result = json.loads(done.stdout)
    return result["verdict"], result["findings"]


def opens(sidecar):
    return [r for r in sidecar.records() if r["kind"] == "open"]


def slow(folder, upstream, keys, **variables):
    """Return a sidecar whose records wait a second for their sync, if one was just before."""
    return Sidecar(
        folder, upstream.url, keys=keys, toml=P0, AUDIT_FLUSH_MS=1000, **ALL, **variables
    )


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    folder = tmp_path_factory.mktemp("sync")
    toml = P0 + "[pools.shared]\nrepeatable = true\nretry_percent = 100\n"
    some = ALL | {"AUDIT_SYNC_P2": "group"}
    with Sidecar(folder, backend.url, keys=keys, toml=toml, **some) as it:
        yield it


def test_the_record_is_on_disk_when_the_upstream_sees_the_request(tmp_path, upstream, keys):
    found = []

    def killing(seen):
        sidecar.kill()
        found.append((seen.get("traceparent").decode(), sidecar.records()))

    upstream.answering(killing)
    sidecar = Sidecar(tmp_path / "s", upstream.url, keys=keys, AUDIT_SYNC_P1="request")
    try:
        for door in ("streamed", "sealed"):
            sidecar.start()
            client = Client(sidecar.sealed if door == "sealed" else sidecar.app)
            sealed = Channel(keys / "client.json").seal(BODY)
            plain = post(LARGE if door == "streamed" else BODY)
            with pytest.raises((EOFError, OSError)), client:
                client.send(sealed.request() if door == "sealed" else plain).answer()
            until(lambda: found, "the request upstream")
            traceparent, records = found.pop()
            (row,) = [r for r in records if r.get("traceparent") == traceparent]
            assert (row["kind"], row["tenant"], row["qos"]) == ("open", "default", "P1")
        upstream.answering(ok)
        sidecar.start()
        assert verify(sidecar) == ("ok", [])
        shown = tongguan(
            "audit", "show", sidecar.audit_dir, "--trace-id", row["trace_id"], "--json"
        )
        assert json.loads(shown.stdout)["record"]["kind"] == "open"
    finally:
        sidecar.kill()


def test_a_request_has_one_open_record_before_its_own_and_a_class_that_does_not_wait_none(
    sidecar, upstream
):
    for qos in (b"P0", b"P1", b"P2"):
        answer = sidecar.ask(post(BODY, b"X-QoS-Class: " + qos))
        record = sidecar.record(answer.trace_id)
        mine = [r for r in opens(sidecar) if r["trace_id"] == answer.trace_id]
        assert [r["qos"] for r in mine] == ([] if qos == b"P2" else [qos.decode()])
        assert all(r["seq"] < record["seq"] for r in mine)
        assert all(r["traceparent"] == record["traceparent"] for r in mine)
        shown = tongguan(
            "audit", "show", sidecar.audit_dir, "--trace-id", answer.trace_id, "--json"
        )
        assert json.loads(shown.stdout)["record"]["kind"] == "request"
    assert sidecar.metric(OPEN, qos="P0", result="durable") == 1
    assert sidecar.metric(OPEN, qos="P2") == 0
    assert sidecar.metric("tongguan_proxy_audit_open_seconds_count", qos="P1") >= 1
    assert sidecar.metric("tongguan_proxy_audit_opening") == 0


def test_sent_again_it_is_not_opened_again(sidecar, upstream):
    closed = []

    def script(seen):
        if len(upstream.seen) == 2:
            closed.append(True)
            seen.wire.close()
        else:
            seen.reply(OK)

    upstream.answering(script)
    with sidecar.client() as client:
        client.send(get(b"/")).answer("GET")
        answer = client.send(get(b"/again")).answer("GET")
    assert closed
    assert answer.status == 200
    sidecar.record(answer.trace_id)
    assert [r["trace_id"] for r in opens(sidecar)].count(answer.trace_id) == 1


def test_a_large_body_is_held_until_then_and_comes_whole(sidecar, upstream):
    answer = sidecar.ask(post(LARGE))
    assert answer.status == 200
    assert upstream.last().body() == LARGE
    sidecar.record(answer.trace_id)
    assert answer.trace_id in {r["trace_id"] for r in opens(sidecar)}


def test_a_tunnel_waits_too(sidecar, upstream):
    def script(seen):
        seen.reply(b"HTTP/1.1 101 Go\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        seen.wire.close()

    upstream.answering(script)
    ask = get(b"/", b"Connection: Upgrade", b"Upgrade: websocket")
    with sidecar.client() as client:
        head = client.send(ask).head()
    assert head.status == 101
    sidecar.record(head.trace_id)
    assert head.trace_id in {r["trace_id"] for r in opens(sidecar)}


@pytest.mark.parametrize("policy", ["block", "degrade"])
def test_a_record_that_comes_late_is_for_policy_to_judge(tmp_path, upstream, keys, policy):
    more = {"AUDIT_ON_FAILURE": policy, "AUDIT_SYNC_WAIT_S": "0.05"}
    with slow(tmp_path / "s", upstream, keys, **more) as sidecar:
        until(lambda: opens(sidecar) or not sidecar.ask(post(BODY)), "one on disk")
        upstream.seen.clear()
        for qos in (b"P0", b"P1"):
            with sidecar.client() as client:
                answers = [
                    client.send(post(BODY, b"X-QoS-Class: " + qos)).answer() for _ in range(5)
                ]
            late = sidecar.metric(OPEN, qos=qos.decode(), result="late")
            assert late >= 1
            if policy == "degrade":
                assert {answer.status for answer in answers} == {200}
                continue
            refused = [answer for answer in answers if answer.status == 503]
            assert len(refused) == late
            assert {answer.error() for answer in refused} == {"audit_unavailable"}
            record = sidecar.record(refused[0].trace_id)
            assert (record["outcome"], record["status"]) == ("shed", 503)
        if policy == "block":
            sent = {seen.get("traceparent") for seen in upstream.seen}
            assert refused[0].trace_id not in {
                r["trace_id"] for r in opens(sidecar) if r["traceparent"].encode() in sent
            }
        sidecar.idle()


def waiting(sidecar, upstream, client, *fields):
    """Bring a request to where it waits for the disk; nothing of it has gone upstream."""
    sidecar.ask(post(BODY, P0_ASKED))  # its answer comes just behind a sync
    upstream.seen.clear()
    client.send(post(BODY, *fields))
    until(lambda: sidecar.metric("tongguan_proxy_audit_opening") == 1, "one that waits")


def test_while_it_waits_a_client_may_leave_and_deadlines_and_a_drain_hold(tmp_path, upstream, keys):
    more = {"QOS_P1_DEADLINE_S": "0.5", "AUDIT_SYNC_WAIT_S": "5"}
    with slow(tmp_path / "s", upstream, keys, **more) as sidecar:
        with sidecar.client() as client:
            waiting(sidecar, upstream, client)
        record = sidecar.record("client_gone", "outcome")
        assert record["phase"] == "before_first_byte"
        assert record["trace_id"] in {r["trace_id"] for r in opens(sidecar)}
        assert sidecar.metric(OPEN, result="left") == 1
        assert upstream.seen == []
        sidecar.idle()
        with sidecar.client() as client:
            waiting(sidecar, upstream, client)
            answer = client.answer()
        assert (answer.status, answer.error()) == (503, "queue_deadline")
        assert upstream.seen == []
        with sidecar.client() as client:
            waiting(sidecar, upstream, client, P0_ASKED)
            sidecar.signal(signal.SIGTERM)
            assert client.answer().status == 200
        assert sidecar.ended() == 0
        assert len(opens(sidecar)) == 6
        assert verify(sidecar) == ("ok", [])
        alone = ROOT / "proxy" / "audit" / "bundle" / "verify.py"  # the one that is handed out
        command = [sys.executable, "-I", "-S", alone, sidecar.audit_dir]
        done = subprocess.run(
            [*command, "--keys", keys / "auditor.json"], capture_output=True, check=False
        )
        assert json.loads(done.stdout)["verdict"] == "ok"


@pytest.mark.parametrize("policy", ["block", "degrade"])
def test_on_a_full_disk_policy_says_whether_it_is_sent_on(tmp_path, upstream, keys, policy):
    sidecar = Sidecar(
        tmp_path / "s", upstream.url, keys=keys, file_bytes=20_000, AUDIT_ON_FAILURE=policy, **ALL
    )
    with sidecar:
        begun = time.monotonic()
        answers = [sidecar.ask(post(BODY)) for _ in range(40)]
        assert time.monotonic() - begun < 10
        until(lambda: sidecar.metric("tongguan_proxy_audit_available") == 0, "the failure")
        answers.append(sidecar.ask(post(BODY)))
        if policy == "block":
            assert (answers[-1].status, answers[-1].error()) == (503, "audit_unavailable")
            # What was sent on has its record on the disk.
            sent = {seen.get("traceparent").decode() for seen in upstream.seen}
            assert sent == {r["traceparent"] for r in opens(sidecar)}
        else:
            assert {answer.status for answer in answers} == {200}
            assert sidecar.metric(OPEN, result="failed") >= 1
        sidecar.kill()
        sidecar.log_path.write_text("")  # the failure may be logged as an error
