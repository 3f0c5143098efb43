"""Clients that leave at any moment, in every way a client can; each thread has its own seed.

Every scenario ends its connection itself, by FIN or RST. What an answer says is not judged here:
the soak looks at what is left in the sidecar. A client that is let hang is counted, as a fault.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
from collections import Counter
from typing import TYPE_CHECKING, Self

import httpx

from proxy.client import Sm4Transport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, no time: close sends RST
ANSWER_S = 15.0
PAUSE_S = 0.05


def request(model: str, *, stream: bool, content: int = 300, close: bool = False) -> bytes:
    """Return one chat request; `close`: the connection ends with its answer."""
    message = {"role": "user", "content": "x" * content}
    body = json.dumps({"model": model, "stream": stream, "messages": [message]}).encode()
    connection = b"Connection: close\r\n" if close else b""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n%b"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (connection, len(body), body)
    )


class Client:
    """One misbehaving client's connection; a context manager that ends it by FIN or RST."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.rng = rng
        self.sock = socket.create_connection(("127.0.0.1", port), ANSWER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.rng.random() < 0.5:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self.sock.sendall(data)

    def read(self, size: int) -> None:
        """Read up to so many bytes, or to the end."""
        while size > 0 and (data := self.sock.recv(min(size, 1 << 16))):
            size -= len(data)

    def rest(self) -> None:
        """Read to the connection's end."""
        self.read(1 << 40)


def cut_request(client: Client) -> None:
    """Leave inside a head or a body."""
    data = request("m-json", stream=False)
    client.send(data[: client.rng.randrange(1, len(data))])


def leave_stream(client: Client) -> None:
    """Leave somewhere inside a stream."""
    client.send(request("m-n64-g10", stream=True, close=True))
    client.read(client.rng.randrange(1, 8000))


def leave_silence(client: Client) -> None:
    """Leave while the engine says nothing, or no more."""
    client.send(request(client.rng.choice(["m-mute", "m-hang"]), stream=True))
    client.sock.settimeout(client.rng.random() * 0.05)
    with contextlib.suppress(TimeoutError):
        client.rest()


def upstream_dies(client: Client) -> None:
    """Read to its end a stream whose engine resets or closes it."""
    kind = client.rng.choice(["m-die5", "m-cut5"])
    client.send(request(kind, stream=True, close=True))
    client.rest()


def nonsense(client: Client) -> None:
    """Send a head that is none."""
    data = bytearray(request("m-json", stream=False))
    for _ in range(3):
        data[client.rng.randrange(60)] = client.rng.randrange(256)
    client.send(bytes(data))
    client.sock.shutdown(socket.SHUT_WR)
    client.rest()


def pipelined(client: Client) -> None:
    """Ask four times at once, leave after some of the answers."""
    last = request("m-n64-g0", stream=True, close=True)
    client.send(request("m-json", stream=False) * 3 + last)
    client.read(client.rng.randrange(1, 9000))


def half_closed(client: Client) -> None:
    """Close the sending side, read the answer."""
    client.send(request("m-n5-g10", stream=True))
    client.sock.shutdown(socket.SHUT_WR)
    client.rest()


def slow_reader(client: Client) -> None:
    """Read a little of a large stream."""
    client.send(request("m-big8", stream=True, close=True))
    client.read(client.rng.randrange(1, 1 << 20))


def large_body(client: Client) -> None:
    """Send a body beyond what is collected, sometimes not all of it."""
    size = client.rng.randrange(1 << 20, 3 << 20)
    data = request("m-json", stream=False, content=size, close=True)
    if client.rng.random() < 0.5:
        client.send(data[: client.rng.randrange(len(data))])
    else:
        client.send(data)
        client.rest()


def no_envelope(client: Client) -> None:
    """Send the sealed door bytes that are no envelope."""
    body = client.rng.randbytes(client.rng.randrange(1, 3000))
    client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/"
        b"x-sm4-envelope\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    client.rest()


PLAIN: tuple[Callable[[Client], None], ...] = (
    cut_request,
    leave_stream,
    leave_silence,
    upstream_dies,
    nonsense,
    pipelined,
    half_closed,
    slow_reader,
    large_body,
)


class Deaths:
    """Threads of such clients; `counts` says what they did, `hung` who got no end."""

    def __init__(self, app: int, sealed: int, keys: Path, *, threads: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.hung: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self._doors = (app, sealed)
        self._keys = keys
        self._over = threading.Event()
        self._lock = threading.Lock()
        work = [self._plain] * threads + [self._sealed]
        self._threads = [
            threading.Thread(target=self._guarded, args=(target, random.Random(seed + number)))
            for number, target in enumerate(work)
        ]

    def start(self) -> None:
        """Let them come."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the last ones leave."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, target: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            target(rng)
        except Exception as problem:  # noqa: BLE001 - a thread's end must not pass for quiet
            self.unexpected.append(f"{target.__name__}: {type(problem).__name__}: {problem}")

    def _plain(self, rng: random.Random) -> None:
        app, sealed = self._doors
        while not self._over.wait(rng.random() * PAUSE_S):
            scenario = rng.choice((*PLAIN, no_envelope))
            name = scenario.__name__
            try:
                with Client(sealed if scenario is no_envelope else app, rng) as client:
                    scenario(client)
            except TimeoutError:
                with self._lock:
                    self.hung[name] += 1
            except OSError:
                pass  # the sidecar ended it first, as it may
            with self._lock:
                self.counts[name] += 1

    def _sealed(self, rng: random.Random) -> None:
        url = f"http://127.0.0.1:{self._doors[1]}"
        body = {"model": "m-json", "messages": [{"role": "user", "content": "hi"}]}
        stream = {**body, "model": "m-n64-g10", "stream": True}
        with httpx.Client(
            base_url=url, transport=Sm4Transport(self._keys), timeout=ANSWER_S
        ) as client:
            while not self._over.wait(rng.random() * PAUSE_S * 4):
                name = "sealed"
                try:
                    if rng.random() < 0.5:
                        client.post("/v1/chat/completions", json=body)
                    else:
                        name = "leave_sealed"
                        with client.stream("POST", "/v1/chat/completions", json=stream) as answer:
                            for _ in zip(range(rng.randrange(20)), answer.iter_raw(), strict=False):
                                pass
                except httpx.TimeoutException:
                    with self._lock:
                        self.hung[name] += 1
                except httpx.TransportError:
                    pass  # the engine was gone
                with self._lock:
                    self.counts[name] += 1
