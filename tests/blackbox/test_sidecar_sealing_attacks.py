"""Whoever lies between two sidecars: nothing of what they answer is taken for the answer."""

import contextlib
import json
import time

import pytest

from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Answer,
    Client,
    Sidecar,
    Upstream,
    chunk,
    new_keys,
    ok,
    post,
    until,
)
from tests.blackbox.recording import Bending, unbent

CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a question"}]}'
STREAMED = CHAT[:-1] + b',"stream":true}'
TOLD = b"what-the-engine-said"
WHOLE = b'{"answer":"%b"}' % TOLD
EVENTS = [b'data: {"n":%d,"t":"%b"}\n\n' % (i, TOLD) for i in range(4)] + [b"data: [DONE]\n\n"]
SSE = b"Accept: text/event-stream"
CARRIERS = {"events": [SSE], "raw": []}


def engine(seen):
    if b'"stream":true' in seen.body():
        seen.reply(SSE_HEAD)
        for event in EVENTS:
            seen.wire.send(chunk(event))
            time.sleep(0.004)  # a frame of its own
        seen.wire.send(LAST_CHUNK)
    else:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        seen.reply(head % len(WHOLE) + WHOLE)


@pytest.fixture(scope="module")
def between(tmp_path_factory, backend, keys):
    folder = tmp_path_factory.mktemp("far")
    with Sidecar(folder, backend.url, keys=keys) as far, Bending(far.sealed) as between:
        yield between


@pytest.fixture(scope="module")
def near(tmp_path_factory, between, keys):
    own = new_keys(tmp_path_factory.mktemp("own"))
    names = {f"POOLS_{p}_SEAL_KEYS": keys / "client.json" for p in ("SHARED", "BEST_EFFORT")}
    with Sidecar(tmp_path_factory.mktemp("near"), between.url, keys=own, **names) as near:
        yield near


@pytest.fixture
def hop(backend, between):
    backend.answering(engine)
    yield between.bending(None)
    assert between.problems == []


def refused(near, answer):
    """Check that an answer is our refusal and shows nothing; return the reason it names."""
    assert TOLD not in answer.raw + answer.body
    assert (answer.status, answer.error()) == (502, "upstream_envelope")
    message = json.loads(answer.body)["error"]["message"]
    record = near.record(answer.trace_id)
    assert (record["outcome"], record["status"]) == ("upstream_error", 502)
    assert "output_hash" not in record
    return message


def test_answer_that_nobody_touched_is_taken(near, hop):
    assert near.ask(post(CHAT)).body == WHOLE
    for fields in CARRIERS.values():
        assert near.ask(post(STREAMED, *fields)).body == b"".join(EVENTS)


@pytest.mark.parametrize("bits", [0x01, 0x80])
def test_single_with_a_flipped_bit_is_refused(near, hop, bits):
    size = []

    def bend(seen, answer):
        body = bytearray(answer.body)
        size[:] = [len(body)]
        body[place] ^= bits
        return unbent(answer, bytes(body))

    hop.bending(bend)
    place = 0
    reasons = set()
    while not size or place < size[0]:
        reasons.add(refused(near, near.ask(post(CHAT))).rsplit("(")[1])
        place += 1 if place < 6 else 13
    assert {"bad_magic)", "bad_suite)", "bad_tag)"} <= reasons


def in_pieces(hop, bend):
    """Let the next hop's answers come as it streams them, bent: `bend(body)`."""

    def hand_on(seen):
        answer = hop.ask(seen)
        body = bend(bytearray(answer.body))
        seen.wire.send(answer.raw)
        for start in range(0, len(body), 500):
            seen.wire.send(chunk(bytes(body[start : start + 500])))
            time.sleep(0.002)  # a read of its own
        seen.wire.send(LAST_CHUNK)

    hop.answering(hand_on)


def broken_off(near, answer, codes):
    """Check the ending of a stream that went wrong; return what was released before."""
    good, mark, error = answer.body.partition(b'data: {"error":')
    assert mark, answer.body
    assert b"".join(EVENTS).startswith(good)
    assert any(code in error for code in codes)
    assert error.count(b"\n\n") == 1
    assert near.record(answer.trace_id)["outcome"] == "truncated"
    return good


@pytest.mark.parametrize("carrier", CARRIERS)
def test_stream_with_a_flipped_byte_never_ends_whole(near, hop, carrier):
    """What was released before is right, then there is one error event, and no more of it."""
    size, begun = [], set()

    def bend(body):
        size[:] = [len(body)]  # frames vary with the cuts
        body[place % len(body)] ^= 1
        return body

    in_pieces(hop, bend)
    place = 3
    while not size or place < size[0]:
        answer = near.ask(post(STREAMED, *CARRIERS[carrier]))
        if answer.status != 200:
            refused(near, answer)
        else:
            # Without its line end the last event has not come.
            begun.add(broken_off(near, answer, [b"upstream_envelope", b"upstream_reset"]))
        place += 131
    assert begun


@pytest.mark.parametrize("carrier", CARRIERS)
def test_stream_without_its_tail_is_truncated_for_the_app_too(near, hop, carrier):
    ends = set()
    for cut in (1, 40, 600, 1300):
        in_pieces(hop, lambda body, cut=cut: body[:-cut])
        answer = near.ask(post(STREAMED, *CARRIERS[carrier]))
        if answer.status != 200:
            refused(near, answer)  # no frame was left
        else:
            ends.add(broken_off(near, answer, [b"upstream_reset"]))
    assert ends


@pytest.mark.parametrize("carrier", CARRIERS)
def test_stream_cut_inside_an_event_is_cut_for_the_app(near, hop, backend, carrier):
    """Not one byte more, and no regular end (docs/sidecar.md, "Answers of our own")."""
    told, ends = [], ["cut", "clean"]

    def script(seen):
        seen.reply(SSE_HEAD, chunk(EVENTS[0] + b"data: half an ev"))
        until(lambda: told, "the client to have the half")
        seen.wire.close()

    def hand_on(seen):
        seen.body()
        with Client(hop.port) as far:
            far.send(seen.raw, seen.raw_body)
            with contextlib.suppress(OSError):
                while far.fill():
                    seen.wire.send(far.buffer)
                    far.buffer = b""
        if ends[0] == "clean":  # as if it were all
            seen.wire.send(LAST_CHUNK)
        else:
            seen.wire.close()

    while ends:
        told.clear()
        backend.answering(script)
        hop.answering(hand_on)
        with near.client() as client:
            client.send(post(STREAMED, *CARRIERS[carrier]))
            head = client.head()
            body = b""
            while not body.endswith(b"half an ev"):
                body += client.take(int(client.line(), 16) + 2)[:-2]
            told.append(True)
            assert client.rest()[0] == b""
        assert near.record(head.trace_id)["outcome"] == "truncated"
        ends.pop(0)


def test_answers_of_two_requests_are_not_swapped_or_played_back(near, hop):
    kept = []

    def keep(seen, answer):
        kept.append(answer)
        return unbent(answer)

    hop.bending(keep)
    assert near.ask(post(CHAT)).body == WHOLE
    for fields in CARRIERS.values():
        assert near.ask(post(STREAMED, *fields)).status == 200
    earlier = [unbent(answer) for answer in kept]
    for wire in earlier:
        hop.answering(lambda seen, wire=wire: seen.reply(wire))
        assert "(bad_" in refused(near, near.ask(post(CHAT)))
        assert refused(near, near.ask(post(STREAMED, SSE)))


def test_request_played_back_as_its_own_answer_is_refused(near, hop):
    def echo(seen):
        body = seen.body()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-sm4-envelope\r\n"
        seen.wire.send(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    hop.answering(echo)
    assert refused(near, near.ask(post(CHAT))).endswith("(bad_flags)")


def plain(status, kind, body, *fields):
    lines = b"".join(field + b"\r\n" for field in fields)
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status, kind, len(body), lines, body,
    )  # fmt: skip


CODE = b'{"error":{"message":"%b","code":"draining"}}' % TOLD
DEEP = b'{"error":{"code":' + b"[" * 9_000 + b"]" * 9_000 + b"}}"
UNSEALED = {
    "json": (plain(b"200 OK", b"application/json", WHOLE), "HTTP 200"),
    "events": (plain(b"200 OK", b"text/event-stream", b"".join(EVENTS)), "bad_carrier"),
    "no type": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "HTTP 200"),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", "HTTP 204"),
    "redirect": (plain(b"302 Found", b"text/html", TOLD, b"Location: http://a.test/"), "HTTP 302"),
    "page": (plain(b"502 Bad", b"text/html", b"<h1>%b</h1>" % TOLD), "HTTP 502"),
    "large": (plain(b"500 No", b"text/html", TOLD * 5000), "HTTP 500"),
    "deep": (plain(b"500 No", b"application/json", DEEP), "HTTP 500"),
    "ours": (plain(b"503 Busy", b"application/json", CODE), "HTTP 503, draining"),
    "coded": (
        plain(b"200 OK", b"application/x-sm4-envelope", b"x" * 99, b"Content-Encoding: gzip"),
        "bad_carrier",
    ),
    "two types": (
        plain(b"200 OK", b"application/json", WHOLE, b"Content-Type: application/x-sm4-envelope"),
        "HTTP 200",
    ),
    "empty": (plain(b"200 OK", b"application/x-sm4-envelope", b""), "truncated"),
    "short": (plain(b"200 OK", b"application/x-sm4-envelope", b"SMX1"), "truncated"),
    "asks for a tunnel": (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        None,
    ),
}


@pytest.mark.parametrize("how", UNSEALED)
@pytest.mark.parametrize("whole", [True, False], ids=["at once", "in pieces"])
def test_what_is_not_sealed_yields_nothing(near, hop, how, whole):
    data, named = UNSEALED[how]

    def script(seen):
        seen.body()
        if whole:
            seen.wire.send(data)
            return
        head, _, body = data.partition(b"\r\n\r\n")
        seen.wire.send(head + b"\r\n\r\n")
        for start in range(0, len(body), 50_000):
            seen.wire.send(body[start : start + 50_000])

    hop.answering(script)
    before = near.metric("tongguan_proxy_answer_failures_total")
    answer = near.ask(post(CHAT))
    if named is None:
        assert (answer.status, answer.error()) == (502, "upstream_protocol")
        return
    assert named in refused(near, answer)
    assert b"a.test" not in answer.raw
    assert near.metric("tongguan_proxy_answer_failures_total") == before + 1


def test_refusals_are_logged_once_a_minute_and_name_no_content(near, hop):
    hop.answering(UNSEALED["json"][0])
    for _ in range(3):
        refused(near, near.ask(post(CHAT)))
    lines = [line for line in near.log.splitlines() if "answers refused: reason=unsealed" in line]
    assert len(lines) == 1
    assert TOLD.decode() not in near.log


@pytest.mark.parametrize("carrier", [*CARRIERS, "single"])
def test_segments_of_a_sealed_answer_change_nothing(near, hop, carrier):
    body, want = (CHAT, WHOLE) if carrier == "single" else (STREAMED, b"".join(EVENTS))
    step = [1]

    def script(seen):
        data = unbent(hop.ask(seen))
        for start in range(0, len(data), step[0]):
            seen.wire.send(data[start : start + step[0]])

    hop.answering(script)
    for step[0] in (1, 7, 113, 700):
        answer = near.ask(post(body, *CARRIERS.get(carrier, [])))
        assert answer.body == want


def test_bad_next_hop_is_left_alone_but_not_for_what_the_request_did(
    backend, keys, tmp_path, between
):
    bad = plain(b"200 OK", b"application/json", WHOLE)
    with Upstream() as rogue:
        rogue.answering(bad)
        backend.answering(ok)
        between.bending(None)
        near = Sidecar(
            tmp_path / "near",
            f"{rogue.url},{between.url}",
            POOLS_SHARED_SEAL_KEYS=keys / "client.json",
            POOLS_SHARED_EJECT_ERRORS=2,
        )
        del near.environ["TONGGUAN_POOLS_DEDICATED_ENDPOINTS"]
        with near:
            rogue.answering(plain(b"413 Too Large", b"text/plain", b"no"))
            assert {near.ask(post(CHAT)).status for _ in range(8)} == {200, 502}
            assert b"ejected" not in near.admin_ask("GET", "/readyz").body
            rogue.answering(bad)
            assert {near.ask(post(CHAT)).status for _ in range(4)} == {200, 502}
            assert b"endpoint_ejected" in near.admin_ask("GET", "/readyz").body
            assert {near.ask(post(CHAT)).status for _ in range(4)} == {200}


def test_answer_is_no_more_than_was_asked_about_the_mac(backend, keys, tmp_path, between):
    """An answer without the MAC that was asked for, under a tag that holds."""
    backend.answering(engine)

    def bend(seen, answer):
        body = bytearray(answer.body)
        body[5] &= ~2
        return unbent(answer, bytes(body))

    with Sidecar(
        tmp_path / "near",
        between.url,
        POOLS_SHARED_SEAL_KEYS=keys / "client.json",
        POOLS_SHARED_SEAL_MAC="true",
    ) as near:
        between.bending(None)
        assert near.ask(post(CHAT)).body == WHOLE
        assert near.ask(post(STREAMED, SSE)).body == b"".join(EVENTS)
        between.bending(bend)
        answer = near.ask(post(CHAT))
        assert isinstance(answer, Answer)
        assert json.loads(answer.body)["error"]["message"].endswith("(missing_mac)")
