"""The reverse proxy that one writes with aiohttp: `python aiohttp_proxy.py PORT BACKEND_PORT`.

As lean as its public interface allows: uvloop, no access log, no limit of connections, bodies with
a length in one piece, all others passed on as they come.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

# RFC 9110 section 7.6.1, and what the client writes itself.
REQUEST_OWN = {
    "connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip
ANSWER_OWN = {"connection", "keep-alive", "transfer-encoding"}


class Hop:
    """One upstream, one pool of connections."""

    def __init__(self, backend: str, session: ClientSession) -> None:
        self._base = f"http://127.0.0.1:{backend}"
        self._session = session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on and its answer back."""
        fields = [(k, v) for k, v in request.headers.items() if k.lower() not in REQUEST_OWN]
        asking = self._session.request(
            request.method,
            self._base + request.path_qs,
            headers=fields,
            data=await request.read(),
            auto_decompress=False,
        )
        async with asking as answer:
            back = {k: v for k, v in answer.headers.items() if k.lower() not in ANSWER_OWN}
            if "Content-Length" in answer.headers:
                return web.Response(body=await answer.read(), status=answer.status, headers=back)
            stream = web.StreamResponse(status=answer.status, headers=back)
            await stream.prepare(request)
            async for piece in answer.content.iter_any():
                await stream.write(piece)
            await stream.write_eof()
            return stream


async def serve(port: str, backend: str) -> None:
    """Serve until the process is ended."""
    connector = TCPConnector(limit=0)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=None)) as session:
        # Without it a client that left while the engine is silent goes unnoticed.
        arguments = {"access_log": None, "handler_cancellation": True}
        application = web.Application(client_max_size=1 << 28)
        application.router.add_route("*", "/{path:.*}", Hop(backend, session).handle)
        runner = web.AppRunner(application, **arguments)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(port), backlog=1024).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:3]))
