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
import hmac
import os
import re
import secrets
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from agent.answers import DONE, Answer, Usage, model_card, model_list
from agent.call import Bodies, Call, ClientGoneError, abort
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
from agent.errors import (
    BAD_METHOD,
    CONTEXT_EXCEEDED,
    DRAINING,
    INTERNAL,
    INVALID,
    MODEL_NOT_FOUND,
    OUT_OF_MEMORY,
    QUEUE_FULL,
    UNKNOWN_URL,
    ApiError,
)
from agent.inbox import AbandonedError, Batch, Inbox
from agent.listen import peer_uid, transport_of
from agent.memory.admission import predicted_tokens, shortage
from agent.metrics import RequestTimes
from agent.openai import Job, parse_chat, parse_completion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from agent.chains import Chains
    from agent.config import Agent
    from agent.metrics import Metrics
    from agent.node import Node

    _Parse = Callable[[bytes, int], Job]

# Below this a body is parsed and tokenised on the loop: a thread hop costs more.
INLINE_BYTES = 8 << 10
# Above this it has a lane of its own, so that a few huge prompts do not hold up ordinary ones.
HUGE_BYTES = 256 << 10
HUGE_WAITING = 8
_JSON_TYPE = re.compile(rb"application/(?:[a-z0-9.-]+\+)?json[ \t]*(?:;.*)?", re.IGNORECASE)
_TENANT = re.compile(r"[!-~]{1,255}")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Api:
    """Builds the ASGI application; `abandon_all` ends what still runs at shutdown."""

    def __init__(
        self,
        node: Node,
        settings: Agent,
        metrics: Metrics,
        token: bytes,
        chains: Chains | None = None,
    ) -> None:
        self._node = node
        self._chain_routes = chains.routes(self._believed, metrics) if chains else []
        self._settings = settings
        self._metrics = metrics
        self._bearer = b"Bearer " + token if token else b""
        self._uids = {0, os.getuid(), *map(int, settings.trusted_uids)}
        self._calls: dict[int, Call] = {}
        self._bodies = Bodies()
        self._long_prompts: Executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._huge_prompts: Executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize-huge")
        self._huge = 0

    def application(self) -> Starlette:
        """Return the ASGI application."""
        app = Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/v1/chat/completions", _Endpoint(self, parse_chat), methods=["POST"]),
                Route("/v1/completions", _Endpoint(self, parse_completion), methods=["POST"]),
                *self._chain_routes,
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

    async def generate(self, parse: _Parse, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one POST."""
        loop = asyncio.get_running_loop()
        started_ns = time.monotonic_ns()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        times = RequestTimes(self._metrics, started_ns)
        call = Call(
            scope=scope,
            receive=receive,
            send=send,
            settings=self._settings,
            metrics=self._metrics,
            bodies=self._bodies,
            inbox=Inbox(loop, on_tokens=times.on_tokens, on_behind=lambda: abort(scope)),
            times=times,
            qos_class=self._qos_class(scope, headers),
            tenant=self._tenant(scope, headers),
            request_id=given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16),
        )
        try:
            self._node.require_engine()
            _check_head(call, headers)
            body = await call.read_body()
        except ApiError as error:
            call.let_go()
            await call.fail(error)
            return
        except ClientGoneError:
            call.let_go()
            self._metrics.abandoned.labels("gone").inc()
            return
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(call.watch())
            self._calls[id(call)] = call
            try:
                await self._run(call, parse, body)
            finally:
                del self._calls[id(call)]
                watcher.cancel()

    async def _run(self, call: Call, parse: _Parse, body: bytes) -> None:
        try:
            try:
                job, prompt_ids = await self._understand(call, parse, body)
            finally:
                call.let_go()
            del body
            await self._serve(call, job, prompt_ids)
        except ApiError as error:
            await call.fail(error)
        except AbandonedError as end:
            await call.end_abandoned(end)

    async def _understand(
        self, call: Call, parse: _Parse, body: bytes
    ) -> tuple[Job, Sequence[int]]:
        def work() -> tuple[Job, Sequence[int]]:
            call.inbox.check()  # who left while this waited for its turn costs nothing
            context_length = engine.info.context_length
            job = parse(body, context_length)
            self._check_model(job.model)
            try:
                return job, job.prompt_ids(engine.tokenizer, context_length)
            except ChatTemplateError as problem:
                raise ApiError(
                    INVALID, f"the model's chat template refused: {problem}", param="messages"
                ) from None

        engine = self._node.require_engine()
        if len(body) <= INLINE_BYTES:
            result = work()
        elif len(body) <= HUGE_BYTES:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._long_prompts, work)
        else:
            result = await self._in_huge_lane(work)
        call.inbox.check()
        return result

    async def _in_huge_lane(
        self, work: Callable[[], tuple[Job, Sequence[int]]]
    ) -> tuple[Job, Sequence[int]]:
        if self._huge >= HUGE_WAITING:
            self._metrics.limits.labels("queue").inc()
            raise ApiError(
                QUEUE_FULL, f"{HUGE_WAITING} bodies of more than {HUGE_BYTES} bytes wait already"
            )
        self._huge += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._huge_prompts, work)
        finally:
            self._huge -= 1

    def _check_model(self, name: str | None) -> None:
        names = self._node.names
        if name is not None and name not in names:
            raise ApiError(
                MODEL_NOT_FOUND,
                f"the model {name[:128]!r} does not exist here; served: {', '.join(names)}",
                param="model",
            )

    async def _serve(self, call: Call, job: Job, prompt_ids: Sequence[int]) -> None:
        engine = self._node.require_engine()
        model = self._node.names[0]
        call.times.begin(model, call.qos_class)
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
            call.times.end()

    def _submit(
        self, engine: Engine, job: Job, prompt_ids: Sequence[int], call: Call
    ) -> Generation:
        try:
            sampling = job.sampling(len(prompt_ids), engine.info.context_length)
            self._check_memory(engine, predicted_tokens(len(prompt_ids), sampling.max_tokens))
            generation = engine.submit(
                prompt_ids, sampling, call.inbox.put, call.qos_class, call.tenant
            )
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
        self._metrics.latencies.request(call.qos_class)
        return generation

    def _check_memory(self, engine: Engine, tokens: int) -> None:
        """Refuse what would not fit instead of being killed over it; raises `ApiError` (503)."""
        report = self._node.memory.latest if self._node.memory else None
        if report is None:
            return
        short = shortage(
            engine.stats(),
            report,
            tokens=tokens,
            reserve_bytes=self._settings.memory_reserve_bytes,
            now_unix_s=time.time(),
        )
        if short is not None:
            self._metrics.limits.labels("memory_reserve_bytes").inc()
            raise ApiError(OUT_OF_MEMORY, str(short), retry_after_s=5)

    async def _whole(self, call: Call, answer: Answer, generation: Generation) -> None:
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
        await call.whole(200, body)

    async def _stream(self, call: Call, job: Job, answer: Answer, generation: Generation) -> None:
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
                await call.begin(200, b"text/event-stream; charset=utf-8")
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
                await call.part(out, more=finish is None)

    def _qos_class(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Return the class asked for where the caller is believed, else the default."""
        asked = headers.get(b"x-qos-class", b"").strip().upper().decode("latin-1")
        # Two values are unknown, not the last one.
        once = sum(name == b"x-qos-class" for name, _ in scope["headers"]) == 1
        if not once or asked not in QOS_CLASSES or not self._believed(scope, headers):
            return self._settings.default_class
        return asked

    def _tenant(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Return the tenant named by a caller who is believed; "": nobody's in particular."""
        named = [value for name, value in scope["headers"] if name == b"x-tenant-id"]
        if len(named) != 1 or not self._believed(scope, headers):
            return ""
        tenant = named[0].strip().decode("latin-1")
        return tenant if _TENANT.fullmatch(tenant) else ""

    def _believed(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        if self._bearer and hmac.compare_digest(given, self._bearer):
            return True
        return peer_uid(transport_of(scope)) in self._uids


class _Endpoint:
    """An ASGI application for one POST path; Starlette routes to it untouched."""

    def __init__(self, api: Api, parse: _Parse) -> None:
        self._api = api
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api.generate(self._parse, scope, receive, send)


def _check_head(call: Call, headers: dict[bytes, bytes]) -> None:
    """Refuse a body that another reader could see otherwise; raises `ApiError` (400)."""
    if b"content-length" in headers and b"transfer-encoding" in headers:
        # RFC 9112 section 6.3: this ought to be handled as an error.
        call.close = True
        raise ApiError(INVALID, "both Content-Length and Transfer-Encoding")
    for name, value in call.scope["headers"]:
        if name == b"content-type" and value and not _JSON_TYPE.fullmatch(value.strip()):
            raise ApiError(INVALID, "Content-Type: expected application/json, or none")


def _check_finish(batch: Batch) -> None:
    if batch.finish_reason == "error":
        raise ApiError(INTERNAL, batch.error or "the engine failed")
    if batch.finish_reason == "cancelled":
        raise ApiError(DRAINING, "the engine ended the request", retry_after_s=5)
