"""The OpenAI-compatible HTTP surface on port 14100 and on the unix socket.

One request: head -> is there an engine -> body within limits -> `Job` -> token ids -> engine ->
deltas through an `Inbox` -> JSON or SSE. The status is sent with the first token, so what fails
before it gets a proper status, and first byte means first token. A watcher awaits the client's
disconnect from the moment the body is read; it ends the generation at once, also one that still
waits. Nothing here blocks the loop: long prompts are tokenised in a thread of their own.

`X-QoS-Class` is believed over the unix socket from a trusted uid, or with the sidecar's bearer
token; anybody else's request has the default class.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import re
import secrets
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from agent.engine.types import (
    QOS_CLASSES,
    ChatTemplateError,
    ContextExceeded,
    Engine,
    EngineClosed,
    FinishReason,
    Generation,
    QueueFull,
)
from agent.inbox import AbandonedError, Batch, Inbox
from agent.listen import peer_uid, transport_of
from agent.openai import (
    BAD_METHOD,
    CONTEXT_EXCEEDED,
    DONE,
    DRAINING,
    INTERNAL,
    INVALID,
    MODEL_NOT_FOUND,
    QUEUE_FULL,
    TIMED_OUT,
    TOO_LARGE,
    UNKNOWN_URL,
    Answer,
    ApiError,
    Job,
    Usage,
    event,
    model_card,
    model_list,
    parse_chat,
    parse_completion,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from agent.config import Agent
    from agent.metrics import Metrics
    from agent.node import Node

log = logging.getLogger("tongguan.agent.api")

# Below this a body is parsed and tokenised on the loop: a thread hop costs more.
INLINE_BYTES = 8 << 10
# An early answer's unread body is read and dropped up to here; beyond it the connection closes.
DISCARD_BYTES = 64 << 20
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

Headers = list[tuple[bytes, bytes]]


class _ClientGoneError(Exception):
    """The client left before its request was whole."""


class _Timing:
    """Observes one request's times; `on_tokens` runs where tokens are made, the engine's thread."""

    __slots__ = ("_inter_token", "_last_ns", "_metrics", "_model", "_ttft", "started_ns")

    def __init__(self, metrics: Metrics, started_ns: int) -> None:
        self.started_ns = started_ns
        self._metrics = metrics
        self._last_ns = 0

    def begin(self, model: str) -> None:
        """Name the model, before the engine is asked."""
        self._model = model
        self._ttft = self._metrics.ttft.labels(model)
        self._inter_token = self._metrics.inter_token.labels(model)

    def on_tokens(self, count: int) -> None:
        """Take one step of `count` tokens."""
        if not count:
            return
        now_ns = time.monotonic_ns()
        if self._last_ns:
            self._inter_token.observe((now_ns - self._last_ns) / 1e9)
        else:
            self._ttft.observe((now_ns - self.started_ns) / 1e9)
        self._last_ns = now_ns

    def end(self) -> None:
        """Take the end of a request that reached the engine."""
        self._metrics.e2e.labels(self._model).observe((time.monotonic_ns() - self.started_ns) / 1e9)


@dataclass(slots=True)
class _Call:
    """One request on its way: who asks, and what has been sent."""

    scope: Scope
    send: Send
    inbox: Inbox
    timing: _Timing
    qos_class: str
    request_id: str
    begun: bool = False
    headers: Headers = field(default_factory=list)


class Api:
    """Builds the ASGI application; `abandon_all` ends what still runs at shutdown."""

    def __init__(self, node: Node, settings: Agent, metrics: Metrics, token: bytes) -> None:
        self._node = node
        self._settings = settings
        self._metrics = metrics
        self._bearer = b"Bearer " + token if token else b""
        self._uids = {0, os.getuid(), *map(int, settings.trusted_uids)}
        self._calls: dict[int, _Call] = {}
        self._long_prompts: Executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def application(self) -> Starlette:
        """Return the ASGI application."""
        app = Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/v1/chat/completions", _Endpoint(self, parse_chat), methods=["POST"]),
                Route("/v1/completions", _Endpoint(self, parse_completion), methods=["POST"]),
            ],
            exception_handlers={
                HTTPException: self._on_http_error,
                ApiError: self._on_api_error,
                Exception: self._on_bug,
            },
        )
        # A redirected POST is lost by many clients; an unknown path is simply unknown.
        app.router.redirect_slashes = False
        return app

    def abandon_all(self) -> None:
        """End every request that still runs with an error that says why."""
        for call in list(self._calls.values()):
            call.inbox.abandon("draining")

    @property
    def running(self) -> int:
        """Requests between a whole body and their end."""
        return len(self._calls)

    # Answers without generation.

    async def _models(self, _request: Request) -> Response:
        engine = self._node.require_engine()
        body = model_list(self._node.names, engine.info.created, engine.info.context_length)
        return Response(body, media_type="application/json")

    async def _model(self, request: Request) -> Response:
        engine = self._node.require_engine()
        name = str(request.path_params["name"])
        self._check_model(name)
        card = model_card(
            name, engine.info.created, engine.info.context_length, root=self._node.names[0]
        )
        return Response(orjson.dumps(card), media_type="application/json")

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        status = cast("HTTPException", error).status_code
        what = f"{request.method} {request.url.path}"[:200]
        if status == 405:
            allow = (cast("HTTPException", error).headers or {}).get("Allow", "")
            problem = ApiError(BAD_METHOD, f"{what}: use {allow}")
            return self._response(problem, {"Allow": allow})
        return self._response(ApiError(UNKNOWN_URL, f"unknown request URL: {what}"))

    async def _on_api_error(self, _request: Request, error: Exception) -> Response:
        return self._response(cast("ApiError", error))

    async def _on_bug(self, _request: Request, _error: Exception) -> Response:
        # uvicorn logs the traceback.
        return self._response(ApiError(INTERNAL, "the agent failed; its log says why"))

    def _response(self, error: ApiError, headers: dict[str, str] | None = None) -> Response:
        self._metrics.errors.labels(error.kind.code).inc()
        headers = headers or {}
        if error.kind.status == 503:
            headers["Retry-After"] = str(error.retry_after_s)
        return Response(
            error.body(), error.kind.status, headers=headers, media_type="application/json"
        )

    # Generation.

    async def generate(
        self, parse: Callable[[bytes], Job], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve one POST."""
        loop = asyncio.get_running_loop()
        started_ns = time.monotonic_ns()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        timing = _Timing(self._metrics, started_ns)
        call = _Call(
            scope=scope,
            send=send,
            inbox=Inbox(loop, on_tokens=timing.on_tokens, on_behind=lambda: _abort(scope)),
            timing=timing,
            qos_class=self._qos_class(scope, headers),
            request_id=given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16),
        )
        call.headers = [
            (b"x-request-id", call.request_id.encode("latin-1")),
            (b"x-qos-class", call.qos_class.encode()),
        ]
        try:
            self._node.require_engine()
            body = await self._read_body(headers, receive)
        except ApiError as error:
            await self._send_error(call, error, close=_unread_is_large(headers))
            return
        except _ClientGoneError:
            self._metrics.abandoned.labels("gone").inc()
            return
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(_watch(receive, call))
            self._calls[id(call)] = call
            try:
                await self._run(call, parse, body)
            finally:
                del self._calls[id(call)]
                watcher.cancel()

    async def _run(self, call: _Call, parse: Callable[[bytes], Job], body: bytes) -> None:
        try:
            job, prompt_ids = await self._understand(call, parse, body)
            del body
            await self._serve(call, job, prompt_ids)
        except ApiError as error:
            await self._send_error(call, error)
        except AbandonedError as end:
            await self._end_abandoned(call, end)

    async def _understand(
        self, call: _Call, parse: Callable[[bytes], Job], body: bytes
    ) -> tuple[Job, Sequence[int]]:
        def work() -> tuple[Job, Sequence[int]]:
            job = parse(body)
            self._check_model(job.model)
            try:
                return job, job.prompt_ids(engine.tokenizer)
            except ChatTemplateError as problem:
                raise ApiError(
                    INVALID, f"the model's chat template refused: {problem}", param="messages"
                ) from None

        engine = self._node.require_engine()
        if len(body) <= INLINE_BYTES:
            result = work()
        else:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._long_prompts, work)
        call.inbox.check()
        return result

    def _check_model(self, name: str | None) -> None:
        names = self._node.names
        if name is not None and name not in names:
            raise ApiError(
                MODEL_NOT_FOUND,
                f"the model {name[:128]!r} does not exist here; served: {', '.join(names)}",
                param="model",
            )

    async def _serve(self, call: _Call, job: Job, prompt_ids: Sequence[int]) -> None:
        engine = self._node.require_engine()
        model = self._node.names[0]
        call.timing.begin(model)
        if job.stream:
            call.inbox.bound(self._settings.pending_tokens)
        generation = self._submit(engine, job, prompt_ids, call)
        try:
            call.inbox.attach(generation)
            answer = Answer(
                job,
                request_id=secrets.token_hex(16),
                created=int(time.time()),
                model=model,
                prompt_ids=prompt_ids if job.return_token_ids else (),
            )
            if job.stream:
                await self._stream(call, job, answer, generation)
            else:
                await self._whole(call, answer, generation)
        finally:
            generation.cancel()
            call.timing.end()

    def _submit(
        self, engine: Engine, job: Job, prompt_ids: Sequence[int], call: _Call
    ) -> Generation:
        try:
            sampling = job.sampling(len(prompt_ids), engine.info.context_length)
            generation = engine.submit(prompt_ids, sampling, call.inbox.put, call.qos_class)
        except QueueFull as problem:
            self._metrics.limits.labels("queue").inc()
            raise ApiError(
                QUEUE_FULL, f"{problem.limit} requests wait already (agent.queue)"
            ) from None
        except ContextExceeded as problem:
            raise ApiError(
                CONTEXT_EXCEEDED,
                f"this model's maximum context length is {problem.context_length} tokens, but the "
                f"prompt has {problem.prompt_tokens} tokens and max_tokens is "
                f"{problem.max_tokens}; shorten one of them",
                param=job.prompt_field,
            ) from None
        except EngineClosed:
            raise ApiError(DRAINING, "the agent is shutting down", retry_after_s=5) from None
        except ValueError as problem:
            raise ApiError(
                INVALID, f"{job.prompt_field}: {problem}", param=job.prompt_field
            ) from None
        self._metrics.requests.labels(call.qos_class).inc()
        return generation

    async def _whole(self, call: _Call, answer: Answer, generation: Generation) -> None:
        texts: list[str] = []
        ids: list[int] = []
        finish: FinishReason | None = None
        while finish is None:
            batch = await call.inbox.take()
            texts.append(batch.text)
            ids.extend(batch.token_ids)
            finish = batch.finish_reason
            _check_finish(batch)
        usage = Usage(generation.prompt_tokens, len(ids), generation.cached_tokens)
        body = answer.whole("".join(texts), ids, finish, usage)
        await self._send_head(call, 200, b"application/json", length=len(body))
        await self._send(call, body, more=False)

    async def _stream(self, call: _Call, job: Job, answer: Answer, generation: Generation) -> None:
        finish: FinishReason | None = None
        completion_tokens = 0
        carried: tuple[int, ...] = ()
        while finish is None:
            batch = await call.inbox.take()
            _check_finish(batch)
            finish = batch.finish_reason
            completion_tokens += len(batch.token_ids)
            out = b""
            if not call.begun:
                await self._send_head(call, 200, b"text/event-stream; charset=utf-8")
                out = answer.first()
            # A step may bring no whole character; its ids travel with the next that does.
            carried += batch.token_ids
            if batch.text or finish is not None:
                out += answer.chunk(batch.text, carried, finish)
                carried = ()
            if finish is not None:
                if job.include_usage:
                    out += answer.usage(
                        Usage(generation.prompt_tokens, completion_tokens, generation.cached_tokens)
                    )
                out += DONE
            if out:
                await self._send(call, out, more=finish is None)

    # Sending.

    async def _send_head(
        self, call: _Call, status: int, kind: bytes, *, length: int | None = None
    ) -> None:
        headers = [(b"content-type", kind), *call.headers]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        if kind.startswith(b"text/event-stream"):
            headers += [
                (b"cache-control", b"no-cache, no-transform"),
                (b"x-accel-buffering", b"no"),
            ]
        call.begun = True
        await call.send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send(self, call: _Call, body: bytes, *, more: bool) -> None:
        """Send within `client_stall_s`; raises `AbandonedError`."""
        try:
            async with asyncio.timeout(self._settings.client_stall_s):
                await call.send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            self._metrics.limits.labels("client_stall_s").inc()
            raise AbandonedError("stalled") from None

    async def _send_error(self, call: _Call, error: ApiError, *, close: bool = False) -> None:
        """Answer with an error, or end a stream that has begun with an error event."""
        self._metrics.errors.labels(error.kind.code).inc()
        with contextlib.suppress(AbandonedError):
            if call.begun:
                # Never a fabricated [DONE]: the client must see that this is no normal end.
                await self._send(call, event(orjson.loads(error.body())), more=False)
                return
            body = error.body()
            if error.kind.status == 503:
                call.headers.append((b"retry-after", str(error.retry_after_s).encode()))
            if close:
                call.headers.append((b"connection", b"close"))
            await self._send_head(call, error.kind.status, b"application/json", length=len(body))
            await self._send(call, body, more=False)

    async def _end_abandoned(self, call: _Call, end: AbandonedError) -> None:
        self._metrics.abandoned.labels(end.why).inc()
        if end.why == "draining":
            await self._send_error(
                call, ApiError(DRAINING, "the agent is shutting down", retry_after_s=5)
            )
            return
        if end.why == "behind":
            self._metrics.limits.labels("pending_tokens").inc()
        if end.why != "gone":
            log.info("a client does not read; its request %s is ended", call.request_id)
        _abort(call.scope)

    # Reading.

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._settings.body_bytes
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise self._too_large()
        body = bytearray()
        more = True
        while more:
            try:
                async with asyncio.timeout(self._settings.body_idle_s):
                    message = await receive()
            except TimeoutError:
                self._metrics.limits.labels("body_idle_s").inc()
                raise ApiError(
                    TIMED_OUT,
                    f"no part of the body for {self._settings.body_idle_s:g} s (agent.body_idle_s)",
                ) from None
            if message["type"] == "http.disconnect":
                raise _ClientGoneError
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> ApiError:
        self._metrics.limits.labels("body_bytes").inc()
        limit = self._settings.body_bytes
        return ApiError(TOO_LARGE, f"the body has more than {limit} bytes (agent.body_bytes)")

    def _qos_class(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Return the class asked for where the caller is believed, else the default."""
        asked = headers.get(b"x-qos-class", b"").strip().upper().decode("latin-1")
        # Two values are unknown, not the last one.
        once = sum(name == b"x-qos-class" for name, _ in scope["headers"]) == 1
        if not once or asked not in QOS_CLASSES or not self._believed(scope, headers):
            return self._settings.default_class
        return asked

    def _believed(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        if self._bearer and hmac.compare_digest(given, self._bearer):
            return True
        return peer_uid(transport_of(scope)) in self._uids


class _Endpoint:
    """An ASGI application for one POST path; Starlette routes to it untouched."""

    def __init__(self, api: Api, parse: Callable[[bytes], Job]) -> None:
        self._api = api
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api.generate(self._parse, scope, receive, send)


async def _watch(receive: Receive, call: _Call) -> None:
    """Await the client's end and give up its request, whatever it waits for."""
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            call.inbox.abandon("gone")
            return


def _abort(scope: Scope) -> None:
    transport = transport_of(scope)
    if transport is not None:
        # close() would wait for a buffer that nobody empties.
        transport.abort()


def _check_finish(batch: Batch) -> None:
    if batch.finish_reason == "error":
        raise ApiError(INTERNAL, batch.error or "the engine failed")
    if batch.finish_reason == "cancelled":
        raise ApiError(DRAINING, "the engine ended the request", retry_after_s=5)


def _unread_is_large(headers: dict[bytes, bytes]) -> bool:
    """Say whether an early answer should close: the rest of the body is long or unknown."""
    if b"transfer-encoding" in headers:
        return True
    declared = headers.get(b"content-length", b"0")
    return not declared.isdigit() or int(declared) > DISCARD_BYTES
