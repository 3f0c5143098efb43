"""The audit chain of a running sidecar: what is written, what a crash leaves, what shows."""

import hmac
import json
import re
import signal
import struct
import threading

import pytest

from tests.blackbox.channel import BOTH, Channel
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Sidecar,
    chunk,
    new_keys,
    post,
    tongguan,
    until,
)

SECRET = "the-prompt-nobody-may-read"
MESSAGES = json.dumps([{"role": "user", "content": SECRET}], separators=(", ", " : ")).encode()
BODY = b'{"model":"m","temperature": 0.70,"messages" : ' + MESSAGES + b',"max_tokens":5}'
EXIT = {"ok": 0, "truncated": 10, "content_mismatch": 13, "half_line": 18}
WORDS = ["Pa", "r\u00efs \u2014 ", "\U0001f600", "\u5de7"]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    folder = tmp_path_factory.mktemp("audit")
    with Sidecar(folder, backend.url, keys=keys, LOG_LEVEL="debug") as sidecar:
        yield sidecar


def verify(folder, keys):
    """Return (exit code, verdict, result) of `tongguan audit verify`."""
    done = tongguan("audit", "verify", folder, "--keys", keys / "auditor.json", "--json")
    result = json.loads(done.stdout)
    return done.returncode, result["verdict"], result


def prompt_key(keys):
    auditor = json.loads((keys / "auditor.json").read_text())
    return bytes.fromhex(auditor["prompt_keys"]["default"])


def keyed(keys, *parts):
    """The record's hash over length-prefixed parts, as the format's document says."""
    data = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return hmac.new(prompt_key(keys), data, "sha256").hexdigest()


def delta(text, index=0):
    piece = {"choices": [{"index": index, "delta": {"content": text}}]}
    return b"data: " + json.dumps(piece).encode() + b"\n\n"


def streaming(seen):
    seen.reply(SSE_HEAD)
    for word in WORDS:
        seen.wire.send(chunk(delta(word)))
    seen.wire.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


def whole(text):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 0, "completion_tokens": 2, "total_tokens": 2}
    body = json.dumps({"model": "served", "choices": [choice], "usage": usage}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def test_prompt_hash_is_over_the_bytes_as_received(sidecar, upstream, keys):
    answer = sidecar.ask(post(BODY))
    record = sidecar.record(answer.trace_id)
    assert record["prompt_hash"] == keyed(keys, MESSAGES, b"m", b"0.70")
    assert record["model"] == "m"
    assert record["outcome"] == "ok"


@pytest.mark.parametrize("door", ["plain", "sealed"])
def test_output_hash_is_over_the_text_the_client_got(sidecar, upstream, keys, door):
    text = "".join(WORDS)
    for script in (streaming, whole(text)):
        upstream.answering(script)
        if door == "plain":
            answer = sidecar.ask(post(BODY))
        else:
            sealed = Channel(keys / "client.json").seal(BODY)
            with Client(sidecar.sealed) as client:
                answer = client.send(sealed.request(accept=BOTH)).answer()
        record = sidecar.record(answer.trace_id)
        expected = hmac.new(prompt_key(keys), text.encode(), "sha256").hexdigest()
        assert record["output_hash"] == expected
        assert record["output_len"] == len(text.encode())


def test_choices_are_hashed_in_index_order(sidecar, upstream, keys):
    def script(seen):
        pieces = [delta("b1", 1), delta("a1"), delta("b2", 1), delta("a2")]
        seen.reply(SSE_HEAD, *map(chunk, pieces), LAST_CHUNK)

    upstream.answering(script)
    record = sidecar.record(sidecar.ask(post(BODY)).trace_id)
    expected = hmac.new(prompt_key(keys), b"a1a2\0b1b2", "sha256").hexdigest()
    assert record["output_hash"] == expected


def test_usage_is_as_reported_an_explicit_zero_stays(sidecar, upstream):
    upstream.answering(whole("x"))
    record = sidecar.record(sidecar.ask(post(BODY)).trace_id)
    assert record["usage"] == {"prompt": 0, "completion": 2, "total": 2}
    assert record["served_model"] == "served"


def test_large_streamed_body_is_hashed_too(sidecar, upstream, keys):
    messages = b'[{"role":"user","content":"' + b"x" * (2 << 20) + b'"}]'
    answer = sidecar.ask(post(b'{"model":"m","messages":' + messages + b"}"))
    assert sidecar.record(answer.trace_id)["prompt_hash"] == keyed(keys, messages, b"m", b"")


def test_show_finds_a_record_by_its_trace_id(sidecar, upstream, keys):
    answer = sidecar.ask(post(BODY))
    sidecar.record(answer.trace_id)
    arguments = ("--trace-id", answer.trace_id, "--auditor-key", keys / "auditor.json", "--json")
    done = tongguan("audit", "show", sidecar.audit_dir, *arguments)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["record"]["trace_id"] == answer.trace_id
    assert shown["mac"] == "ok"


def test_refused_requests_are_counted_by_reason(sidecar, upstream):
    with sidecar.client() as client:
        client.send(b"GET / HTTP/1.1\r\nBad Name: 1\r\n\r\n").answer()
    with Client(sidecar.sealed) as client:
        client.send(post(b"{}")).answer()

    def counted():
        counts = [r["counts"] for r in sidecar.records() if r["kind"] == "rejected"]
        names = {name for row in counts for name in row}
        return {"invalid_request", "bad_carrier"} <= names

    assert until(counted, "the rejected record")


def test_running_chain_verifies_and_nobody_elses_key_does(sidecar, upstream, keys, tmp_path):
    for _ in range(20):
        sidecar.ask(post(BODY))
    code, verdict, result = verify(sidecar.audit_dir, keys)
    assert (code, verdict) == (0, "ok"), result["findings"]
    assert result["mac_checked"] is True
    other = new_keys(tmp_path / "other")
    assert verify(sidecar.audit_dir, other)[1] != "ok"
    done = tongguan("audit", "verify", sidecar.audit_dir, "--json")
    assert json.loads(done.stdout)["verdict"] == "ok_public"


def test_nothing_secret_is_logged_or_recorded(sidecar, upstream, keys):
    sidecar.ask(post(BODY, b"Authorization: Bearer very-secret-credential"))
    channel = Channel(keys / "client.json")
    sealed = channel.seal(BODY)
    with Client(sidecar.sealed) as client:
        client.send(sealed.request()).answer()
        client.send(sealed.request()).answer()  # a replay is logged
    sidecar.ask(post(BODY + b"}", b"Authorization: Bearer very-secret-credential\x00"))
    answer = sidecar.ask(post(BODY))
    sidecar.record(answer.trace_id)
    written = sidecar.log.encode() + b"".join(
        file.read_bytes() for file in sidecar.audit_dir.rglob("*") if file.is_file()
    )
    assert b"DEBUG" in written
    assert SECRET.encode() not in written
    assert b"very-secret-credential" not in written
    document = json.loads((keys / "sidecar.json").read_text())
    secrets = [key["root"] for key in document["envelope_keys"]]
    secrets += [seed["seed"] for seed in document["chain_seeds"]]
    secrets += document["prompt_keys"].values()
    for secret in secrets:
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert secret.encode() not in written
        assert bytes.fromhex(secret) not in written


def test_one_changed_byte_is_named_with_class_and_number(tmp_path, upstream, keys):
    with Sidecar(tmp_path / "s", upstream.url, keys=keys) as sidecar:
        answers = [sidecar.ask(post(BODY)) for _ in range(5)]
        record = sidecar.record(answers[2].trace_id)
        sidecar.signal(signal.SIGTERM)
        assert sidecar.ended() == 0
        assert verify(sidecar.audit_dir, keys)[:2] == (0, "ok")
        (file,) = sidecar.audit_dir.glob("*/*.log")
        data = file.read_bytes()
        at = data.index(record["trace_id"].encode())
        changed = bytearray(data)
        changed[at + 1] ^= 1
        file.write_bytes(changed)
        code, verdict, result = verify(sidecar.audit_dir, keys)
        assert (code, verdict) == (EXIT["content_mismatch"], "content_mismatch")
        assert result["seq"] == record["seq"]
        done = tongguan("audit", "verify", sidecar.audit_dir, "--keys", keys / "auditor.json")
        assert "content_mismatch" in done.stdout
        assert f"seq {record['seq']}" in done.stdout


def test_removed_record_is_named(tmp_path, upstream, keys):
    with Sidecar(tmp_path / "s", upstream.url, keys=keys) as sidecar:
        for _ in range(5):
            sidecar.ask(post(BODY))
        sidecar.signal(signal.SIGTERM)
        assert sidecar.ended() == 0
        (file,) = sidecar.audit_dir.glob("*/*.log")
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[:2] + lines[3:]))
        code, verdict, result = verify(sidecar.audit_dir, keys)
        assert verdict in {"gap", "link_mismatch"}
        assert code != 0
        assert result["seq"] in {2, 3}


def load(sidecar, stop, counts):
    """Send requests until the sidecar is gone."""
    try:
        with sidecar.client() as client:
            while not stop.is_set():
                client.send(post(BODY)).answer()
                counts.append(1)
    except (OSError, EOFError):
        pass


def test_crash_under_load_is_declared_by_the_next_start(tmp_path, upstream, keys):
    upstream.answering(whole("x"))
    sidecar = Sidecar(tmp_path / "s", upstream.url, keys=keys)
    try:
        for crash in range(3):
            sidecar.start()
            counts, stop = [], threading.Event()
            threads = [threading.Thread(target=load, args=(sidecar, stop, counts)) for _ in "1234"]
            for thread in threads:
                thread.start()
            until(lambda n=counts, c=crash: len(n) > 400 + 37 * c, "some load")
            sidecar.kill()
            stop.set()
            for thread in threads:
                thread.join()
            code, verdict, result = verify(sidecar.audit_dir, keys)
            classes = {finding["class"] for finding in result["findings"]}
            if verdict == "half_line":
                assert "truncated" in classes
            else:
                assert verdict == "truncated", result["findings"]
            assert code == EXIT[verdict]
            assert classes <= {"truncated", "half_line"}
            assert sum(b'"kind":"request"' in line for line in sidecar.lines()) > 50
        sidecar.start()
        sidecar.ask(post(BODY))
        code, verdict, result = verify(sidecar.audit_dir, keys)
        assert (code, verdict) == (0, "ok"), result["findings"]
        recovered = [r for r in sidecar.records() if r["kind"] == "recovered"]
        assert len(recovered) == 3
        origins = {r["origin"] for r in sidecar.records()}
        assert {r["of_origin"] for r in recovered} < origins
        sidecar.signal(signal.SIGTERM)
        assert sidecar.ended() == 0
        assert verify(sidecar.audit_dir, keys)[:2] == (0, "ok")
    finally:
        sidecar.kill()


def test_trace_ids_are_unique_and_ordered_under_load(sidecar, upstream):
    ids = []

    def ask():
        with sidecar.client() as client:
            ids.extend(client.send(post(b"{}")).answer().trace_id for _ in range(50))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 200
    wanted = set(ids)
    until(lambda: wanted <= {r.get("trace_id") for r in sidecar.records()}, "all the records")
    written = [r["trace_id"] for r in sidecar.records() if r["kind"] == "request"]
    stamps = [int(i.split("-")[0]) for i in written if i in wanted]
    assert max(stamps) - min(stamps) < 20_000
    assert verify(sidecar.audit_dir, sidecar.keys)[:2] == (0, "ok")


def test_hostile_strings_never_make_a_record_unwritable(sidecar, upstream, keys):
    bodies = [
        json.dumps({"model": "m" * 5000 + "\u0000\u5de7" * 200, "messages": []}).encode(),
        b'{"model":"\\ud800\\u0000\\n\\t\\"","messages":[]}',
        b'{"model":5,"messages":"x"}',
        b'{"model":"m","messages":[],"temperature":1e999999}',
        b'{"model":"m","messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model":"\xff","messages":[]}',
    ]
    usage = (
        b'{"usage":{"prompt_tokens":1e400,"completion_tokens":-5,"total_tokens":"x"},"choices":[]}'
    )
    upstream.answering(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(usage), usage)
    )
    for body in bodies:
        answer = sidecar.ask(post(body, b"X-QoS-Class: \xff\xfe" + b"P" * 300))
        assert answer.status == 200
        assert sidecar.record(answer.trace_id)["outcome"] == "ok"
    assert verify(sidecar.audit_dir, keys)[:2] == (0, "ok")


@pytest.mark.parametrize("policy", ["block", "degrade"])
def test_full_disk_blocks_or_degrades_as_policy_says(tmp_path, upstream, keys, policy):
    sidecar = Sidecar(
        tmp_path / "s", upstream.url, keys=keys, file_bytes=20_000, AUDIT_ON_FAILURE=policy
    )
    with sidecar:
        answers = [sidecar.ask(post(BODY)) for _ in range(60)]
        until(lambda: sidecar.metric("tongguan_proxy_audit_available") == 0, "the failure")
        answers.append(sidecar.ask(post(BODY)))
        ready = sidecar.admin_ask("GET", "/readyz")
        if policy == "block":
            assert (answers[-1].status, answers[-1].error()) == (503, "audit_unavailable")
            assert ready.status == 503
            assert b"audit_unavailable" in ready.body
        else:
            assert {answer.status for answer in answers} == {200}
            assert b"audit_degraded" in ready.body
        assert sidecar.metric("tongguan_proxy_audit_failures_total") >= 1
        _, verdict, result = verify(sidecar.audit_dir, keys)
        assert verdict == "ok", result["findings"]
        assert sidecar.log.count("audit records cannot be written") == 1
        sidecar.signal(signal.SIGTERM)
        assert sidecar.ended() == 1
        assert "could not be written before the end" in sidecar.log
