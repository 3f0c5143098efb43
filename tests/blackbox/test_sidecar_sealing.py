"""Sealing on the way out: an app that knows nothing of it, two sidecars, and what lies between."""

import json
import random
import secrets
import shutil
import time

import httpx
import openai
import pytest

from proxy.keys.file import read
from tests.blackbox.harness import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    Client,
    Sidecar,
    Upstream,
    answer_with,
    chunk,
    get,
    new_keys,
    ok,
    post,
    until,
)
from tests.blackbox.recording import Recorder, found

MIB = 1 << 20
POOLS = ("DEDICATED", "SHARED", "BEST_EFFORT")
TOKEN = "sk-" + secrets.token_hex(16)
# Long enough that no part of them is on the wire by chance.
PROMPT = "the question is " + secrets.token_hex(12)
WORDS = [f" word-{secrets.token_hex(8)}" for _ in range(5)]
CHAT = json.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}, separators=(",", ":")
).encode()
STREAMED = CHAT[:-1] + b',"stream":true}'


def sealing_to(keys, **more):
    """Return the variables that make every pool seal with these key files."""
    names = ",".join(str(path) for path in keys) if isinstance(keys, list) else str(keys)
    return {f"POOLS_{pool}_SEAL_KEYS": names for pool in POOLS} | more


def engine(seen):
    """Answer as an OpenAI server does."""
    if b'"stream":true' in seen.body().replace(b" ", b""):
        seen.reply(SSE_HEAD, *map(chunk, events()), LAST_CHUNK)
    else:
        message = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
        seen.reply(answer_with(body))


def events():
    for text in WORDS:
        piece = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
        yield b"data: " + json.dumps({"object": "chat.completion.chunk"} | piece).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def far(tmp_path_factory, backend, keys):
    folder = tmp_path_factory.mktemp("far")
    with Sidecar(folder, backend.url, keys=keys) as far:
        yield far


@pytest.fixture(scope="module")
def wire(far):
    with Recorder(far.sealed) as wire:
        yield wire


@pytest.fixture(scope="module")
def near(tmp_path_factory, wire, keys):
    own = new_keys(tmp_path_factory.mktemp("own"))
    sealing = sealing_to(keys / "client.json", POOLS_SHARED_REPEATABLE="true")
    toml = "[tenants.default]\nmax_class = 'P0'"
    with Sidecar(tmp_path_factory.mktemp("near"), wire.url, keys=own, toml=toml, **sealing) as near:
        yield near


@pytest.fixture
def upstream(backend):
    yield backend.answering(engine)
    assert backend.problems == []


# --- what is on the wire


def assert_hidden(wire, *more):
    seen = wire.bytes()
    assert b"application/x-sm4-envelope" in seen
    for secret in (TOKEN, PROMPT, *WORDS, *more):
        assert not found(secret.encode(), seen), secret


def test_search_finds_what_is_not_sealed(far, upstream, tmp_path):
    with (
        Recorder(far.app) as wire,
        Sidecar(tmp_path / "near", wire.url) as near,
    ):
        answer = near.ask(post(CHAT, b"Authorization: Bearer " + TOKEN.encode()))
        assert answer.status == 200
        assert all(found(s.encode(), wire.bytes()) for s in (TOKEN, PROMPT, *WORDS))


@pytest.mark.parametrize("stream", [False, True])
def test_openai_package_talks_through_and_the_wire_shows_nothing(near, wire, upstream, stream):
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{near.app}/v1",
            api_key=TOKEN,
            http_client=http,
            max_retries=0,
        ) as client,
    ):
        messages = [{"role": "user", "content": PROMPT}]
        answer = client.chat.completions.create(model="tiny", messages=messages, stream=stream)
        if stream:
            text = "".join(part.choices[0].delta.content or "" for part in answer)
        else:
            text = answer.choices[0].message.content
    assert text == "".join(WORDS)
    seen = upstream.last()
    assert json.loads(seen.payload)["messages"][0]["content"] == PROMPT
    assert seen.get("Authorization") is None  # the next hop has its own
    assert_hidden(wire)


@pytest.mark.parametrize("accept", [None, b"*/*", b"application/json", b"text/event-stream"])
@pytest.mark.parametrize("body", [CHAT, STREAMED], ids=["single", "stream"])
def test_both_carriers_bring_the_same_bytes(near, wire, upstream, accept, body):
    fields = [b"Authorization: Bearer " + TOKEN.encode(), b"Cookie: c=" + TOKEN.encode()]
    if accept is not None:
        fields.append(b"Accept: " + accept)
    before = len(wire.bytes())
    answer = near.ask(post(body, *fields, target=b"/v1/chat/completions?key=" + TOKEN.encode()))
    assert answer.status == 200
    if body is STREAMED:
        assert answer.get("Content-Type") == b"text/event-stream"
        assert answer.body == b"".join(events())
        carrier = b"text/event-stream" if accept == b"text/event-stream" else b"x-sm4-envelope"
        assert b"\r\nContent-Type: %b" % carrier in wire.bytes()[before:].replace(
            b"application/", b""
        )
    else:
        assert "".join(WORDS).encode() in answer.body
    seen = upstream.last()
    assert seen.line == b"POST /v1/chat/completions?key=%b HTTP/1.1" % TOKEN.encode()
    assert seen.payload == body
    assert_hidden(wire)


def test_outside_stands_what_may_stand_there_and_no_more(near, wire, upstream):
    trace = b"00-%032x-%016x-01" % (7, 7)
    fields = [b"traceparent: " + trace, b"tracestate: k=v", b"X-Request-Id: r-7",
              b"X-QoS-Class: P2", b"X-Tenant-Id: somebody", b"X-Any: 1", b"User-Agent: u",
              b"Accept-Encoding: gzip", b"Authorization: Bearer " + TOKEN.encode()]  # fmt: skip
    near.ask(post(CHAT, *fields, target=b"/a/b?q=secret#f"))
    heads = [part for sent in wire.directions() for part in sent.split(b"POST /")[1:]]
    (head,) = (h for h in heads if trace in h)
    names = {line.partition(b":")[0].lower() for line in head.split(b"\r\n\r\n")[0].split(b"\r\n")}
    assert names == {b"a/b http/1.1", b"host", b"content-type", b"content-length", b"accept",
                     b"x-model-id", b"traceparent", b"tracestate", b"x-request-id"}  # fmt: skip
    seen = upstream.last()
    assert seen.line == b"POST /a/b?q=secret#f HTTP/1.1"
    assert seen.get("X-QoS-Class") == b"P2"
    assert seen.get("X-Request-Id") == b"r-7"
    assert seen.get("traceparent") == trace
    assert seen.get("X-Tenant-Id") == b"default"  # of the kid


@pytest.mark.parametrize("qos", ["P0", "P1", "P2"])
def test_class_goes_inside(near, far, upstream, qos):
    answer = near.ask(post(CHAT, b"X-QoS-Class: " + qos.encode()))
    assert answer.get("X-QoS-Class") == qos.encode()
    capped = b"P1" if qos == "P0" else qos.encode()  # the far tenant's cap
    assert upstream.last().get("X-QoS-Class") == capped


def test_stream_is_opened_event_by_event(near, upstream):
    told = []

    def script(seen):
        seen.reply(SSE_HEAD)
        for event in events():
            seen.wire.send(chunk(event))
            until(lambda e=event: e in told, "the client to have the event")
        seen.wire.send(LAST_CHUNK)

    upstream.answering(script)
    with near.client() as client:
        client.send(post(STREAMED))
        client.head()
        for event in events():
            opened = b""
            while opened != event:
                size = int(client.line(), 16)
                opened += client.take(size + 2)[:-2]
            told.append(event)
        assert client.chunked()[0] == b""


# --- every request that HTTP allows


def test_record_says_how_it_left(near, keys, upstream):
    answer = near.ask(post(CHAT))
    record = near.record(answer.trace_id)
    kid = read(keys / "client.json").envelope_keys[0].kid.hex()
    assert record["envelope"] == {"kid": kid, "suite": 1, "signature": False, "mac": False}
    assert (record["outcome"], record["status"], record["pool"]) == ("ok", 200, "shared")
    assert record["model"] == "tiny"
    assert record["prompt_hash"]
    assert record["output_hash"]


@pytest.mark.parametrize("method", [b"GET", b"DELETE"])
def test_request_without_a_body_is_a_post_outside(near, wire, upstream, method):
    upstream.answering(ok)
    answer = near.ask(get(b"/v1/models?after=" + TOKEN.encode()).replace(b"GET", method, 1))
    assert (answer.status, answer.body) == (200, b"{}")
    assert upstream.last().line == b"%b /v1/models?after=%b HTTP/1.1" % (method, TOKEN.encode())
    assert b"\n%b /" % method not in wire.bytes()
    assert_hidden(wire)


def test_head_is_answered_without_a_body(near, upstream):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    upstream.answering(lambda seen: seen.reply(head if seen.line.startswith(b"HEAD") else OK))
    with near.client() as client:
        client.send(get(b"/v1/models").replace(b"GET", b"HEAD", 1), get(b"/next"))
        assert client.answer("HEAD").status == 200
        assert client.answer().body == b"{}"


@pytest.mark.parametrize("status", [b"204 No Content", b"404 Not Found", b"503 Busy", b"429 Wait"])
def test_upstreams_own_status_passes(near, upstream, status):
    body = b"" if status.startswith(b"204") else b'{"error":"theirs"}'
    framing = b"" if not body else b"Content-Length: %d\r\n" % len(body)
    upstream.answering(b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, framing, body))
    answer = near.ask(post(CHAT))
    assert (answer.status, answer.body) == (int(status[:3]), body)


def test_next_hops_own_error_comes_sealed_and_is_shown(near, upstream):
    upstream.answering(lambda seen: (seen.reply(), seen.wire.close()))
    answer = near.ask(post(CHAT))
    assert answer.status == 502
    assert json.loads(answer.body)["error"]["code"] == "upstream_reset"
    assert answer.get("X-Tongguan-Error") is None  # not ours


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_expect_pipelining_and_http10(near, upstream, version):
    upstream.answering(lambda seen: seen.reply(answer_with(seen.body(), kind=b"text/plain")))
    if version == b"1.0":
        answer = near.ask(post(CHAT, version=b"1.0"))
        assert (answer.status, answer.body) == (200, CHAT)
        return
    with near.client() as client:
        head, body = post(CHAT, b"Expect: 100-continue").split(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert client.head().status == 100
        client.send(body, *(post(b'{"n":%d}' % i) for i in range(4)))
        answers = [client.answer().body for _ in range(5)]
    assert answers == [CHAT, *(b'{"n":%d}' % i for i in range(4))]


@pytest.mark.parametrize("size", [MIB - 200, MIB, 3 * MIB, 7 * MIB])
@pytest.mark.parametrize("kind", ["json", "octets"])
@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_body_of_any_size_goes_both_ways(near, upstream, size, kind, coding):
    text = random.Random(size).randbytes(size // 2).hex().encode()
    payload = b'{"model":"tiny","x":"%b"}' % text if kind == "json" else text
    upstream.answering(lambda seen: seen.reply(answer_with(seen.body(), kind=b"text/plain")))
    data = post(payload)
    if kind == "octets":
        data = data.replace(b"application/json", b"application/octet-stream", 1)
    if coding == "chunked":
        head, _, body = data.partition(b"\r\n\r\n")
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        pieces = [chunk(body[i : i + 70_001]) for i in range(0, len(body), 70_001)]
        data = b"".join([head, b"\r\n\r\n", *pieces, LAST_CHUNK])
    answer = near.ask(data)
    assert answer.status == 200, answer.body[:300]
    assert answer.body == payload
    assert upstream.last().payload == payload


def test_too_large_for_the_next_hop_is_our_error_and_names_its(near, upstream):
    answer = near.ask(post(b'{"model":"tiny","x":"%b"}' % (b"y" * 9 * MIB)))
    assert (answer.status, answer.error()) == (502, "upstream_envelope")
    assert "payload_too_large" in json.loads(answer.body)["error"]["message"]
    assert answer.get("x-should-retry") == b"false"
    assert near.metric("tongguan_proxy_sealing_held_bytes") == 0


@pytest.mark.parametrize(
    ("body", "fields", "param"),
    [
        (b'{"model":"a","model":"b"}', [], "model"),
        (b"{no json", [], "model"),
        (b'{"model":"two words"}', [], "model"),
        (CHAT, [b"Content-Encoding: gzip"], "Content-Encoding"),
        (CHAT, [b"Content-Type: text/plain"], "Content-Type"),
    ],
    ids=["two models", "no json", "two words", "coded", "two types"],
)
def test_what_cannot_stand_in_an_envelope_is_refused_and_not_sent(
    near, upstream, body, fields, param
):
    answer = near.ask(post(body, *fields))
    assert (answer.status, answer.error()) == (400, "invalid_request")
    error = json.loads(answer.body)["error"]
    assert error["param"] == param
    assert "cannot be sealed" in error["message"]
    assert upstream.seen == []


def test_upgrade_is_not_asked_for(near, wire, upstream):
    upstream.answering(ok)
    answer = near.ask(get(b"/ws", b"Connection: upgrade", b"Upgrade: websocket"))
    assert answer.status == 200
    assert upstream.last().get("Upgrade") is None
    assert b"websocket" not in wire.bytes()


# --- attempts


def nonces(wire):
    return [part[24:36] for part in wire.bytes().split(b"SMX1")[1:]]


def test_each_attempt_is_another_envelope(far, keys, upstream, tmp_path):
    attempts = []

    def script(seen):
        attempts.append(seen.body())
        if len(attempts) == 2:  # on the connection that the first request used
            seen.wire.close()
            return
        with Client(far.sealed) as client:
            answer = client.send(seen.raw, seen.raw_body).answer()
        seen.wire.send(b"\r\n".join([answer.line, *answer.lines, b"", b""]) + answer.raw_body)

    sealing = sealing_to(keys / "client.json", POOLS_SHARED_REPEATABLE="true")
    with (
        Upstream() as between,
        Sidecar(tmp_path / "near", between.url, **sealing) as near,
    ):
        between.answering(script)
        with near.client() as client:
            for _ in range(2):
                assert client.send(post(CHAT)).answer().status == 200
        assert between.problems == []
    assert len(attempts) == 3
    assert len({body[24:36] for body in attempts}) == 3
    assert all(body.startswith(b"SMX1") for body in attempts)
    assert [seen.payload for seen in upstream.seen] == [CHAT, CHAT]


def test_each_endpoint_is_sealed_to_with_its_own_keys(keys, upstream, tmp_path):
    others = new_keys(tmp_path / "keys")
    with (
        Sidecar(tmp_path / "one", upstream.url, keys=keys) as one,
        Sidecar(tmp_path / "two", upstream.url, keys=others) as two,
    ):
        urls = f"http://127.0.0.1:{one.sealed},http://127.0.0.1:{two.sealed}"
        sealing = sealing_to([keys / "client.json", others / "client.json"])
        with Sidecar(tmp_path / "near", urls, **sealing) as near:
            assert [near.ask(post(CHAT)).status for _ in range(6)] == [200] * 6
            assert one.metric("tongguan_proxy_envelopes_opened_total") == 3
            assert two.metric("tongguan_proxy_envelopes_opened_total") == 3
            one.kill()
            assert [near.ask(post(CHAT)).status for _ in range(4)] == [200] * 4
            assert two.metric("tongguan_proxy_envelopes_opened_total") == 7
            assert near.metric("tongguan_proxy_sealed_requests_total") >= 10


def test_upstream_is_cancelled_at_once_when_the_client_leaves(near, upstream):
    gone = []

    def script(seen):
        seen.reply(SSE_HEAD, chunk(b"data: {}\n\n"))
        gone.append(seen.wire.ended())

    upstream.answering(script)
    with near.client() as client:
        client.send(post(STREAMED))
        client.head()
        client.line()
        left = time.monotonic()
    until(lambda: gone, "the upstream's connection to close")
    assert gone[0] - left < 1
    assert near.idle()


def test_slow_reader_holds_the_upstream_back_in_bounded_memory(near, far, upstream):
    total, sent = 100 * MIB, [0]
    block = chunk(b"data: " + b"x" * 65000 + b"\n\n")

    def script(seen):
        seen.reply(SSE_HEAD)
        while sent[0] < total:
            seen.wire.send(block)
            sent[0] += len(block)
        seen.wire.send(LAST_CHUNK)

    near.ask(post(STREAMED))  # what the first stream loads is loaded
    before = near.resident_bytes(), far.resident_bytes()
    upstream.answering(script)
    with near.client(receive_buffer=65536) as client:
        client.send(post(STREAMED))
        client.head()
        last = -1
        while last != sent[0]:  # until the upstream stands still
            last = sent[0]
            time.sleep(0.2)
        assert 0 < sent[0] < 60 * MIB
        after = near.resident_bytes(), far.resident_bytes()
        assert max(now - then for now, then in zip(after, before, strict=True)) < 12 * MIB
    assert near.idle()


# --- settings


def test_large_bodies_that_wait_share_a_bound(far, keys, upstream, tmp_path):
    sealing = sealing_to(keys / "client.json", LIMITS_SEALING_BYTES=3 * MIB)
    url = f"http://127.0.0.1:{far.sealed}"
    large = post(b'{"model":"tiny","x":"%b"}' % (b"y" * 2 * MIB))
    with Sidecar(tmp_path / "near", url, **sealing) as near, near.client() as waiting:
        waiting.send(large[:-10])
        until(lambda: near.metric("tongguan_proxy_sealing_held_bytes") > MIB, "the held bytes")
        answer = near.ask(large)
        assert (answer.status, answer.error()) == (503, "envelope_busy")
        hits = near.metric("tongguan_proxy_limit_hits_total", limit="limits.sealing_bytes")
        assert hits == 1
        assert near.ask(post(CHAT)).status == 200  # small ones are not counted
        assert waiting.send(large[-10:]).answer().status == 200
        until(lambda: near.metric("tongguan_proxy_sealing_held_bytes") == 0, "none held")


@pytest.mark.parametrize("scheme", ["ed25519", "sm2"])
def test_demands_of_the_key_are_met(upstream, tmp_path, scheme):
    keys = new_keys(
        tmp_path / "keys", "--sign", scheme, "--require-signature", "--require-mac",
        "--digest", "sm3",
    )  # fmt: skip
    own = new_keys(tmp_path / "own")
    with (
        Sidecar(tmp_path / "far", upstream.url, keys=keys) as far,
        Sidecar(
            tmp_path / "near",
            f"http://127.0.0.1:{far.sealed}",
            keys=own,
            **sealing_to(keys / "client.json", POOLS_SHARED_SEAL_EVENTS="true"),
        ) as near,
    ):
        answer = near.ask(post(STREAMED))
        assert answer.body == b"".join(events())
        record = near.record(answer.trace_id)
        assert record["envelope"]["signature"] is True
        assert record["envelope"]["mac"] is True
        large = b'{"model":"tiny","x":"%b"}' % (b"y" * 2 * MIB)
        assert near.ask(post(large)).status == 200


def test_sealed_requests_are_sealed_again(far, keys, upstream, tmp_path):
    from tests.blackbox.channel import Channel

    own = new_keys(tmp_path / "own")
    url = f"http://127.0.0.1:{far.sealed}"
    with Sidecar(tmp_path / "near", url, keys=own, **sealing_to(keys / "client.json")) as near:
        for body in (CHAT, STREAMED):
            sealed = Channel(own / "client.json").seal(body, target="/inner?x=1")
            with Client(near.sealed) as client:
                answer = client.send(sealed.request()).answer()
            status, _, opened = sealed.open(answer)
            assert status == 200
            assert WORDS[0].encode() in opened
            assert upstream.last().line == b"POST /inner?x=1 HTTP/1.1"
        record = near.record(answer.trace_id)
        kid = read(own / "client.json").envelope_keys[0].kid.hex()
        assert record["envelope"]["kid"] == kid  # how it came


def test_overflow_to_a_pool_that_seals(far, keys, upstream, tmp_path):
    busy = []

    def local(seen):
        seen.body()
        busy.append(seen)
        until(lambda: len(busy) > 1, "the end")
        seen.reply(OK)

    with Upstream() as here:
        here.answering(local)
        toml = f"""
[pools.shared]
endpoints = ["{here.url}"]
inflight = 1
overflow = true
[pools.best_effort]
endpoints = ["http://127.0.0.1:{far.sealed}"]
seal.keys = ["{keys / "client.json"}"]
[limits]
collect_bytes = 1000
"""
        near = Sidecar(tmp_path / "near", here.url, toml=toml)
        for name in ("SHARED", "BEST_EFFORT"):
            del near.environ[f"TONGGUAN_POOLS_{name}_ENDPOINTS"]
        with near, near.client() as first:
            first.send(post(CHAT))
            until(lambda: busy, "the local engine to be busy")
            for body in (CHAT, b'{"model":"tiny","x":"%b"}' % (b"y" * 9000)):
                answer = near.ask(post(body))
                assert answer.status == 200
                assert answer.get("X-QoS-Pool") == b"best_effort"
                assert upstream.last().payload == body
            answer = near.ask(post(b"no json"))
            assert (answer.status, answer.error()) == (400, "invalid_request")
            busy.append(None)
            assert first.answer().status == 200


def test_keys_are_taken_while_it_runs_and_a_bad_file_is_not(upstream, tmp_path):
    keys = new_keys(tmp_path / "keys")
    shutil.copy(keys / "client.json", tmp_path / "out.json")
    (tmp_path / "out.json").chmod(0o600)
    audience = read(keys / "client.json").envelope_keys[0].audience
    with Sidecar(tmp_path / "far", upstream.url, keys=keys) as far:
        url = f"http://127.0.0.1:{far.sealed}"
        with Sidecar(tmp_path / "near", url, **sealing_to(tmp_path / "out.json")) as near:
            assert near.ask(post(CHAT)).status == 200
            (tmp_path / "out.json").write_text("{}")
            until(lambda: "not reloaded" in near.log, "the mistake to be seen")
            assert "seal.keys" in near.log
            assert near.ask(post(CHAT)).status == 200
            new_keys(keys, "--force", "--audience", audience)
            far.signal(1)
            until(lambda: "reloaded: " in far.log, "the far side's new key")
            answer = near.ask(post(CHAT))  # with a kid that is gone there
            assert (answer.status, answer.error()) == (502, "upstream_envelope")
            message = json.loads(answer.body)["error"]["message"]
            assert message.endswith("(HTTP 400, envelope_rejected)")
            (tmp_path / "out.json").write_bytes((keys / "client.json").read_bytes())
            near.signal(1)
            until(lambda: near.ask(post(CHAT)).status == 200, "the new key")


def test_without_a_key_in_time_nothing_leaves(upstream, tmp_path, far, keys):
    document = json.loads((keys / "client.json").read_text())
    document["envelope_keys"][0]["not_after_ms"] = int(time.time() * 1000) - 1000
    old = tmp_path / "old.json"
    old.write_text(json.dumps(document))
    old.chmod(0o600)
    with Recorder(far.sealed) as wire:
        near = Sidecar(tmp_path / "near", wire.url, **sealing_to(old))
        try:
            near.start()
            answer = near.ask(post(CHAT))
            assert (answer.status, answer.error()) == (503, "no_upstream")
            assert "pools.shared.seal.keys" in json.loads(answer.body)["error"]["message"]
            assert b"no_sealing_key" in near.admin_ask("GET", "/readyz").body
            assert "no key is valid now" in near.log
        finally:
            near.kill()
        assert not any(wire.directions())


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"POOLS_SHARED_SEAL_KEYS": "a.json,b.json"}, "pools.shared.seal.keys: expected one file"),
        (
            {"POOLS_SHARED_SEAL_KEYS": "a.json", "POOLS_SHARED_AUTHORIZATION_FILE": "x"},
            "pools.shared.authorization_file: beside an envelope",
        ),
        (
            {"POOLS_SHARED_SEAL_KEYS": "a.json", "POOLS_SHARED_OVERFLOW": "true"},
            "pools.shared.overflow: best_effort does not seal",
        ),
        ({"POOLS_SHARED_SEAL_KEYS": "no-such.json"}, "no-such.json"),
        ({"POOLS_SHARED_SEAL_KEYS": "{keys}/sidecar.json"}, "made for the sidecar"),
    ],
)
def test_mistakes_end_the_start(tmp_path, keys, variables, what):
    variables = {name: value.format(keys=keys) for name, value in variables.items()}
    sidecar = Sidecar(tmp_path / "s", "http://127.0.0.1:1", **variables)
    sidecar.spawn()
    try:
        assert sidecar.ended() in {2, 3}
        assert what in sidecar.log
    finally:
        sidecar.kill()
