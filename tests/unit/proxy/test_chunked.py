"""Chunked framing: any split gives the same payload; anything odd ends the body."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.http import chunked
from proxy.http.chunked import LAST_CHUNK, LINE_BYTES, ChunkError, ChunkReader, frame

# Two shared cores: slow is no finding.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=["pure", "as built"], autouse=True)
def implementation(request):
    """Run all that is here without and with C."""
    built = chunked.whole_chunks
    chunked.whole_chunks = chunked.whole_chunks_pure if request.param == "pure" else built
    yield
    chunked.whole_chunks = built


def read(data: bytes, step: int = 0):
    """Feed `data` in steps; return (payload, bytes taken, done)."""
    reader, got, pos = ChunkReader(), b"", 0
    step = step or max(1, len(data))
    while pos < len(data):
        part = data[pos : pos + step]
        used = reader.feed(part)
        assert all(reader.pieces)
        got += b"".join(reader.pieces)
        pos += used
        if reader.done:
            break
        assert used == len(part)
    return got, pos, reader.done


GOOD = {
    "empty": (b"0\r\n\r\n", b""),
    "one": (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
    "two": (b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n", b"abc"),
    "upper hex": (b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
    "leading zeros": (b"0005\r\nhello\r\n000\r\n\r\n", b"hello"),
    "extension": (b"5;a=b\r\nhello\r\n0;last\r\n\r\n", b"hello"),
    "extension with blanks": (b'5 ; a = "b;\\"c"\r\nhello\r\n0\r\n\r\n', b"hello"),
    "trailers": (b"0\r\nX-QoS-Class: P0\r\nB:\r\n\r\n", b""),
    "line ends in data": (b"4\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n\r\n"),
    "an end in data": (b"5\r\n0\r\n\r\n\r\n0\r\n\r\n", b"0\r\n\r\n"),
}


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(("data", "payload"), GOOD.values(), ids=GOOD.keys())
def test_good_bodies(data, payload, step):
    assert read(data + b"GET / HTTP", step) == (payload, len(data), True)


BAD = {
    "no digits": b"\r\nhello\r\n",
    "bad digit": b"g\r\n",
    "sign": b"+5\r\nhello\r\n",
    "minus": b"-5\r\n",
    "prefix": b"0x5\r\nhello\r\n",
    "underscore": b"1_0\r\n",
    "leading space": b" 5\r\nhello\r\n",
    "trailing space": b"5 \r\nhello\r\n",
    "blank without extension": b"5 a\r\nhello\r\n",
    "overflow": b"10000000000000000\r\n",
    "many zeros": b"0" * 16 + b"\r\n",
    "LF after size": b"5\nhello\r\n",
    "LF after size, alone": b"5\n",
    "CR in size": b"5\rhello",
    "LF in extension": b"5;a\nb\r\nhello\r\n",
    "CR in extension": b"5;a\rb\r\nhello\r\n",
    "NUL in extension": b"5;a\x00\r\nhello\r\n",
    "comma": b"5,5\r\nhello\r\n",
    "junk after data": b"5\r\nhelloX\r\n",
    "LF after data": b"5\r\nhello\n0\r\n\r\n",
    "CR then junk after data": b"5\r\nhello\rX",
    "data longer than its size": b"4\r\nhello\r\n0\r\n\r\n",
    "LF after last chunk": b"0\n\n",
    "LF ends trailers": b"0\r\n\n",
    "trailer without colon": b"0\r\nabc\r\n\r\n",
    "trailer with space in name": b"0\r\nA : b\r\n\r\n",
    "trailer fold": b"0\r\nA: b\r\n c\r\n\r\n",
    "trailer with NUL": b"0\r\nA: \x00\r\n\r\n",
    "trailer with bare LF": b"0\r\nA: b\nC: d\r\n\r\n",
    "trailer is a request line": b"0\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "long size line": b"5;" + b"a" * LINE_BYTES + b"\r\nhello\r\n",
    "long trailer line": b"0\r\nA: " + b"a" * LINE_BYTES + b"\r\n\r\n",
    "many trailers": b"0\r\n" + b"A: bcdefgh\r\n" * 2000 + b"\r\n",
}


@pytest.mark.parametrize("step", [0, 1, 7])
@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_bad_framing_is_refused(data, step):
    with pytest.raises(ChunkError):
        read(data, step)


@pytest.mark.parametrize(
    "data", [b"5\r\nhel", b"5\r", b"", b"5;ab", b"0\r\nA", b"0\r\n\r", b"5 \t"]
)
def test_an_incomplete_body_is_not_done(data):
    _, used, done = read(data)
    assert (used, done) == (len(data), False)


def test_an_incomplete_line_is_bounded():
    reader = ChunkReader()
    reader.feed(b"5;")
    for _ in range(LINE_BYTES - 3):
        reader.feed(b"a")
    with pytest.raises(ChunkError):
        reader.feed(b"a")


def test_nothing_is_taken_after_the_end():
    reader = ChunkReader()
    assert reader.feed(b"1\r\na\r\n0\r\n\r\nrest") == 11
    assert reader.feed(b"more") == 0
    assert reader.pieces == []
    assert reader.done


def test_a_piece_in_mid_chunk_is_the_very_buffer():
    reader = ChunkReader()
    reader.feed(b"100\r\n")
    data = b"x" * 100
    reader.feed(data)
    assert reader.pieces[0] is data


def test_an_empty_payload_makes_no_chunk():
    assert frame(b"") == b""
    assert frame(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"


@settings(UNHURRIED, max_examples=200)
@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 250), max_size=12),
    st.sampled_from([b"", b"A: b\r\n"]),
    st.binary(max_size=8),
)
def test_any_split_gives_the_same_payload(payloads, cuts, trailer, rest):
    body = b"".join(map(frame, payloads)) + LAST_CHUNK[:-2] + trailer + b"\r\n"
    data = body + rest
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    reader, got, used = ChunkReader(), b"", 0
    for a, b in itertools.pairwise(edges):
        used += reader.feed(data[a:b])
        got += b"".join(reader.pieces)
        if reader.done:
            break
    assert (got, used, reader.done) == (b"".join(payloads), len(body), True)


NOISE = st.lists(
    st.sampled_from([b"0", b"5", b"a", b"\r\n", b"\r", b"\n", b";", b" ", b"hello", b":", b"\x00"]),
    max_size=25,
).map(b"".join)


@settings(UNHURRIED, max_examples=400)
@given(st.one_of(st.binary(max_size=80), NOISE), st.integers(1, 9))
def test_any_bytes_end_the_same_whatever_the_split(data, step):
    def outcome(step):
        try:
            return read(data, step)
        except ChunkError:
            return "refused"

    whole = outcome(0)
    parts = outcome(step)
    assert parts == whole
