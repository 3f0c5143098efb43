"""What a hostile tester found once: unseen prompts, shares held for ever, promises not kept."""

import hmac
import json
import os
import struct
import threading
import time

import pytest

from tests.blackbox.channel import now_ms
from tests.blackbox.harness import (
    OK,
    Client,
    Sidecar,
    get,
    ok,
    post,
    until,
)

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
MIB = 1 << 20


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    folder = tmp_path_factory.mktemp("attacks")
    variables = {
        "TIMEOUTS_FIRST_BYTE_S": "0.6",
        "ENVELOPE_WINDOW_S": "2",
        "ENVELOPE_FENCE_S": "0",
        "ENVELOPE_UNVERIFIED_BYTES": str(8 * MIB),
    }
    with Sidecar(folder, backend.url, keys=keys, **variables) as sidecar:
        yield sidecar


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CHAT, (b"Content-Type: text/plain",)),
        (CHAT, ()),
        (CHAT[:-1] + b',"messages":[]}', (b"Content-Type: application/json",)),
        (CHAT[:-1] + b',"user":"\xff"}', (b"Content-Type: application/json",)),
    ],
    ids=["text", "no type", "twice", "not UTF-8"],
)
def test_no_body_goes_on_without_a_hash_in_its_record(sidecar, upstream, keys, body, fields):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(body)
    answer = sidecar.ask(head + b"".join(f + b"\r\n" for f in fields) + b"\r\n" + body, "POST")
    record = sidecar.record(answer.trace_id)
    if "prompt_hash" in record:
        assert body == CHAT
    else:
        key = bytes.fromhex(
            json.loads((keys / "auditor.json").read_text())["prompt_keys"]["default"]
        )
        assert record["body_hash"] == hmac.new(key, body, "sha256").hexdigest()


def test_a_connection_that_was_said_to_close_takes_no_second_request(sidecar, upstream):
    def early(seen):
        if b"second" in seen.line:
            seen.reply(OK)
            return
        seen.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        seen.body()
        seen.wire.send(b"67890")

    upstream.answering(early)
    size = 2 * MIB
    with sidecar.client() as client:
        head = b"POST /first HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size
        client.send(head, b"x" * (size - 10))
        assert client.head().get("Connection") == b"close"
        client.send(b"y" * 10, get(b"/second"))
        assert client.take(10) == b"1234567890"
        assert client.rest()[0] == b""
    assert not [seen for seen in upstream.seen if b"second" in seen.line]


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_bytes_behind_an_answer_without_body_are_not_its_body(sidecar, upstream, method):
    status = b"204 No Content" if method == b"GET" else b"200 OK"
    upstream.answering(
        lambda seen: seen.reply(b"HTTP/1.1 " + status + b"\r\nContent-Length: 5\r\n\r\nextra")
    )
    before = sidecar.metric("tongguan_proxy_pool_late_closes_total", pool="shared")
    with sidecar.client() as client:
        client.send(method + b" / HTTP/1.1\r\nHost: a\r\n\r\n")
        head = client.head()
        assert (b"Content-Length" in head.raw) == (method == b"HEAD")
        upstream.answering(ok)
        assert client.send(get()).answer().status == 200
    after = sidecar.metric("tongguan_proxy_pool_late_closes_total", pool="shared")
    assert after == before + 1


def silent(seen):
    del seen
    threading.Event().wait(2)


def test_an_upstream_that_does_not_read_is_not_blamed_on_the_client(sidecar, upstream):
    upstream.answering(silent)
    size = 24 * MIB
    with sidecar.client() as client:
        client.sock.settimeout(10)
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        left = size
        try:
            while left:
                left -= client.sock.send(b"x" * min(left, 65536))
        except OSError:
            pass
        answer = client.answer("POST")
    assert (answer.status, answer.error()) == (504, "upstream_timeout")


def forged(channel, size):
    header = b"SMX1" + bytes([channel.key.suite, 0, 0, 0]) + channel.key.kid
    header += struct.pack(">Q", now_ms()) + os.urandom(12) + struct.pack(">I", size - 40)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/x-sm4-envelope\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % size, header


def test_a_forged_body_gives_its_share_back_when_the_window_is_over(sidecar, upstream, channel):
    head, header = forged(channel, MIB)
    with Client(sidecar.sealed) as client:
        client.send(head, header, bytes(MIB - 1024))
        until(lambda: sidecar.metric("tongguan_proxy_unverified_bytes") > MIB // 2, "a share")
        began = time.monotonic()
        client.sock.settimeout(0.1)
        while not client.buffer:
            try:
                client.fill()
            except TimeoutError:
                client.send(b"\0")  # the attack is its slowness
            assert time.monotonic() - began < 6
        client.sock.settimeout(5)
        assert client.answer("POST").status == 400
    until(lambda: sidecar.metric("tongguan_proxy_unverified_bytes") == 0, "the share to be back")
    assert sidecar.metric("tongguan_proxy_envelope_failures_total", reason="stale") >= 1


def test_a_sealed_body_over_a_peers_share_is_too_large_and_not_busy(sidecar, upstream, channel):
    head, header = forged(channel, 2 * MIB)
    with Client(sidecar.sealed) as client:
        answer = client.send(head, header).answer("POST")
    assert (answer.status, answer.error()) == (413, "payload_too_large")


def test_names_with_underscores_do_not_pass_for_ours(sidecar, upstream):
    sidecar.ask(post(CHAT, b"X_Tenant_Id: other", b"X_QoS_Class: P0"), "POST")
    assert not [name for name in upstream.last().names if b"_" in name]
