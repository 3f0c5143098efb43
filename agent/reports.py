"""The node's reports on the admin door: summary, plan, topology, heat map, other engines.

Each answer is the newest sample or is made from it; a report never makes the engine wait.
"""

from __future__ import annotations

import dataclasses
import time
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response
from starlette.routing import Route

from agent.engine.types import QOS_CLASSES
from agent.memory.pressure import png, svg

if TYPE_CHECKING:
    from starlette.requests import Request

    from agent.memory.watch import MemoryWatch
    from agent.metrics import Metrics
    from agent.node import Node

_NOT_CACHED = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def report_routes(node: Node, metrics: Metrics) -> list[Route]:
    """Return the routes."""

    async def topology(_request: Request) -> Response:
        watch = node.memory
        if watch is None or watch.latest is None:
            return _none(watch)
        return answer(200, watch.latest.plain())

    async def plan(_request: Request) -> Response:
        if node.engine is None:
            return answer(503, {"reasons": node.not_ready()})
        return answer(200, {"model": node.engine.info.id, **node.engine.placement})

    async def summary(_request: Request) -> Response:
        return answer(200, summary_of(node, metrics))

    async def upstreams(_request: Request) -> Response:
        reports = node.upstreams.reports if node.upstreams else {}
        return answer(200, {"upstreams": [report.plain() for report in reports.values()]})

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
        Route("/v1/node/summary", summary),
        Route("/v1/node/topology", topology),
        Route("/v1/node/plan", plan),
        Route("/v1/node/upstreams", upstreams),
        Route("/v1/node/heatmap", heatmap),
        Route("/v1/node/heatmap.svg", heatmap),
        Route("/v1/node/heatmap.png", heatmap),
    ]


def summary_of(node: Node, metrics: Metrics) -> dict[str, Any]:
    """Return the node on one page: state, model, engine, classes, memory, what else runs."""
    engine, reasons = node.engine, node.not_ready()
    stats = engine.stats() if engine else None
    latencies, by_class = metrics.latencies.table(), stats.classes if stats else {}
    report = node.memory.latest if node.memory else None
    return {
        "at_unix_s": round(time.time(), 3),
        "version": _version(),
        "ready": not reasons,
        "reasons": reasons,
        "model": dataclasses.asdict(engine.info) | {"path": None} if engine else None,
        "engine": dataclasses.asdict(stats) if stats else None,
        "classes": [
            {
                "class": name,
                "running": by_class.get(name, (0, 0))[0],
                "waiting": by_class.get(name, (0, 0))[1],
                **latencies[name],
            }
            for name in QOS_CLASSES
        ],
        "memory": {
            "backend": report.backend,
            "limit_bytes": report.host.limit_bytes,
            "headroom_bytes": report.host.headroom_bytes,
            "process_bytes": report.host.process.rss_bytes,
        }
        if report
        else None,
        "sections": {name: section() for name, section in node.sections.items()},
    }


@cache
def _version() -> str:
    return metadata.version("tongguan")


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
