"""Addresses, endpoints and URLs in settings."""

from __future__ import annotations

import pytest

from proxy.config import (
    load,
    split_address,
    split_endpoint,
)
from tests.unit.proxy.settings_kit import problems

# --- addresses and endpoints


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:65535", ("localhost", 65535)),
        ("[::1]:14080", ("::1", 14080)),
        ("[::]:80", ("::", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("engine-0.engine.llm.svc:8000", ("engine-0.engine.llm.svc", 8000)),
    ],
)
def test_an_address(text, address):
    assert split_address(text) == address


BAD_ADDRESSES = [
    "",
    ":",
    ":80",
    "[]:80",
    "host",
    "host:",
    "host:http",
    "host:-1",
    "host:65536",
    "host:" + "9" * 5000,
    "host:\u00b2",
    "host:\u0663",
    "::1",
    "::1:80",
    "[::1]",
    "[::1:80",
    "::1]:80",
    "[::1]80",
    "ho st:80",
    "user@host:80",
    "a/b:80",
]


@pytest.mark.parametrize("text", BAD_ADDRESSES)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match="expected host:port"):
        split_address(text)


@pytest.mark.parametrize("door", ["app", "sealed", "admin"])
def test_a_door_is_an_address_or_closed(door):
    assert getattr(load(f"[doors]\n{door} = ''\n", {}).doors, door) == ""
    assert problems(f"[doors]\n{door} = 'host'\n")[0].startswith(
        f"doors.{door}: expected host:port"
    )


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:14100", ("127.0.0.1", 14100)),
        ("http://engine", ("engine", 80)),
        ("http://engine/", ("engine", 80)),
        ("http://engine:8000/", ("engine", 8000)),
        ("http://[::1]", ("::1", 80)),
        ("http://[2001:db8::1]:8000", ("2001:db8::1", 8000)),
        ("https://engine", ("engine", 443)),
        ("https://[::1]:8443/", ("::1", 8443)),
        ("unix:/run/engine.sock", "/run/engine.sock"),
    ],
)
def test_an_endpoint(text, address):
    assert split_endpoint(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "engine:8000",
        "HTTP://engine",
        "httpss://engine",
        "https:engine",
        "https://",
        "https://engine/v1",
        "https://user:pass@engine",
        "http://",
        "http:///",
        "http://:80",
        "http://engine/v1",
        "http://engine:80/v1",
        "http://engine:x",
        "http://engine?x=1",
        "http://user@engine",
        "http://::1",
        "unix:",
        "unix:run/engine.sock",
    ],
)
def test_what_is_no_endpoint(text):
    with pytest.raises(ValueError, match=r"expected|has no path"):
        split_endpoint(text)


@pytest.mark.parametrize("pool", ["dedicated", "shared", "best_effort"])
def test_each_endpoint_of_a_pool_is_checked(pool):
    found = problems(f"[pools.{pool}]\nendpoints = ['http://ok', 'bad', 'worse']\n")
    assert len(found) == 2
    assert all(p.startswith(f"pools.{pool}.endpoints: ") for p in found)
    assert problems("", {f"TONGGUAN_POOLS_{pool.upper()}_ENDPOINTS": ""}) == [
        f"pools.{pool}.endpoints: at least one endpoint"
    ]
