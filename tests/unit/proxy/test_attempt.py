"""One attempt over a real connection object: whatever the cuts, the relay is told the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import RequestError
from proxy.exchange import End
from proxy.http.http1 import HeadLimits
from proxy.outbound import names_model, sealable
from proxy.qos.pools import Endpoint
from proxy.sm4.envelope import MEDIA_TYPE
from proxy.sm4.sealer import ResponseSealer, SingleTooLargeError
from tests.unit.proxy.sm4_kit import MODEL, NOW_MS, derived_of, fresh_nonce, make_key, seal_request

if TYPE_CHECKING:
    from proxy.http.http1 import ResponseHead
    from proxy.sm4.sealer import RequestSealer


def interpreted(name: str) -> Any:
    """Return a module from its source: a compiled one takes no stand-in for a relay or a pool."""
    path = Path(__file__).resolve().parents[3] / "proxy" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"interpreted_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[made.__name__] = made
    spec.loader.exec_module(made)
    return made


SealedAttempt = interpreted("attempt").SealedAttempt
UpstreamConnection = interpreted("upstream").UpstreamConnection
LIMITS = HeadLimits(65536, 32768, 128)
KEY = make_key()


class Far:
    """Stands where the relay does, and writes down what it is told; also the pool's end of it."""

    def __init__(self) -> None:
        self.closed = False
        self.head: ResponseHead | None = None
        self.body = b""
        self.ends: list[str] = []
        self.refused: list[str] = []
        self.fault: bool | None = None
        self.late_closes = 0

    # as a relay

    def upstream_head(self, head: ResponseHead) -> None:
        assert self.head is None
        self.head = head

    def upstream_body(self, data: bytes) -> None:
        assert self.head is not None
        assert data
        self.body += data

    def upstream_whole(self, head: ResponseHead, body: bytes) -> None:
        self.upstream_head(head)
        self.body = body
        self.upstream_end()

    def upstream_end(self) -> None:
        self.ends.append("whole")
        self.closed = True

    def upstream_lost(self, end: End, *, answered: bool, unwritten: bool) -> None:
        del unwritten
        assert answered or end is End.UPSTREAM_RESET
        self.ends.append(end.value)
        self.closed = True

    def upstream_pause(self) -> None:
        pass

    def answer_comes(self) -> None:
        pass

    def answer_refused(self, endpoint: Endpoint, reason: str) -> None:
        assert endpoint.url == "u"
        self.refused.append(reason)

    def no_envelope(self, problem: RequestError, *, fault: bool) -> None:
        self.ends.append(problem.code)
        self.fault = fault
        self.closed = True
        connection.lessee = None

    # as a pool

    def put_back(self, connection: Any) -> None:  # noqa: ARG002 - as the pool is called
        self.ends.append("kept")

    def forget(self, connection: Any) -> None:
        pass


connection: Any


def told(data: bytes, cuts: list[int], sealer: RequestSealer, method: bytes = b"POST") -> Far:
    """Feed an answer in segments and return what the relay heard."""
    global connection  # noqa: PLW0603 - the one under test, which `Far.no_envelope` ends
    far = Far()
    connection = UpstreamConnection(cast("Any", far), Endpoint("u", ("u", 1)), LIMITS)
    connection.request_whole = True
    connection.lessee = SealedAttempt(cast("Any", far), connection, sealer, method)
    start = 0
    for end in [*sorted(c % (len(data) + 1) for c in cuts), len(data)]:
        if end > start and connection.lessee is not None:
            connection.data_received(data[start:end])
        start = max(start, end)
    if connection.lessee is not None:
        connection.connection_lost(None)
    return far


def http(kind: str, body: bytes, *, chunks: int = 0, fields: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b" % (kind.encode(), fields)
    if not chunks:
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    parts = [body[i : i + chunks] for i in range(0, len(body), chunks)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def sealed(
    sealer: RequestSealer, carrier: str, parts: list[bytes], kind: str = "text/event-stream"
) -> tuple[str, bytes]:
    """Return (outer type, body) of an answer in one of three forms."""
    answer = ResponseSealer(derived_of(KEY), MODEL.encode(), sealer.nonce, mac=sealer.mac)
    nonce = fresh_nonce()
    if carrier == "single":
        return MEDIA_TYPE, answer.single(200, kind, b"".join(parts), nonce=nonce, now_ms=NOW_MS)
    form = "sse" if carrier == "sse" else "raw"
    stream = answer.stream(200, kind, nonce=nonce, now_ms=NOW_MS, carrier=cast("Any", form))
    wire = stream.head() + b"".join(stream.data(part) for part in parts) + stream.last()
    return ("text/event-stream" if form == "sse" else MEDIA_TYPE), wire


@given(
    carrier=st.sampled_from(["single", "sse", "raw"]),
    parts=st.lists(st.binary(min_size=1, max_size=700), max_size=5),
    mac=st.booleans(),
    chunks=st.sampled_from([0, 1, 37, 5000]),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=12),
)
@settings(deadline=None)
def test_any_segments_of_a_sealed_answer_give_the_same_bytes(
    carrier: str, parts: list[bytes], mac: bool, chunks: int, cuts: list[int]
) -> None:
    sealer, _ = seal_request(KEY, mac=mac)
    kind, body = sealed(sealer, carrier, parts)
    hints = b"Date: today\r\nServer-Timing: a;dur=1\r\nSet-Cookie: a=b\r\nX-Any: 1\r\n"

    far = told(http(kind, body, chunks=chunks, fields=hints), cuts, sealer)

    assert far.ends == ["kept", "whole"]
    assert far.body == b"".join(parts)
    assert far.head is not None
    assert far.head.status == 200
    assert far.head.lines == (
        b"Content-Type: text/event-stream\r\nDate: today\r\nServer-Timing: a;dur=1\r\n"
    )
    assert far.refused == []


@given(
    carrier=st.sampled_from(["single", "sse", "raw"]),
    chunks=st.sampled_from([0, 37]),
    place=st.integers(0, 1 << 16),
    bit=st.integers(0, 7),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=6),
)
@settings(deadline=None)
def test_no_flipped_bit_ends_whole_and_what_was_told_before_is_right(
    carrier: str, chunks: int, place: int, bit: int, cuts: list[int]
) -> None:
    sealer, _ = seal_request(KEY, mac=True)
    parts = [b"one " * 20, b"two " * 200, b"three"]
    kind, body = sealed(sealer, carrier, parts)
    bent = bytearray(body)
    bent[place % len(body)] ^= 1 << bit

    far = told(http(kind, bytes(bent), chunks=chunks), cuts, sealer)

    if far.ends[-1:] == ["whole"]:
        # Only where the carrier has two forms of one thing: "data:" and no space, CR LF, a comment.
        assert kind == "text/event-stream"
        assert far.body == b"".join(parts)
        return
    assert b"".join(parts).startswith(far.body)
    assert far.refused
    assert far.ends[-1] in {"upstream_envelope", "upstream_reset"}


@pytest.mark.parametrize("carrier", ["single", "sse", "raw"])
@pytest.mark.parametrize("step", [1, 50, 100_000])
def test_no_beginning_of_an_answer_is_a_whole_one(carrier: str, step: int) -> None:
    sealer, _ = seal_request(KEY)
    parts = [b"data: one\n\n", b"data: two\n\n"]
    kind, body = sealed(sealer, carrier, parts)
    last = len(body) - (1 if kind == MEDIA_TYPE else 2)  # an event without its last LF is there
    for end in [*range(0, last, 61), last]:
        data = http(kind, body[:end], chunks=90)

        far = told(data, list(range(0, len(data), step)), sealer)

        assert "whole" not in far.ends, end
        assert b"".join(parts).startswith(far.body)
        assert far.ends[-1] == ("upstream_reset" if far.head is not None else "upstream_envelope")


@pytest.mark.parametrize("status", [100, 101, 199, 600, 999, 0])
def test_an_inner_status_that_ends_nothing_is_no_answer(status: int) -> None:
    sealer, _ = seal_request(KEY)
    answer = ResponseSealer(derived_of(KEY), MODEL.encode(), sealer.nonce, mac=False)
    body = answer.single(status, "", b"", nonce=fresh_nonce(), now_ms=NOW_MS)

    far = told(http(MEDIA_TYPE, body), [], sealer)

    assert far.refused == ["bad_prelude"]
    assert far.ends[-1] == "upstream_envelope"


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (b"413 Large", b"", False),
        (b"400 Bad", b'{"error":{"code":"envelope_rejected"}}', True),
        (b"400 Bad", b'{"error":{"code":"invalid_request"}}', False),
        (b"503 Busy", b'{"error":{"code":"draining"}}', True),
        (b"200 OK", b"{}", True),
        (b"302 Found", b"", True),
    ],
)
def test_whose_fault_an_unsealed_answer_is(status: bytes, body: bytes, fault: bool) -> None:
    data = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    for cuts in ([], [30]):
        sealer, _ = seal_request(KEY)

        far = told(data, cuts, sealer)

        assert (far.refused, far.fault) == (["unsealed"], fault)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.api+json", True),
        ("multipart/form-data; boundary=x", True),
        ("application/octet-stream", False),
        ("text/plain", False),
        ("", False),
    ],
)
def test_types_whose_bodies_can_name_a_model(kind: str, names: bool) -> None:
    assert names_model(kind) is names


@pytest.mark.parametrize(
    ("method", "target", "kind", "body"),
    [
        (b"POST", b"/", b"application/json", b"{"),
        (b"POST", b"/", b"application/json", b'{"model":7}'),
        (b"POST", b"/", b"application/json", b'{"model":"a b"}'),
        (b"POST", b"/", b"application/json", b'{"model":"%b"}' % (b"m" * 256)),
        (b"POST", b"/", b"multipart/form-data", b"x"),
        (b"POST", b"/", b"text/\xe9", b"x"),
        (b"OPTIONS", b"*", b"", b""),
        (b"m-search", b"/", b"", b""),
    ],
)
def test_what_cannot_be_sealed_is_an_invalid_request(
    method: bytes, target: bytes, kind: bytes, body: bytes
) -> None:
    with pytest.raises(RequestError) as caught:
        sealable(method, target, kind, "P1", body)
    assert caught.value.code == "invalid_request"
    assert "cannot be sealed" in caught.value.message


def test_a_single_that_is_too_large_is_found_before_it_is_sealed() -> None:
    sealer, _ = seal_request(KEY)
    derived = sealer.derived
    before = derived.sealed_bytes
    with pytest.raises(SingleTooLargeError):
        seal_request(KEY, bytes(1 << 20))
    assert derived.sealed_bytes == before
