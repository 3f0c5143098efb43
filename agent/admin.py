"""The admin door, port 14190: `/livez`, `/readyz`, `/metrics`, reports, a page.

It has a thread and a loop of its own, so that it answers while the API's loop is busy or stuck —
which is the very thing a liveness probe wants to know. It serves nobody's prompts and writes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING

import orjson
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from agent.errors import UNKNOWN_URL
from agent.listen import HEAD_BYTES, DoorLimits, door
from agent.node import STUCK_S, Node
from agent.page_routes import page_routes
from agent.reports import report_routes
from proxy.errors import error_body

if TYPE_CHECKING:
    import socket

    from starlette.requests import Request

    from agent.metrics import Metrics

log = logging.getLogger("tongguan.agent.admin")
_CONNECTIONS = 64
_HEAD_S = 5.0


def application(node: Node, metrics: Metrics) -> Starlette:
    """Return the ASGI application of the admin door."""

    async def livez(_request: Request) -> Response:
        if node.alive(time.monotonic_ns()):
            return _json(200, {"alive": True})
        return _json(503, {"alive": False, "reasons": [f"the API loop is stuck for {STUCK_S} s"]})

    async def readyz(_request: Request) -> Response:
        reasons = node.not_ready()
        if reasons:
            return _json(503, {"ready": False, "reasons": reasons})
        return _json(200, {"ready": True, "reasons": []})

    async def render(_request: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def on_error(_request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return Response(
            error_body(
                UNKNOWN_URL, "this door has /livez, /readyz, /metrics and /v1/node/…, / (GET)"
            ),
            status,
            media_type="application/json",
        )

    app = Starlette(
        routes=[
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/metrics", render),
            *report_routes(node, metrics),
            *page_routes(),
        ],
        exception_handlers={HTTPException: on_error},
    )
    app.router.redirect_slashes = False
    return app


def _json(status: int, value: object) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


class AdminThread:
    """Runs the admin door until `stop`."""

    def __init__(self, sock: socket.socket, node: Node, metrics: Metrics) -> None:
        self._sock = sock
        limits = DoorLimits(
            connections=_CONNECTIONS,
            head_s=_HEAD_S,
            on_limit=lambda _name: None,
            on_count=lambda _count: None,
            on_error=lambda _code: None,
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                application(node, metrics),
                http=door(limits),
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=HEAD_BYTES,
            )
        )
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._sock]))
        except Exception:
            log.exception("the admin door has failed")

    def stop(self) -> None:
        """Stop within about two seconds."""
        self._server.should_exit = True
        self._thread.join(3)
