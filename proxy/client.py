"""An httpx transport, sync and async, that speaks SMX1: each request is sealed, each answer opened.

    client = httpx.Client(transport=Sm4Transport("client.json"))
    openai.OpenAI(base_url="http://127.0.0.1:14081/v1", api_key="x", http_client=client)

What goes in clear is fixed (docs/envelope.md): the path, the model's name and trace fields; never
Authorization, the query or the body. It takes nothing but an envelope for an answer: anything else
ends the call and yields no content. Status and type of the `httpx.Response` are the sealed ones;
its other headers come from outside the envelope and are hints. A retry above this transport is a
new envelope. It honours no proxy of the environment.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from proxy.http.body import BodyError, model_of
from proxy.keys.file import KeyFileError, read
from proxy.sm4.caller import CLEAR_BYTES_MAX, HINTS, answer_opener, clear_code, seal_whole
from proxy.sm4.cipher import NONCE_BYTES
from proxy.sm4.envelope import MEDIA_TYPE, EnvelopeError, RequestPrelude
from proxy.sm4.keyring import EnvelopeKey, Keyring
from proxy.sm4.sealer import EVENT_STREAM, RequestSealer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from proxy.sm4.answer import AnswerOpener

# Outer fields that pass in clear, beside those that this transport sets itself.
_OUTER_FIELDS = ("traceparent", "tracestate", "x-request-id")


class SealError(httpx.LocalProtocolError):
    """The request cannot be sealed: no key valid now, or a field that cannot stand in one."""


class AnswerError(httpx.RemoteProtocolError):
    """What came is no envelope for this request. `status` is the outer one; `code`, if the peer
    named one of ours (docs/sidecar.md), says why; `reason` is an envelope's outcome class.
    """  # noqa: D205 - the attributes belong to the first sentence

    def __init__(
        self, message: str, *, status: int = 0, code: str | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.reason = reason


class _Channel:
    """The client's keys and how it seals; shared by both transports."""

    def __init__(
        self, keys: str | Path | EnvelopeKey, *, mac: bool, sign: bool, qos: str | None
    ) -> None:
        if isinstance(keys, EnvelopeKey):
            self._ring = Keyring([keys])
        else:
            file = read(Path(keys))
            if file.role != "client":
                raise KeyFileError(f"{keys}: made for the {file.role}, not for a client")
            self._ring = Keyring(file.envelope_keys)
        self._mac = mac
        self._sign = sign
        self._qos = qos or ""

    def seal(self, request: httpx.Request, body: bytes) -> tuple[httpx.Request, RequestSealer]:
        """Return the request to send instead, and what its answer is opened with."""
        now_ms = time.time_ns() // 1_000_000
        self._ring.drop_expired(now_ms)
        derived = self._ring.sealing_key(now_ms)
        if derived is None:
            raise SealError(
                "no envelope key is valid now; see: tongguan keys show", request=request
            )
        content_type = request.headers.get("content-type", "") if body else ""
        try:
            model = model_of(body, content_type)
            prelude = RequestPrelude(
                request.method,
                request.url.raw_path.decode("ascii"),
                content_type,
                request.headers.get("x-qos-class", self._qos),
            )
            sealer = RequestSealer(
                derived,
                model=model,
                mac=self._mac,
                nonce=os.urandom(NONCE_BYTES),
                now_ms=now_ms,
                signer=derived.signer() if self._sign else None,
            )
            wire = seal_whole(sealer, prelude, body)
        except BodyError as problem:
            raise SealError(
                f"the body's model cannot be read: {problem}", request=request
            ) from None
        except ValueError as problem:
            raise SealError(str(problem), request=request) from None
        headers = [
            (name, request.headers[name]) for name in _OUTER_FIELDS if name in request.headers
        ]
        if "host" in request.headers:
            headers.append(("Host", request.headers["host"]))
        headers.append(("Content-Type", MEDIA_TYPE))
        streams = EVENT_STREAM in request.headers.get("accept", "").lower() or _wants_stream(body)
        headers.append(("Accept", f"{MEDIA_TYPE}, {EVENT_STREAM}" if streams else MEDIA_TYPE))
        if model:
            headers.append(("X-Model-Id", model))
        outer = httpx.Request(
            "POST",
            request.url.copy_with(query=None, fragment=None),
            headers=headers,
            content=wire,
            extensions=request.extensions,
        )
        return outer, sealer


class _StreamMember(msgspec.Struct):
    stream: Any = None


def _wants_stream(body: bytes) -> bool:
    """Say whether a body asks for a streamed answer, as OpenAI's requests do."""
    try:
        return msgspec.json.decode(body, type=_StreamMember).stream is True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _unsealed(status: int, body: bytes) -> AnswerError:
    code = clear_code(body)
    named = f" {code}" if code else ""
    return AnswerError(f"unsealed answer: HTTP {status}{named}", status=status, code=code)


def _refused(problem: EnvelopeError, status: int) -> AnswerError:
    return AnswerError(
        f"the answer's envelope is refused: {problem.reason}", status=status, reason=problem.reason
    )


def _opener(sealer: RequestSealer, outer: httpx.Response) -> AnswerOpener | None:
    """Return what opens this answer, or None if it is not sealed."""
    fields = outer.headers
    return answer_opener(
        sealer, outer.status_code, fields.get("content-type"), fields.get("content-encoding")
    )


def _response(
    request: httpx.Request,
    outer: httpx.Response,
    opener: AnswerOpener,
    stream: httpx.SyncByteStream | httpx.AsyncByteStream,
) -> httpx.Response:
    prelude = opener.prelude
    assert prelude is not None
    headers = [(name, outer.headers[name]) for name in HINTS if name in outer.headers]
    if prelude.content_type:
        headers.append(("content-type", prelude.content_type))
    return httpx.Response(
        prelude.status,
        headers=headers,
        stream=stream,
        request=request,
        extensions={"http_version": outer.extensions.get("http_version", b"HTTP/1.1")},
    )


class _OpenedStream(httpx.SyncByteStream):
    """The rest of a sealed stream, opened as it is read."""

    def __init__(
        self,
        outer: httpx.Response,
        source: Iterator[bytes],
        opener: AnswerOpener,
        begun: list[bytes],
    ) -> None:
        self._outer, self._source, self._opener, self._begun = outer, source, opener, begun

    def __iter__(self) -> Iterator[bytes]:
        yield from self._begun
        self._begun = []
        try:
            for data in self._source:
                yield from self._opener.feed(data)
            self._opener.finish()
        except EnvelopeError as problem:
            raise _refused(problem, self._outer.status_code) from None

    def close(self) -> None:
        self._outer.close()


class _OpenedAsyncStream(httpx.AsyncByteStream):
    """The rest of a sealed stream, opened as it is read."""

    def __init__(
        self,
        outer: httpx.Response,
        source: AsyncIterator[bytes],
        opener: AnswerOpener,
        begun: list[bytes],
    ) -> None:
        self._outer, self._source, self._opener, self._begun = outer, source, opener, begun

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for body in self._begun:
            yield body
        self._begun = []
        try:
            async for data in self._source:
                for body in self._opener.feed(data):
                    yield body
            self._opener.finish()
        except EnvelopeError as problem:
            raise _refused(problem, self._outer.status_code) from None

    async def aclose(self) -> None:
        await self._outer.aclose()


class Sm4Transport(httpx.BaseTransport):
    """Seals requests and opens answers, below `httpx.Client`.

    `keys` is a client's key file (mode 0600) or a key; `mac` adds an SM3-HMAC; `sign` signs where
    the key has a private key for it; `qos` is the class of requests without `X-QoS-Class`;
    `transport` carries the envelopes (default: plain HTTP).
    Raises `KeyFileError` or OSError when made, `SealError` and `AnswerError` when used.
    """

    def __init__(
        self,
        keys: str | Path | EnvelopeKey,
        *,
        mac: bool = False,
        sign: bool = True,
        transport: httpx.BaseTransport | None = None,
        qos: str | None = None,
    ) -> None:
        self._channel = _Channel(keys, mac=mac, sign=sign, qos=qos)
        self._transport = transport or httpx.HTTPTransport(trust_env=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request as a fresh envelope and return the opened answer."""
        outer_request, sealer = self._channel.seal(request, request.read())
        outer = self._transport.handle_request(outer_request)
        try:
            return self._open(request, sealer, outer)
        except BaseException as problem:
            outer.close()
            if isinstance(problem, EnvelopeError):
                raise _refused(problem, outer.status_code) from None
            raise

    def _open(
        self, request: httpx.Request, sealer: RequestSealer, outer: httpx.Response
    ) -> httpx.Response:
        assert isinstance(outer.stream, httpx.SyncByteStream)
        source = iter(outer.stream)
        opener = _opener(sealer, outer)
        if opener is None:
            clear = b""
            for data in source:
                clear += data
                if len(clear) > CLEAR_BYTES_MAX:
                    break
            raise _unsealed(outer.status_code, clear)
        begun: list[bytes] = []
        for data in source:
            begun += opener.feed(data)
            if opener.prelude is not None:
                stream = _OpenedStream(outer, source, opener, begun)
                return _response(request, outer, opener, stream)
        body = opener.finish()
        outer.close()
        return _response(request, outer, opener, httpx.ByteStream(body))

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


class AsyncSm4Transport(httpx.AsyncBaseTransport):
    """`Sm4Transport` for `httpx.AsyncClient`."""

    def __init__(
        self,
        keys: str | Path | EnvelopeKey,
        *,
        mac: bool = False,
        sign: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        qos: str | None = None,
    ) -> None:
        self._channel = _Channel(keys, mac=mac, sign=sign, qos=qos)
        self._transport = transport or httpx.AsyncHTTPTransport(trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request as a fresh envelope and return the opened answer."""
        outer_request, sealer = self._channel.seal(request, await request.aread())
        outer = await self._transport.handle_async_request(outer_request)
        try:
            return await self._open(request, sealer, outer)
        except BaseException as problem:
            await outer.aclose()
            if isinstance(problem, EnvelopeError):
                raise _refused(problem, outer.status_code) from None
            raise

    async def _open(
        self, request: httpx.Request, sealer: RequestSealer, outer: httpx.Response
    ) -> httpx.Response:
        assert isinstance(outer.stream, httpx.AsyncByteStream)
        source = aiter(outer.stream)
        opener = _opener(sealer, outer)
        if opener is None:
            clear = b""
            async for data in source:
                clear += data
                if len(clear) > CLEAR_BYTES_MAX:
                    break
            raise _unsealed(outer.status_code, clear)
        begun: list[bytes] = []
        async for data in source:
            begun += opener.feed(data)
            if opener.prelude is not None:
                stream = _OpenedAsyncStream(outer, source, opener, begun)
                return _response(request, outer, opener, stream)
        body = opener.finish()
        await outer.aclose()
        return _response(request, outer, opener, httpx.ByteStream(body))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()
