"""One request to the node's agent, on a connection of its own: HTTP/1.1, blocking, bounded.

For threads that have time: the witness's, the lease's, and a start. There is one such request in
seconds, so there is no pool.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import orjson

from proxy.audit.escrow import NOTE_BYTES_MAX
from proxy.audit.setup import ChainSeed
from proxy.discreet import Discreet

TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 64 << 10


class AgentError(Exception):
    """The agent did not do it; says why. `refused`: it said no, and would again."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class AgentAddress(Discreet, frozen=True):
    """Where an agent is: (host, port) or a unix socket's path, and what is shown to it."""

    shown = ("address",)

    address: tuple[str, int] | str
    authorization: bytes = b""

    def post(
        self, path: str, body: bytes, *fields: str, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, str]:
        """Return (status, body); raises OSError, ValueError for what is no answer."""
        rows = [
            f"POST {path} HTTP/1.1",
            "Host: agent",
            "Connection: close",
            f"Content-Length: {len(body)}",
            *fields,
        ]
        head = "\r\n".join(rows).encode()
        if self.authorization:
            head += b"\r\nAuthorization: " + self.authorization
        with self._connect(timeout_s) as wire:
            wire.sendall(head + b"\r\n\r\n" + body)
            answer = b""
            while len(answer) <= ANSWER_BYTES_MAX and (part := wire.recv(16384)):
                answer += part
        status_line, _, rest = answer.partition(b"\r\n")
        text = rest.partition(b"\r\n\r\n")[2].decode("utf-8")
        parts = status_line.split(b" ")
        if len(parts) < 2 or not status_line.startswith(b"HTTP/1."):
            raise ValueError("no HTTP answer")
        return int(parts[1]), text

    def ask(self, path: str, asked: dict[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return the JSON object that a POST of one gives; raises `AgentError`."""
        try:
            status, text = self.post(path, orjson.dumps(asked), timeout_s=timeout_s)
            if status == 200:
                found = orjson.loads(text)
                if isinstance(found, dict):
                    return found
                raise ValueError("not an object")  # noqa: TRY301 - one exit
        except (OSError, ValueError) as problem:
            raise AgentError(f"{path}: {problem}") from None
        refused = status in (400, 401, 403, 404, 413)
        raise AgentError(f"{path}: {status} {text[:200].strip()}", refused=refused)

    def _connect(self, timeout_s: float) -> socket.socket:
        if isinstance(self.address, tuple):
            return socket.create_connection(self.address, timeout_s)
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            wire.settimeout(timeout_s)
            wire.connect(self.address)
        except OSError:
            wire.close()
            raise
        return wire


def chain_seed(agent: AgentAddress, origin: str) -> ChainSeed:
    """Ask the agent for the seed of a chain; raises `AgentError`."""
    found = agent.ask("/chains/seed", {"origin": origin})
    try:
        seed = ChainSeed(str(found["id"]), bytes.fromhex(found["seed"]), str(found["escrow"]))
    except (KeyError, TypeError, ValueError):
        raise AgentError("/chains/seed: no seed in the answer") from None
    plain = seed.id.isascii() and seed.id.isalnum() and len(seed.id) <= 64
    if not plain or len(seed.value) != 32 or not 0 < len(seed.escrow) <= NOTE_BYTES_MAX:
        raise AgentError("/chains/seed: not a seed of this format")
    return seed


class TraceLease(msgspec.Struct, frozen=True):
    """A block of trace ids; `until_s` by the clock that was asked with."""

    id: str
    machine: int
    first: int
    count: int
    until_s: float


def trace_lease(agent: AgentAddress, lease_id: str, now_s: float, timeout_s: float) -> TraceLease:
    """Ask for a lease, or renew one; raises `AgentError`."""
    found = agent.ask("/chains/lease", {"lease": lease_id}, timeout_s)
    try:
        numbers = [found[name] for name in ("machine", "first", "count", "ttl_s")]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise TypeError  # noqa: TRY301 - one exit
        machine, first, count, ttl_s = numbers
        return TraceLease(str(found["lease"]), machine, first, count, now_s + ttl_s)
    except (KeyError, TypeError):
        raise AgentError("/chains/lease: no lease in the answer") from None
