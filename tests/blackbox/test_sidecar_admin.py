"""The admin door of the real process: its paths, who may use them, what it takes and refuses."""

import json
import socket

import pytest

from tests.blackbox.harness import Client, Sidecar, Upstream, ok, until

SECRET = "upstream-credential"


@pytest.fixture(scope="module")
def upstream():
    with Upstream() as upstream:
        yield upstream.answering(ok)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, upstream, keys):
    folder = tmp_path_factory.mktemp("admin")
    secret = folder / "upstream-secret"
    secret.write_text(f"Bearer {SECRET}\n")
    toml = f'[pools.shared]\nauthorization_file = "{secret}"\n'
    with Sidecar(folder / "s", upstream.url, keys=keys, toml=toml) as sidecar:
        yield sidecar


def test_livez_readyz_and_metrics_are_open(sidecar):
    live = json.loads(sidecar.admin_ask("GET", "/livez").body)
    assert live == {"live": True, "reasons": [], "lag_ms": live["lag_ms"]}
    until(lambda: sidecar.admin_ask("GET", "/readyz").status == 200, "ready")
    metrics = sidecar.admin_ask("GET", "/metrics?x=1")
    assert metrics.get("Content-Type").startswith(b"text/plain")
    assert b"# TYPE tongguan_proxy_requests_total counter" in metrics.body


def test_config_shows_settings_and_no_secret(sidecar, keys):
    shown = sidecar.admin_ask("GET", "/config").body
    assert json.loads(shown)["doors"]["app"] == f"127.0.0.1:{sidecar.app}"
    secrets = json.loads((keys / "sidecar.json").read_text())
    for secret in (
        "upstream-credential",
        secrets["envelope_keys"][0]["root"],
        secrets["chain_seeds"][0]["seed"],
        secrets["prompt_keys"]["default"],
    ):
        assert secret.encode() not in shown
        assert secret not in sidecar.log


def test_log_level_is_changed_and_checked(sidecar):
    assert sidecar.admin_ask("POST", "/loglevel", b"debug").status == 200
    assert sidecar.admin_ask("POST", "/loglevel", b"loud").status == 400
    assert sidecar.admin_ask("GET", "/loglevel").status == 405
    assert sidecar.admin_ask("POST", "/loglevel", b"info").status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/models", 404),
        ("POST", "/livez", 404),
        ("GET", "/drain", 405),
        ("DELETE", "/config", 405),
        ("TRACE", "/livez", 405),
    ],
)
def test_admin_door_knows_its_paths_and_methods(sidecar, method, path, status):
    assert sidecar.admin_ask(method, path).status == status


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /livez HTTP/1.1\n\n", 400),
        (b"\x16\x03\x01\x00\x00", 400),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 9000 + b"\r\n\r\n", 431),
        (b"POST /loglevel HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n", 413),
        (b"POST /loglevel HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
    ],
)
def test_admin_door_refuses_bad_heads(sidecar, data, status):
    with Client(sidecar.admin) as client:
        assert client.send(data).answer().status == status
    assert sidecar.admin_ask("GET", "/livez").status == 200


def outside_address():
    """Return an address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # no packet is sent
        except OSError:
            return None
        address = sock.getsockname()[0]
    return None if address.startswith("127.") else address


def test_guarded_paths_want_loopback_or_the_token(tmp_path, upstream):
    address = outside_address()
    if address is None:
        pytest.skip("capability: an address besides loopback")
    token = tmp_path / "token"
    token.write_text("the-admin-token\n")
    sidecar = Sidecar(tmp_path / "s", upstream.url, DOORS_ADMIN_TOKEN_FILE=token)
    sidecar.environ["TONGGUAN_DOORS_ADMIN"] = f"{address}:{sidecar.admin}"

    def ask(path, *fields):
        with socket.create_connection((address, sidecar.admin)) as sock:
            lines = "".join(f"{field}\r\n" for field in fields)
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode())
            return int(sock.recv(1 << 16).split(b" ")[1])

    with sidecar:
        assert ask("/livez") == 200
        assert ask("/metrics") == 200
        assert ask("/config") == 401
        assert ask("/drain") == 401
        assert ask("/config", "Authorization: Bearer wrong") == 401
        assert ask("/config", "Authorization: Bearer the-admin-token") == 200
        assert "the-admin-token" not in sidecar.log


def test_head_of_an_admin_answer_has_no_body(sidecar):
    with Client(sidecar.admin) as client:
        client.send(b"HEAD /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.answer("HEAD").status == 200
        assert client.rest() == (b"", True)


def test_head_behind_an_empty_line_has_no_body_either(sidecar):
    with Client(sidecar.admin) as client:
        client.send(b"\r\nHEAD /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.answer("HEAD").status == 200
        assert client.rest() == (b"", True)


def test_refusals_have_the_form_of_all_others(tmp_path, upstream):
    with Sidecar(tmp_path / "s", upstream.url) as sidecar:  # without audit
        rotate = sidecar.admin_ask("POST", "/audit/rotate")
        assert (rotate.status, rotate.error()) == (503, "audit_unavailable")
        nothing = sidecar.admin_ask("GET", "/nothing")
        assert (nothing.line, nothing.error()) == (b"HTTP/1.1 404 Not Found", "invalid_request")
        for answer in (rotate, nothing):
            assert answer.get("Cache-Control") == b"no-store"
            assert answer.get("Connection") == b"close"


@pytest.mark.parametrize(("body", "status"), [(b"info", 200), (b"loud", 400)])
def test_expect_is_answered_before_the_body(sidecar, body, status):
    with Client(sidecar.admin) as client:
        client.send(
            b"POST /loglevel HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert client.head().line == b"HTTP/1.1 100 Continue"
        for byte in body:
            client.send(bytes([byte]))
        answer = client.answer()
        assert (answer.status, answer.interim) == (status, 0)


def test_who_keeps_connections_open_keeps_no_probe_out(sidecar):
    with Client(sidecar.admin) as first:
        others = [Client(sidecar.admin) for _ in range(64)]
        try:
            assert first.rest()[0] == b""  # the oldest made room
            assert sidecar.admin_ask("GET", "/livez").status == 200
            assert sidecar.metric("tongguan_proxy_admin_turned_out_total") >= 2
            # One that asks now is as good as any: only the oldest goes.
            others[-1].send(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            assert others[-1].answer().status == 200
        finally:
            for client in others:
                client.close()
