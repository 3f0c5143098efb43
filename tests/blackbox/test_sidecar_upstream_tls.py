"""TLS to the upstreams: who is believed, what is spoken, how a body ends."""

import datetime as dt
import ipaddress
import socket
import ssl
import threading
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.blackbox.harness import (
    OK,
    SSE_HEAD,
    Sidecar,
    Upstream,
    Wire,
    chunk,
    get,
    post,
)
from tests.blackbox.node import free_base
from tests.blackbox.pooled import CHAT

# --- TLS


class Authority:
    """A certificate authority of one test run."""

    def __init__(self, folder, name):
        self.folder = folder
        folder.mkdir()
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / "ca.pem"
        made = self._sign(self.name, self.key.public_key(), ca=True)
        self.file.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def _sign(self, subject, public, *, ca, names=(), days=1):
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=9))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def context(self, *names, days=1):
        """Return a server's context with a certificate for these names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        made = self._sign(subject, key.public_key(), ca=False, names=names, days=days)
        file = self.folder / f"{made.serial_number}.pem"
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, *plain)
            + made.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context


LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
LOCALHOST = x509.DNSName("localhost")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca") / "ca", "authority")


class TlsWire(Wire):
    """A TLS connection that can end with or without saying so."""

    def end(self):
        """End it by close_notify, then FIN."""
        self.sock.unwrap().close()

    def cut(self):
        """End it by FIN alone."""
        raw = socket.socket(fileno=self.sock.detach())
        raw.shutdown(socket.SHUT_RDWR)
        raw.close()


class TlsUpstream(Upstream):
    def __init__(self, context, host="127.0.0.1"):
        self.context = context
        self.server_names = []
        self.refusals = []
        context.sni_callback = lambda _sock, name, _context: self.server_names.append(name)
        super().__init__()
        self.url = self.url.replace("http:", "https:").replace("127.0.0.1", host)

    def _accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._shake, args=(sock,), daemon=True).start()

    def _shake(self, sock):
        try:
            wire = TlsWire(self.context.wrap_socket(sock, server_side=True))
        except OSError as problem:
            self.refusals.append(problem)
            sock.close()
            return
        self.wires.append(wire)
        self._serve(wire)


def verified(authority):
    return {"POOLS_SHARED_CA_FILE": str(authority.file)}


def over_tls(folder, upstream, authority, **more):
    """A sidecar whose shared pool speaks TLS; the others are plain and unused."""
    plain = f"http://127.0.0.1:{free_base()}"
    more = {"POOLS_SHARED_ENDPOINTS": upstream.url} | verified(authority) | more
    return Sidecar(folder, plain, **more)


def test_requests_over_tls_on_one_connection(tmp_path, authority):
    with (
        TlsUpstream(authority.context(LOOPBACK, LOCALHOST), "localhost") as upstream,
        over_tls(tmp_path / "s", upstream, authority) as sidecar,
    ):
        upstream.answering(OK)
        for _ in range(3):
            answer = sidecar.ask(post(CHAT))
            assert (answer.status, answer.body) == (200, b"{}")
        time.sleep(0.25)  # longer than a tick: it is asked for its end, and has none
        assert sidecar.ask(post(CHAT)).status == 200
        assert len(upstream.wires) == 1
        assert upstream.server_names == ["localhost"]
        assert upstream.wires[0].sock.version() == "TLSv1.3"
        assert [seen.payload for seen in upstream.seen] == [CHAT] * 4
        assert upstream.problems == []


def test_a_large_body_and_a_stream_over_tls(tmp_path, authority):
    body = b"x" * (5 << 20)
    events = [b"data: %d %b\n\n" % (number, b"y" * 999) for number in range(300)]

    def script(seen):
        seen.reply(SSE_HEAD, *(chunk(event) for event in events), b"0\r\n\r\n")

    with (
        TlsUpstream(authority.context(LOOPBACK)) as upstream,
        over_tls(tmp_path / "s", upstream, authority) as sidecar,
    ):
        upstream.answering(script)
        for size in (5 << 20, 1 << 19):  # streamed through, and collected
            assert sidecar.ask(post(body[:size])).body == b"".join(events)
            assert upstream.last().payload is not None
        assert [len(seen.payload) for seen in upstream.seen] == [5 << 20, 1 << 19]


def test_tls_12_is_spoken(tmp_path, authority):
    context = authority.context(LOOPBACK)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        TlsUpstream(context) as upstream,
        over_tls(tmp_path / "s", upstream, authority) as sidecar,
    ):
        assert sidecar.ask(post(CHAT)).status == 200
        assert upstream.wires[0].sock.version() == "TLSv1.2"


@pytest.mark.parametrize("why", ["another authority", "another name", "expired", "no TLS at all"])
def test_what_is_not_verified_is_not_asked(tmp_path, authority, why):
    trusted, context = authority, authority.context(LOOPBACK)
    if why == "another authority":
        trusted = Authority(tmp_path / "other", "other")
    elif why == "another name":
        context = authority.context(LOCALHOST, x509.DNSName("127.0.0.1"))
    elif why == "expired":
        context = authority.context(LOOPBACK, days=-1)
    upstream = Upstream() if why == "no TLS at all" else TlsUpstream(context)
    upstream.url = upstream.url.replace("http:", "https:")
    more = {"TIMEOUTS_CONNECT_S": 0.3} if why == "no TLS at all" else {}
    with upstream, over_tls(tmp_path / "s", upstream, trusted, **more) as sidecar:
        answer = sidecar.ask(post(CHAT, b"Authorization: Bearer secret"))
        assert (answer.status, answer.error()) == (503, "no_upstream")
        assert upstream.seen == []
        assert f"no connection to {upstream.url}: " in sidecar.log
        assert "secret" not in sidecar.log


def test_a_private_authority_is_not_in_the_systems_trust(tmp_path, authority):
    with (
        TlsUpstream(authority.context(LOOPBACK)) as upstream,
        over_tls(tmp_path / "s", upstream, authority, POOLS_SHARED_CA_FILE="") as sidecar,
    ):
        assert sidecar.ask(post(CHAT)).status == 503
        assert upstream.seen == []


@pytest.mark.parametrize("content", [None, "", "no certificate\n"])
def test_a_ca_file_that_cannot_be_used_stops_the_start_and_is_named(tmp_path, content):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    more = {"POOLS_SHARED_CA_FILE": str(file)}
    sidecar = Sidecar(tmp_path / "s", "https://127.0.0.1:1", **more).spawn()
    try:
        assert sidecar.ended() == 3
    finally:
        sidecar.kill()
    assert "pools.shared.ca_file: " in sidecar.log


BY_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nwhole?"


def test_a_body_that_ends_with_a_tls_connection_is_whole_only_if_that_was_said(tmp_path, authority):
    with (
        TlsUpstream(authority.context(LOOPBACK)) as upstream,
        over_tls(tmp_path / "s", upstream, authority) as sidecar,
    ):
        upstream.answering(lambda seen: (seen.reply(BY_CLOSE), seen.wire.end()))
        assert sidecar.ask(get()).body == b"whole?"
        upstream.answering(lambda seen: (seen.reply(BY_CLOSE), seen.wire.cut()))
        with sidecar.client() as client:
            client.send(get())
            assert client.head().get("Transfer-Encoding") == b"chunked"
            rest, _ = client.rest()
            assert b"whole?" in rest
            assert not rest.endswith(b"0\r\n\r\n")
