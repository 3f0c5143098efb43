"""The page for people on the admin door: three static files under a strict policy.

The files are read once, when the door is made; nothing in them comes from a request. The policy
allows what the door itself serves and no inline script, style or other host, so the page works
offline and text from a model's or a process's name cannot become markup.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

FOLDER: Final = Path(__file__).with_name("page")
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


def page_routes() -> list[Route]:
    """Return the routes; raises OSError where the files are not installed."""
    return [_route(path, *file) for path, file in FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    body = (FOLDER / name).read_bytes()

    async def serve(_request: Request) -> Response:
        return Response(body, headers=HEADERS, media_type=kind)

    return Route(path, serve)
