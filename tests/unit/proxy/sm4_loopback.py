"""A small HTTP server on loopback that answers over the real receiver and sealers."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from proxy.errors import ERRORS, error_body
from proxy.sm4.envelope import MEDIA_TYPE, EnvelopeError
from proxy.sm4.keyring import EnvelopeKey, Keyring
from proxy.sm4.receiver import Receiver
from proxy.sm4.replay import ReplayCache
from tests.unit.proxy.sm4_kit import finished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.sm4.opener import OpenedRequest

PIECES = ["Pa", "ris", " is", " the", " capital", "."]
ANSWER = "".join(PIECES)
MODEL = "tiny"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def live_key(suite: int = 1, **changes: Any) -> EnvelopeKey:
    """Return a fresh key that is valid now."""
    now = now_ms()
    facts: dict[str, Any] = {
        "kid": os.urandom(8),
        "root": os.urandom(32),
        "client": "client-a",
        "audience": "local/default/test",
        "tenant": "team-a",
        "suite": suite,
        "digest": "sha256",
        "not_before_ms": now - 60_000,
        "not_after_ms": now + 3_600_000,
    }
    return EnvelopeKey(**(facts | changes))


def chunk(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    delta = {"content": text} if text is not None else {}
    event = {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(event | more).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": len(PIECES), "total_tokens": 7 + len(PIECES)}


def sse_pieces() -> list[bytes]:
    last = [chunk(None, "stop"), chunk(None, choices=[], usage=USAGE), b"data: [DONE]\n\n"]
    return [chunk(text) for text in PIECES] + last


def completion() -> bytes:
    message = {"role": "assistant", "content": ANSWER}
    return json.dumps(
        {
            "id": "c1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": USAGE,
        }
    ).encode()


class Loopback:
    """The server: what it was sent, and how it misbehaves (`fault`)."""

    def __init__(self, key: EnvelopeKey | None) -> None:
        self.receiver = None
        if key is not None:
            self.receiver = Receiver(
                Keyring([key]), ReplayCache(), start_ms=0, fence_ms=0, max_body_bytes=32 << 20
            )
        self.lock = threading.Lock()
        self.fault = ""
        self.outer: list[tuple[str, str, dict[str, str]]] = []
        self.opened: list[OpenedRequest] = []
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    loopback: Loopback

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        pass

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        loopback = self.loopback
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        loopback.outer.append(
            (self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        )
        if loopback.receiver is None:
            self._plain(body)
            return
        fault = loopback.fault
        if fault.startswith("clear:"):
            kind = ERRORS[fault.removeprefix("clear:")]
            self._send(kind.status, "application/json", error_body(kind, "secret words"))
            return
        if fault == "unsealed":
            self._send(200, "application/json", completion())
            return
        if fault == "unsealed-sse":
            self._send(200, "text/event-stream", b"".join(sse_pieces()))
            return
        try:
            with loopback.lock:
                opener = loopback.receiver.begin(
                    self.headers["Content-Type"],
                    self.headers["Content-Encoding"],
                    self.headers["X-Model-Id"],
                    False,
                    self.headers["X-Tenant-Id"],
                )
                opener.feed(body, now_ms())
                opened = finished(opener, now_ms())
        except EnvelopeError as problem:
            kind = ERRORS[problem.code]
            if problem.sealer is None:
                self._send(kind.status, "application/json", error_body(kind, "no"))
                return
            sealed = problem.sealer.single(
                400,
                "application/json",
                error_body(kind, "no"),
                nonce=os.urandom(12),
                now_ms=now_ms(),
            )
            self._send(200, MEDIA_TYPE, sealed)
            return
        loopback.opened.append(opened)
        self._answer(opened)

    def _answer(self, opened: OpenedRequest) -> None:
        status, kind, parts = inner_answer(opened.method, opened.target, opened.body)
        stamp = {"nonce": os.urandom(12), "now_ms": now_ms()}
        if kind != "text/event-stream" and len(b"".join(parts)) < 1_000_000:
            sealed = opened.sealer.single(status, kind, b"".join(parts), **stamp)  # type: ignore[arg-type]
            if self.loopback.fault == "flip":
                sealed = sealed[:-1] + bytes([sealed[-1] ^ 1])
            self._send(200, MEDIA_TYPE, sealed)
            return
        as_events = "text/event-stream" in self.headers.get("Accept", "") and "event" in kind
        carrier = "sse" if as_events else "raw"
        stream = opened.sealer.stream(status, kind, carrier=carrier, **stamp)  # type: ignore[arg-type]
        self._head(200, "text/event-stream" if carrier == "sse" else MEDIA_TYPE, None)
        self._chunk(stream.head())
        for index, part in enumerate(parts):
            if self.loopback.fault == "truncate" and index == 3:
                self._chunk(b"")
                return
            self._chunk(stream.data(part))
        self._chunk(stream.last())
        self._chunk(b"")

    def _plain(self, body: bytes) -> None:
        if self.loopback.fault == "not json":
            self._send(502, "text/html", b"<h1>bad gateway</h1>")
            return
        if self.headers["Content-Type"] == MEDIA_TYPE:
            code = "method_not_allowed" if self.path.endswith("/models") else "invalid_request"
            refusal = ERRORS[code]
            self._send(refusal.status, "application/json", error_body(refusal, "no"))
            return
        status, kind, parts = inner_answer(self.command, self.path, body)
        if self.loopback.fault == "finish length":
            parts = [part.replace(b'"stop"', b'"length"') for part in parts]
        if self.loopback.fault == "truncate":
            parts = parts[:3]
        if self.loopback.fault == "error event":
            parts = [*parts[:2], b'data: {"error":{"code":"upstream_reset","message":"gone"}}\n\n']
        if self.loopback.fault == "junk event":
            parts = [b"data: {\n\n"]
        self._send(status, kind, b"".join(parts))

    def _head(self, status: int, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("X-Trace-Id", "trace-1")
        self.send_header("X-QoS-Class", "P1")
        self.send_header("X-QoS-Pool", "shared")
        self.send_header("X-Injected", "by a gateway")
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


def inner_answer(method: str, target: str, body: bytes) -> tuple[int, str, list[bytes]]:
    """Return (status, type, parts) of what the engine behind would say."""
    if target.endswith("/models"):
        row = {"id": MODEL, "object": "model", "created": 1, "owned_by": "test"}
        return 200, "application/json", [json.dumps({"object": "list", "data": [row]}).encode()]
    if target.startswith("/echo"):
        return (
            200,
            "application/octet-stream",
            [method.encode() + b" " + target.encode() + b"\n", body],
        )
    if not target.endswith("/chat/completions"):
        return 404, "application/json", [error_body(ERRORS["invalid_request"], "no such path")]
    asked = json.loads(body)
    if asked.get("model") == "unknown":
        return 404, "application/json", [error_body(ERRORS["invalid_request"], "unknown model")]
    if asked.get("stream"):
        return 200, "text/event-stream", sse_pieces()
    return 200, "application/json", [completion()]


@contextmanager
def serving(key: EnvelopeKey | None) -> Iterator[Loopback]:
    """Serve on a free port of 127.0.0.1 until the block ends."""
    loopback = Loopback(key)
    handler = type("Handler", (_Handler,), {"loopback": loopback})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    loopback.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield loopback
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
