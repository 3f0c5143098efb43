"""Who may name a tenant, and that no number of names makes a sidecar grow."""

from __future__ import annotations

import asyncio

import pytest

from proxy import context as contexts
from proxy.clock import ManualClock
from proxy.config import load
from proxy.context import Context
from proxy.errors import RequestError
from proxy.gateways import is_gateway, network
from proxy.http.http1 import HeadLimits, parse_request
from proxy.reception import named_tenant

LISTED = tuple(network(text) for text in ("10.1.0.0/16", "192.0.2.7", "fd00::/8", "fe80::/64"))
LIMITS = HeadLimits(4096, 2048, 16)


@pytest.mark.parametrize("peer", ["10.1.0.0", "10.1.255.255", "192.0.2.7", "fd12::1", "fe80::1%lo"])
def test_peer_in_a_listed_network_is_a_gateway(peer):
    assert is_gateway(LISTED, peer)


@pytest.mark.parametrize(
    "peer", ["10.0.255.255", "10.2.0.0", "192.0.2.6", "127.0.0.1", "::1", "fc00::1", "::a01:1"]
)
def test_peer_in_none_is_no_gateway(peer):
    assert not is_gateway(LISTED, peer)
    assert not is_gateway((), peer)


def named(*lines):
    fields = b"".join(line + b"\r\n" for line in lines)
    head = parse_request(b"GET / HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n", LIMITS)
    return named_tenant(head)


@pytest.mark.parametrize("value", [b"a", b"team/a:1,b", b"!~", b"x" * 255])
def test_tenant_is_the_value_without_space_around(value):
    assert named(b"x-tenant-ID: \t" + value + b" ") == value.decode()


def test_tenant_is_not_named_by_another_field():
    assert named() == ""
    assert named(b"X_Tenant_Id: a", b"X-Tenant: b") == ""


@pytest.mark.parametrize(
    "lines",
    [
        [b"X-Tenant-Id:"],
        [b"X-Tenant-Id: a b"],
        [b"X-Tenant-Id: a\tb"],
        [b"X-Tenant-Id: \x80"],
        [b"X-Tenant-Id: caf\xc3\xa9"],
        [b"X-Tenant-Id: " + b"x" * 256],
        [b"X-Tenant-Id: a", b"x-tenant-id: a"],
        [b"X-Tenant-Id: a", b"X-Tenant-Id:"],
        [b"X-Tenant-Id:", b"X-Tenant-Id:"],
    ],
)
def test_value_that_is_no_tenant_is_refused(lines):
    with pytest.raises(RequestError) as refused:
        named(*lines)
    assert (refused.value.code, refused.value.param) == ("invalid_request", "X-Tenant-Id")


def test_endless_names_are_not_kept_and_those_with_a_row_are():
    loop = asyncio.new_event_loop()
    context = Context(load("[tenants.vip]\nmax_class = 'P0'", {}), ManualClock(), loop, "node")
    for number in range(contexts.TENANTS_MAX):
        context.tenant(f"t{number}")
    assert context.tenant("t0") is context.tenant("t0")
    late = context.tenant("late")
    assert late is not context.tenant("late")
    assert late.known[b"P0"].asked == "P0"
    assert context.tenant("vip") is context.tenant("vip")
    assert context.tenant("vip").known[b"P0"].asked == ""
    loop.close()
