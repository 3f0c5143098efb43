"""Settings of TLS on the sealed door (docs/tls.md)."""

from typing import Literal

from proxy.settings import Section, setting


class Tls(Section):
    """TLS 1.3 by RFC 8998 around the sealed door; off without a certificate."""

    certificate: str = setting("", "SM2 certificate and its chain, PEM; empty: no TLS")
    key: str = setting("", "its private key, PEM, for its owner's eyes only")
    client_ca: str = setting("", "who signs clients' certificates, PEM; empty: none is asked for")
    clients: Literal["require", "allow"] = setting(
        "require", "whether a client must have a certificate, where client_ca is set"
    )
    handshake_s: float = setting(5.0, "a handshake in all", ge=0.1, le=60)
    handshakes: int = setting(
        256, "handshakes at once; an eighth of them for one peer", ge=8, le=65536
    )
