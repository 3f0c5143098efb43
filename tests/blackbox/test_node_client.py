"""The JavaScript client of docs/clients: all vectors of its role, and calls to a real sidecar."""

import contextlib
import json
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from proxy.sm4 import sm2
from proxy.sm4.envelope import MAC, SIGNATURE, STREAM
from tests.blackbox.harness import LAST_CHUNK, SSE_HEAD, Sidecar, Upstream, chunk, new_keys, ok
from tests.unit.proxy import envelope_cases
from tests.unit.proxy.sm4_kit import vector_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "smx1_client.mjs"
NODE = shutil.which("node") or ""
PACKAGE = ROOT / "docs/clients/node_modules/sm-crypto-v2"
CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a secret question"}]})
JSON = {"content-type": "application/json"}
OUTSIDE = {
    "host", "content-type", "content-length", "transfer-encoding", "accept", "x-model-id",
    "traceparent", "tracestate", "x-request-id", "connection",
}  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not NODE, reason="capability: node"),
    pytest.mark.skipif(
        not PACKAGE.is_dir(), reason="capability: sm-crypto-v2 (npm ci --prefix docs/clients)"
    ),
]


class Node:
    """The client's process; `call` sends one request, `line` reads one line of what it says."""

    def __init__(self, keys, **options):
        command = [NODE, str(SCRIPT), "calls", str(keys / "client.json"), json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, url, *, method="POST", headers=None, body=None, **more):
        init = {"method": method, "headers": headers or {}}
        if body is not None:
            init["body"] = body
        line = json.dumps({"url": url, "init": init, **more})
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def line(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, *arguments, **options):
        """Return (head or error, end)."""
        self.call(*arguments, **options)
        head = last = self.line()
        while not ("end" in last or "error" in last):
            last = self.line()
        return head, last

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        self.process.stdout.close()


@pytest.fixture(scope="module")
def upstream():
    with Upstream() as upstream:
        yield upstream


VARIANTS = {
    "plain": [],
    "ed25519, mac": ["--sign", "ed25519", "--require-signature", "--require-mac"],
    "aes, sm2": ["--suite", "2", "--sign", "sm2", "--digest", "sm3", "--require-signature"],
}


@pytest.fixture(scope="module", params=VARIANTS)
def ends(request, tmp_path_factory, upstream):
    if "sm2" in request.param and not sm2.available():
        pytest.skip("capability: OpenSSL with SM2")
    folder = tmp_path_factory.mktemp("node")
    keys = new_keys(folder / "keys", *VARIANTS[request.param])
    with Sidecar(folder / "s", upstream.url, keys=keys) as sidecar, Node(keys) as node:
        yield f"http://127.0.0.1:{sidecar.sealed}", node, sidecar


def rows_of(keys):
    names = ("kid", "root", "sign_public", "sign_private")
    plain = ("client", "audience", "suite", "digest", "pad", "require_mac", "require_signature")
    return [
        {name: getattr(key, name).hex() for name in names}
        | {name: getattr(key, name) for name in (*plain, "scheme")}
        for key in keys
    ]


def to_seal(vectors, schemes):
    """Return what a client would make byte for byte; SM2 draws a number of its own."""
    found = []
    for vector in vectors:
        if vector["outcome"] != "ok" or vector["direction"] != "request":
            continue
        wire = vector["wire_hex"]
        flags, kid = int(wire[10:12], 16), wire[16:32]
        by_sm2 = flags & SIGNATURE and schemes[kid] == "sm2"
        if flags & STREAM or by_sm2 or "no multiple" in vector["title"]:
            continue
        row = {"kid": kid, "flags": flags, "time_ms": int(wire[32:48], 16), "nonce": wire[48:72]}
        row |= {"model": vector["headers"].get("X-Model-Id", "")}
        found.append(
            row | {"prelude": vector["prelude_hex"], "body": vector["body_hex"], "v": wire}
        )
    return found


@pytest.mark.parametrize("which", ["published", "ours"])
def test_every_vector_of_a_client_has_its_outcome(which):
    if which == "published":
        vectors, rows = vector_file()["vectors"], vector_file()["keys"]
        rows = [
            r | {k: r[k] or "" for k in ("scheme", "sign_public", "sign_private")} for r in rows
        ]
    else:
        keys, vectors = envelope_cases.stored()
        rows = rows_of(keys)
    opening = [v for v in vectors if v["direction"] == "response"]
    sealing = to_seal(vectors, {row["kid"]: row["scheme"] for row in rows})
    assert len(opening) > 5
    assert any(row["flags"] & MAC for row in sealing)
    asked = {"rows": rows, "open": opening, "seal": sealing, "cuts": [0, 1, 7, 41]}
    done = subprocess.run(
        [NODE, str(SCRIPT), "vectors"],
        input=json.dumps(asked).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    told = json.loads(done.stdout)
    for vector, outcomes in zip(opening, told["opened"], strict=True):
        for got in outcomes:
            allowed = {vector["outcome"], *vector.get("also", ())}
            assert got["outcome"] in allowed, (vector["id"], vector["title"], got)
            if got["outcome"] == "ok":
                prelude = f"{got['status']:03d}\n{got['type']}\n".encode().hex()
                assert (prelude, got["body"]) == (vector["prelude_hex"], vector["body_hex"])
    assert told["sealed"] == [row["v"] for row in sealing]


def test_a_question_goes_sealed_and_its_answer_comes_back(ends, upstream):
    url, node, sidecar = ends
    upstream.answering(ok)
    headers = JSON | {"authorization": "Bearer a-secret-token", "x-qos-class": "P2"}
    head, end = node.ask(f"{url}/v1/chat/completions?x=1", headers=headers, body=CHAT)
    assert (head, end["body"]) == ({"status": 200, "type": "application/json"}, "{}")
    seen = upstream.last()
    assert seen.line == b"POST /v1/chat/completions?x=1 HTTP/1.1"
    assert seen.body() == CHAT.encode()
    assert seen.all("Authorization") == []
    assert sidecar.metric("tongguan_proxy_envelopes_opened_total") >= 1
    head, end = node.ask(f"{url}/v1/models", method="GET")
    assert (head["status"], end["body"]) == (200, "{}")
    assert upstream.seen[-1].line == b"GET /v1/models HTTP/1.1"


@pytest.mark.parametrize("accept", ["text/event-stream", "*/*"])
def test_events_come_one_by_one_in_both_carriers(ends, upstream, accept):
    url, node, _ = ends
    go_on = threading.Event()

    def script(seen):
        seen.reply(SSE_HEAD, chunk(b"data: 1\n\n"))
        assert go_on.wait(20)
        seen.wire.send(chunk(b"data: 2\n\n"), LAST_CHUNK)

    upstream.answering(script)
    node.call(f"{url}/v1/chat/completions", headers=JSON | {"accept": accept}, body=CHAT)
    assert node.line() == {"status": 200, "type": "text/event-stream"}
    assert node.line() == {"part": "data: 1\n\n"}
    go_on.set()
    assert node.line() == {"part": "data: 2\n\n"}
    assert node.line()["end"]


def test_large_bodies_go_as_streams_both_ways(ends, upstream):
    url, node, _ = ends
    size = 1_100_000
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % size
    upstream.answering(head + b"y" * size)
    got, end = node.ask(f"{url}/v1/files", headers={"content-type": "text/plain"}, size=size)
    assert (got["status"], end["length"]) == (200, size)
    assert upstream.last().body() == b"x" * size


def test_a_body_that_comes_in_pieces_is_sealed_as_it_comes(ends, upstream):
    url, node, _ = ends
    upstream.answering(ok)
    pieces = ["one ", "", "two ", "three"]
    head, _ = node.ask(f"{url}/v1/files", headers={"content-type": "text/plain"}, slowly=pieces)
    assert head["status"] == 200
    assert upstream.last().body() == b"one two three"


def test_a_form_goes_with_the_model_of_its_part(ends, upstream):
    url, node, _ = ends
    upstream.answering(ok)
    head, _ = node.ask(f"{url}/v1/audio/transcriptions", form={"model": "tiny", "prompt": "a b"})
    assert head["status"] == 200
    seen = upstream.last()
    assert seen.get("Content-Type").startswith(b"multipart/form-data; boundary=")
    assert b'name="model"\r\n\r\ntiny\r\n' in seen.body()


def test_an_answer_that_is_cut_ends_as_an_error_after_what_came(ends, upstream):
    url, node, _ = ends

    def script(seen):
        seen.reply(SSE_HEAD, chunk(b"data: 1\n\n"), chunk(b"data: half"))
        seen.wire.close()

    upstream.answering(script)
    accept = {"accept": "text/event-stream"}
    head, end = node.ask(f"{url}/v1/chat/completions", headers=JSON | accept, body=CHAT)
    assert head["status"] == 200
    assert end["error"] == "truncated"


def test_what_is_no_envelope_is_no_answer(ends, upstream, tmp_path):
    url, node, sidecar = ends
    upstream.answering(ok)
    _, end = node.ask(f"http://127.0.0.1:{sidecar.app}/v1/x", headers=JSON, body=CHAT)
    assert end["error"] == "unsealed"
    with Node(new_keys(tmp_path / "other")) as stranger:
        _, end = stranger.ask(f"{url}/v1/x", headers=JSON, body=CHAT)
    assert (end["error"], end["status"], end["code"]) == ("unsealed", 400, "envelope_rejected")


def test_only_the_listed_fields_go_outside(ends):
    _, node, _ = ends
    with socket.create_server(("127.0.0.1", 0)) as listener:
        trace = {"traceparent": "00-1-2-01", "x-request-id": "r1", "cookie": "a-secret-cookie"}
        port = listener.getsockname()[1]
        node.call(f"http://127.0.0.1:{port}/v1/x?q=a-secret-query", headers=JSON | trace, body=CHAT)
        sock, _ = listener.accept()
        with sock:
            raw = b""
            while b"\r\n\r\n" not in raw:
                raw += sock.recv(65536)
            head = raw.split(b"\r\n\r\n")[0]
            with contextlib.suppress(OSError):
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        assert node.line()["error"] == "unsealed"
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/x HTTP/1.1"
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    assert set(fields) <= OUTSIDE
    assert fields["x-model-id"] == "tiny"
    assert fields["x-request-id"] == "r1"
    assert b"secret" not in raw
