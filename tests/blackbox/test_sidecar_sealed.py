"""The sealed door: both carriers, both directions, and everything that is no good envelope."""

import json
import random
import time

import httpx
import openai
import pytest

from proxy.client import AsyncSm4Transport, Sm4Transport
from proxy.sm4.envelope import EnvelopeError
from tests.blackbox.channel import BOTH, Channel, ask, counted, refused
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Sidecar,
    answer_with,
    chunk,
    new_keys,
    ok,
    post,
    until,
)

CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'
TEXT = ["Pa", "ris", ", of", " course."]
MIB = 1 << 20
REFUSED = {(400, "envelope_rejected"), (400, "envelope_stale")}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    with Sidecar(
        tmp_path_factory.mktemp("sealed"), backend.url, keys=keys, TIMEOUTS_STREAM_IDLE_S=0.5
    ) as sidecar:
        yield sidecar


def events():
    for text in TEXT:
        piece = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
        yield b"data: " + json.dumps({"object": "chat.completion.chunk"} | piece).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def engine(seen):
    """Answer as an OpenAI server does."""
    if json.loads(seen.body()).get("stream"):
        seen.reply(SSE_HEAD, *map(chunk, events()), LAST_CHUNK)
    else:
        message = {"role": "assistant", "content": "".join(TEXT)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        seen.reply(
            answer_with(json.dumps({"object": "chat.completion", "choices": [choice]}).encode())
        )


# --- through the client's library


@pytest.mark.parametrize("mac", [False, True])
def test_openai_package_gets_the_same_text_plain_and_sealed(sidecar, upstream, keys, mac):
    upstream.answering(engine)
    texts = []
    transport = Sm4Transport(keys / "client.json", mac=mac)
    doors = [(sidecar.app, httpx.HTTPTransport()), (sidecar.sealed, transport)]
    for port, carrier in doors:
        with (
            httpx.Client(transport=carrier, trust_env=False) as http,
            openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="x", http_client=http, max_retries=0
            ) as client,
        ):
            arguments = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            whole = client.chat.completions.create(**arguments)
            texts.append(whole.choices[0].message.content)
            stream = client.chat.completions.create(**arguments, stream=True)
            texts.append("".join(part.choices[0].delta.content or "" for part in stream))
    assert texts == ["".join(TEXT)] * 4


@pytest.mark.parametrize("door", ["plain", "sealed"])
def test_openai_package_reads_our_own_errors(sidecar, upstream, keys, door):
    def script(seen):
        seen.reply()
        seen.wire.close()

    upstream.answering(script)
    port, carrier = sidecar.app, httpx.HTTPTransport()
    if door == "sealed":
        port, carrier = sidecar.sealed, Sm4Transport(keys / "client.json")
    with (
        httpx.Client(transport=carrier, trust_env=False) as http,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="x", http_client=http, max_retries=0
        ) as client,
        pytest.raises(openai.InternalServerError) as refused_call,
    ):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert refused_call.value.status_code == 502
    assert refused_call.value.code == "upstream_reset"


@pytest.mark.parametrize("size", [10, MIB - 40, 3 * MIB])
def test_body_of_any_size_goes_both_ways(sidecar, upstream, keys, size):
    payload = random.Random(size).randbytes(size)

    def script(seen):
        body = seen.body()
        seen.reply(answer_with(body, kind=b"application/octet-stream"))

    upstream.answering(script)
    with httpx.Client(transport=Sm4Transport(keys / "client.json"), timeout=20) as http:
        answer = http.put(
            f"http://127.0.0.1:{sidecar.sealed}/x?q=1",
            content=payload,
            headers={"content-type": "application/octet-stream"},
        )
    assert answer.content == payload
    assert upstream.last().line == b"PUT /x?q=1 HTTP/1.1"
    assert upstream.last().get("Content-Type") == b"application/octet-stream"


def test_async_transport_streams(sidecar, upstream, keys):
    import asyncio

    async def talk():
        transport = AsyncSm4Transport(keys / "client.json")
        async with httpx.AsyncClient(transport=transport, timeout=20) as http:
            url = f"http://127.0.0.1:{sidecar.sealed}/v1/chat/completions"
            body = json.loads(CHAT) | {"stream": True}
            async with http.stream("POST", url, json=body) as answer:
                assert answer.headers["content-type"] == "text/event-stream"
                return b"".join([part async for part in answer.aiter_bytes()])

    upstream.answering(engine)
    assert asyncio.run(talk()) == b"".join(events())


# --- as bytes


def test_single_answer_is_sealed_and_its_outside_says_nothing(sidecar, upstream, channel):
    upstream.answering(
        b"HTTP/1.1 201 Made\r\nContent-Type: application/json\r\nX-Secret: told\r\n"
        b"Set-Cookie: a=b\r\nContent-Length: 17\r\n\r\n" + b'{"answer":"told"}'
    )
    sealed = channel.seal(CHAT, qos="P2")
    answer = ask(sidecar, sealed.request())
    assert answer.status == 200
    assert answer.get("Content-Type") == b"application/x-sm4-envelope"
    assert answer.get("Cache-Control") == b"no-store, no-transform"
    assert answer.get("X-Accel-Buffering") == b"no"
    assert answer.get("X-QoS-Class") == b"P2"
    assert b"told" not in answer.raw + answer.body
    assert answer.get("Set-Cookie") is None
    assert sealed.open(answer) == (201, "application/json", b'{"answer":"told"}')
    record = sidecar.record(answer.trace_id)
    assert record["status"] == 201
    assert record["envelope"]["kid"] == channel.key.kid.hex()
    assert record["outcome"] == "ok"


def test_only_the_inner_request_reaches_the_upstream(sidecar, upstream, channel):
    sealed = channel.seal(CHAT, target="/inner?x=1", qos="P2")
    fields = ["Authorization: Bearer outer", "Cookie: c=1", "X-QoS-Class: P0", "X-Any: 1",
              "X-Forwarded-For: 1.2.3.4", "X-Request-Id: r-7", "tracestate: k=v",
              f"traceparent: 00-{7:032x}-{7:016x}-01"]  # fmt: skip
    answer = ask(sidecar, sealed.request(*fields, path="/outer?y=2"))
    assert sealed.open(answer)[0] == 200
    seen = upstream.last()
    assert seen.line == b"POST /inner?x=1 HTTP/1.1"
    assert seen.payload == CHAT
    assert seen.get("Content-Type") == b"application/json"
    assert seen.get("X-QoS-Class") == b"P2"
    assert seen.get("X-Tenant-Id") == channel.key.tenant.encode()
    assert seen.get("X-Request-Id") == b"r-7"
    assert seen.get("tracestate") == b"k=v"
    for name in ("Authorization", "Cookie", "X-Any", "X-Forwarded-For", "X-Model-Id"):
        assert seen.get(name) is None
    assert b"sidecar.test" not in seen.raw


def test_class_of_the_prelude_is_capped_by_the_kids_tenant(sidecar, upstream, channel):
    sealed = channel.seal(CHAT, qos="P0")
    answer = ask(sidecar, sealed.request())
    assert answer.get("X-QoS-Class") == b"P1"
    assert sidecar.record(answer.trace_id)["qos_asked"] == "P0"


def test_get_and_head_are_sealed_as_post(sidecar, upstream, channel):
    upstream.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    sealed = channel.seal(method="GET", target="/v1/models")
    assert sealed.open(ask(sidecar, sealed.request()))[2] == b"hello"
    assert upstream.last().line == b"GET /v1/models HTTP/1.1"
    upstream.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    sealed = channel.seal(method="HEAD", target="/v1/models")
    assert sealed.open(ask(sidecar, sealed.request()))[::2] == (200, b"")


@pytest.mark.parametrize(
    ("accept", "kind"),
    [(BOTH, b"text/event-stream"), ("application/x-sm4-envelope", b"application/x-sm4-envelope")],
    ids=["event carrier", "raw frames"],
)
@pytest.mark.parametrize("mac", [False, True])
def test_stream_is_opened_token_by_token(sidecar, upstream, channel, accept, kind, mac):
    told = []

    def script(seen):
        seen.reply(SSE_HEAD)
        for event in events():
            seen.wire.send(chunk(event))
            until(lambda e=event: e in told, "the client to have the event")
        seen.wire.send(LAST_CHUNK)

    upstream.answering(script)
    sealed = channel.seal(CHAT, mac=mac)
    with Client(sidecar.sealed) as client:
        client.send(sealed.request(accept=accept))
        head = client.head()
        assert head.get("Content-Type") == kind
        opener = sealed.opener(head)
        for event in events():
            opened = b""
            while opened != event:
                size = int(client.line(), 16)
                assert size
                data = client.take(size + 2)[:-2]
                assert b"course" not in data
                opened += b"".join(opener.feed(data))
            told.append(event)
        rest, _ = client.chunked()
        assert b"".join(opener.feed(rest)) + opener.finish() == b""
        assert opener.complete


def test_connection_is_kept_and_pipelined_envelopes_are_answered_in_order(
    sidecar, upstream, channel
):
    upstream.answering(lambda seen: seen.reply(answer_with(seen.line, kind=b"text/plain")))
    several = [channel.seal(CHAT, target=f"/{i}") for i in range(6)]
    with Client(sidecar.sealed) as client:
        client.send(b"".join(sealed.request() for sealed in several))
        bodies = [sealed.open(client.answer())[2] for sealed in several]
    assert bodies == [b"POST /%d HTTP/1.1" % i for i in range(6)]


@pytest.mark.parametrize("stream", [False, True])
def test_dripped_envelope_is_the_same_envelope(sidecar, upstream, channel, stream):
    sealed = channel.seal(CHAT, stream=stream)
    with Client(sidecar.sealed) as client:
        for byte in sealed.request():
            client.send(bytes([byte]))
        assert sealed.open(client.answer())[0] == 200
    assert upstream.last().payload == CHAT


def test_chunked_envelope_is_the_same_envelope(sidecar, upstream, channel):
    sealed = channel.seal(CHAT, stream=True)
    head = sealed.head().replace(
        b"Content-Length: %d" % len(sealed.wire), b"Transfer-Encoding: chunked"
    )
    pieces = [sealed.wire[i : i + 37] for i in range(0, len(sealed.wire), 37)]
    answer = ask(sidecar, head + b"".join(map(chunk, pieces)) + LAST_CHUNK)
    assert sealed.open(answer)[0] == 200


def test_http10_caller_gets_its_sealed_stream_until_the_end(sidecar, upstream, channel):
    upstream.answering(engine)
    sealed = channel.seal(json.dumps(json.loads(CHAT) | {"stream": True}).encode())
    answer = ask(sidecar, sealed.request(version="1.0", accept=BOTH))
    assert answer.get("Transfer-Encoding") is None
    assert sealed.open(answer)[2] == b"".join(events())


@pytest.mark.parametrize("status", [b"404 Not Found", b"503 Busy", b"422 No"])
def test_upstreams_error_is_sealed_inside_200(sidecar, upstream, channel, status):
    upstream.answering(answer_with(b'{"error":"theirs"}', status))
    sealed = channel.seal(CHAT)
    answer = ask(sidecar, sealed.request())
    assert sealed.open(answer)[::2] == (int(status[:3]), b'{"error":"theirs"}')


def test_our_own_error_after_opening_is_sealed(sidecar, upstream, channel):
    def script(seen):
        seen.reply()
        seen.wire.close()

    upstream.answering(script)
    sealed = channel.seal(CHAT)
    status, kind, body = sealed.open(ask(sidecar, sealed.request()))
    assert (status, kind) == (502, "application/json")
    assert json.loads(body)["error"]["code"] == "upstream_reset"


@pytest.mark.parametrize("method", ["CONNECT", "TRACE"])
def test_inner_method_that_is_not_served_is_refused_sealed(sidecar, upstream, channel, method):
    sealed = channel.seal(CHAT, method=method)
    status, _, body = sealed.open(ask(sidecar, sealed.request()))
    assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
    assert upstream.seen == []


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("accept", [BOTH, "application/x-sm4-envelope"])
def test_sealed_stream_that_breaks_between_events_ends_whole(
    sidecar, upstream, channel, accept, how
):
    first = next(events())
    told = []

    def script(seen):
        seen.reply(SSE_HEAD, chunk(first))
        until(lambda: told, "the client to have the event")
        getattr(seen.wire, how)()

    upstream.answering(script)
    sealed = channel.seal(CHAT)
    with Client(sidecar.sealed) as client:
        client.send(sealed.request(accept=accept))
        opener = sealed.opener(client.head())
        opened = b""
        while opened != first:
            opened += b"".join(opener.feed(client.take(int(client.line(), 16) + 2)[:-2]))
        told.append(True)
        rest = b"".join(opener.feed(client.chunked()[0])) + opener.finish()
    assert rest.startswith(b'data: {"error":')
    assert b"upstream_reset" in rest
    assert opener.complete


def test_sealed_stream_that_breaks_inside_an_event_is_truncated(sidecar, upstream, channel):
    def script(seen):
        seen.reply(SSE_HEAD, chunk(b"data: half an ev"))
        until(lambda: told, "the client to have the half")
        seen.wire.close()

    told = []
    upstream.answering(script)
    sealed = channel.seal(CHAT)
    with Client(sidecar.sealed) as client:
        client.send(sealed.request(accept=BOTH))
        opener = sealed.opener(client.head())
        opened = b""
        while not opened:
            opened += b"".join(opener.feed(client.take(int(client.line(), 16) + 2)[:-2]))
        told.append(True)
        rest, _ = client.rest()
    assert rest == b""
    assert not opener.complete
    with pytest.raises(EnvelopeError) as refused:
        opener.finish()
    assert refused.value.reason == "truncated"


def test_client_library_reports_a_cut_stream(sidecar, upstream, keys):
    def script(seen):
        seen.reply(SSE_HEAD, chunk(b"data: half an ev"))
        seen.wire.close()

    upstream.answering(script)
    with (
        httpx.Client(transport=Sm4Transport(keys / "client.json"), timeout=20) as http,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        http.post(
            f"http://127.0.0.1:{sidecar.sealed}/v1/chat/completions",
            json=json.loads(CHAT) | {"stream": True},
        )


def test_upstream_is_cancelled_when_a_sealed_caller_leaves(sidecar, upstream, channel):
    gone = []

    def script(seen):
        seen.body()
        gone.append(seen.wire.ended())

    upstream.answering(script)
    with Client(sidecar.sealed) as client:
        client.send(channel.seal(CHAT).request())
        upstream.last().body()
        left = time.monotonic()
    until(lambda: gone, "the upstream's connection to close")
    assert gone[0] - left < 0.25


# --- processes of their own


def test_unverified_bodies_share_a_budget_that_a_stalled_one_gives_back(
    tmp_path, upstream, keys, channel
):
    with Sidecar(
        tmp_path / "s",
        upstream.url,
        keys=keys,
        ENVELOPE_UNVERIFIED_BYTES=1 << 20,  # one peer: an eighth
        ENVELOPE_PROGRESS_S=0.4,
    ) as sidecar:
        body = b'{"model":"tiny","x":"' + b"y" * 100_000 + b'"}'
        with Client(sidecar.sealed) as holder:
            half = channel.seal(body).request()[:-10]
            holder.send(half)
            until(
                lambda: sidecar.metric("tongguan_proxy_unverified_bytes") > 90_000, "the held bytes"
            )
            answer = ask(sidecar, channel.seal(body).request())
            assert (answer.status, answer.error()) == (503, "envelope_busy")
            until(
                lambda: sidecar.metric("tongguan_proxy_unverified_bytes") == 0,
                "the stalled body to free its share",
                wait_s=3,
            )
            sealed = channel.seal(body)
            assert sealed.open(ask(sidecar, sealed.request()))[0] == 200
        hits = sidecar.metric("tongguan_proxy_limit_hits_total", limit="envelope.unverified_bytes")
        assert hits == 1


def test_fence_and_window_refuse_what_a_restart_or_a_drip_would_let_through(
    tmp_path, upstream, keys, channel
):
    sidecar = Sidecar(
        tmp_path / "s",
        upstream.url,
        keys=keys,
        ENVELOPE_FENCE_S=1,
        ENVELOPE_WINDOW_S=1,
        TIMEOUTS_BODY_IDLE_S=10,
    )
    try:
        sidecar.start()
        fenced = channel.seal(CHAT)
        assert refused(ask(sidecar, fenced.request())) in REFUSED
        not_ready = sidecar.admin_ask("GET", "/readyz")
        assert not_ready.status == 503
        assert b"start_fence" in not_ready.body
        assert sidecar.ask(post(CHAT)).status == 200  # the plain door serves at once
        until(lambda: sidecar.admin_ask("GET", "/readyz").status == 200, "the end of the fence")
        upstream.answering(ok)
        captured = channel.seal(CHAT)
        assert captured.open(ask(sidecar, captured.request()))[0] == 200
        with Client(sidecar.sealed) as slow:
            fresh = channel.seal(CHAT)
            slow.send(fresh.request()[:-1])
            end = time.monotonic() + 4.3  # two generations of two windows
            while time.monotonic() < end:
                time.sleep(0.1)
            slow.send(fresh.wire[-1:])
            assert refused(slow.answer()) in REFUSED
        assert refused(ask(sidecar, captured.request())) in REFUSED
        captured = channel.seal(CHAT)
        assert captured.open(ask(sidecar, captured.request()))[0] == 200
        sidecar.kill()
        sidecar.start()
        assert refused(ask(sidecar, captured.request())) in REFUSED
        assert len(upstream.seen) == 2
        assert counted(sidecar, "stale") == 1
    finally:
        sidecar.kill()


@pytest.mark.parametrize("together", [True, False], ids=["one packet", "head first"])
def test_drain_refuses_sealed_requests_and_serves_plain_ones(
    tmp_path, upstream, keys, channel, together
):
    with Sidecar(tmp_path / "s", upstream.url, keys=keys) as sidecar:
        until(lambda: sidecar.admin_ask("GET", "/readyz").status == 200, "ready")
        assert sidecar.admin_ask("POST", "/drain").status == 200
        ready = sidecar.admin_ask("GET", "/readyz")
        assert ready.status == 503
        assert "draining" in json.loads(ready.body)["reasons"]
        sealed = channel.seal(CHAT)
        with Client(sidecar.sealed) as client:
            if together:
                client.send(sealed.request())
            else:
                client.send(sealed.head())
            answer = client.answer()
            assert (answer.status, answer.error()) == (503, "draining")
            assert answer.get("Connection") == b"close"
            assert answer.get("x-should-retry") == b"false"  # nobody else has its audience
            if not together:
                client.send(sealed.wire)
            assert client.rest() == (b"", True)
        assert sidecar.ask(post(CHAT)).status == 200


def test_first_start_of_a_pods_own_audience_needs_no_fence(tmp_path, upstream):
    uid = "5f0c1d2e-0000-4000-8000-000000000001"
    keys = new_keys(tmp_path / "keys", "--audience", f"local/default/{uid}")
    channel = Channel(keys / "client.json")
    (tmp_path / "state").mkdir()
    sidecar = Sidecar(
        tmp_path / "s",
        upstream.url,
        keys=keys,
        IDENTITY_POD_UID=uid,
        ENVELOPE_STATE_DIR=tmp_path / "state",
        ENVELOPE_FENCE_S=30,
    )
    with sidecar:
        sealed = channel.seal(CHAT)
        assert sealed.open(ask(sidecar, sealed.request()))[0] == 200
        assert sidecar.admin_ask("GET", "/readyz").status == 200
        sidecar.kill()
        sidecar.start()
        assert refused(ask(sidecar, sealed.request())) in REFUSED
        assert b"start_fence" in sidecar.admin_ask("GET", "/readyz").body
