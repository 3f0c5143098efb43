"""Chain seeds and trace-id leases over HTTP, for the node's own sidecars.

    POST /chains/seed      {origin} -> {id, seed, escrow}; over the unix socket or loopback alone
    POST /chains/lease     {lease} ("" for a new one) -> {lease, machine, first, count, ttl_s}
    POST /chains/release   {lease}
    GET  /chains/escrow    every escrow, for the auditor
    GET  /chains/keys      the key that signs escrows

Believed callers only, as the witness's. Disk is one thread's; at most `WAITING_MAX` wait for it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response
from starlette.routing import Route

from agent.leases import BLOCK, TTL_S
from agent.seeds import RefusedError, check_origin

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import Scope

    from agent.lease_store import LeaseStore
    from agent.metrics import Metrics
    from agent.seed_store import SeedStore

WAITING_MAX = 256
BODY_BYTES_MAX = 8 << 10

log = logging.getLogger("tongguan.agent.chains")


class ChainsApi:
    """See the module. Without `seeds` there are leases alone."""

    def __init__(
        self,
        seeds: SeedStore | None,
        leases: LeaseStore,
        believed: Callable[[Scope, dict[bytes, bytes]], bool],
        metrics: Metrics,
    ) -> None:
        self._seeds = seeds
        self._leases = leases
        self._believed = believed
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chains")
        self._waiting = 0

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/chains/seed", self._seed, methods=["POST"]),
            Route("/chains/lease", self._lease, methods=["POST"]),
            Route("/chains/release", self._release, methods=["POST"]),
            Route("/chains/escrow", self._escrow, methods=["GET"]),
            Route("/chains/keys", self._keys, methods=["GET"]),
        ]

    async def _seed(self, request: Request) -> Response:
        if not _is_near(request.scope):
            return _text(403, "seeds are given over the unix socket or loopback alone")
        return await self._answer(request, self._hand_out)

    async def _lease(self, request: Request) -> Response:
        return await self._answer(request, self._grant)

    async def _release(self, request: Request) -> Response:
        return await self._answer(request, self._give_back)

    async def _escrow(self, request: Request) -> Response:
        if self._seeds is None or not self._allowed(request):
            return _text(401 if self._seeds else 404, "only a believed caller may ask")
        loop = asyncio.get_running_loop()
        notes = await loop.run_in_executor(self._thread, self._seeds.escrows)
        return Response(notes, 200, media_type="text/plain; charset=utf-8")

    async def _keys(self, request: Request) -> Response:
        if self._seeds is None or not self._allowed(request):
            return _text(401 if self._seeds else 404, "only a believed caller may ask")
        return _text(200, self._seeds.key_line + "\n")

    def _allowed(self, request: Request) -> bool:
        return self._believed(request.scope, dict(request.scope["headers"]))

    async def _answer(
        self, request: Request, work: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Response:
        if not self._allowed(request):
            return _text(401, "only a believed sidecar may ask")
        if self._waiting >= WAITING_MAX:
            return _text(503, f"{WAITING_MAX} wait already")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > BODY_BYTES_MAX:
                return _text(413, f"a body of more than {BODY_BYTES_MAX} bytes")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, _guarded, work, body)
        finally:
            self._waiting -= 1

    # In the thread.

    def _hand_out(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self._seeds is None:
            raise RefusedError(404, "no seeds here: agent.auditor_public is not set")
        seed, note = self._seeds.hand_out(check_origin(asked.get("origin")))
        self._metrics.chain_seeds.inc()
        return {"id": seed.id, "seed": seed.value.hex(), "escrow": note}

    def _grant(self, asked: dict[str, Any]) -> dict[str, Any]:
        lease = self._leases.grant(str(asked.get("lease", "")), int(time.time()))
        self._count()
        return {
            "lease": lease.id,
            "machine": self._leases.machine,
            "first": lease.first,
            "count": BLOCK,
            "ttl_s": TTL_S,
        }

    def _give_back(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._leases.release(str(asked.get("lease", "")), int(time.time()))
        self._count()
        return {}

    def _count(self) -> None:
        now_s = time.time()
        alive = sum(lease.until_s > now_s for lease in self._leases.leases.values())
        self._metrics.trace_leases.set(alive)


def _guarded(work: Callable[[dict[str, Any]], dict[str, Any]], body: bytes) -> Response:
    try:
        asked = orjson.loads(body)
        if not isinstance(asked, dict):
            raise RefusedError(400, "expected a JSON object")  # noqa: TRY301 - one exit
        return Response(orjson.dumps(work(asked)), 200, media_type="application/json")
    except orjson.JSONDecodeError:
        return _text(400, "expected a JSON object")
    except RefusedError as refusal:
        return _text(refusal.status, str(refusal))
    except OSError as problem:
        log.critical("chains: %s: %s", problem.filename, problem.strerror)
        return _text(503, "it could not be kept")


def _is_near(scope: Scope) -> bool:
    client = scope.get("client")
    if not client or not client[0]:
        return True  # a unix socket
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def _text(status: int, text: str) -> Response:
    return Response(text, status, media_type="text/plain; charset=utf-8")
