"""Pools: which endpoint, which pool, over which connection; TLS; what is known of endpoints."""

import contextlib
import datetime as dt
import ipaddress
import json
import re
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
    new_keys,
    post,
    until,
)
from tests.blackbox.node import free_base

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
P0 = b"X-QoS-Class: P0"
UNAVAILABLE = b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno"


@pytest.fixture
def two():
    with Upstream() as first, Upstream() as second:
        yield first.answering(OK), second.answering(OK)
        assert first.problems == second.problems == []


def both(two):
    return ",".join(upstream.url for upstream in two)


def asked(two):
    return [len(upstream.seen) for upstream in two]


def state(sidecar, upstream, pool="shared"):
    """Return the endpoint's state as the metrics say it."""
    text = sidecar.admin_ask("GET", "/metrics").body.decode()
    rows = re.findall(r"(?m)^tongguan_proxy_endpoint_state\{(.*)\} (\S+)$", text)
    labels = f'endpoint="{upstream.url}",pool="{pool}",state='
    (name,) = (row for row, value in rows if row.startswith(labels) and float(value))
    return name.removeprefix(labels).strip('"')


def notes(sidecar):
    return json.loads(sidecar.admin_ask("GET", "/readyz").body)["notes"]


def holding(release):
    """Return a script that answers when `release` is set."""

    def script(seen):
        seen.body()
        assert release.wait(20)
        seen.wire.send(OK)

    return script


# --- the least outstanding cost


def test_equals_take_turns(tmp_path, two):
    with Sidecar(tmp_path / "s", both(two)) as sidecar:
        assert {sidecar.ask(post(CHAT)).status for _ in range(10)} == {200}
    assert asked(two) == [5, 5]


def test_the_endpoint_that_holds_less_is_asked(tmp_path, two):
    release = threading.Event()
    first, second = two
    first.answering(holding(release))
    second.answering(holding(release))
    with Sidecar(tmp_path / "s", both(two)) as sidecar:
        held = [sidecar.client().send(post(CHAT))]
        until(lambda: sum(asked(two)) == 1, "the first request")
        busy, free = (first, second) if first.seen else (second, first)
        free.answering(OK)
        assert [sidecar.ask(post(CHAT)).status for _ in range(4)] == [200] * 4
        assert (len(busy.seen), len(free.seen)) == (1, 4)
        outstanding = "tongguan_proxy_endpoint_outstanding"
        assert sidecar.metric(outstanding, pool="shared", endpoint=busy.url) >= 1
        release.set()
        assert [client.answer().status for client in held] == [200]
        assert sidecar.metric(outstanding) == 0
        for client in held:
            client.close()


# --- endpoints that fail


def eject(**more):
    return {"POOLS_SHARED_EJECT_ERRORS": 3, "POOLS_SHARED_EJECT_S": 0.5} | more


def until_ejected(sidecar, upstream):
    until(
        lambda: [sidecar.ask(post(CHAT))] and state(sidecar, upstream) == "ejected",
        "the ejection",
    )


@pytest.mark.parametrize(
    "failure",
    [
        b"HTTP/1.1 504 No\r\nContent-Length: 0\r\n\r\n",
        b"nonsense\r\n\r\n",
        lambda seen: (seen.body(), seen.wire.reset()),
        lambda seen: (seen.reply(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
                      seen.wire.close()),
    ],
    ids=["504", "nonsense", "reset", "cut"],
)  # fmt: skip
def test_one_that_fails_in_a_row_is_left_alone(tmp_path, two, failure):
    bad, good = two
    bad.answering(failure)
    with Sidecar(tmp_path / "s", both(two), **eject(POOLS_SHARED_EJECT_S=60)) as sidecar:
        for _ in range(6):
            with sidecar.client() as client:
                client.send(post(CHAT))
                with contextlib.suppress(EOFError):  # an answer that was cut
                    client.answer()
        assert state(sidecar, bad) == "ejected"
        assert asked(two) == [3, 3]
        assert f"endpoint_ejected: {bad.url} of shared" in notes(sidecar)
        assert [sidecar.ask(post(CHAT)).status for _ in range(5)] == [200] * 5
        assert asked(two) == [3, 8]
        assert sidecar.metric("tongguan_proxy_pool_ejections_total", reason="errors") == 1
        assert state(sidecar, good) == "healthy"
        assert sidecar.admin_ask("GET", "/readyz").status == 200


def test_an_upstreams_own_refusals_are_answers(tmp_path, two):
    one, _ = two
    with Sidecar(tmp_path / "s", both(two), **eject()) as sidecar:
        for status in (b"400", b"404", b"429", b"500", b"501", b"505"):
            one.answering(b"HTTP/1.1 " + status + b" No\r\nContent-Length: 0\r\n\r\n")
            answers = [sidecar.ask(post(CHAT)).status for _ in range(8)]
            assert answers.count(int(status)) == 4
            assert state(sidecar, one) == "healthy"


def on_idle_connections(count, sidecar, upstream):
    """Ask so often at once that so many connections are idle afterwards."""
    release = threading.Event()
    upstream.answering(holding(release))
    clients = [sidecar.client().send(post(CHAT)) for _ in range(count)]
    until(lambda: len(upstream.seen) == count, "the requests")
    release.set()
    for client in clients:
        assert client.answer().status == 200
        client.close()


def test_idle_connections_that_end_are_no_errors(tmp_path, two):
    one, _ = two
    with Sidecar(tmp_path / "s", one.url, **eject()) as sidecar:
        on_idle_connections(5, sidecar, one)
        one.answering(lambda seen: (seen.body(), seen.wire.close()))
        assert [sidecar.ask(post(CHAT)).status for _ in range(5)] == [502] * 5
        assert state(sidecar, one) == "healthy"
        assert [sidecar.ask(post(CHAT)).status for _ in range(3)] == [502] * 3  # made for them
        assert state(sidecar, one) == "suspect"


def test_a_second_attempt_takes_no_idle_connection(tmp_path, two):
    one, _ = two
    toml = "[pools.shared]\nrepeatable = true\n"
    with Sidecar(tmp_path / "s", one.url, toml=toml) as sidecar:
        on_idle_connections(3, sidecar, one)
        idle = list(one.wires)
        one.answering(
            lambda seen: (seen.body(), seen.wire.close()) if seen.wire in idle else seen.reply(OK)
        )
        assert sidecar.ask(post(CHAT)).status == 200
        assert [seen.wire in idle for seen in one.seen] == [True, False]


def test_one_that_comes_back_is_tried_by_one_request_and_used_again(tmp_path, two):
    bad, _ = two
    bad.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", both(two), **eject()) as sidecar:
        until_ejected(sidecar, bad)
        release = threading.Event()
        bad.answering(holding(release))
        with sidecar.client() as client:
            time.sleep(0.55)
            client.send(post(CHAT))
            until(lambda: bad.seen, "a request that tries it")
            assert state(sidecar, bad) == "half_open"
            assert {sidecar.ask(post(CHAT)).status for _ in range(6)} == {200}
            assert len(bad.seen) == 1
            release.set()
            assert client.answer().status == 200
        assert state(sidecar, bad) == "healthy"
        assert sidecar.metric("tongguan_proxy_pool_probes_total", result="passed") == 1
        bad.answering(OK)
        for _ in range(6):
            sidecar.ask(post(CHAT))
        assert len(bad.seen) == 3


def test_a_stream_closes_it_by_its_head(tmp_path, two):
    bad, _ = two
    bad.answering(UNAVAILABLE)
    going = threading.Event()

    def stream(seen):
        seen.reply(SSE_HEAD, chunk(b"data: 1\n\n"))
        going.wait(20)
        seen.wire.send(b"0\r\n\r\n")

    with Sidecar(tmp_path / "s", both(two), **eject()) as sidecar:
        until_ejected(sidecar, bad)
        bad.answering(stream)
        with sidecar.client() as client:
            while client.send(post(CHAT)).head().get("Content-Length"):
                assert client.take(2) == b"{}"
            assert state(sidecar, bad) == "healthy"
            going.set()


def test_one_that_fails_again_is_left_alone_for_longer(tmp_path, two):
    bad, _ = two
    bad.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", both(two), **eject(POOLS_SHARED_EJECT_S=0.3)) as sidecar:
        until_ejected(sidecar, bad)
        failed = lambda: sidecar.metric("tongguan_proxy_pool_probes_total", result="failed")  # noqa: E731
        times = [time.monotonic()]
        for count in (1, 2):
            until(lambda n=count: [sidecar.ask(post(CHAT))] and failed() >= n, "a failed try")
            times.append(time.monotonic())
        assert times[1] - times[0] > 0.25
        assert times[2] - times[1] > 0.55
        assert sidecar.metric("tongguan_proxy_pool_ejections_total", reason="errors") == 1


def test_a_client_that_leaves_says_nothing_of_the_endpoint_it_tried(tmp_path, two):
    bad, _ = two
    bad.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", both(two), **eject(POOLS_SHARED_EJECT_S=0.2)) as sidecar:
        until_ejected(sidecar, bad)
        bad.answering(lambda seen: (seen.body(), seen.wire.ended()))
        time.sleep(0.2)
        with sidecar.client() as client:
            client.send(post(CHAT))
            until(lambda: bad.seen, "a request that tries it")
        until(lambda: sidecar.metric("tongguan_proxy_pool_inflight") == 0, "its end")
        assert state(sidecar, bad) == "half_open"
        bad.answering(OK)
        assert sidecar.ask(post(CHAT)).status == 200
        assert state(sidecar, bad) == "healthy"


def test_the_last_healthy_one_is_suspect_and_is_still_asked(tmp_path, two):
    for upstream in two:
        upstream.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", both(two), **eject(POOLS_SHARED_EJECT_S=60)) as sidecar:
        assert {sidecar.ask(post(CHAT)).status for _ in range(12)} == {503}
        states = {upstream: state(sidecar, upstream) for upstream in two}
        assert sorted(states.values()) == ["ejected", "suspect"]
        (last,) = (upstream for upstream, name in states.items() if name == "suspect")
        last.answering(OK)
        assert sidecar.ask(post(CHAT)).status == 200
        assert state(sidecar, last) == "healthy"


def test_the_only_one_is_suspect_in_the_notes_and_nowhere_else(tmp_path, two):
    only, _ = two
    only.answering(UNAVAILABLE)
    with Sidecar(tmp_path / "s", only.url, **eject()) as sidecar:
        for count in range(1, 8):
            assert sidecar.ask(post(CHAT)).status == 503
            assert len(only.seen) == count
        assert f"endpoint_suspect: {only.url} of shared" in notes(sidecar)
        assert sidecar.admin_ask("GET", "/readyz").status == 200
        only.answering(OK)
        assert sidecar.ask(post(CHAT)).status == 200
        assert "endpoint_suspect" not in str(notes(sidecar))


def test_one_that_is_far_slower_than_the_other_is_left_alone(tmp_path, two):
    slow, _ = two

    def script(seen):
        seen.body()
        time.sleep(0.08)
        seen.wire.send(OK)

    slow.answering(script)
    with Sidecar(tmp_path / "s", both(two), POOLS_SHARED_EJECT_S=60) as sidecar:
        until(
            lambda: [sidecar.ask(post(CHAT))] and state(sidecar, slow) == "ejected",
            "the ejection",
        )
        assert sidecar.metric("tongguan_proxy_pool_ejections_total", reason="slow") == 1
        assert len(slow.seen) >= 20
        latency = sidecar.metric(
            "tongguan_proxy_endpoint_first_byte_seconds", pool="shared", endpoint=slow.url
        )
        assert 0.07 < latency < 1


# --- overflow


def pools(**pools):
    """Return TOML of pools: values as they are written there."""
    return "".join(
        f"[pools.{name}]\n" + "".join(f"{key} = {value}\n" for key, value in rows.items())
        for name, rows in pools.items()
    )


GRANTED = '[tenants.default]\nmax_class = "P0"\n'


def two_pools(two, tmp_path, *, overflow, **dedicated):
    """Return TOML: P0 goes to the first upstream, all else to the second."""
    secret = tmp_path / "secret"
    secret.write_text("Bearer shared\n")
    other = tmp_path / "other"
    other.write_text("Bearer dedicated\n")
    first, second = (json.dumps([upstream.url]) for upstream in two)
    return GRANTED + pools(
        dedicated={
            "endpoints": first,
            "overflow": str(overflow).lower(),
            "host": '"dedicated.test"',
            "authorization_file": json.dumps(str(other)),
            **dedicated,
        },
        shared={
            "endpoints": second,
            "host": '"shared.test"',
            "authorization_file": json.dumps(str(secret)),
        },
    )


class Pooled(Sidecar):
    """A sidecar whose pools are all in its file."""

    def __init__(self, folder, toml, **more):
        super().__init__(folder, "", toml=toml, **more)
        for pool in ("DEDICATED", "SHARED", "BEST_EFFORT"):
            del self.environ[f"TONGGUAN_POOLS_{pool}_ENDPOINTS"]


def test_without_overflow_p0_beyond_its_places_is_refused(tmp_path, two):
    release = threading.Event()
    two[0].answering(holding(release))
    toml = two_pools(two, tmp_path, overflow=False)
    with Pooled(tmp_path / "s", toml, QOS_P0_INFLIGHT=1) as sidecar, sidecar.client() as client:
        client.send(post(CHAT, P0))
        two[0].last()
        assert sidecar.ask(post(CHAT, P0)).error() == "queue_full"
        release.set()
        assert client.answer().get("X-QoS-Pool") == b"dedicated"
    assert asked(two) == [1, 0]


def test_p0_without_a_place_goes_to_the_shared_pool_as_one_of_its_own(tmp_path, two):
    release = threading.Event()
    two[0].answering(holding(release))
    keys = new_keys(tmp_path / "keys")
    toml = two_pools(two, tmp_path, overflow=True)
    with (
        Pooled(tmp_path / "s", toml, keys=keys, QOS_P0_INFLIGHT=1) as sidecar,
        sidecar.client() as client,
    ):
        client.send(post(CHAT, P0))
        two[0].last()
        answer = sidecar.ask(post(CHAT, P0))
        assert answer.status == 200
        assert (answer.get("X-QoS-Class"), answer.get("X-QoS-Pool")) == (b"P0", b"shared")
        seen = two[1].last()
        assert seen.get("Host") == b"shared.test"
        assert seen.all("Authorization") == [b"Bearer shared"]
        assert seen.get("X-QoS-Class") == b"P0"
        record = sidecar.record(answer.trace_id)
        assert (record["qos"], record["pool"]) == ("P0", "shared")
        assert sidecar.metric("tongguan_proxy_pool_overflows_total", pool="dedicated") == 1
        release.set()
        assert client.answer().get("X-QoS-Pool") == b"dedicated"
        assert sidecar.metric("tongguan_proxy_pool_inflight") == 0


@pytest.mark.parametrize("size", [len(CHAT), 3 << 20], ids=["whole", "streamed"])
def test_p0_whose_pool_cannot_be_reached_goes_to_the_shared_one(tmp_path, two, size):
    closed = f"http://127.0.0.1:{free_base()}"
    toml = two_pools(two, tmp_path, overflow=True, endpoints=json.dumps([closed]))
    body = CHAT + b" " * (size - len(CHAT))
    more = {"POOLS_DEDICATED_EJECT_ERRORS": 2, "QOS_P0_PREOPEN": 0}
    with Pooled(tmp_path / "s", toml, **more) as sidecar:
        for _ in range(5):
            answer = sidecar.ask(post(body, P0))
            assert (answer.status, answer.get("X-QoS-Pool")) == (200, b"shared")
        # Once it is suspect it is not asked for each request any more.
        assert sidecar.metric("tongguan_proxy_pool_connect_failures_total") == 2
        assert sidecar.metric("tongguan_proxy_pool_inflight") == 0
    assert [seen.payload == body for seen in two[1].seen] == [True] * 5
    assert {seen.get("Host") for seen in two[1].seen} == {b"shared.test"}
    assert {seen.get("Authorization") for seen in two[1].seen} == {b"Bearer shared"}


def test_a_pool_that_let_another_one_serve_comes_back_by_itself(tmp_path, two):
    two[0].answering(UNAVAILABLE)
    toml = two_pools(two, tmp_path, overflow=True, eject_errors=2, eject_s=0.3)
    with Pooled(tmp_path / "s", toml) as sidecar:
        assert [sidecar.ask(post(CHAT, P0)).status for _ in range(3)] == [503, 503, 200]
        assert asked(two) == [2, 1]
        two[0].answering(OK)
        until(
            lambda: sidecar.ask(post(CHAT, P0)).get("X-QoS-Pool") == b"dedicated",
            "the dedicated pool",
        )
        assert state(sidecar, two[0], "dedicated") == "healthy"


def test_overflow_goes_one_step(tmp_path, two):
    """P0 that finds no place in the dedicated pool nor in the shared one is refused."""
    release = threading.Event()
    for upstream in two:
        upstream.answering(holding(release))
    toml = two_pools(two, tmp_path, overflow=True, inflight=1)
    more = {"POOLS_SHARED_INFLIGHT": 1, "POOLS_SHARED_OVERFLOW": "true"}
    with (
        Pooled(tmp_path / "s", toml, **more) as sidecar,
        sidecar.client() as one,
        sidecar.client() as other,
    ):
        one.send(post(CHAT, P0))
        two[0].last()
        other.send(post(CHAT, P0))
        two[1].last()
        assert sidecar.ask(post(CHAT, P0)).error() == "queue_full"
        release.set()
        assert [client.answer().status for client in (one, other)] == [200, 200]


def test_the_last_pool_has_no_overflow_to_set(tmp_path, two):
    toml = pools(best_effort={"overflow": "true"})
    sidecar = Sidecar(tmp_path / "s", two[0].url, toml=toml, POOLS_BEST_EFFORT_OVERFLOW="true")
    assert sidecar.spawn().ended() == 2
    first, second = sidecar.log.splitlines()
    assert "pools.best_effort.overflow: unknown" in first
    assert "TONGGUAN_POOLS_BEST_EFFORT_OVERFLOW: unknown" in second


def test_the_shared_pool_lets_best_effort_serve(tmp_path, two):
    closed = f"http://127.0.0.1:{free_base()}"
    toml = pools(
        shared={"endpoints": json.dumps([closed]), "overflow": "true"},
        best_effort={"endpoints": json.dumps([two[1].url])},
    )
    with Pooled(tmp_path / "s", toml) as sidecar:
        answer = sidecar.ask(post(CHAT))
        assert (answer.get("X-QoS-Class"), answer.get("X-QoS-Pool")) == (b"P1", b"best_effort")


def test_ids_that_only_the_first_pool_understands_are_not_asked_of_the_other(tmp_path, two):
    closed = f"http://127.0.0.1:{free_base()}"
    keys = new_keys(tmp_path / "keys")
    toml = two_pools(two, tmp_path, overflow=True, endpoints=json.dumps([closed]), token_ids="true")
    with Pooled(tmp_path / "s", toml, keys=keys) as sidecar:
        assert sidecar.ask(post(CHAT, P0)).status == 200
    seen = two[1].last()
    assert seen.payload == CHAT
    assert seen.get("Content-Length") == b"%d" % len(CHAT)


# --- connections


def test_what_the_upstream_announces_bounds_the_idle_time(tmp_path, two):
    one, _ = two
    one.answering(OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: timeout=1, max=99\r\n\r\n", 1))
    with Sidecar(tmp_path / "s", one.url) as sidecar:
        start = time.monotonic()
        answer = sidecar.ask(post(CHAT))
        assert answer.get("Keep-Alive") is None
        until(lambda: one.last().wire.sock.fileno() < 0, "the connection's end")
        assert 0.4 < time.monotonic() - start < 0.98  # by the sidecar: the upstream never closes


def test_what_announces_no_shorter_time_changes_nothing(tmp_path, two):
    one, _ = two
    values = [b"timeout=60", b"max=5", b"timeout=x", b"timeout=-1", b"xtimeout=1", b""]
    with Sidecar(tmp_path / "s", one.url) as sidecar:
        for value in values:
            one.answering(OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: " + value + b"\r\n\r\n", 1))
            sidecar.ask(post(CHAT))
            one.seen[0].wire.close()  # the next one is announced on a connection of its own
            until(lambda: sidecar.metric("tongguan_proxy_pool_idle_connections") == 0, "its end")
        one.answering(OK)
        sidecar.ask(post(CHAT))
        time.sleep(0.7)
        assert sidecar.metric("tongguan_proxy_pool_idle_connections", pool="shared") == 1


def test_connections_for_p0_are_open_before_it_comes(tmp_path, two):
    toml = two_pools(two, tmp_path, overflow=False)
    with Pooled(tmp_path / "s", toml, QOS_P0_PREOPEN=3) as sidecar:
        until(lambda: len(two[0].wires) == 3, "the connections")
        assert sidecar.ask(post(CHAT, P0)).status == 200
        assert [wire for wire in two[0].wires if wire.sock.fileno() < 0] == []
        assert two[0].last().wire in two[0].wires[:3]
        two[0].wires[0].close()
        until(lambda: len(two[0].wires) == 4, "another one for the one that ended")
        assert len(two[1].wires) == 0


def test_nothing_is_opened_ahead_where_nobody_is_granted_p0(tmp_path, two):
    toml = two_pools(two, tmp_path, overflow=False).replace(GRANTED, "")
    with Pooled(tmp_path / "s", toml, POOLS_SHARED_KEEPALIVE_S=1) as sidecar:
        sidecar.ask(post(CHAT))
        until(lambda: sidecar.metric("tongguan_proxy_pool_idle_connections") == 0, "seconds")
        assert two[0].wires == []


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
