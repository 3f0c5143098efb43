"""However the bytes of an exchange are cut on their way, both sides get the same ones.

Conversations are drawn from a seed: pipelined requests of every framing, answers of every framing.
Each is held whole twice, which shows what differs between any two equal ones, and then with its
bytes cut at random on both sides. Chunks are no part of a message (RFC 9112 section 7.1): of a
chunked body the content is compared.
"""

import json
import random
import re
import time

import pytest

from proxy.sm4.envelope import MEDIA_TYPE
from tests.blackbox.channel import BOTH, Channel
from tests.blackbox.harness import LAST_CHUNK, SSE_HEAD, Client, Sidecar, until

COLLECT = 3000  # a larger body streams through
SEEDS = range(8)
FRESH = random.SystemRandom().randrange(1 << 32)
STREAM_END = b"data: [DONE]\n\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
# Of a record: what the bytes alone decide.
OF_THE_BYTES = {"prompt_hash", "output_hash", "outcome", "status", "qos", "model"}


@pytest.fixture(scope="module", params=["as shipped", "ids asked for"])
def sidecar(request, tmp_path_factory, backend, keys):
    folder = tmp_path_factory.mktemp("segments")
    toml = "[pools.shared]\ntoken_ids = true\n" if request.param == "ids asked for" else ""
    with Sidecar(
        folder, backend.url, keys=keys, toml=toml, LIMITS_COLLECT_BYTES=COLLECT
    ) as sidecar:
        yield sidecar


def cut(rng, data, most):
    """Return `data` in at most so many pieces, cut anywhere."""
    count = min(rng.choice([1, 2, 5, 20, most]), len(data))
    cuts = sorted(rng.sample(range(1, len(data)), count - 1)) if count > 1 else []
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def letters(rng, size):
    return bytes(rng.choices(b'ab {}":,\r\n\xc3\xa9\\', k=size))


def chat(rng, *, stream):
    words = "".join(rng.choices('ab \u00e9\u5de7\U0001f600"\\\n', k=rng.choice([0, 9, 400])))
    body = {"model": "m", "messages": [{"role": "user", "content": words}], "stream": stream}
    return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()


def request(rng, number):
    """Return (method, bytes) of one request."""
    stream = rng.random() < 0.5
    target = b"/%d" % number
    match rng.randrange(7):
        case 0:
            return "GET", b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target
        case 1:
            return "HEAD", b"HEAD %b HTTP/1.1\r\nHost: a\r\nX-A:b\r\n\r\n" % target
        case 2:
            body = letters(rng, rng.choice([0, 1, COLLECT, COLLECT + 1, 20_000]))
            kind = b"text/plain"
        case 3:
            body, kind = letters(rng, rng.choice([1, 700, 9000])), b"application/octet-stream"
            return "PUT", (
                b"PUT %b HTTP/1.1\r\nHost: a\r\n%b\r\n%b" % (target, CHUNKED, chunks(rng, body))
            )
        case 4:
            return "POST", (
                b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n%b\r\n%b"
                % (target, CHUNKED, chunks(rng, chat(rng, stream=stream)))
            )
        case _:
            body, kind = chat(rng, stream=stream), b"application/json"
    blank = rng.choice([b"", b"\r\n"])
    return "POST", (
        b"%bPOST %b HTTP/1.1\r\nHost: a\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (blank, target, kind, len(body), body)
    )


def chunks(rng, body):
    """Return a chunked body with extensions, leading zeros and trailers now and then."""
    parts = []
    for piece in cut(rng, body, 12) if body else []:
        size = b"%x" % len(piece)
        if rng.random() < 0.3:
            size = rng.choice([b"00" + size, size.upper(), size + b';a="b"', size + b";x"])
        parts.append(b"%b\r\n%b\r\n" % (size, piece))
    return b"".join([*parts, rng.choice([LAST_CHUNK, LAST_CHUNK, b"0\r\nT: 1\r\n\r\n"])])


def events(rng):
    """Return an event stream as engines write it, token ids and usage in some."""
    eol = rng.choice([b"\n", b"\r\n"])
    parts = [rng.choice([b"", b": ping" + eol * 2])]
    for index in range(rng.randrange(1, 12)):
        choice = {"index": 0, "delta": {"content": rng.choice(["a", "\u5de7", '"', ""])}}
        if rng.random() < 0.5:
            choice["token_ids"] = [index, 70000]
        event = {"choices": [choice]}
        if rng.random() < 0.2:
            event["usage"] = {"prompt_tokens": 1, "completion_tokens": index, "total_tokens": 1}
        parts.append(b"data: " + json.dumps(event).encode() + eol * 2)
    return b"".join([*parts, STREAM_END if rng.random() < 0.8 else b""])


def answer(rng):
    """Return the bytes of one answer."""
    interim = rng.choice([b"", b"", b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"])
    match rng.randrange(6):
        case 0:
            return interim + b"HTTP/1.1 204 No Content\r\nX-B: 1\r\n\r\n"
        case 1:
            body = letters(rng, rng.choice([0, 1, 30_000]))
        case 2:
            message = {"content": "".join(rng.choices("a\u5de7", k=300))}
            body = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
        case 3:
            kind = b"Content-Type: text/plain\r\n"
            head = b"HTTP/1.1 200 OK\r\n%b%b\r\n" % (kind, CHUNKED)
            return interim + head + chunks(rng, letters(rng, rng.choice([1, 5000])))
        case _:
            return interim + SSE_HEAD + chunks(rng, events(rng))
    return interim + (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )


def conversation(seed):
    rng = random.Random(seed)
    asked = [request(rng, number) for number in range(rng.randrange(1, 8))]
    return asked, [answer(rng) for _ in asked]


def constant(raw):
    """Bytes less what differs between two equal requests."""
    return re.sub(rb"(?m)^(X-Trace-Id|Server-Timing|traceparent): .*\r\n", rb"\1\r\n", raw)


def run(sidecar, upstream, seed, cutting=None):
    """Hold a conversation; return (requests upstream, answers, their records)."""
    asked, answers = conversation(seed)

    def script(seen):
        seen.body()
        data = answers[int(seen.line.split(b" ")[1][1:])]
        if seen.line.startswith(b"HEAD"):
            interim = b"HTTP/1.1 103" in data
            data = b"".join(re.findall(rb".*?\r\n\r\n", data, re.DOTALL)[: 1 + interim])
        send(seen.wire, data, cutting)

    upstream.answering(script)
    with sidecar.client() as client:
        send(client, b"".join(data for _, data in asked), cutting)
        got = [client.answer(method) for method, _ in asked]
    assert not any(one.interim for one in got)  # none was asked for
    until(lambda: len(upstream.seen) == len(asked), "every request upstream")
    records = [sidecar.record(one.trace_id) for one in got]
    return (
        [(constant(seen.raw), seen.payload) for seen in upstream.seen],
        [(constant(one.raw), one.body) for one in got],
        records,
    )


def send(wire, data, cutting):
    if cutting is None:
        wire.send(data)
        return
    pieces = cut(cutting, data, 150)
    for piece in pieces:
        wire.send(piece)
        if len(pieces) < 25:
            time.sleep(0.0005)  # so that it is read alone


@pytest.mark.parametrize("seed", [*SEEDS, pytest.param(FRESH, id="a new one")])
def test_any_segmentation_gives_the_same_bytes_and_records(sidecar, backend, seed):
    whole, again = (run(sidecar, backend, seed) for _ in range(2))
    assert whole[:2] == again[:2]
    stable = [
        {name for name in one if other.get(name) == one[name]}
        for one, other in zip(whole[2], again[2], strict=True)
    ]
    cutting = random.Random(seed)
    for turn in range(3):
        upwards, back, records = run(sidecar, backend, seed, cutting)
        assert upwards == whole[0], (seed, turn)
        assert back == whole[1], (seed, turn)
        for expected, record, names in zip(whole[2], records, stable, strict=True):
            assert names >= OF_THE_BYTES & set(expected)
            differing = {n for n in names if record.get(n) != expected[n]}
            assert differing == set(), (seed, turn)
    assert backend.problems == []


@pytest.mark.parametrize("accept", [MEDIA_TYPE, BOTH])
@pytest.mark.parametrize("stream", [False, True], ids=["one frame", "frames"])
def test_any_segmentation_of_an_envelope_gives_the_same_text(
    sidecar, backend, keys, accept, stream
):
    channel, rng = Channel(keys / "client.json"), random.Random(FRESH)
    for turn in range(6):
        body, told = chat(rng, stream=True), SSE_HEAD + chunks(rng, events(rng))

        def whole(seen, told=told):
            seen.body()
            send(seen.wire, told, None)

        def in_pieces(seen, told=told):
            seen.body()
            send(seen.wire, told, rng)

        got = []
        for script, cutting in ((whole, None), (in_pieces, rng)):
            backend.answering(script)
            sealed = channel.seal(body, stream=stream)
            with Client(sidecar.sealed) as client:
                send(client, sealed.request(accept=accept), cutting)
                opened = sealed.open(client.answer("POST"))
            got.append((opened, constant(backend.last().raw), backend.last().payload))
        assert got[0] == got[1], (FRESH, turn)
        assert got[0][2].startswith(body[:-1])  # what asks for ids may follow
