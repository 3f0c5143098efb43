"""Keys for the tests of providers, and a small stand-in for a key service.

`Kv2Server` is no Vault: it knows the few requests of KV version 2 that `proxy/keys/kv2.py` makes,
in the wire form of HashiCorp's documentation, and can be told to be away, sealed, slow or wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from proxy.keys.file import KeyFile, encode
from proxy.keys.issue import DAY_MS
from proxy.sm4.keyring import EnvelopeKey

NOW_MS = 1_800_000_000_000
TOKEN = "s.test-token-0123456789"


def key(number=0, **changes):
    facts = {
        "kid": number.to_bytes(8, "big"),
        "root": os.urandom(32),
        "client": f"client-{number}",
        "audience": "local/default/pod",
        "tenant": "default",
        "suite": 1,
        "digest": "sha256",
        "not_before_ms": NOW_MS - 60_000,
        "not_after_ms": NOW_MS + DAY_MS,
    }
    return EnvelopeKey(**(facts | changes))


def sidecar(*keys, prompts=None, seeds=(), auditor=None, signs=(), revoked=()):
    return KeyFile(
        "sidecar", tuple(keys), prompts or {}, tuple(seeds), auditor, None, tuple(signs),
        revoked=tuple(revoked),
    )  # fmt: skip


def put(path, contents, mode=0o600):
    """Write a key file beside its place and move it there."""
    data = contents if isinstance(contents, bytes) else encode(contents)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    temporary.chmod(mode)
    temporary.replace(path)


def mount(volume, files):
    """Swap a mounted volume's generation as Kubernetes does: new directory, then one rename."""
    generation = volume / f"..{time.time_ns()}"
    generation.mkdir(parents=True)
    for name, contents in files.items():
        put(generation / name, contents)
        link = volume / name
        if not link.is_symlink():
            link.symlink_to(f"..data/{name}")
    for link in volume.iterdir():
        if link.is_symlink() and link.name not in {*files, "..data"}:
            link.unlink()
    (volume / "..data_tmp").symlink_to(generation.name)
    before = (volume / "..data").resolve() if (volume / "..data").exists() else None
    (volume / "..data_tmp").replace(volume / "..data")
    if before is not None:
        for file in before.iterdir():
            file.unlink()
        before.rmdir()


class Kv2Server:
    """See the module. `secrets[path]` is a list of versions, None where destroyed."""

    def __init__(self, mount_at="secret", namespace=""):
        self.secrets = {}
        self.mount_at, self.namespace = mount_at, namespace
        self.away = False  # closes each connection without an answer
        self.status = 0  # answers with this instead
        self.delay_s = 0.0
        self.lease_s = 0
        self.answer = None  # these bytes instead
        self.token = TOKEN
        self.seen = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_any(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                outer.seen.append((self.command, self.path, dict(self.headers)))
                if outer.away:
                    self.close_connection = True
                    return
                threading.Event().wait(outer.delay_s)
                status, answer = outer.answered(self.command, self.path, self.headers, body)
                data = outer.answer if outer.answer is not None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_LIST = do_POST = do_PUT = do_any  # noqa: N815 - http.server's names

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, path, contents):
        data = json.loads(encode(contents)) if isinstance(contents, KeyFile) else contents
        self.secrets.setdefault(path, []).append(data)

    def answered(self, method, target, headers, body):
        if self.status:
            return self.status, {"errors": ["told to"]}
        if headers["X-Vault-Token"] != self.token:
            return 403, {"errors": ["permission denied"]}
        if (headers["X-Vault-Namespace"] or "") != self.namespace:
            return 404, {"errors": ["no handler for route"]}
        prefix = f"/v1/{self.mount_at}/"
        kind, _, path = target.removeprefix(prefix).partition("/")
        if not target.startswith(prefix):
            return 404, {"errors": ["no handler for route"]}
        if (method, kind) == ("LIST", "metadata"):
            below = (p.removeprefix(path) for p in self.secrets if p.startswith(path))
            names = {"".join(rest.partition("/")[:2]) for rest in below}
            return (200, {"data": {"keys": sorted(names)}}) if names else (404, {"errors": []})
        versions = self.secrets.get(path, [])
        if (method, kind) == ("GET", "data"):
            if not versions or versions[-1] is None:
                return 404, {"errors": []}
            metadata = {"version": len(versions), "destroyed": False, "deletion_time": ""}
            data = {"data": versions[-1], "metadata": metadata}
            return 200, {"data": data, "lease_duration": self.lease_s, "renewable": False}
        asked = json.loads(body)
        if (method, kind) == ("POST", "data"):
            if asked["options"]["cas"] != len(versions):
                return 400, {"errors": ["check-and-set parameter did not match"]}
            versions.append(asked["data"])
            return 200, {"data": {"version": len(versions)}}
        if (method, kind) == ("PUT", "destroy"):
            for version in asked["versions"]:
                versions[version - 1] = None
            return 204, {}
        return 405, {"errors": ["unsupported operation"]}


@contextlib.contextmanager
def kv2(**changes):
    server = Kv2Server(**changes)
    try:
        yield server
    finally:
        server.close()
