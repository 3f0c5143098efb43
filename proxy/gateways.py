"""Who may name a request's tenant on the app door: `identity.gateways`.

Read from settings at start, asked once for each client connection, never for a request. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from ipaddress import IPv4Network, IPv6Network

Network: TypeAlias = "IPv4Network | IPv6Network"


def network(text: str) -> Network:
    """Return the network that an address or a CIDR means; raises ValueError with the reason."""
    from ipaddress import ip_network  # noqa: PLC0415 - only with gateways

    if "%" in text:  # `in` does not look at it: every link would match
        raise ValueError(f"{text!r} has an IPv6 zone")
    return ip_network(text)


def mistakes(texts: Iterable[str]) -> list[str]:
    """Return what is wrong with each one that is no network."""
    found = []
    for text in texts:
        try:
            network(text)
        except ValueError as problem:
            found.append(str(problem))
    return found


def is_gateway(gateways: tuple[Network, ...], peer: str) -> bool:
    """Say whether a peer's address, as the kernel tells it, is in one of these networks."""
    from ipaddress import ip_address  # noqa: PLC0415 - loaded by now

    address = ip_address(peer)
    return any(address in gateway for gateway in gateways)
