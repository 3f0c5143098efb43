"""The node's reports on the admin door: `/v1/node/topology`, `/v1/node/heatmap` (JSON, SVG, PNG).

Each answer is the newest sample or is made from it; a report never makes the engine wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response
from starlette.routing import Route

from agent.memory.pressure import png, svg

if TYPE_CHECKING:
    from starlette.requests import Request

    from agent.memory.watch import MemoryWatch
    from agent.node import Node

_NOT_CACHED = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def report_routes(node: Node) -> list[Route]:
    """Return the routes."""

    async def topology(_request: Request) -> Response:
        watch = node.memory
        if watch is None or watch.latest is None:
            return _none(watch)
        return answer(200, watch.latest.plain())

    async def heatmap(request: Request) -> Response:
        watch = node.memory
        if watch is None:
            return _none(watch)
        table = watch.heat.table()
        if request.url.path.endswith(".svg"):
            return Response(svg(table), media_type="image/svg+xml", headers=_NOT_CACHED)
        if request.url.path.endswith(".png"):
            return Response(png(table), media_type="image/png", headers=_NOT_CACHED)
        return answer(200, table)

    return [
        Route("/v1/node/topology", topology),
        Route("/v1/node/heatmap", heatmap),
        Route("/v1/node/heatmap.svg", heatmap),
        Route("/v1/node/heatmap.png", heatmap),
    ]


def answer(status: int, value: object) -> Response:
    """Return a report as JSON."""
    return Response(orjson.dumps(value), status, media_type="application/json", headers=_NOT_CACHED)


def _none(watch: MemoryWatch | None) -> Response:
    reason = (
        "memory is not sampled (agent.memory_sample_s is 0)"
        if watch is None
        else "no sample yet, or memory cannot be read here; the log says why"
    )
    return answer(503, {"reasons": [reason]})
