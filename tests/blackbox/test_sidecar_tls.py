"""The sealed door behind TLS by RFC 8998, met by a client that is another process."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import sys
import time

import pytest

from proxy.config import Tls
from tests.blackbox.channel import BOTH
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Sidecar,
    Upstream,
    chunk,
    ok,
    until,
)
from tests.blackbox.node import environment

pytest.importorskip("OpenSSL", reason="capability: pyOpenSSL")
from proxy.tls_context import TlsError, load

OPENSSL = shutil.which("openssl") or ""
CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'
SM2_ID = "distid:1234567812345678"
HANDSHAKES = "tongguan_proxy_tls_handshakes_total"


def openssl(*arguments):
    return subprocess.run([OPENSSL, *map(str, arguments)], capture_output=True, check=False)


def has_sm2():
    return bool(OPENSSL) and b"SM2" in openssl("ecparam", "-list_curves").stdout


pytestmark = pytest.mark.skipif(not has_sm2(), reason="capability: the openssl program with SM2")


class Authority:
    """A certificate authority of SM2 in a folder; `issue` gives (certificate, key)."""

    def __init__(self, folder, name="ca"):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.key, self.certificate = folder / f"{name}.key", folder / f"{name}.pem"
        openssl("ecparam", "-genkey", "-name", "SM2", "-noout", "-out", self.key)
        made = openssl(
            *("req", "-x509", "-new", "-key", self.key, "-sm3", "-sigopt", SM2_ID, "-days", 30),
            *("-subj", f"/CN={name}", "-out", self.certificate),
        )
        assert made.returncode == 0, made.stderr

    def issue(self, name, days=30):
        key, certificate, asked = (self.folder / f"{name}.{end}" for end in ("key", "pem", "csr"))
        openssl("ecparam", "-genkey", "-name", "SM2", "-noout", "-out", key)
        key.chmod(0o600)
        signed = ("-sm3", "-sigopt", SM2_ID)
        openssl("req", "-new", "-key", key, *signed, "-subj", f"/CN={name}", "-out", asked)
        made = openssl(
            *("x509", "-req", "-in", asked, "-CA", self.certificate, "-CAkey", self.key),
            *(*signed, "-vfyopt", SM2_ID, "-days", days, "-out", certificate),
        )
        assert made.returncode == 0, made.stderr
        return certificate, key


class Peer:
    """The other process; `client()` is a connection through it."""

    def __init__(self, sidecar, ca, *pair):
        command = [sys.executable, "-m", "tests.blackbox.tls_peer", sidecar.sealed, ca, *pair]
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, env=environment()
        )
        self.port = self.line()["port"]

    def line(self):
        return json.loads(self.process.stdout.readline())

    def client(self):
        return Client(self.port)

    def ask(self, data):
        with self.client() as client:
            return client.send(data).answer()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def upstream():
    with Upstream() as upstream:
        yield upstream.answering(ok)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


def door(folder, upstream, keys, pair, **options):
    certificate, key = pair
    return Sidecar(
        folder, upstream.url, keys=keys, TLS_CERTIFICATE=certificate, TLS_KEY=key, **options
    )


@pytest.fixture(scope="module")
def ends(tmp_path_factory, upstream, keys, authority):
    folder = tmp_path_factory.mktemp("tls")
    pair = authority.issue("sidecar.test")
    with (
        door(folder, upstream, keys, pair, TLS_HANDSHAKE_S=1) as sidecar,
        Peer(sidecar, authority.certificate) as peer,
    ):
        yield sidecar, peer


def ended(sidecar, outcome):
    return sidecar.metric(HANDSHAKES, outcome=outcome)


def test_an_envelope_goes_through_tls_of_rfc_8998(ends, upstream, channel):
    sidecar, peer = ends
    sealed = channel.seal(CHAT)
    assert sealed.open(peer.ask(sealed.request())) == (200, "application/json", b"{}")
    assert upstream.last().body() == CHAT
    assert peer.line() == {
        "cipher": "TLS_SM4_GCM_SM3",
        "group": "curveSM2",
        "version": "TLSv1.3",
        "peer": "sidecar.test",
    }
    assert peer.line() == {"end": "clean"}
    assert ended(sidecar, "ok") == 1
    month = sidecar.metric("tongguan_proxy_tls_certificate_expiry_timestamp_seconds")
    assert 28 * 86400 < month - time.time() < 31 * 86400


def test_requests_follow_one_another_on_a_connection(ends, upstream, channel):
    _, peer = ends
    upstream.answering(ok)
    sealed = [channel.seal(CHAT, stream=bool(i % 2)) for i in range(6)]
    with peer.client() as client:
        client.send(b"".join(s.request() for s in sealed[:3]))
        for one in sealed[:3]:
            assert one.open(client.answer())[0] == 200
        for one in sealed[3:]:
            client.send(one.request())
            assert one.open(client.answer())[0] == 200


def test_large_bodies_go_both_ways_and_wait_for_a_slow_reader(ends, upstream, channel):
    sidecar, peer = ends
    size = 6_000_000
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % size
    upstream.answering(lambda seen: seen.reply(head, b"y" * size))
    sealed = channel.seal(b"x" * 3_000_000, kind="text/plain", stream=True)
    with peer.client() as client:
        client.send(sealed.request())
        client.take_until(b"\r\n\r\n")
        client.buffer = b""
        time.sleep(0.3)
        assert sidecar.resident_bytes() < 400 << 20
    upstream.answering(lambda seen: seen.reply(head, b"y" * size))
    again = channel.seal(b"x" * 3_000_000, kind="text/plain", stream=True)
    assert again.open(peer.ask(again.request())) == (200, "text/plain", b"y" * size)
    assert upstream.last().body() == b"x" * 3_000_000


def test_events_come_as_they_are_made(ends, upstream, channel):
    _, peer = ends
    seen_first = []

    def script(seen):
        seen.reply(SSE_HEAD, chunk(b"data: 1\n\n"))
        until(lambda: seen_first, "the first event")
        seen.wire.send(chunk(b"data: 2\n\n"), LAST_CHUNK)

    upstream.answering(script)
    sealed = channel.seal(CHAT)
    with peer.client() as client:
        client.send(sealed.request(accept=BOTH))
        opener = sealed.opener(client.head())
        released = b""
        while b"data: 2" not in released:
            size = int(client.line(), 16)
            released += b"".join(opener.feed(client.take(size + 2)[:-2]))
            seen_first.append(released)
    assert released.startswith(b"data: 1\n\ndata: 2")


def test_a_client_that_leaves_cancels_its_request(ends, upstream, channel):
    sidecar, peer = ends
    upstream.answering(
        lambda seen: seen.reply(SSE_HEAD, chunk(b"data: 1\n\n")) or seen.wire.ended()
    )
    with peer.client() as client:
        client.send(channel.seal(CHAT).request(accept=BOTH))
        client.head()
    assert sidecar.idle()


def test_whoever_speaks_something_else_gets_no_further(ends):
    sidecar, _ = ends
    failed = ended(sidecar, "failed")
    with Client(sidecar.sealed) as plain:
        plain.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        data, _ = plain.rest()
        assert b"HTTP" not in data
    other = ssl.create_default_context()
    other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", sidecar.sealed), 10) as sock,
        pytest.raises(ssl.SSLError),
    ):
        other.wrap_socket(sock)
    with Client(sidecar.sealed) as long:  # a record that never ends in sense
        long.send(b"\x16\x03\x01\xff\xff" + bytes(200_000))
        long.rest()
    until(lambda: ended(sidecar, "failed") == failed + 3, "three failures")
    assert sidecar.metric("tongguan_proxy_tls_handshakes_pending") == 0


def test_a_handshake_has_an_end(ends):
    sidecar, _ = ends
    late, left = ended(sidecar, "late"), ended(sidecar, "left")
    with Client(sidecar.sealed) as silent:
        silent.send(b"\x16\x03")
        begun = time.monotonic()
        assert 0.5 < silent.ended() - begun < 5
    assert ended(sidecar, "late") == late + 1
    assert sidecar.metric("tongguan_proxy_limit_hits_total", limit="tls.handshake_s") >= 1
    Client(sidecar.sealed).close()
    until(lambda: ended(sidecar, "left") == left + 1, "a client that left")


def test_one_peer_has_an_eighth_of_the_places(tmp_path, upstream, keys, authority, channel):
    pair = authority.issue("narrow.test")
    with (
        door(tmp_path / "s", upstream, keys, pair, TLS_HANDSHAKES=16) as sidecar,
        Peer(sidecar, authority.certificate) as peer,
    ):
        waiting = [Client(sidecar.sealed) for _ in range(2)]
        pending = "tongguan_proxy_tls_handshakes_pending"
        until(lambda: sidecar.metric(pending) == 2, "both wait")
        with Client(sidecar.sealed) as refused:
            refused.ended()
        assert ended(sidecar, "refused") == 1
        assert sidecar.metric("tongguan_proxy_limit_hits_total", limit="tls.handshakes") == 1
        with Client(sidecar.sealed, source="127.0.0.2"):
            until(lambda: sidecar.metric(pending) == 3, "another peer has its own")
        for client in waiting:
            client.close()
        until(lambda: sidecar.metric(pending) == 0, "all places back")
        sealed = channel.seal(CHAT)
        upstream.answering(ok)
        assert sealed.open(peer.ask(sealed.request()))[0] == 200


@pytest.mark.parametrize("clients", ["require", "allow"])
def test_clients_show_certificates(tmp_path, upstream, keys, authority, channel, clients):
    stranger = Authority(tmp_path / "strangers", "strangers").issue("stranger")
    mine = authority.issue("client-a")
    upstream.answering(ok)
    with door(
        tmp_path / "s",
        upstream,
        keys,
        authority.issue("mutual.test"),
        TLS_CLIENT_CA=authority.certificate,
        TLS_CLIENTS=clients,
    ) as sidecar:
        for pair, good in ((mine, True), ((), clients == "allow"), (stranger, False)):
            with Peer(sidecar, authority.certificate, *pair) as peer:
                sealed = channel.seal(CHAT)
                if good:
                    assert sealed.open(peer.ask(sealed.request()))[0] == 200
                    continue
                with pytest.raises((EOFError, ConnectionError)):
                    peer.ask(sealed.request())
        assert ended(sidecar, "ok") == (2 if clients == "allow" else 1)


def test_requests_right_behind_a_handshake_wait_for_its_end(
    tmp_path, upstream, keys, authority, channel
):
    """A client is done before we have verified it: more than a handshake may hold comes then."""
    upstream.answering(ok)
    pair = authority.issue("hurried.test")
    certificate = authority.issue("client-h")
    sealed = [channel.seal(b"x" * 900_000, kind="text/plain", stream=True) for _ in range(8)]
    with (
        door(tmp_path / "s", upstream, keys, pair, TLS_CLIENT_CA=authority.certificate) as sidecar,
        Peer(sidecar, authority.certificate, *certificate) as peer,
        contextlib.ExitStack() as stack,
    ):
        # Together: one thread does all their signatures.
        clients = [stack.enter_context(peer.client()) for _ in sealed]
        for client, one in zip(clients, sealed, strict=True):
            client.send(one.request())
        for client, one in zip(clients, sealed, strict=True):
            assert one.open(client.answer())[0] == 200
        assert ended(sidecar, "ok") == len(sealed)


def test_a_new_certificate_is_taken_and_a_broken_one_is_not(
    tmp_path, upstream, keys, authority, channel
):
    certificate, key = authority.issue("first.test")
    upstream.answering(ok)
    with (
        door(tmp_path / "s", upstream, keys, (certificate, key)) as sidecar,
        Peer(sidecar, authority.certificate) as peer,
    ):
        old = peer.client()
        assert peer.line()["peer"] == "first.test"
        fresh_certificate, fresh_key = authority.issue("second.test")
        certificate.write_bytes(fresh_certificate.read_bytes())
        key.write_bytes(fresh_key.read_bytes())
        until(lambda: sidecar.metric("tongguan_proxy_reload_total", result="ok") == 1, "a reload")
        sealed = channel.seal(CHAT)
        with peer.client() as client:
            assert peer.line()["peer"] == "second.test"
            assert sealed.open(client.send(sealed.request()).answer())[0] == 200
        key.write_bytes(b"no key")
        until(lambda: sidecar.metric("tongguan_proxy_reload_total", result="failed"), "a refusal")
        assert "tls.key" in sidecar.log
        sealed = channel.seal(CHAT)
        with old as client:
            assert sealed.open(client.send(sealed.request()).answer())[0] == 200


def test_what_cannot_serve_is_said_at_the_start(tmp_path, upstream, keys, authority):
    certificate, key = authority.issue("start.test")
    ordinary = tmp_path / "rsa.pem", tmp_path / "rsa.key"
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=rsa", "-days", 2),
        *("-out", ordinary[0], "-keyout", ordinary[1]),
    )
    ordinary[1].chmod(0o600)
    loose = tmp_path / "loose.key"
    loose.write_bytes(key.read_bytes())
    loose.chmod(0o644)
    other = authority.issue("other.test")[1]
    told = {
        (certificate, other): "tls.key: not the private key",
        ordinary: "it has to be of SM2",
        (certificate, tmp_path / "none"): "No such file",
        (key, key): "no certificate",
        (tmp_path / "none", key): "No such file",
    }
    for pair, text in told.items():
        row = Tls(certificate=str(pair[0]), key=str(pair[1]))
        with pytest.raises(TlsError, match=text):
            load(row)
    row = Tls(certificate=str(certificate), key=str(key), client_ca=str(key))
    with pytest.raises(TlsError, match="client_ca"):
        load(row)
    for i, (second, text) in enumerate(((loose, "chmod 600"), ("", "go together"))):
        sidecar = door(tmp_path / f"s{i}", upstream, keys, (certificate, second)).spawn()
        try:
            assert sidecar.ended() == 3
            assert text in sidecar.log
        finally:
            sidecar.kill()
