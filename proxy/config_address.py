"""Addresses in settings: of doors, of endpoints, of URLs. Pure."""

from __future__ import annotations

import re

_HOST = re.compile(r"[0-9A-Za-z._:%~-]+")
# What is written into a header field as it is.
FIELD_VALUE = re.compile(r"[!-~]{0,255}")


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `host:port`; raises ValueError with the reason."""
    host, _, port = address.rpartition(":")
    if host[:1] == "[" and host[-1:] == "]":
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"expected host:port, IPv6 as [address]:port, got {address!r}")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 65536
    if not _HOST.fullmatch(host) or number > 65535:
        raise ValueError(f"expected host:port, the port 1-65535, got {address!r}")
    return host, number


def split_endpoint(endpoint: str) -> tuple[str, int] | str:
    """Return (host, port) of an http or https URL, or a unix one's path; raises ValueError."""
    if endpoint.startswith("unix:"):
        path = endpoint.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError(f"expected unix:/path, got {endpoint!r}")
        return path
    scheme, found, rest = endpoint.partition("://")
    port = {"http": 80, "https": 443}.get(scheme)
    if not found or port is None:
        raise ValueError(f"expected http(s)://host:port or unix:/path, got {endpoint!r}")
    rest = rest.rstrip("/")
    if "/" in rest or not rest:
        raise ValueError(f"an endpoint has no path: {endpoint!r}")
    return split_address(rest if ":" in rest.rsplit("]", 1)[-1] else f"{rest}:{port}")


def split_url(url: str) -> tuple[tuple[str, int], str]:
    """Return ((host, port), path) of an http URL; raises ValueError with the reason."""
    scheme, found, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if not found or scheme != "http" or not host or not FIELD_VALUE.fullmatch(path):
        raise ValueError(f"expected http://host:port/path, got {url!r}")
    address = split_endpoint(f"http://{host}")
    assert not isinstance(address, str)
    return address, slash + path or "/"
