"""Plain requests relayed byte for byte: heads, framing, keep-alive, pipelining, classes."""

import json
import random
import re
import socket
import time

import pytest

from tests.blackbox.harness import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    Sidecar,
    Upstream,
    chunk,
    get,
    new_keys,
    ok,
    post,
    until,
)

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":0}'
OURS = {b"X-QoS-Class", b"X-QoS-Pool", b"X-Trace-Id", b"Server-Timing"}
TRACE = b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend):
    folder = tmp_path_factory.mktemp("relay")
    keys = new_keys(folder / "keys")
    toml = '[pools.best_effort]\nhost = "model.test"\nrepeatable = true\n'
    with Sidecar(folder / "sidecar", backend.url, keys=keys, toml=toml) as sidecar:
        yield sidecar


def theirs(answer):
    """The field lines that are not ours, framing apart."""
    names = OURS | {b"Content-Length", b"Transfer-Encoding"}
    return [line for line in answer.lines if line.partition(b":")[0] not in names]


def test_json_answer_is_relayed_byte_for_byte(sidecar, upstream):
    body = b'{"a" :1,\n  "b":"\\u00e9\xc3\xa9"}\n'
    lines = [b"content-TYPE:application/json", b"X-A:  two  words ", b"Set-Cookie: a=1",
             b"x-a: 2", b"Set-Cookie: b=2", b"Date: Mon, 01 Jan 2024 00:00:00 GMT",
             b"x-ratelimit-remaining: 3"]  # fmt: skip
    upstream.answering(
        b"HTTP/1.1 201 Quite Fine\r\n"
        + b"".join(line + b"\r\n" for line in lines)
        + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    answer = sidecar.ask(post(CHAT))
    assert answer.line == b"HTTP/1.1 201 Quite Fine"
    assert theirs(answer) == lines
    assert answer.get("Content-Length") == b"%d" % len(body)
    assert answer.body == body


def test_request_head_and_body_reach_the_upstream_as_sent(sidecar, upstream):
    fields = [b"x-LOWER:v", b"X-Many: 1", b"X-Other:  b ", b"x-many: 2", b"Authorization: Bearer s",
              b"X-Request-Id: r-1", b"tracestate: k=v", TRACE]  # fmt: skip
    sidecar.ask(post(CHAT, *fields, target=b"/v1/a%20b?q=1&q=2"))
    seen = upstream.last()
    assert seen.line == b"POST /v1/a%20b?q=1&q=2 HTTP/1.1"
    assert seen.get("Host") == b"app.test"
    assert [line for line in seen.lines if line in fields] == fields
    assert seen.payload == CHAT
    assert not {b"via", b"forwarded", b"x-forwarded-for"} & {name.lower() for name in seen.names}


def test_hop_by_hop_fields_are_removed_both_ways(sidecar, upstream):
    upstream.answering(
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"Proxy-Authenticate: x\r\nX-Stays: 1\r\nUpgrade: foo\r\nContent-Length: 0\r\n\r\n"
    )
    fields = [b"Connection: X-Gone, keep-alive", b"X-Gone: 1", b"Keep-Alive: timeout=5", b"TE: x",
              b"Proxy-Connection: x", b"Proxy-Authorization: x", b"Upgrade: websocket",
              b"X-Stays: 1"]  # fmt: skip
    answer = sidecar.ask(post(CHAT, *fields))
    hop = {"Connection", "X-Hop", "X-Gone", "Keep-Alive", "Proxy-Authenticate", "Upgrade", "TE",
           "Proxy-Connection", "Proxy-Authorization"}  # fmt: skip
    for head in (answer, upstream.last()):
        assert [name for name in hop if head.all(name)] == []
        assert head.get("X-Stays") == b"1"


def test_connection_may_not_strip_a_field_meant_for_every_hop(sidecar, upstream):
    answer = sidecar.ask(post(CHAT, b"Connection: authorization", b"Authorization: Bearer s"))
    assert (answer.status, answer.error()) == (400, "invalid_request")
    assert upstream.seen == []


def test_answer_names_class_pool_trace_and_timing(sidecar, upstream):
    upstream.answering(
        b"HTTP/1.1 200 OK\r\nX-QoS-Class: P0\r\nX-QoS-Pool: theirs\r\nX-Trace-Id: theirs\r\n"
        b"Server-Timing: db;dur=1\r\nX-Tongguan-Error: queue_full\r\nContent-Length: 0\r\n\r\n"
    )
    answer = sidecar.ask(post(CHAT, b"X-QoS-Class: p2"))
    assert answer.get("X-QoS-Class") == b"P2"
    assert answer.get("X-QoS-Pool") == b"best_effort"
    assert re.fullmatch(r"\d{13}-\d{5}-\d{4}", answer.trace_id)
    theirs_timing, timing = answer.all("Server-Timing")
    assert theirs_timing == b"db;dur=1"
    assert re.fullmatch(rb"queue;dur=\d+\.\d{3}, upstream;dur=\d+\.\d{3}", timing)
    assert answer.get("X-Tongguan-Error") is None
    assert answer.get("X-Tongguan-Upstream-Error") == b"queue_full"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([], b"P1"),
        ([b"X-QoS-Class:  P2 "], b"P2"),
        ([b"X-QoS-Class: P9"], b"P1"),
        ([b"X-QoS-Class: P2, P1"], b"P1"),
        ([b"X-QoS-Class: P2", b"x-qos-class: P2"], b"P1"),
        ([b"X-QoS-Class:"], b"P1"),
    ],
)
def test_effective_class_is_answered_and_forwarded(sidecar, upstream, fields, expected):
    answer = sidecar.ask(post(CHAT, *fields))
    assert answer.get("X-QoS-Class") == expected
    assert upstream.last().get("X-QoS-Class") == expected


def test_class_in_a_trailer_is_none(sidecar, upstream):
    body = b"X-Q: 1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(CHAT) + b"0\r\n"
    answer = sidecar.ask(b"POST / HTTP/1.1\r\nHost: a\r\n" + body + b"X-QoS-Class: P2\r\n\r\n")
    assert answer.get("X-QoS-Class") == b"P1"
    assert upstream.last().get("X-QoS-Class") == b"P1"


def test_cap_shows_in_answer_upstream_and_record(sidecar, upstream):
    answer = sidecar.ask(post(CHAT, b"X-QoS-Class: P0"))
    assert answer.get("X-QoS-Class") == b"P1"
    assert answer.get("X-QoS-Pool") == b"shared"
    assert upstream.last().get("X-QoS-Class") == b"P1"
    record = sidecar.record(answer.trace_id)
    assert (record["qos"], record["qos_asked"], record["outcome"]) == ("P1", "P0", "ok")


def test_upstream_gets_the_pods_tenant_not_the_apps_claim(sidecar, upstream):
    sidecar.ask(post(CHAT, b"X-Tenant-Id: somebody-else"))
    assert upstream.last().get("X-Tenant-Id") == b"default"


def test_traceparent_is_kept_or_made(sidecar, upstream):
    kept = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sidecar.ask(post(CHAT, b"traceparent: " + kept))
    assert upstream.last().get("traceparent") == kept
    sidecar.ask(post(CHAT, b"traceparent: 00-nonsense"))
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", upstream.last().get("traceparent"))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ([b"tracestate: a=1", TRACE, b"X-A: 1", b"Tracestate: b=2"], [b"a=1", b"b=2"]),
        ([b"tracestate: a=1", b"X-A: 1", b"Tracestate: b=2"], []),
        ([b"tracestate: a=1", b"traceparent: 00-nonsense", b"X-A: 1"], []),
        ([b"TRACESTATE:a=1", TRACE, TRACE, b"X-A: 1"], []),
    ],
    ids=["valid", "none", "invalid", "two"],
)
def test_tracestate_goes_on_with_its_traceparent_only(sidecar, upstream, fields, kept):
    sidecar.ask(post(CHAT, *fields))
    seen = upstream.last()
    assert seen.all("tracestate") == kept
    assert len(seen.all("traceparent")) == 1
    assert seen.get("X-A") == b"1"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 429 Too Many\r\nRetry-After: 7\r\nx-ratelimit-reset: 1s\r\n",
        b"HTTP/1.1 500 Oops\r\nX-E: 1\r\n",
        b"HTTP/1.1 404 Not Here\r\nX-E: 1\r\n",
    ],
)
def test_upstreams_own_errors_pass_untouched(sidecar, upstream, head):
    upstream.answering(head + b"Content-Length: 3\r\n\r\nerr")
    answer = sidecar.ask(post(CHAT))
    assert b"\r\n".join([answer.line, *theirs(answer)]) + b"\r\n" == head
    assert answer.body == b"err"
    assert sidecar.record(answer.trace_id)["status"] == answer.status


def test_event_stream_is_relayed_event_by_event(sidecar, upstream):
    events = [b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % i for i in range(4)]
    events += [b": comment\r\n\r\n", b"event: x\ndata: [DONE]\n\n"]
    told = []

    def script(seen):
        seen.reply(SSE_HEAD)
        for event in events:
            seen.wire.send(chunk(event))
            until(lambda e=event: e in told, "the client to have the event")
        seen.wire.send(LAST_CHUNK)

    upstream.answering(script)
    with sidecar.client() as client:
        client.send(post(CHAT))
        head = client.head()
        assert head.get("Cache-Control") == b"no-cache, no-transform"
        assert head.get("X-Accel-Buffering") == b"no"
        for event in events:
            assert client.take(len(chunk(event))) == chunk(event)
            told.append(event)
        assert client.take(5) == LAST_CHUNK


def test_event_stream_keeps_the_upstreams_own_cache_fields(sidecar, upstream):
    head = SSE_HEAD[:-2] + b"cache-control: private\r\nX-Accel-Buffering: yes\r\n\r\n"
    upstream.answering(head + LAST_CHUNK)
    answer = sidecar.ask(post(CHAT))
    assert answer.get("Cache-Control") == b"private"
    assert answer.get("X-Accel-Buffering") == b"yes"


def test_chunked_request_is_relayed_without_extensions_and_trailers(sidecar, upstream):
    body = b'5;ext=1\r\n{"a":\r\n3 ; x="y"\r\n"b"\r\n1\r\n}\r\n000\r\nX-Zed: 1\r\nX-U: 2\r\n\r\n'
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\nTrailer: X-Zed\r\n\r\n"
    assert sidecar.ask(head + body).status == 200
    seen = upstream.last()
    assert seen.payload == b'{"a":"b"}'
    assert b"ext" not in seen.raw + seen.raw_body
    assert b"X-Zed" not in seen.raw + seen.raw_body


def test_chunked_answer_is_relayed_without_extensions_and_trailers(sidecar, upstream):
    upstream.answering(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Zed\r\n\r\n"
        b"3;a=b\r\nabc\r\n4\r\ndefg\r\n0\r\nX-Zed: 1\r\n\r\n"
    )
    with sidecar.client() as client:
        for _ in range(2):
            answer = client.send(get()).answer()
            assert answer.body == b"abcdefg"
            assert b"X-Zed" not in answer.raw + answer.raw_body
            assert b"a=b" not in answer.raw_body


def test_connections_are_kept_on_both_sides(sidecar, upstream):
    with sidecar.client() as client:
        for i in range(5):
            assert client.send(post(b'{"n":%d}' % i)).answer().status == 200
    assert len({id(seen.wire) for seen in upstream.seen}) == 1
    assert [seen.payload for seen in upstream.seen] == [b'{"n":%d}' % i for i in range(5)]


def test_connection_close_is_honoured(sidecar, upstream):
    with sidecar.client() as client:
        answer = client.send(post(CHAT, b"Connection: close")).answer()
        assert answer.get("Connection") == b"close"
        assert client.rest() == (b"", True)


def test_upstream_that_closes_after_its_answer_is_not_used_again(sidecar, upstream):
    def script(seen):
        seen.reply(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        seen.wire.close()

    upstream.answering(script)
    with sidecar.client() as client:
        for _ in range(3):
            assert client.send(post(CHAT)).answer().body == b"{}"
    assert len({id(seen.wire) for seen in upstream.seen}) == 3


def test_body_that_ends_with_the_upstreams_connection_arrives_chunked(sidecar, upstream):
    def script(seen):
        seen.reply(b"HTTP/1.0 200 OK\r\n\r\npart one,")
        seen.wire.send(b"part two")
        seen.wire.close()

    upstream.answering(script)
    with sidecar.client() as client:
        assert client.send(get()).answer().body == b"part one,part two"
        upstream.answering(ok)
        assert client.send(get()).answer().body == b"{}"


def test_pipelined_requests_are_answered_in_order(sidecar, upstream):
    upstream.answering(
        lambda seen: seen.reply(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(seen.line), seen.line)
        )
    )
    count = 40
    with sidecar.client() as client:
        client.send(b"".join(post(b"x" * i, target=b"/%d" % i) for i in range(count)))
        answers = [client.answer() for _ in range(count)]
    assert [a.body for a in answers] == [b"POST /%d HTTP/1.1" % i for i in range(count)]
    assert [seen.payload for seen in upstream.seen] == [b"x" * i for i in range(count)]


def test_pipelined_refusals_are_answered_in_order(sidecar, upstream):
    with sidecar.client() as client:
        client.send(get(b"/1"), b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", get(b"/2"))
        assert client.answer().status == 200
        assert client.answer().status == 405
    assert [seen.line for seen in upstream.seen] == [b"GET /1 HTTP/1.1"]


def test_head_answer_has_the_length_and_no_body(sidecar, upstream):
    upstream.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")
    with sidecar.client() as client:
        client.send(b"HEAD /a HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.answer("HEAD").get("Content-Length") == b"1234"
        upstream.answering(ok)
        assert client.send(get()).answer().body == b"{}"


@pytest.mark.parametrize("status", [204, 304])
def test_bodiless_status_keeps_the_connection_in_step(sidecar, upstream, status):
    upstream.answering(b'HTTP/1.1 %d X\r\nETag: "1"\r\n\r\n' % status)
    with sidecar.client() as client:
        answer = client.send(get()).answer()
        assert answer.status == status
        assert answer.get("Transfer-Encoding") is None
        upstream.answering(ok)
        assert client.send(get()).answer().body == b"{}"


def test_continue_is_given_at_once_and_never_forwarded(sidecar, upstream):
    with sidecar.client() as client:
        head, body = post(CHAT, b"Expect: 100-continue").split(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert client.head().line == b"HTTP/1.1 100 Continue"
        assert upstream.seen == []
        assert client.send(body).answer().status == 200
    assert upstream.last().get("Expect") is None


def test_interim_answers_of_the_upstream_are_not_the_answer(sidecar, upstream):
    upstream.answering(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK
    )
    with sidecar.client() as client:
        for _ in range(2):
            assert client.send(post(CHAT)).head().status == 200
            client.take(2)


def test_http10_client_gets_the_answer_without_chunks(sidecar, upstream):
    upstream.answering(SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + LAST_CHUNK)
    with sidecar.client() as client:
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = client.answer()
        assert answer.get("Transfer-Encoding") is None
        assert answer.body == b"data: 1\n\ndata: 2\n\n"


def test_http10_client_needs_no_host(sidecar, upstream):
    with sidecar.client() as client:
        assert client.send(b"GET / HTTP/1.0\r\n\r\n").answer().body == b"{}"
        assert client.rest() == (b"", True)


def test_large_body_streams_through_intact(sidecar, upstream):
    body = random.Random(1).randbytes(3 << 20)
    answer = sidecar.ask(post(body))
    assert answer.status == 200
    assert upstream.last().payload == body


def test_large_chunked_body_streams_through_intact(sidecar, upstream):
    rng = random.Random(2)
    pieces = [rng.randbytes(rng.randrange(1, 200_000)) for _ in range(30)]
    head = b"PUT /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with sidecar.client() as client:
        client.send(head + b"".join(map(chunk, pieces)) + LAST_CHUNK)
        assert client.answer().status == 200
        assert client.send(get()).answer().status == 200
    assert upstream.seen[0].payload == b"".join(pieces)


def test_large_answer_streams_through_intact(sidecar, upstream):
    body = random.Random(3).randbytes(8 << 20)
    upstream.answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert sidecar.ask(get()).body == body


def test_dripped_bytes_make_the_same_request(sidecar, upstream):
    data = post(CHAT)
    with sidecar.client() as client:
        for i in range(len(data)):
            client.send(data[i : i + 1])
        assert client.answer().status == 200
    assert upstream.last().payload == CHAT


def test_absolute_form_is_forwarded_in_origin_form(sidecar, upstream):
    sidecar.ask(b"GET http://app.test/a?b HTTP/1.1\r\nHost: app.test\r\n\r\n")
    assert upstream.last().line == b"GET /a?b HTTP/1.1"


CONVERSATION = [
    post(CHAT, target=b"/1"),
    get(b"/2"),
    b"POST /3 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(b'{"a":1,')
    + b'6;x=y\r\n"b":2}\r\n0\r\nT: 1\r\n\r\n',
    b"\r\n" + get(b"/4"),
    post(b"", target=b"/5"),
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    post(b"z" * 3000, target=b"/6"),
]


def constant(raw):
    """Bytes less what differs between two equal requests."""
    return re.sub(rb"(?m)^(X-Trace-Id|Server-Timing|traceparent): .*\r\n", rb"\1\r\n", raw)


def talk(sidecar, upstream, pieces):
    """Send the conversation in `pieces`; return (bytes upstream, bytes to the client)."""
    upstream.answering(
        lambda seen: (
            seen.reply(SSE_HEAD + chunk(b"data: " + seen.line + b"\n\n") + LAST_CHUNK)
            if b"/2" in seen.line or b"/6" in seen.line
            else seen.reply(OK)
        )
    )
    with sidecar.client() as client:
        for piece in pieces:
            client.send(piece)
            if len(pieces) < 40:
                time.sleep(0.001)
        answers = [client.answer() for _ in CONVERSATION]
    return (
        [constant(seen.raw + seen.raw_body) for seen in upstream.seen],
        [constant(answer.raw + answer.raw_body) for answer in answers],
    )


def test_segmentation_changes_no_byte_on_either_side(sidecar, upstream):
    data = b"".join(CONVERSATION)
    expected = talk(sidecar, upstream, [data])
    assert len(expected[0]) == len(CONVERSATION)
    for seed in range(12):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(1, len(data)), rng.choice([2, 7, 25, 300])))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert talk(sidecar, upstream, pieces) == expected, f"seed {seed}"


def test_many_connections_at_once_get_their_own_answers(sidecar, upstream):
    upstream.answering(
        lambda seen: seen.reply(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(seen.body()), seen.body())
        )
    )
    clients = [sidecar.client() for _ in range(40)]
    try:
        for i, client in enumerate(clients):
            client.send(post(b'{"n":%d}' % i))
        for i, client in enumerate(clients):
            answer = client.answer()
            assert json.loads(answer.body) == {"n": i}
    finally:
        for client in clients:
            client.close()


def test_idle_client_that_shuts_down_is_let_go(sidecar):
    with sidecar.client() as client:
        client.sock.shutdown(socket.SHUT_WR)
        assert client.rest() == (b"", True)


def test_idle_connection_that_the_upstream_closed_is_not_used(sidecar, upstream):
    def script(seen):
        seen.reply(OK)
        until(lambda: told, "the client to have its answer")
        seen.wire.close()

    told = []
    upstream.answering(script)
    with sidecar.client() as client:
        assert client.send(post(CHAT)).answer().status == 200
        closed = upstream.last().wire
        idle = sidecar.metric("tongguan_proxy_pool_idle_connections", pool="shared")
        told.append(True)
        until(
            lambda: sidecar.metric("tongguan_proxy_pool_idle_connections", pool="shared") < idle,
            "the idle connection to be forgotten",
        )
        upstream.answering(ok)
        assert client.send(post(CHAT)).answer().status == 200
        assert upstream.last().wire is not closed


@pytest.mark.parametrize(("qos", "status"), [(b"P1", 502), (b"P2", 200)])
def test_request_is_sent_again_only_where_the_pool_is_repeatable(sidecar, upstream, qos, status):
    def script(seen):
        seen.reply()
        if len(upstream.seen) == 1:
            seen.wire.send(OK)
        elif len(upstream.seen) == 2:
            seen.wire.close()
        else:
            seen.wire.send(OK)

    upstream.answering(script)
    fields = b"X-QoS-Class: " + qos
    with sidecar.client() as client:
        assert client.send(post(CHAT, fields)).answer().status == 200
        assert client.send(post(CHAT, fields)).answer().status == status
    assert len(upstream.seen) == (3 if status == 200 else 2)


def test_pools_host_overrides_the_clients(sidecar, upstream):
    sidecar.ask(post(CHAT, b"X-QoS-Class: P2"))
    assert upstream.last().get("Host") == b"model.test"


def test_upstream_on_a_unix_socket(tmp_path):
    path = tmp_path / "socket"
    with Upstream(path) as upstream, Sidecar(tmp_path / "s", f"unix:{path}") as sidecar:
        assert sidecar.ask(post(CHAT)).status == 200
        assert upstream.last().payload == CHAT


def test_request_that_takes_longer_than_any_may_is_ended(tmp_path, upstream):
    event = chunk(b"data: 1\n\n")

    def script(seen):
        seen.reply(SSE_HEAD)
        while True:
            seen.wire.send(event)
            time.sleep(0.05)

    upstream.answering(script)
    with Sidecar(tmp_path / "s", upstream.url, TIMEOUTS_REQUEST_TOTAL_S=0.3) as sidecar:
        answer = sidecar.ask(post(CHAT))
    assert b'"upstream_timeout"' in answer.body[-300:]


def test_idle_connections_end_in_time_on_both_sides(tmp_path, upstream):
    with Sidecar(
        tmp_path / "s", upstream.url, TIMEOUTS_KEEPALIVE_S=0.4, POOLS_SHARED_KEEPALIVE_S=0.4
    ) as sidecar:
        start = time.monotonic()
        with sidecar.client() as client, sidecar.client() as unused:
            assert client.send(post(CHAT)).answer().status == 200
            assert client.rest() == (b"", True)
            assert unused.rest() == (b"", True)
        assert 0.35 < time.monotonic() - start < 3
        until(lambda: upstream.last().wire.sock.fileno() < 0, "the upstream's connection to end")


def test_nothing_is_held_when_all_is_done(sidecar, upstream):
    assert sidecar.ask(post(CHAT)).status == 200
    assert sidecar.idle()
