"""A client of RFC 8998 as a process of its own: plain connections in, TLS out.

    python -m tests.blackbox.tls_peer PORT CA [CERTIFICATE KEY]

Says the port it listens on, then a line of JSON for each connection: what was agreed, or why not.
It shares no code with the sidecar.
"""

import contextlib
import json
import select
import socket
import sys
import threading

from cryptography.x509.oid import NameOID
from OpenSSL import SSL, _util

LOCK = threading.Lock()


def say(value):
    with LOCK:
        print(json.dumps(value), flush=True)


def context_of(ca, certificate=None, key=None):
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_tls13_ciphersuites(b"TLS_SM4_GCM_SM3:TLS_AES_256_GCM_SHA384")
    lib, handle = _util.lib, context._context
    assert lib.SSL_CTX_set1_curves_list(handle, b"X25519:curveSM2") == 1
    assert lib.SSL_CTX_set1_sigalgs_list(handle, b"ed25519:sm2sig_sm3") == 1
    context.load_verify_locations(ca)
    context.set_verify(SSL.VERIFY_PEER, lambda *judged: bool(judged[-1]))
    if certificate:
        context.use_certificate_chain_file(certificate)
        context.use_privatekey_file(key)
    return context


class Bridge:
    def __init__(self, context, port, plain):
        self.plain = plain
        self.raw = socket.create_connection(("127.0.0.1", port))
        self.tls = SSL.Connection(context, None)
        self.tls.set_connect_state()

    def flush(self):
        with contextlib.suppress(SSL.WantReadError):
            while True:
                self.raw.sendall(self.tls.bio_read(65536))

    def shake(self):
        while True:
            try:
                self.tls.do_handshake()
            except SSL.WantReadError:
                self.flush()
                data = self.raw.recv(65536)
                if not data:
                    raise EOFError("closed") from None
                self.tls.bio_write(data)
            else:
                self.flush()
                return

    def name(self):
        shown = self.tls.get_peer_certificate(as_cryptography=True).subject
        return shown.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value

    def received(self):
        """Bring plaintext over; False at the end."""
        try:
            while True:
                self.plain.sendall(self.tls.recv(65536))
        except SSL.WantReadError:
            return True
        except SSL.ZeroReturnError:
            return False

    def run(self):
        try:
            self.shake()
            say(
                {
                    "cipher": self.tls.get_cipher_name(),
                    "group": self.tls.get_group_name(),
                    "version": self.tls.get_protocol_version_name(),
                    "peer": self.name(),
                }
            )
            if self.received():
                self.pump()
            say({"end": "clean"})
        except (SSL.Error, OSError, EOFError) as problem:
            say({"end": type(problem).__name__, "why": str(problem)})
        finally:
            for sock in (self.plain, self.raw):
                sock.close()

    def pump(self):
        while True:
            ready, _, _ = select.select([self.plain, self.raw], [], [])
            if self.plain in ready:
                data = self.plain.recv(65536)
                if not data:
                    self.tls.shutdown()
                    self.flush()
                    return
                while data:
                    data = data[self.tls.send(data) :]
                    self.flush()
            if self.raw in ready:
                data = self.raw.recv(65536)
                if not data:
                    raise EOFError("closed without close_notify")
                self.tls.bio_write(data)
                if not self.received():
                    return
                self.flush()


def main():
    port, *files = sys.argv[1:]
    context = context_of(*files)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        say({"port": listener.getsockname()[1]})
        while True:
            plain, _ = listener.accept()
            bridge = Bridge(context, int(port), plain)
            threading.Thread(target=bridge.run, daemon=True).start()


if __name__ == "__main__":
    main()
