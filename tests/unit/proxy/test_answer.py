"""Each form of an answer, as bytes, read back by a reader that is not ours."""

from __future__ import annotations

import http.client
import io

import pytest

from proxy.answer import (
    ENVELOPE_TYPE,
    Bodiless,
    Chunked,
    Lengthed,
    SealedStream,
    UntilClose,
    sealed_fields,
    unlengthed,
)
from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import EnvelopeError
from tests.unit.proxy.sm4_kit import (
    NOW_MS,
    fresh_nonce,
    make_key,
    make_receiver,
    open_request,
    seal_request,
)

PIECES = [b"one", b"", b"\r\n0\r\n\r\n", b"x" * 70_000, b"\x00\xff"]
BODY = b"".join(PIECES)


def wire(answer, pieces, status=b"200 OK", fields=b""):
    head = b"HTTP/1.1 " + status + b"\r\n" + fields + answer.framing() + b"\r\n"
    return head + answer.start() + b"".join(map(answer.data, pieces)) + answer.end()


class _Socket:
    def __init__(self, data):
        self._data = data

    def makefile(self, *_args, **_kwargs):
        return io.BytesIO(self._data)


def read(data, method="GET"):
    """Return (body, bytes behind it) as the standard library's client reads them."""
    response = http.client.HTTPResponse(_Socket(data), method=method)
    response.begin()
    file = response.fp
    body = response.read()
    return body, file.read() if file is not None and not file.closed else b""


# --- in clear


def test_a_known_length_goes_through_as_it_is():
    answer = Lengthed(len(BODY))
    assert not answer.ends_by_close
    data = wire(answer, PIECES)
    assert data == b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    assert read(data)[0] == BODY


def test_an_empty_body_has_a_length_too():
    assert wire(Lengthed(0), []) == b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def test_chunks_are_read_back_whole():
    answer = unlengthed(1)
    assert isinstance(answer, Chunked)
    assert not answer.ends_by_close
    assert read(wire(answer, PIECES))[0] == BODY


def test_chunks_as_they_stand_on_the_wire():
    answer = Chunked()
    assert answer.framing() == b"Transfer-Encoding: chunked\r\n"
    assert answer.start() == b""
    assert answer.data(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"
    assert answer.end() == b"0\r\n\r\n"


def test_no_bytes_make_no_chunk_that_would_end_the_body():
    assert Chunked().data(b"") == b""


def test_a_cut_chunked_answer_does_not_read_as_whole():
    answer = Chunked()
    head = b"HTTP/1.1 200 OK\r\n" + answer.framing() + b"\r\n"
    with pytest.raises(http.client.IncompleteRead):
        read(head + answer.data(b"half"))


def test_an_http_1_0_client_reads_to_the_end_of_the_connection():
    answer = unlengthed(0)
    assert isinstance(answer, UntilClose)
    assert answer.ends_by_close
    data = wire(answer, PIECES)
    assert data == b"HTTP/1.1 200 OK\r\n\r\n" + BODY
    assert b"chunked" not in data[:20]


@pytest.mark.parametrize(("length", "field"), [(None, b""), (0, b"0"), (5, b"5")])
def test_head_says_the_length_and_sends_nothing(length, field):
    answer = Bodiless(length)
    assert not answer.ends_by_close
    assert answer.framing() == (b"" if not field else b"Content-Length: " + field + b"\r\n")
    assert answer.start() + answer.data(b"must not go out") + answer.end() == b""
    assert read(wire(answer, [b"body"]), "HEAD") == (b"", b"")


# --- sealed


class Channel:
    """A sealed request that was opened: both ends of its answer."""

    def __init__(self, suite=1, *, mac=False):
        self.client, request = seal_request(make_key(suite), mac=mac)
        self.server = open_request(make_receiver(make_key(suite)), request).sealer

    def answer(self, minor, carrier, content_type="text/event-stream"):
        stream = self.server.stream(
            200, content_type, nonce=fresh_nonce(), now_ms=NOW_MS, carrier=carrier
        )
        return SealedStream(stream, unlengthed(minor))

    def open(self, data, carrier, cut=0):
        kind = "text/event-stream" if carrier == "sse" else ENVELOPE_TYPE.decode()
        opener = AnswerOpener(self.client, kind, None)
        size = cut or len(data) or 1
        out = [b"".join(opener.feed(data[i : i + size])) for i in range(0, len(data), size)]
        return opener, b"".join(out) + opener.finish()


FORMS = [(minor, carrier) for minor in (0, 1) for carrier in ("raw", "sse")]


@pytest.mark.parametrize(("minor", "carrier"), FORMS)
@pytest.mark.parametrize(("suite", "mac"), [(1, False), (1, True), (2, True)])
def test_a_sealed_stream_is_opened_again_by_the_client(minor, carrier, suite, mac):
    channel = Channel(suite, mac=mac)
    answer = channel.answer(minor, carrier)
    assert answer.ends_by_close is (minor == 0)
    sealed, _ = read(wire(answer, PIECES))
    assert b"x" * 16 not in sealed
    opener, body = channel.open(sealed, carrier, cut=1000)
    assert body == BODY
    assert opener.complete
    assert (opener.prelude.status, opener.prelude.content_type) == (200, "text/event-stream")


@pytest.mark.parametrize(("minor", "carrier"), FORMS)
def test_a_sealed_stream_without_a_body_still_ends(minor, carrier):
    channel = Channel()
    opener, body = channel.open(read(wire(channel.answer(minor, carrier), []))[0], carrier)
    assert (body, opener.complete) == (b"", True)


@pytest.mark.parametrize("carrier", ["raw", "sse"])
def test_each_piece_can_be_opened_before_the_next_comes(carrier):
    channel = Channel()
    answer = channel.answer(1, carrier)
    kind = "text/event-stream" if carrier == "sse" else ENVELOPE_TYPE.decode()
    opener = AnswerOpener(channel.client, kind, None)

    def payload(chunk):
        head, _, rest = chunk.partition(b"\r\n")
        assert len(rest) == int(head, 16) + 2
        return rest[:-2]

    assert opener.feed(payload(answer.start())) == []
    for event in (b"data: a\n\n", b"data: b\n\n"):
        assert b"".join(opener.feed(payload(answer.data(event)))) == event
        assert not opener.complete


@pytest.mark.parametrize(("minor", "carrier"), FORMS)
def test_a_sealed_stream_that_was_cut_is_truncated_for_the_client(minor, carrier):
    channel = Channel()
    answer = channel.answer(minor, carrier)
    head = b"HTTP/1.1 200 OK\r\n" + answer.framing() + b"\r\n"
    # Even where somebody in between puts a regular outer end under it.
    outer_end = b"0\r\n\r\n" if minor else b""
    sealed, _ = read(head + answer.start() + answer.data(b"data: a\n\n") + outer_end)
    with pytest.raises(EnvelopeError) as caught:
        channel.open(sealed, carrier)
    assert caught.value.reason == "truncated"


def test_a_sealed_answer_shows_no_field_of_the_upstreams():
    raw, events = sealed_fields(event_stream=False), sealed_fields(event_stream=True)
    assert raw.startswith(b"Content-Type: application/x-sm4-envelope\r\n")
    assert events.startswith(b"Content-Type: text/event-stream\r\n")
    for fields in (raw, events):
        assert b"Cache-Control: no-store, no-transform\r\n" in fields
        assert fields.endswith(b"\r\n")
        assert b"\r\n\r\n" not in fields
