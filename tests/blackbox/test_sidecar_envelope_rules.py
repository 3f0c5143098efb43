"""Sentences of docs/envelope.md that only a whole process shows: alarms, drains, rotation."""

import os
import time

import pytest

from proxy.keys.file import read
from proxy.sm4.envelope import MAC, SIGNATURE, Header, RequestPrelude, associated_data
from proxy.sm4.keyring import Keyring
from proxy.sm4.sealer import RequestSealer
from tests.blackbox.channel import BOTH, Channel, Sealed, ask, counted, now_ms
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Sidecar,
    chunk,
    new_keys,
    tongguan,
    until,
)

CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'
LIMIT = 64 << 10
# A sidecar whose wall clock is what a file says, so that a test can set it back.
SHIFTED = """
import runpy, sys, time
path = sys.argv.pop(1)
real = time.time_ns
def time_ns():
    with open(path) as file:
        return real() + int(file.read() or 0)
time.time_ns = time_ns
runpy.run_module("proxy", run_name="__main__")
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("keys"), "--sign", "ed25519")


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    with Sidecar(tmp_path_factory.mktemp("rules"), backend.url, keys=keys) as sidecar:
        yield sidecar


def alarms(sidecar, reason):
    return [line for line in sidecar.log.splitlines() if f"reason={reason} " in line]


# --- outer fields


@pytest.mark.parametrize(
    "line",
    [
        "Content-Type: application/x-sm4-envelope;a=b\r\nContent-Type: application/json",
        "Content-Type: application/x-sm4-envelope\r\nContent-Type: application/x-sm4-envelope",
        "Content-Type: ",
        "X-No-Type: 1",
    ],
)
def test_a_type_that_is_not_plainly_the_envelope_s_is_refused(sidecar, upstream, channel, line):
    request = channel.seal(CHAT).request()
    before = counted(sidecar, "bad_carrier")
    changed = request.replace(b"Content-Type: application/x-sm4-envelope", line.encode(), 1)
    assert ask(sidecar, changed).error() == "envelope_rejected"
    assert counted(sidecar, "bad_carrier") == before + 1
    assert upstream.seen == []


def test_a_tenant_that_is_told_twice_is_not_the_kid_s(sidecar, upstream, channel):
    sealed = channel.seal(CHAT)
    tenant = f"X-Tenant-Id: {channel.key.tenant}"
    assert sealed.open(ask(sidecar, sealed.request(tenant, "X-Tenant-Id: x")))[0] == 400
    sealed = channel.seal(CHAT)
    assert sealed.open(ask(sidecar, sealed.request(tenant)))[0] == 200
    assert len(upstream.seen) == 1


def test_a_delete_is_sealed_as_a_post_and_the_outer_path_says_nothing(sidecar, upstream, channel):
    sealed = channel.seal(method="DELETE", target="/v1/files/7")
    answer = ask(sidecar, sealed.request(path="/v1/other?x"))
    assert sealed.open(answer)[0] == 200
    assert upstream.last().line == b"DELETE /v1/files/7 HTTP/1.1"


# --- answers


def test_every_answer_has_a_fresh_n_repeats_its_request_and_names_no_model(
    sidecar, upstream, channel
):
    seen = set()
    for index in range(8):
        sealed = channel.seal(CHAT, mac=bool(index % 2))
        answer = ask(sidecar, sealed.request())
        header = answer.body[:40]
        assert header[4] == sealed.wire[4]
        assert header[8:16] == sealed.wire[8:16]
        assert header[5] == 4 | (sealed.wire[5] & 2)
        assert answer.get("X-Model-Id") is None
        seen |= {header[24:36], sealed.wire[24:36]}
    assert len(seen) == 16


def test_an_event_carrier_may_not_be_stored_or_changed(sidecar, upstream, channel):
    upstream.answering(lambda seen: seen.reply(SSE_HEAD, chunk(b"data: x\n\n"), LAST_CHUNK))
    sealed = channel.seal(CHAT)
    answer = ask(sidecar, sealed.request(accept=BOTH))
    assert answer.get("Content-Type") == b"text/event-stream"
    assert answer.get("Cache-Control") == b"no-store, no-transform"
    assert answer.get("X-Accel-Buffering") == b"no"
    assert sealed.open(answer) == (200, "text/event-stream", b"data: x\n\n")


def test_failures_of_steps_4_to_6_cannot_be_told_apart(sidecar, upstream, channel, tmp_path):
    derived = channel.ring.get(channel.key.kid)

    def by_hand(inner, flags=0, padded=None):
        padded = (inner + b"\x80").ljust(512, b"\0") if padded is None else padded
        size = len(padded) + 16
        head = Header(1, flags, channel.key.kid, now_ms(), os.urandom(12), size).encode()
        aad = associated_data(head, b"tiny", derived.audience)
        return head + derived.request.seal(head[24:36], padded, aad)

    good = channel.seal(CHAT)
    wires = {
        "bad_tag": good.wire[:-1] + bytes([good.wire[-1] ^ 1]),
        "bad_padding": by_hand(b"", padded=bytes(512)),
        "missing_mac": by_hand(b"short", MAC),
        "bad_mac": by_hand(bytes(100), MAC),
        "missing_signature": by_hand(b"short", SIGNATURE),
        "bad_signature": by_hand(bytes(100), SIGNATURE),
    }
    answers = set()
    for reason, wire in wires.items():
        before = counted(sidecar, reason)
        sealed = channel.seal(CHAT)
        sealed.wire = wire
        answer = ask(sidecar, sealed.request())
        assert counted(sidecar, reason) == before + 1, reason
        answers.add((answer.raw, answer.body))
    assert len(answers) == 1
    assert upstream.seen == []


def test_the_body_of_step_7_s_sealed_refusal_is_that_of_the_clear_one(sidecar, channel):
    bad = channel.seal(CHAT)
    clear = ask(sidecar, bad.request()[:-1] + bytes([bad.wire[-1] ^ 1]))
    sealed = channel.seal(CHAT, model="other")
    assert sealed.open(ask(sidecar, sealed.request())) == (400, "application/json", clear.body)


# --- what is still read after a refusal


@pytest.mark.parametrize("chunked", [False, True])
def test_after_a_refusal_no_more_than_64_kib_is_read(sidecar, channel, chunked):
    size = 4 << 20
    head = channel.seal(CHAT).head(length=size)
    if chunked:
        head = head.replace(b"Content-Length: %d" % size, b"Transfer-Encoding: chunked")
    bad = b"SMX2" + bytes(36)
    with Client(sidecar.sealed) as client:
        client.send(head, (b"%x\r\n" % size if chunked else b"") + bad)
        assert client.answer().error() == "envelope_rejected"
        sent = 0
        try:
            while sent < size - 64:
                client.sock.sendall(bytes(32 << 10))
                sent += 32 << 10
                time.sleep(0.002)
        except OSError:  # reset, or a broken pipe
            pass
        # What had not been read when it closed was in the kernel's buffers.
        assert sent < size - 64


def test_a_short_rest_is_read_so_that_the_refusal_arrives(sidecar, channel):
    with Client(sidecar.sealed) as client:
        client.send(channel.seal(CHAT).head(length=40 + LIMIT), b"SMX2" + bytes(36))
        client.send(bytes(LIMIT))
        answer = client.answer()
        assert answer.error() == "envelope_rejected"
        if answer.get("Connection") == b"close":  # it answered before it had read all
            assert client.rest() == (b"", True)


# --- alarms


def test_a_client_s_own_second_copy_is_counted_and_raises_no_alarm(
    tmp_path, backend, upstream, keys, channel
):
    with Sidecar(tmp_path / "own", backend.url, keys=keys) as sidecar:
        for stream in (False, True):
            sealed = channel.seal(CHAT, stream=stream)
            assert sealed.open(ask(sidecar, sealed.request()))[0] == 200
            for _ in range(3):
                assert ask(sidecar, sealed.request()).error() == "envelope_rejected"
        assert counted(sidecar, "replayed") == 6
        assert alarms(sidecar, "replayed") == []
        assert sidecar.metric("tongguan_proxy_alarms_total") == 0
        with Client(sidecar.sealed, source="127.0.0.2") as stranger:
            answer = stranger.send(sealed.request()).answer()
        assert answer.error() == "envelope_rejected"
        (line,) = alarms(sidecar, "replayed")
        assert "peer=127.0.0.2 count=1" in line


def test_one_reason_of_one_peer_is_one_line_a_minute(tmp_path, backend, upstream, keys, channel):
    with Sidecar(tmp_path / "one", backend.url, keys=keys) as sidecar:
        for _ in range(20):
            sealed = channel.seal(CHAT)
            bad = bytes([sealed.wire[-1] ^ 1])
            assert ask(sidecar, sealed.request()[:-1] + bad).status == 400
            ask(sidecar, sealed.request().replace(b"SMX1", b"SMX2"))
        assert counted(sidecar, "bad_magic") == 20
        assert len(alarms(sidecar, "bad_magic")) == 1
        assert len(alarms(sidecar, "bad_tag")) == 1
        assert sidecar.metric("tongguan_proxy_alarms_total") == 2


# --- the clock


def test_a_wall_clock_set_back_is_not_followed_and_raises_the_alarm(
    tmp_path, backend, upstream, keys, channel
):
    shift = tmp_path / "shift"
    shift.write_text("0")
    sidecar = Sidecar(tmp_path / "clock", backend.url, keys=keys)
    sidecar.command[1:3] = ["-c", SHIFTED, str(shift)]

    def move(seconds):
        whole = tmp_path / "next"
        whole.write_text(str(seconds * 10**9))
        whole.replace(shift)

    with sidecar:
        until(lambda: sidecar.admin_ask("GET", "/readyz").status == 200, "ready")
        move(-20)
        until(lambda: b"clock_behind_ms" in sidecar.admin_ask("GET", "/readyz").body, "unready")
        until(lambda: "ms behind: not ready" in sidecar.log, "the alarm")
        assert sidecar.metric("tongguan_proxy_alarms_total") == 1
        sealed = channel.seal(CHAT)  # in time by the clock that did not go back
        assert sealed.open(ask(sidecar, sealed.request()))[0] == 200
        move(30)
        until(lambda: sidecar.admin_ask("GET", "/readyz").status == 200, "ready again")
        early = channel.seal(CHAT, time_ms=now_ms() + 34_000)  # a forward step is taken at once
        assert early.open(ask(sidecar, early.request()))[0] == 200


# --- rotation


def sealed_with(derived):
    sealer = RequestSealer(derived, model="tiny", mac=False, nonce=os.urandom(12), now_ms=now_ms())
    prelude = RequestPrelude("POST", "/v1/chat/completions", "application/json", "")
    return Sealed(sealer.single(prelude, CHAT), sealer, "tiny")


def test_a_rotation_is_taken_by_a_sidecar_that_runs(tmp_path, backend, upstream):
    folder = new_keys(tmp_path / "keys", "--days", "1")
    with Sidecar(tmp_path / "rotated", backend.url, keys=folder) as sidecar:
        assert sidecar.metric("tongguan_proxy_live_kids") == 1
        old = Channel(folder / "client.json")
        assert tongguan("keys", "rotate", "--dir", folder).returncode == 0
        until(lambda: "reloaded" in sidecar.log, "the new file")
        sealed = old.seal(CHAT)
        assert sealed.open(ask(sidecar, sealed.request()))[0] == 200
        fresh = Channel(folder / "client.json")
        fresh.key = read(folder / "client.json").envelope_keys[1]
        fresh.ring = Keyring([fresh.key])
        # It is known already, and its times begin in ten minutes: sealed now it is too early.
        before = counted(sidecar, "kid_expired")
        early = sealed_with(fresh.ring.get(fresh.key.kid))
        assert ask(sidecar, early.request()).error() == "envelope_rejected"
        assert counted(sidecar, "kid_expired") == before + 1
        assert counted(sidecar, "unknown_kid") == 0
