"""The TLS context of a door by RFC 8998: TLS_SM4_GCM_SM3, curveSM2, sm2sig_sm3 and nothing else.

Python's `ssl` cannot choose these, so it is pyOpenSSL's, on the OpenSSL 4 that `cryptography`
carries. What was read is believed only after a handshake was made with it in memory.
"""

from __future__ import annotations

import datetime as dt
import logging
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from OpenSSL import SSL, _util

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.config import Tls

SUITE, GROUP, SIGNATURE = b"TLS_SM4_GCM_SM3", b"curveSM2", b"sm2sig_sm3"
READ_BYTES = 64 << 10
_WARN_DAYS = 14
_RELEASE_BUFFERS = 0x10  # SSL_MODE_RELEASE_BUFFERS: an idle connection holds 32 KiB less

log = logging.getLogger(__name__)


class TlsError(Exception):
    """Certificate, key or library cannot be used; the text names the setting."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was read: a context that has made a handshake, and when its certificate ends."""

    context: SSL.Context
    expires_s: float


def load(settings: Tls) -> Loaded:
    """Read certificate, key and CA, and try them; raises `TlsError`."""
    try:
        expires_s = _expiry(settings.certificate)
        _check_mode(settings.key)
        _try(_serving(settings))
        context = _serving(settings)
    except OSError as problem:
        name = problem.filename or settings.certificate
        raise TlsError(f"tls: {name}: {problem.strerror}") from None
    except SSL.Error:
        raise TlsError("tls.key: not the private key of tls.certificate, or not PEM") from None
    if settings.client_ca:
        try:
            context.load_verify_locations(settings.client_ca)
            context.load_client_ca(settings.client_ca.encode())
        except SSL.Error:
            raise TlsError(f"tls.client_ca: {settings.client_ca}: no certificates, PEM") from None
        demand = SSL.VERIFY_FAIL_IF_NO_PEER_CERT if settings.clients == "require" else 0
        context.set_verify(SSL.VERIFY_PEER | demand, lambda *judged: bool(judged[-1]))
    return Loaded(context, expires_s)


def _serving(settings: Tls) -> SSL.Context:
    context = _context(server=True)
    context.use_certificate_chain_file(settings.certificate)
    context.use_privatekey_file(settings.key)
    context.check_privatekey()
    return context


def _context(*, server: bool) -> SSL.Context:
    context = SSL.Context(SSL.TLS_SERVER_METHOD if server else SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_options(SSL.OP_NO_TICKET)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_mode(_RELEASE_BUFFERS)
    # pyOpenSSL has no public call for groups and signature schemes.
    lib: Any = _util.lib
    handle = cast("Any", context)._context  # noqa: SLF001 - as above
    try:
        context.set_tls13_ciphersuites(SUITE)
        good = lib.SSL_CTX_set1_curves_list(handle, GROUP) == 1
        good &= lib.SSL_CTX_set1_sigalgs_list(handle, SIGNATURE) == 1
    except (SSL.Error, AttributeError):
        good = False
    if not good:
        lib.ERR_clear_error()
        version = SSL.SSLeay_version(SSL.SSLEAY_VERSION).decode()
        raise TlsError(f"tls: RFC 8998 needs pyOpenSSL on OpenSSL 4 or newer; this is {version}")
    return context


def _check_mode(path: str) -> None:
    """The same rule as for key files (docs/keys.md)."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        raise TlsError(f"tls.key: {path}: mode {mode:o} lets others use it; chmod 600 {path}")


def _expiry(path: str) -> float:
    from cryptography.x509 import load_pem_x509_certificate  # noqa: PLC0415 - only with TLS

    try:
        first = load_pem_x509_certificate(Path(path).read_bytes())
    except ValueError:
        raise TlsError(f"tls.certificate: {path}: no certificate, PEM") from None
    left = first.not_valid_after_utc - dt.datetime.now(dt.UTC)
    if left < dt.timedelta(days=_WARN_DAYS):
        log.warning("tls.certificate ends at %s", first.not_valid_after_utc.isoformat())
    return first.not_valid_after_utc.timestamp()


def _try(context: SSL.Context) -> None:
    """Make one handshake in memory: another kind of certificate would fail at the first client."""
    server, client = SSL.Connection(context, None), SSL.Connection(_context(server=False), None)
    server.set_accept_state()
    client.set_connect_state()
    left = [client, server]
    try:
        for _ in range(4):
            for one, other in ((client, server), (server, client)):
                try:
                    one.do_handshake()
                    left = [end for end in left if end is not one]
                except SSL.WantReadError:
                    pass
                for data in outgoing(one):
                    other.bio_write(data)
    except SSL.Error:
        left = [server]
    if left:
        raise TlsError("tls.certificate: no handshake can be made with it; it has to be of SM2")


def outgoing(connection: SSL.Connection) -> Iterable[bytes]:
    """Yield what TLS has to send."""
    while True:
        try:
            yield connection.bio_read(READ_BYTES)
        except SSL.WantReadError:
            return
