"""The httpx transport against a receiver on loopback: sealed both ways, and nothing else taken."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from proxy.client import AnswerError, AsyncSm4Transport, SealError, Sm4Transport
from proxy.keys.file import KeyFile, KeyFileError, encode
from proxy.sm4 import sm2
from proxy.sm4.signature import draw
from tests.unit.proxy.sm4_loopback import (
    ANSWER,
    MODEL,
    Loopback,
    live_key,
    serving,
    sse_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = live_key()


@pytest.fixture
def server() -> Iterator[Loopback]:
    with serving(KEY) as loopback:
        yield loopback


@pytest.fixture
def client(server: Loopback) -> Iterator[httpx.Client]:
    with httpx.Client(transport=Sm4Transport(KEY), base_url=server.url) as made:
        yield made


def chat(*, stream: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital?"}],
        "stream": stream,
    } | more


@pytest.mark.parametrize("suite", [1, 2])
@pytest.mark.parametrize("mac", [False, True])
def test_request_and_answer_cross_sealed(suite: int, mac: bool) -> None:
    key = live_key(suite)
    with (
        serving(key) as server,
        httpx.Client(transport=Sm4Transport(key, mac=mac), base_url=server.url) as client,
    ):
        response = client.post("/v1/chat/completions", json=chat())

    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
    (opened,) = server.opened
    assert (opened.target, opened.model, opened.mac) == ("/v1/chat/completions", MODEL, mac)
    assert json.loads(opened.body) == chat()


@pytest.mark.parametrize("scheme", ["ed25519", "sm2"])
@pytest.mark.parametrize("size", [10, 2 << 20])
def test_a_client_with_a_private_key_signs_and_may_be_told_not_to(scheme: str, size: int) -> None:
    if scheme == "sm2" and not sm2.available():
        pytest.skip("capability: OpenSSL with SM2")
    private, public = draw(scheme, os.urandom)
    issued = msgspec.structs.replace(live_key(), scheme=scheme, sign_public=public)
    key = msgspec.structs.replace(issued, sign_private=private)
    more = {"padding": "x" * size}
    with serving(issued) as server:
        for sign in (True, False):
            with httpx.Client(
                transport=Sm4Transport(key, sign=sign), base_url=server.url
            ) as client:
                assert client.post("/v1/chat/completions", json=chat(**more)).status_code == 200
        assert [opened.signature for opened in server.opened] == [True, False]


def test_a_client_that_may_not_sign_sends_nothing_where_a_signature_is_demanded() -> None:
    private, public = draw("ed25519", os.urandom)
    key = msgspec.structs.replace(
        live_key(),
        scheme="ed25519",
        sign_public=public,
        sign_private=private,
        require_signature=True,
    )
    with (
        serving(key) as server,
        httpx.Client(transport=Sm4Transport(key, sign=False), base_url=server.url) as client,
        pytest.raises(SealError, match="demands a signature"),
    ):
        client.post("/v1/chat/completions", json=chat())
    assert not server.opened


def test_a_client_drops_keys_whose_grace_is_over() -> None:
    old = msgspec.structs.replace(live_key(), kid=bytes(8), not_before_ms=1, not_after_ms=2)
    channel = Sm4Transport(old)._channel
    assert len(channel._ring) == 1

    with pytest.raises(SealError, match="no envelope key"):
        channel.seal(httpx.Request("GET", "http://x/"), b"")
    assert len(channel._ring) == 0


def test_only_the_listed_fields_go_outside(server: Loopback, client: httpx.Client) -> None:
    client.post(
        "/v1/chat/completions?api-version=1",
        json=chat(),
        headers={
            "Authorization": "Bearer secret",
            "X-Api-Key": "secret",
            "Cookie": "a=secret",
            "X-QoS-Class": "P2",
            "X-Request-Id": "r-1",
            "traceparent": "00-1-2-01",
            "tracestate": "a=b",
        },
    )

    method, path, fields = server.outer[0]
    assert (method, path) == ("POST", "/v1/chat/completions")
    assert fields.keys() == {
        "host",
        "content-type",
        "content-length",
        "accept",
        "x-model-id",
        "x-request-id",
        "traceparent",
        "tracestate",
    }
    assert fields["content-type"] == "application/x-sm4-envelope"
    assert fields["x-model-id"] == MODEL
    assert server.opened[0].target == "/v1/chat/completions?api-version=1"
    assert server.opened[0].qos == "P2"


def test_a_get_is_sealed_as_a_post(server: Loopback, client: httpx.Client) -> None:
    response = client.get("/v1/models")

    assert response.json()["data"][0]["id"] == MODEL
    assert server.outer[0][0] == "POST"
    assert "x-model-id" not in server.outer[0][2]
    assert (server.opened[0].method, server.opened[0].body) == ("GET", b"")


@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH", "OPTIONS"])
def test_other_methods_cross_too(client: httpx.Client, method: str) -> None:
    assert client.request(method, "/echo/x").text == f"{method} /echo/x\n"


def test_the_transport_s_class_is_a_default(server: Loopback) -> None:
    with httpx.Client(transport=Sm4Transport(KEY, qos="P0"), base_url=server.url) as client:
        client.get("/v1/models")
        client.get("/v1/models", headers={"X-QoS-Class": "P2"})

    assert [opened.qos for opened in server.opened] == ["P0", "P2"]


def test_status_and_type_are_the_sealed_ones_and_hints_are_few(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=chat(model="unknown"))

    assert response.status_code == 404
    assert response.json()["error"]["message"] == "unknown model"
    assert response.headers["x-trace-id"] == "trace-1"
    assert response.headers["x-qos-pool"] == "shared"
    assert "x-injected" not in response.headers


def test_every_request_is_a_new_envelope(server: Loopback, client: httpx.Client) -> None:
    for _ in range(3):
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200

    assert len(server.opened) == 3


@pytest.mark.parametrize("size", [1_100_000, 3_000_000])
def test_a_large_request_and_answer_go_as_streams(
    server: Loopback, client: httpx.Client, size: int
) -> None:
    body = bytes(range(256)) * (size // 256)

    response = client.post("/echo", content=body)

    assert response.content == b"POST /echo\n" + body
    assert server.opened[0].body == body


@pytest.mark.parametrize("accept", [None, "text/event-stream", "application/json"])
def test_a_streamed_answer_is_asked_for_and_released_piece_by_piece(
    server: Loopback, client: httpx.Client, accept: str | None
) -> None:
    headers = {"Accept": accept} if accept else {}
    with client.stream(
        "POST", "/v1/chat/completions", json=chat(stream=True), headers=headers
    ) as response:
        pieces = list(response.iter_raw())

    assert response.headers["content-type"] == "text/event-stream"
    assert pieces == sse_pieces()
    assert "text/event-stream" in server.outer[0][2]["accept"]


def test_a_stream_left_early_disturbs_nothing(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        next(response.iter_raw())

    assert client.get("/v1/models").status_code == 200


# -- nothing but an envelope


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("envelope_rejected", 400),
        ("envelope_stale", 400),
        ("draining", 503),
        ("envelope_busy", 503),
        ("payload_too_large", 413),
    ],
)
def test_a_clear_error_of_ours_is_named_by_code_and_nothing_more(
    server: Loopback, client: httpx.Client, code: str, status: int
) -> None:
    server.fault = f"clear:{code}"

    with pytest.raises(httpx.RemoteProtocolError) as caught:
        client.post("/v1/chat/completions", json=chat())

    problem = caught.value
    assert isinstance(problem, AnswerError)
    assert (problem.code, problem.status) == (code, status)
    assert str(problem) == f"unsealed answer: HTTP {status} {code}"


def test_an_unsealed_answer_yields_no_content(server: Loopback, client: httpx.Client) -> None:
    server.fault = "unsealed"

    with pytest.raises(AnswerError) as caught:
        client.post("/v1/chat/completions", json=chat())

    assert str(caught.value) == "unsealed answer: HTTP 200"
    assert caught.value.code is None


def test_an_unsealed_event_stream_yields_no_content(server: Loopback, client: httpx.Client) -> None:
    server.fault = "unsealed-sse"
    seen: list[bytes] = []

    with pytest.raises(AnswerError, match="bad_carrier"):
        read_stream(client, seen)

    assert seen == []


def read_stream(client: httpx.Client, seen: list[bytes]) -> None:
    with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        for piece in response.iter_raw():
            seen.append(piece)  # noqa: PERF402 - what came before an error is looked at


def test_a_truncated_stream_raises_after_what_was_true(
    server: Loopback, client: httpx.Client
) -> None:
    server.fault = "truncate"
    seen: list[bytes] = []

    with pytest.raises(AnswerError, match="truncated") as caught:
        read_stream(client, seen)

    assert seen == sse_pieces()[:3]
    assert caught.value.reason == "truncated"


def test_a_changed_answer_is_refused(server: Loopback, client: httpx.Client) -> None:
    server.fault = "flip"

    with pytest.raises(AnswerError, match="bad_tag"):
        client.get("/v1/models")


def test_a_refusal_from_step_7_comes_sealed(server: Loopback) -> None:
    class Rename(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            request.headers["X-Tenant-Id"] = "somebody-else"
            return super().handle_request(request)

    transport = Sm4Transport(KEY, transport=Rename())
    with httpx.Client(transport=transport, base_url=server.url) as client:
        response = client.get("/v1/models")

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "envelope_rejected"


def test_the_wrong_key_is_rejected_and_says_so(server: Loopback) -> None:
    with (
        httpx.Client(transport=Sm4Transport(live_key()), base_url=server.url) as client,
        pytest.raises(AnswerError) as caught,
    ):
        client.get("/v1/models")

    assert (caught.value.status, caught.value.code) == (400, "envelope_rejected")


def test_a_captured_request_sent_again_is_rejected(server: Loopback) -> None:
    captured: list[httpx.Request] = []

    class Tap(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            captured.append(request)
            return super().handle_request(request)

    with httpx.Client(transport=Sm4Transport(KEY, transport=Tap()), base_url=server.url) as client:
        client.get("/v1/models")
    with httpx.Client() as thief:
        again = thief.post(
            server.url + "/v1/models", content=captured[0].content, headers=captured[0].headers
        )

    assert again.status_code == 400
    assert again.json()["error"]["code"] == "envelope_rejected"


# -- what cannot be sealed


@pytest.mark.parametrize(
    "body", [b"{", b'{"model":1}', b'{"model":"a","model":"b"}', b'{"model":"a b"}', b"[1", b"\xff"]
)
def test_a_body_whose_model_cannot_be_read_is_not_sent(
    server: Loopback, client: httpx.Client, body: bytes
) -> None:
    with pytest.raises(SealError):
        client.post("/x", content=body, headers={"Content-Type": "application/json"})

    assert server.outer == []


def test_a_class_that_cannot_stand_in_a_prelude_is_not_sent(
    server: Loopback, client: httpx.Client
) -> None:
    with pytest.raises(SealError, match="cannot stand"):
        client.get("/x", headers=[(b"X-QoS-Class", b"\xe9")])

    assert server.outer == []


def test_without_a_key_valid_now_nothing_is_sent(server: Loopback) -> None:
    expired = live_key(not_before_ms=1, not_after_ms=2)
    with (
        httpx.Client(transport=Sm4Transport(expired), base_url=server.url) as client,
        pytest.raises(SealError, match="no envelope key is valid now"),
    ):
        client.get("/x")

    assert server.outer == []


def key_file(tmp_path: Path, role: str, mode: int = 0o600) -> Path:
    path = tmp_path / f"{role}.json"
    path.write_bytes(encode(KeyFile(role, (KEY,), {}, (), None, None)))
    path.chmod(mode)
    return path


def test_the_keys_come_from_a_client_s_file(server: Loopback, tmp_path: Path) -> None:
    transport = Sm4Transport(str(key_file(tmp_path, "client")))
    with httpx.Client(transport=transport, base_url=server.url) as client:
        assert client.get("/v1/models").status_code == 200


def test_a_file_made_for_another_or_open_to_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="not for a client"):
        Sm4Transport(key_file(tmp_path, "sidecar"))
    with pytest.raises(KeyFileError, match="chmod 600"):
        Sm4Transport(key_file(tmp_path, "client", 0o640))
    with pytest.raises(FileNotFoundError):
        AsyncSm4Transport(tmp_path / "nothing")


# -- asynchronous


def test_the_async_transport_does_the_same(server: Loopback) -> None:
    async def talk() -> tuple[int, bytes, list[bytes]]:
        transport = AsyncSm4Transport(KEY, mac=True)
        async with httpx.AsyncClient(transport=transport, base_url=server.url) as client:
            models = await client.get("/v1/models")
            large = await client.post("/echo", content=bytes(1_500_000))
            async with client.stream(
                "POST", "/v1/chat/completions", json=chat(stream=True)
            ) as response:
                pieces = [piece async for piece in response.aiter_raw()]
            return models.status_code, large.content, pieces

    status, large, pieces = asyncio.run(talk())

    assert status == 200
    assert large == b"POST /echo\n" + bytes(1_500_000)
    assert pieces == sse_pieces()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("clear:draining", "unsealed answer: HTTP 503 draining"),
        ("unsealed", "unsealed answer: HTTP 200"),
        ("unsealed-sse", "bad_carrier"),
        ("truncate", "truncated"),
        ("flip", None),
    ],
)
def test_the_async_transport_refuses_the_same(
    server: Loopback, fault: str, text: str | None
) -> None:
    server.fault = fault

    async def talk() -> None:
        transport = AsyncSm4Transport(KEY)
        async with httpx.AsyncClient(transport=transport, base_url=server.url) as client:
            await client.post("/v1/chat/completions", json=chat(stream=text is not None))

    with pytest.raises(AnswerError, match=text or "bad_tag"):
        asyncio.run(talk())


# -- the OpenAI package, through a legacy httpx client


def test_the_openai_package_works_sealed(server: Loopback) -> None:
    import openai

    with httpx.Client(transport=Sm4Transport(KEY)) as http_client:
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="secret", http_client=http_client
        )
        whole = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "?"}]
        )
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "?"}], stream=True
        )
        text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
        models = [model.id for model in client.models.list()]
        with pytest.raises(openai.NotFoundError, match="unknown model"):
            client.chat.completions.create(
                model="unknown", messages=[{"role": "user", "content": "?"}]
            )

    assert whole.choices[0].message.content == text == ANSWER
    assert models == [MODEL]
    assert all("authorization" not in fields for _, _, fields in server.outer)


def test_the_async_openai_package_works_sealed(server: Loopback) -> None:
    import openai

    async def talk() -> str:
        async with httpx.AsyncClient(transport=AsyncSm4Transport(KEY)) as http_client:
            client = openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="x", http_client=http_client
            )
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "?"}], stream=True
            )
            parts = [e.choices[0].delta.content or "" async for e in stream if e.choices]
            return "".join(parts)

    assert asyncio.run(talk()) == ANSWER


def test_the_openai_package_s_retries_are_new_envelopes(server: Loopback) -> None:
    import openai

    server.fault = "flip"
    with httpx.Client(transport=Sm4Transport(KEY)) as http_client:
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="x", http_client=http_client, max_retries=1
        )
        with pytest.raises(openai.APIConnectionError):
            client.models.list()

    assert len(server.opened) == 2
