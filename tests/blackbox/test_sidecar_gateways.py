"""Who names a tenant on the app door: a peer of `identity.gateways`, and nobody else."""

import json

import pytest

from tests.blackbox.harness import Sidecar, post

CHAT = b'{"model":"m"}'
TOML = """
[tenants.vip]
max_class = "P0"
[tenants.low]
max_class = "P2"
[tenants.slow]
rate = 0.001
burst = 1
"""


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    """Listen to 127.0.0.2 as to a gateway, not to 127.0.0.1."""
    with Sidecar(
        tmp_path_factory.mktemp("gateway") / "s",
        backend.url,
        keys=keys,
        toml=TOML,
        IDENTITY_GATEWAYS="10.0.0.0/8, 127.0.0.2/31, ::/0",
        IDENTITY_TENANT="own",
    ) as sidecar:
        yield sidecar


def gateway(sidecar):
    return sidecar.client(source="127.0.0.2")


def ask(sidecar, *fields):
    """Ask as the gateway."""
    with gateway(sidecar) as client:
        return client.send(post(CHAT, *fields)).answer()


def tenant_of(name):
    return b"X-Tenant-Id: " + name


def test_gateway_names_the_tenant_upstream_and_in_the_record(sidecar, upstream):
    answer = ask(sidecar, b"x-tenant-id:  acme/1 ")
    assert answer.status == 200
    assert upstream.last().all("X-Tenant-Id") == [b"acme/1"]
    assert sidecar.record(answer.trace_id)["tenant"] == "acme/1"


def test_each_request_of_a_gateways_connection_has_its_own_tenant(sidecar, upstream):
    with gateway(sidecar) as client:
        for name in (b"one", None, b"x" * 255):
            fields = [] if name is None else [tenant_of(name)]
            assert client.send(post(CHAT, *fields)).answer().status == 200
            assert upstream.last().all("X-Tenant-Id") == [name or b"own"]


@pytest.mark.parametrize(
    ("name", "asked", "given"),
    [
        (b"vip", b"P0", b"P0"),
        (b"vip", b"P2", b"P2"),
        (b"low", b"P0", b"P2"),
        (b"stranger", b"P0", b"P1"),
        (b"VIP", b"P0", b"P1"),
    ],
)
def test_class_is_capped_by_the_named_tenant(sidecar, upstream, name, asked, given):
    answer = ask(sidecar, tenant_of(name), b"X-QoS-Class: " + asked)
    assert answer.get("X-QoS-Class") == given
    assert upstream.last().get("X-QoS-Class") == given


def test_rate_is_the_named_tenants(sidecar, upstream):
    assert [ask(sidecar, tenant_of(b"slow")).status for _ in range(2)] == [200, 429]
    assert ask(sidecar).status == 200
    assert upstream.last().get("X-Tenant-Id") == b"own"


@pytest.mark.parametrize(
    "fields",
    [
        [b"X-Tenant-Id:"],
        [tenant_of(b"a b")],
        [tenant_of(b"a, b")],
        [tenant_of(b"\xe4")],
        [tenant_of(b"x" * 256)],
        [tenant_of(b"vip"), tenant_of(b"vip")],
        [tenant_of(b"vip"), b"x-tenant-id: low"],
    ],
)
def test_gateways_bad_value_is_refused_and_not_forwarded(sidecar, upstream, fields):
    answer = ask(sidecar, *fields)
    assert (answer.status, answer.error()) == (400, "invalid_request")
    assert json.loads(answer.body)["error"]["param"] == "X-Tenant-Id"
    assert upstream.seen == []
    assert sidecar.ask(post(CHAT, *fields)).status == 200  # from elsewhere nobody reads it
    assert upstream.last().all("X-Tenant-Id") == [b"own"]


def test_connection_goes_on_after_a_refused_tenant(sidecar, upstream):
    with gateway(sidecar) as client:
        assert client.send(post(CHAT, tenant_of(b"a b"))).answer().status == 400
        assert client.send(post(CHAT, tenant_of(b"a"))).answer().status == 200
    assert upstream.last().get("X-Tenant-Id") == b"a"


def test_everybody_elses_tenant_is_ignored(sidecar, upstream):
    answer = sidecar.ask(post(CHAT, tenant_of(b"vip"), b"X-QoS-Class: P0"))
    assert (answer.status, answer.get("X-QoS-Class")) == (200, b"P1")
    assert upstream.last().all("X-Tenant-Id") == [b"own"]
    assert upstream.last().get("X-QoS-Class") == b"P1"


def test_bad_gateway_is_named_and_nothing_starts(tmp_path, backend):
    sidecar = Sidecar(tmp_path / "s", backend.url, IDENTITY_GATEWAYS="10.0.0.1, 10.0.0.1/8")
    try:
        assert sidecar.spawn().ended() != 0
        assert "identity.gateways: 10.0.0.1/8 has host bits set" in sidecar.log
    finally:
        sidecar.kill()


def test_metrics_name_no_tenant(sidecar, upstream):
    assert ask(sidecar, tenant_of(b"never-a-label")).status == 200
    assert b"never-a-label" not in sidecar.admin_ask("GET", "/metrics").body
