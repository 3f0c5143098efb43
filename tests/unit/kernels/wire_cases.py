"""What the wire tests and tests/fuzz/wire.py share: usual traffic, damage, and the comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels import wire
from proxy.http import body, chunked, http1
from proxy.http.body import BodyError
from proxy.http.chunked import ChunkError, ChunkReader
from proxy.http.http1 import HeadError, HeadLimits

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

LIMITS = HeadLimits(head_bytes=65536, field_bytes=32768, fields=128)
ALL_LIMITS = (
    LIMITS,
    HeadLimits(head_bytes=256, field_bytes=64, fields=4),
    HeadLimits(head_bytes=120, field_bytes=40, fields=6),
    HeadLimits(head_bytes=0, field_bytes=0, fields=0),
)
IDS = frozenset([body.IDS])
NONE: frozenset[str] = frozenset()


class DeferredError(Exception):
    """The C reader was not sure."""


def defer(*_args: object, **_words: object) -> Any:
    raise DeferredError


def readers() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return each function alone in C (raises DeferredError), and its twin."""
    classes = (http1.RequestHead, http1.ResponseHead, HeadLimits)
    request, response = wire.heads(classes, http1._GRAMMAR, defer, defer)
    members, view, cut = wire.bodies(
        (body.RequestView, body.AnswerFacts), body.IDS, defer, defer, defer
    )
    return {
        "parse_request": (request, http1.parse_request_pure),
        "parse_response": (response, http1.parse_response_pure),
        "members": (members, body.members_pure),
        "view": (view, body.view_pure),
        "cut_answer": (cut, body.cut_answer_pure),
        "feed": (
            feeder(wire.chunks(chunked.whole_chunks_pure)),
            feeder(chunked.whole_chunks_pure),
        ),
    }


def feeder(whole_chunks: Callable[[bytes, list[bytes]], int]) -> Callable[..., Any]:
    """Return a function that feeds bytes in steps to a reader that uses `whole_chunks`."""

    def feed(data: bytes, step: int) -> object:
        used = chunked.whole_chunks
        chunked.whole_chunks = whole_chunks
        reader, seen = ChunkReader(), []
        try:
            for at in range(0, len(data), step):
                taken = reader.feed(data[at : at + step])
                seen.append((taken, reader.pieces, reader.done))
        except ChunkError as problem:
            seen.append((-1, reader.pieces, str(problem)))
        finally:
            chunked.whole_chunks = used
        return seen

    return feed


def outcome(function: Callable[..., Any], *arguments: object, **words: object) -> str:
    """Return all that a caller can see: the order in dicts and the type of numbers included."""
    try:
        return repr(function(*arguments, **words))
    except HeadError as refused:
        return f"{refused.code}: {refused}"
    except BodyError as refused:
        return f"body: {refused}"


def agrees(pair: tuple[Callable[..., Any], Callable[..., Any]], *arguments: object) -> bool:
    """Compare both; return whether C was sure. AssertionError when they differ."""
    fast, pure = pair
    try:
        got = outcome(fast, *arguments)
    except DeferredError:
        return False
    want = outcome(pure, *arguments)
    assert got == want, f"\n{got}\n{want}\n{arguments}"
    return True


def as_one(fast: Callable[..., Any], pure: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that asks both, compares, and answers."""

    def ask(*given: object, **words: object) -> Any:
        assert outcome(fast, *given, **words) == outcome(pure, *given, **words)
        return fast(*given, **words)

    return ask


CLIENTS = {
    "openai-python": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:14080\r\n"
        b"Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nAccept: application/json\r\n"
        b"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 1.99.0\r\n"
        b"X-Stainless-Lang: python\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
        b"Authorization: Bearer sk-0123456789abcdef\r\nx-stainless-retry-count: 0\r\n"
        b"Content-Length: 212\r\n\r\n"
    ),
    "curl": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost:14080\r\nUser-Agent: curl/7.88.1\r\n"
        b"Accept: */*\r\nContent-Type: application/json\r\nContent-Length: 2000000\r\n"
        b"Expect: 100-continue\r\n\r\n"
    ),
    "go": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway.ns.svc:14080\r\n"
        b"User-Agent: Go-http-client/1.1\r\nTransfer-Encoding: chunked\r\nX-QoS-Class: P0\r\n"
        b"X-Tenant-Id: team-a\r\nTraceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"
        b"01\r\nTracestate: a=1\r\nAccept-Encoding: gzip\r\n\r\n"
    ),
    "undici": (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]:14080\r\nconnection: keep-alive\r\n"
        b"content-type: application/json\r\naccept: */*\r\naccept-language: *\r\n"
        b"sec-fetch-mode: cors\r\nuser-agent: node\r\naccept-encoding: gzip, deflate\r\n"
        b"content-length: 99\r\n\r\n"
    ),
    "probe": b"GET /health HTTP/1.0\r\n\r\n",
    "close": b"GET /v1/models?x=%C3%A9 HTTP/1.1\r\nHost:a\r\nConnection: close\r\nA: b\r\n\r\n",
    "empty line": b"\r\nDELETE /a HTTP/1.1\r\nHost: a \r\nCookie: \xc3\xa4=b\r\n\r\n",
}  # fmt: skip
SERVERS = {
    "uvicorn": (
        b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-length: 480\r\ncontent-type: application/json\r\nx-request-id: 0123\r\n\r\n"
    ),
    "stream": (
        b"HTTP/1.1 200 OK\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
        b"content-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    ),
    "llama.cpp": (
        b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nContent-Type: application/json\r\n"
        b"Server: llama.cpp\r\nContent-Length: 12\r\nConnection: close\r\n\r\n"
    ),
    "busy": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\n",
    "none": b"HTTP/1.0 204\r\nConnection: keep-alive\r\n\r\n",
    "until close": "HTTP/1.1 200 d\u00e9j\u00e0\r\nSet-Cookie: a\r\nset-cookie: b\r\n\r\n".encode(),
}
BODIES = {
    "chat": (
        b'{"model":"Qwen/Qwen2.5-7B-Instruct","messages":[{"role":"system","content":"You help."},'
        b'{"role":"user","content":"Say \\"hi\\"\\n"}],"temperature":0.7,"max_tokens":64,'
        b'"stream":true,"stream_options":{"include_usage":true},"top_p":1}'
    ),
    "spaced": (
        b' {\n "messages" : [ {"role": "user", "content": ["a", {"type": "image_url"}]} ] ,\r\n'
        b'\t"model": "m" , "max_completion_tokens": 0, "seed": -12.5e+3, "n": null }\r\n'
    ),
    "completion": b'{"prompt":"Once","model":"a\\/b","temperature":0,"stream":false,"stop":["."]}',
    "other tongues": (
        '{"model":"\u901a\u4e49","messages":[{"role":"user","content":"\u4f60\u597d \U0001f600 '
        '\u00e9 \\ud83d\\ude00"}],"\u540d":1}'
    ).encode(),
    "empty": b"{}",
    "members": b'{"a":1,"b":[],"c":{},"":true}',
}
_CHOICE = (
    b'{"index":0,"message":{"role":"assistant","content":"Paris \\u2014 \\"la\\" \xe4\xbd\xa0",'
    b'"tool_calls":[],"reasoning_content":null},"logprobs":null,"finish_reason":"stop",'
    b'"stop_reason":null,"token_ids":[59604,374,4294967295,0]}'
)
_USAGE = (
    b'"usage":{"prompt_tokens":31,"total_tokens":48,"completion_tokens":17,'
    b'"prompt_tokens_details":{"cached_tokens":0},"extra":null}'
)
ANSWERS = {
    "chat": b'{"id":"x","object":"chat.completion","created":1700000000,"model":"m","choices":['
    + _CHOICE + b"]," + _USAGE + b',"prompt_token_ids":[7, 8]}',
    "two": b'{"token_ids": [], "choices":[{"text":"a","index":1},{"text":"b","token_ids":null}]}',
    "tool": b'{"choices":[{"index":0,"finish_reason":"tool_calls","message":{"content":null}}]}',
    "spaced": b'{ "prompt_token_ids" : [ 1 , 2 ] , "token_ids" : null , "model" : "m" }\n',
    "error": b'{"error":{"message":"no such model","code":404}}',
    "empty": b' { "choices" : [ ] , "usage" : null } ',
}  # fmt: skip
CHUNKS = (
    b"5\r\nhello\r\n0\r\n\r\n",
    b"A\r\n0123456789\r\n1f;a=b\r\n" + b"x" * 31 + b"\r\n000003\r\n\r\n0\r\n0\r\nA: b\r\n\r\n",
    b"1\r\na\r\n2\r\nbc\r\n00000000000000d\r\n\r\n0\r\n\r\n234567\r\n0\r\n\r\nGET / HTTP/1.1\r\n",
)
SEEDS = {
    "parse_request": list(CLIENTS.values()),
    "parse_response": list(SERVERS.values()),
    "members": [*BODIES.values(), *ANSWERS.values()],
    "view": list(BODIES.values()),
    "cut_answer": list(ANSWERS.values()),
    "feed": list(CHUNKS),
}
_HEAD_JUNK = (
    b"\r\n", b"\r", b"\n", b" ", b"\t", b":", b"\x00", b"\x7f", b"\xff", b"Host: x\r\n",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: upgrade, te\r\n",
    b"x-tongguan-error: a\r\n", b"Expect: 100-Continue\r\n", b"HTTP/1.0", b"\r\n\r\n", b"/", b"*",
    b"A: b\r\n" * 9, b"Upgrade: a\r\n", b"x-qos-class: P1\r\n", b"0", b"999999999999999999",
    b"Content-Length: 1234567890123456789\r\n",
)  # fmt: skip
_JSON_JUNK = (
    b'"', b"\\", b"\\u", b"\\ud83d", b"\\ude00", b"{", b"}", b"[", b"]", b",", b":", b"0", b"-",
    b"1.5", b"e9", b"\x00", b"\x1f", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b" ",
    b'"model":"b",', b'"token_ids":[1],', b'"choices":[{}],', b'"index":1,', b"null", b"true",
    b'"\\u0061":1,', b"-0", b"9007199254740992", b"[" * 70, b'"text":"t",', b'"message":{},',
    b'"prompt":1,', b'"max_tokens":5,', b"\xe4\xbd\xa0", b"\\/", b"4294967296",
)  # fmt: skip
_JUNK = {
    "parse_request": _HEAD_JUNK,
    "parse_response": _HEAD_JUNK,
    "feed": (b"\r\n", b"\r", b"\n", b"0", b"f", b";", b" ", b"0" * 15, b"F" * 15, b"8", b"\x00"),
}


def damaged(rng: random.Random, name: str) -> bytes:
    """Return one of the usual cases with one to four small things wrong."""
    seeds = SEEDS[name]
    data = bytearray(rng.choice(seeds))
    junk = _JUNK.get(name, _JSON_JUNK)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randint(0, len(data))
        match rng.randrange(7):
            case 0:
                data[at:at] = rng.choice(junk)
            case 1:
                del data[at : at + rng.randint(1, 12)]
            case 2:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                other = rng.choice(seeds)
                begin = rng.randint(0, len(other))
                data[at:at] = other[begin : begin + rng.randint(1, 60)]
            case 4:
                data[at : at + rng.randint(1, 8)] = rng.choice(junk)
            case 5:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            case _:
                if rng.random() < 0.3:
                    del data[at:]
    return bytes(data)


def arguments(rng: random.Random, name: str, data: bytes) -> tuple[object, ...]:
    """Return what `name` is called with for these bytes, in one of the ways it can be."""
    if name.startswith("parse"):
        start = rng.choice((0, 0, 3))
        buffer = b"\r\n\r"[:start] + data
        limits = rng.choice(ALL_LIMITS)
        method = (rng.choice((b"GET", b"HEAD")),) if name == "parse_response" else ()
        typed = bytearray(buffer) if rng.random() < 0.2 else buffer
        return (typed, limits, *method, *([start] if start else []))
    if name == "feed":
        return (data, rng.choice((1, 2, 7, 1000)))
    return (data, rng.choice((IDS, NONE))) if name == "cut_answer" else (data,)
