"""The witness over HTTP: C2SP tlog-witness for sidecars, a signed list for auditors.

    POST /witness/add-checkpoint   cosignature lines, or 409 and the size that is known
    GET  /witness/heads            a signed note of lines `<origin> <size> <root> open|closed`
    GET  /witness/keys             the witness's public key lines

Believed callers only: a trusted uid over the unix socket, or the sidecars' bearer token. Those of
other nodes have another token, which opens no other route than the first and the last. Disk and
proofs are one thread's; at most `WAITING_MAX` submissions wait for it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from agent.witness import RefusedError, judge, parse_offered, parse_submission
from proxy.audit.note import write_note

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import Scope

    from agent.metrics import Metrics
    from agent.witness_store import WitnessStore

WAITING_MAX = 256
BODY_BYTES_MAX = 64 << 10
LOG_KEY_HEADER = "tongguan-log-key"
CLOSED_HEADER = "tongguan-log-closed"
_SIZE_TYPE = "text/x.tlog.size"
_FORGET_EVERY = 1024

log = logging.getLogger("tongguan.agent.witness")


class WitnessApi:
    """See the module."""

    def __init__(
        self,
        store: WitnessStore,
        believed: Callable[[Scope, dict[bytes, bytes]], bool],
        metrics: Metrics,
        peers_token: bytes = b"",
    ) -> None:
        self._store = store
        self._peers_bearer = b"Bearer " + peers_token if peers_token else b""
        self._believed = believed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="witness")
        self._metrics = metrics
        self._waiting = 0
        self._cosigned = 0
        metrics.witness_origins.set(len(store.heads))

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/witness/add-checkpoint", self._add, methods=["POST"]),
            Route("/witness/heads", self._heads, methods=["GET"]),
            Route("/witness/keys", self._keys, methods=["GET"]),
        ]

    async def _add(self, request: Request) -> Response:
        if not self._allowed(request, peers=True):
            return _text(401, "only a believed sidecar may ask")
        if self._waiting >= WAITING_MAX:
            return _text(503, f"{WAITING_MAX} submissions wait already")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > BODY_BYTES_MAX:
                return _text(413, f"a submission of more than {BODY_BYTES_MAX} bytes")
        offered = request.headers.get(LOG_KEY_HEADER, "")
        closed = request.headers.get(CLOSED_HEADER, "") == "yes"
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._judge, body, offered, closed)
        finally:
            self._waiting -= 1

    def _judge(self, body: bytes, offered: str, closed: bool) -> Response:  # noqa: FBT001
        store, now_s = self._store, int(time.time())
        try:
            asked = parse_submission(body.decode("utf-8", "replace"))
            head = judge(
                store.heads.get(asked.origin),
                asked,
                parse_offered(offered),
                closed=closed,
                now_s=now_s,
                room=store.room or store.forget(now_s) > 0,
            )
            store.keep(head)
        except RefusedError as refusal:
            reason = "fork" if refusal.fork else str(refusal.status)
            self._metrics.witness_refused.labels(reason).inc()
            if refusal.fork:
                log.critical("two histories of one audit log: %s", refusal)
            if refusal.status == 409:
                return Response(f"{refusal.size}\n", 409, media_type=_SIZE_TYPE)
            return _text(refusal.status, str(refusal))
        except OSError as problem:
            log.critical("the witness cannot keep a head: %s", problem.strerror)
            return _text(503, "the head could not be kept")
        self._metrics.witness_cosigned.inc()
        self._cosigned += 1
        if self._cosigned % _FORGET_EVERY == 0:
            store.forget(now_s)
        self._metrics.witness_origins.set(len(store.heads))
        return _text(200, store.cosigner.sign(asked.note.text, now_s).line())

    async def _heads(self, request: Request) -> Response:
        if not self._allowed(request):
            return _text(401, "only a believed caller may ask")
        heads = sorted(self._store.heads.values(), key=lambda head: head.origin)
        text = "".join(head.line() for head in heads)
        return _text(200, write_note(text, [self._store.list_signer.sign(text)]) if text else "")

    async def _keys(self, request: Request) -> Response:
        if not self._allowed(request, peers=True):
            return _text(401, "only a believed caller may ask")
        return _text(200, self._store.cosigner.key.line() + "\n")

    def _allowed(self, request: Request, *, peers: bool = False) -> bool:
        headers: dict[bytes, bytes] = dict(request.scope["headers"])
        given, bearer = headers.get(b"authorization", b""), self._peers_bearer
        if peers and bearer and hmac.compare_digest(given, bearer):
            return True
        return self._believed(request.scope, headers)


def _text(status: int, text: str) -> Response:
    return Response(text, status, media_type="text/plain; charset=utf-8")
