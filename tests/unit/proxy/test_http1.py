"""Heads: what is taken, what is refused at once, which lines go on."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from proxy.http import http1
from proxy.http.fields import REQUEST
from proxy.http.http1 import HeadError, HeadLimits, parse_request, parse_response
from tests.unit.kernels.wire_cases import as_one

# Two shared cores: slow is no finding.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=["pure", "both"], autouse=True)
def implementation(request):
    """Run all that is here with the pure functions, then with C, each answer compared with pure."""
    for name in ("parse_request", "parse_response"):
        pure = getattr(http1, name + "_pure")
        both = as_one(getattr(http1, name), pure)
        globals()[name] = both if request.param == "both" else pure


LIMITS = HeadLimits(head_bytes=65536, field_bytes=32768, fields=128)
SMALL = HeadLimits(head_bytes=256, field_bytes=64, fields=4)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


def request(extra: bytes = b"", line: bytes = b"POST /v1/x HTTP/1.1", host: bytes = b"Host: x\r\n"):
    head = parse_request(line + b"\r\n" + host + extra + b"\r\n", LIMITS)
    assert head is not None
    return head


def response(extra: bytes = b"", line: bytes = b"HTTP/1.1 200 OK", method: bytes = b"POST"):
    head = parse_response(line + b"\r\n" + extra + b"\r\n", LIMITS, method)
    assert head is not None
    return head


FRAMING = {
    "length with chunked": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "chunked with length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n",
    "two equal lengths": b"Content-Length: 5\r\ncontent-length: 5\r\n",
    "length list": b"Content-Length: 5, 5\r\n",
    "length with sign": b"Content-Length: +5\r\n",
    "length negative": b"Content-Length: -5\r\n",
    "length hex": b"Content-Length: 0x5\r\n",
    "length empty": b"Content-Length:\r\n",
    "length with underscore": b"Content-Length: 1_0\r\n",
    "length with inner space": b"Content-Length: 1 0\r\n",
    "length in other digits": "Content-Length: \u0665\r\n".encode(),
    "length overflow": b"Content-Length: 18446744073709551621\r\n",
    "unknown coding": b"Transfer-Encoding: xchunked\r\n",
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n",
    "identity": b"Transfer-Encoding: identity\r\n",
    "chunked twice in a list": b"Transfer-Encoding: chunked, chunked\r\n",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "chunked with parameter": b"Transfer-Encoding: chunked;q=1\r\n",
    "chunked quoted": b'Transfer-Encoding: "chunked"\r\n',
    "chunked and empty": b"Transfer-Encoding: chunked\r\nTransfer-Encoding:\r\n",
    "coding empty": b"Transfer-Encoding:\r\n",
    "chunked behind vertical tab": b"Transfer-Encoding: \x0bchunked\r\n",
    "space before colon": b"Content-Length : 5\r\n",
    "tab before colon": b"Content-Length\t: 5\r\n",
    "obs-fold": b"A: b\r\n c\r\n",
    "obs-fold with tab": b"A: b\r\n\tc: d\r\n",
    "whitespace before the first field": b" A: b\r\n",
    "bare LF": b"A: b\nB: c\r\n",
    "bare CR": b"A: b\rB: c\r\n",
    "CR CR LF": b"A: b\r\r\n",
    "NUL in value": b"A: b\x00c\r\n",
    "DEL in value": b"A: b\x7fc\r\n",
    "escape in value": b"A: \x1b[2J\r\n",
    "NUL in name": b"A\x00: b\r\n",
    "empty name": b": b\r\n",
    "no colon": b"just a line\r\n",
    "no colon after a known name": b"Accept\r\n",
    "name with space": b"A B: c\r\n",
    "name with bracket": b"A[]: c\r\n",
    "name in UTF-8": "Ä: c\r\n".encode(),
    "name with quote": b'"A": c\r\n',
}


@pytest.mark.parametrize("lines", FRAMING.values(), ids=FRAMING.keys())
def test_bad_field_lines_are_refused_both_ways(lines):
    with pytest.raises(HeadError) as refused:
        request(lines)
    assert refused.value.code == "invalid_request"
    with pytest.raises(HeadError):
        response(lines)


REQUESTS = {
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "no host but a lookalike": b"GET / HTTP/1.1\r\nX-Host: x\r\n\r\n",
    "two hosts": GET + b"Host: y\r\n\r\n",
    "two equal hosts": GET + b"host: x\r\n\r\n",
    "two hosts in 1.0": b"GET / HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n",
    "host list": b"GET / HTTP/1.1\r\nHost: x, y\r\n\r\n",
    "host with userinfo": b"GET / HTTP/1.1\r\nHost: a@x\r\n\r\n",
    "host with path": b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "host with space": b"GET / HTTP/1.1\r\nHost: x y\r\n\r\n",
    "host in UTF-8": "GET / HTTP/1.1\r\nHost: bücher\r\n\r\n".encode(),
    "coding in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "version 1.2": b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    "version 2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "version 11": b"GET / HTTP/1.11\r\nHost: x\r\n\r\n",
    "version lower case": b"GET / http/1.1\r\nHost: x\r\n\r\n",
    "no version": b"GET /\r\nHost: x\r\n\r\n",
    "no target": b"GET HTTP/1.1\r\nHost: x\r\n\r\n",
    "empty target": b"GET  HTTP/1.1\r\nHost: x\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
    "space in target": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "tab for space": b"GET\t/\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "tab in target": b"GET /a\tb HTTP/1.1\r\nHost: x\r\n\r\n",
    "trailing space": b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n",
    "leading space": b" GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "raw UTF-8 target": "GET /ä HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "bad method": b"G(T / HTTP/1.1\r\nHost: x\r\n\r\n",
    "empty method": b" / HTTP/1.1\r\nHost: x\r\n\r\n",
    "relative target": b"GET a HTTP/1.1\r\nHost: x\r\n\r\n",
    "authority target": b"GET x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n",
    "star without OPTIONS": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "other host in target": b"GET http://y/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "userinfo in target": b"GET http://x@y/ HTTP/1.1\r\nHost: y\r\n\r\n",
    "empty authority": b"GET http:///a HTTP/1.1\r\nHost:\r\n\r\n",
    "https target": b"GET https://x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "file target": b"GET file:///etc HTTP/1.1\r\nHost: x\r\n\r\n",
    "two empty lines first": b"\r\n\r\n" + GET + b"\r\n",
    "LF first": b"\n" + GET + b"\r\n",
    "LF heads": b"GET / HTTP/1.1\nHost: x\n\n",
    "LF heads before a CR LF body": b"GET / HTTP/1.1\nHost: x\n\nA: b\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "connection names authorization": GET + b"Connection: close, Authorization\r\n\r\n",
    "connection names host": GET + b"Connection: host\r\n\r\n",
    "connection names length": GET + b"Content-Length: 1\r\nConnection: content-length\r\n\r\n",
    "connection names class": GET + b"Connection: x-qos-class\r\n\r\n",
    "connection names tenant twice": GET + b"Connection: a\r\nConnection: X-Tenant-Id\r\n\r\n",
}


@pytest.mark.parametrize("head", REQUESTS.values(), ids=REQUESTS.keys())
def test_bad_requests_are_refused(head):
    with pytest.raises(HeadError) as refused:
        parse_request(head, LIMITS)
    assert refused.value.code == "invalid_request"
    with pytest.raises(HeadError):
        parse_request(bytearray(head), LIMITS)


RESPONSES = {
    "no version": b"200 OK\r\n\r\n",
    "version 2": b"HTTP/2 200\r\n\r\n",
    "version 1.2": b"HTTP/1.2 200 OK\r\n\r\n",
    "two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "zero": b"HTTP/1.1 000 OK\r\n\r\n",
    "two spaces": b"HTTP/1.1  200 OK\r\n\r\n",
    "no space before reason": b"HTTP/1.1 200OK\r\n\r\n",
    "other protocol": b"ICY 200 OK\r\n\r\n",
    "empty line first": b"\r\nHTTP/1.1 200 OK\r\n\r\n",
    "coding in 1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
}


@pytest.mark.parametrize("head", RESPONSES.values(), ids=RESPONSES.keys())
def test_bad_responses_are_refused(head):
    with pytest.raises(HeadError):
        parse_response(head, LIMITS, b"GET")


INCOMPLETE = {
    "bare LF": b"GET / HTTP/1.1\n",
    "bare CR": b"GET / HTTP/1.1\rH",
    "CR at a line's end, then text": GET + b"A: b\r\rB",
    "NUL": b"GET /\x00",
    "TLS": b"\x16\x03\x01",
    "LF after CR LF": GET + b"\n",
}


@pytest.mark.parametrize("part", INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_incomplete_head_that_is_wrong_already_is_not_waited_on(part):
    with pytest.raises(HeadError) as refused:
        parse_request(part, LIMITS)
    assert refused.value.code == "invalid_request"
    with pytest.raises(HeadError):
        parse_response(part, LIMITS, b"GET")


@pytest.mark.parametrize("method", [b"CONNECT", b"TRACE"])
def test_connect_and_trace_are_not_allowed(method):
    with pytest.raises(HeadError) as refused:
        request(line=method + b" /x HTTP/1.1")
    assert refused.value.code == "method_not_allowed"


LARGE = {
    "total": GET + b"".join(b"A%d: %b\r\n" % (i, b"x" * 55) for i in range(4)) + b"\r\n",
    "one field": GET + b"A: " + b"x" * 62 + b"\r\n\r\n",
    "request line": b"GET /" + b"x" * 64 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "number of fields": GET + b"A: b\r\n" * 4 + b"\r\n",
    "incomplete total": b"GET /" + b"x" * 260,
    "incomplete at the bound": b"GET /" + b"x" * 251,
}


@pytest.mark.parametrize("head", LARGE.values(), ids=LARGE.keys())
def test_large_requests_are_refused_as_such(head):
    with pytest.raises(HeadError) as refused:
        parse_request(head, SMALL)
    assert refused.value.code == "headers_too_large"
    assert "limits." in str(refused.value)


def test_large_response_head_is_refused():
    with pytest.raises(HeadError) as refused:
        parse_response(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5 + b"\r\n", SMALL, b"GET")
    assert refused.value.code == "headers_too_large"


def test_limits_are_inclusive():
    line = b"GET / HTTP/1.1\r\n"
    lines = line + b"Host: x\r\n" + b"A: " + b"x" * 61 + b"\r\nB: c\r\nC: d\r\n\r\n"
    assert parse_request(lines, SMALL) is not None
    filler = b"Host: x\r\n" + (b"A: " + b"x" * 57 + b"\r\n") * 3
    rest = 256 - len(line) - len(filler) - 4
    whole = line[:-11] + b"x" * rest + line[-11:] + filler + b"\r\n"
    assert len(whole) <= 256
    head = parse_request(whole, SMALL)
    assert head is not None
    assert head.size == len(whole)


def test_messages_hold_no_value():
    secret = b"sk-verysecret"
    for lines in (
        b"Authorization: " + secret + b"\x00\r\n",
        b"Content-Length: " + secret + b"\r\n",
        b"Transfer-Encoding: " + secret + b"\r\n",
        secret + b" : x\r\n",
        b"Connection: authorization, " + secret + b"\r\n",
    ):
        with pytest.raises(HeadError) as refused:
            request(lines)
        assert b"secret" not in str(refused.value).encode()


def test_request_shows_what_the_data_path_needs():
    head = request(
        b"Content-Type: application/json\r\nContent-Length: 12\r\nX-QoS-Class:  p0 \r\n"
        b"traceparent: 00-a-b-01\r\nAuthorization: Bearer t\r\n"
    )
    assert (head.method, head.target, head.minor) == (b"POST", b"/v1/x", 1)
    assert (head.content_length, head.chunked, head.keep_alive) == (12, False, True)
    assert head.fields == {
        b"host": b"x",
        b"content-type": b"application/json",
        b"content-length": b"12",
        b"x-qos-class": b"p0",
        b"traceparent": b"00-a-b-01",
    }
    assert head.repeated == frozenset()
    assert head.lines == b"Content-Type: application/json\r\nAuthorization: Bearer t\r\n"


def test_forwarded_lines_keep_case_order_duplicates_and_bytes():
    lines = "x-B:1\r\nX-a:  two  \r\nx-B: \xe9\r\nX-A:\r\nCookie: a=b\r\n".encode("latin-1")
    assert request(lines).lines == lines
    assert response(lines).lines == lines


@pytest.mark.parametrize(
    "name",
    [
        b"Keep-Alive",
        b"Proxy-Connection",
        b"Proxy-Authenticate",
        b"Proxy-Authorization",
        b"TE",
        b"Trailer",
        b"Upgrade",
        b"HTTP2-Settings",
    ],
)
def test_hop_by_hop_fields_go_no_further(name):
    for kept in (request, response):
        assert kept(b"A: b\r\n" + name.upper() + b": v\r\nC: d\r\n").lines == b"A: b\r\nC: d\r\n"


def test_request_fields_that_the_data_path_writes_are_left_out():
    lines = (
        b"Host: x\r\nContent-Length: 1\r\nExpect: 100-continue\r\nX-QoS-Class: P0\r\n"
        b"X-TENANT-ID: t\r\nTraceparent: 00\r\nConnection: close\r\n"
    )
    assert request(lines, host=b"").lines == b""


def test_response_fields_of_ours_are_left_out_and_the_error_code_is_renamed():
    head = response(
        b"Content-Length: 1\r\nX-QoS-Class: P0\r\nx-qos-pool: a\r\nX-Trace-Id: b\r\n"
        b"x-tongguan-error: queue_full\r\nServer-Timing: a;dur=1\r\n"
    )
    assert head.lines == b"Server-Timing: a;dur=1\r\nX-Tongguan-Upstream-Error: queue_full\r\n"
    assert set(head.fields) == {b"content-length", b"server-timing"}


def test_error_codes_of_two_hops_are_no_watched_name():
    head = response(b"X-Tongguan-Error: a\r\nX-Tongguan-Error: b\r\n")
    assert head.lines == b"X-Tongguan-Upstream-Error: a, b\r\n"
    assert head.repeated == frozenset()
    assert head.fields == {}


@pytest.mark.parametrize("name", [b"Host", b"Content-Length"])
def test_a_repeated_field_is_named_as_that(name):
    with pytest.raises(HeadError, match="came twice"):
        request(name + b": 1\r\n" + name + b": 1\r\n", b"GET / HTTP/1.0", b"")


def test_connection_named_fields_go_no_further():
    lines = b"Connection: X-Hop, close\r\nX-Hop: 1\r\nx-hop: 2\r\nX-Hopper: 3\r\n"
    for read in (request, response):
        head = read(lines)
        assert head.lines == b"X-Hopper: 3\r\n"
        assert not head.keep_alive


def test_upstream_cannot_strip_fields_meant_for_every_hop():
    head = response(b"Connection: Content-Type, Retry-After, X-Y\r\nContent-Type: a\r\nX-Y: 1\r\n")
    assert head.lines == b"Content-Type: a\r\n"


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        (b"1", b"", True),
        (b"1", b"Connection: close\r\n", False),
        (b"1", b"Connection: foo,\tCLOSE ,\r\n", False),
        (b"1", b"Connection: keep-alive\r\nConnection: close\r\n", False),
        (b"1", b"Connection: keep-alive\r\n", True),
        (b"1", b"Connection: closed\r\n", True),
        (b"0", b"", False),
        (b"0", b"Connection: Keep-Alive\r\n", True),
        (b"0", b"Connection: keep-alive, close\r\n", False),
        (b"0", b"Connection: x, KEEP-alive\r\n", True),
    ],
)
def test_keep_alive(version, connection, kept):
    assert request(connection, line=b"GET / HTTP/1." + version).keep_alive is kept
    answer = response(connection + b"Content-Length: 0\r\n", line=b"HTTP/1." + version + b" 200 OK")
    assert answer.keep_alive is kept


@pytest.mark.parametrize(
    ("line", "extra", "expected"),
    [
        (b"POST / HTTP/1.1", b"Expect: 100-continue\r\nContent-Length: 5\r\n", True),
        (b"POST / HTTP/1.1", b"Expect: 100-Continue\r\nTransfer-Encoding: chunked\r\n", True),
        (b"POST / HTTP/1.1", b"Expect: 100-continue\r\nContent-Length: 0\r\n", False),
        (b"POST / HTTP/1.1", b"Expect: 100-continue\r\n", False),
        (b"POST / HTTP/1.0", b"Expect: 100-continue\r\nContent-Length: 5\r\n", False),
        (b"POST / HTTP/1.1", b"Expect: 200-ok\r\nContent-Length: 5\r\n", False),
        (b"POST / HTTP/1.1", b"Expect: 200-ok, \t100-Continue\r\nContent-Length: 5\r\n", True),
        (b"POST / HTTP/1.1", b"Expect: ,100-continue,\r\nContent-Length: 5\r\n", True),
        (b"POST / HTTP/1.1", b"Expect: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n", True),
        (b"POST / HTTP/1.1", b"Expect: 100-continue=1\r\nContent-Length: 5\r\n", False),
        (b"POST / HTTP/1.1", b"Expect:\r\nContent-Length: 5\r\n", False),
    ],
)
def test_expect(line, extra, expected):
    assert request(extra, line=line).expect is expected


@pytest.mark.parametrize(
    ("line", "extra", "expected"),
    [
        (b"GET / HTTP/1.1", b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"websocket"),
        (b"GET / HTTP/1.1", b"Connection: keep-alive, upgrade\r\nUpgrade: a/1\r\n", b"a/1"),
        (b"GET / HTTP/1.1", b"Upgrade: websocket\r\n", None),
        (b"GET / HTTP/1.1", b"Connection: upgrade\r\n", None),
        (b"GET / HTTP/1.0", b"Connection: upgrade\r\nUpgrade: websocket\r\n", None),
        (b"GET / HTTP/1.1", b"Connection: upgrade, HTTP2-Settings\r\nUpgrade: H2C\r\n", None),
        (b"GET / HTTP/1.1", b"Connection: upgrade\r\nUpgrade: websocket, h2c\r\n", None),
    ],
)
def test_upgrade_is_seen_when_connection_names_it(line, extra, expected):
    assert request(extra, line=line).upgrade == expected


def test_switching_answer_shows_its_protocol():
    head = response(
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: a=\r\n",
        line=b"HTTP/1.1 101 Switching Protocols",
        method=b"GET",
    )
    assert head.upgrade == b"websocket"
    assert head.bodiless
    assert head.keep_alive
    assert head.lines == b"Sec-WebSocket-Accept: a=\r\n"


@pytest.mark.parametrize(
    ("line", "method", "bodiless"),
    [
        (b"HTTP/1.1 200 OK", b"HEAD", True),
        (b"HTTP/1.1 204 No Content", b"GET", True),
        (b"HTTP/1.1 304 Not Modified", b"GET", True),
        (b"HTTP/1.1 100 Continue", b"POST", True),
        (b"HTTP/1.1 103 Early Hints", b"POST", True),
        (b"HTTP/1.1 200 OK", b"GET", False),
        (b"HTTP/1.1 200 OK", b"head", False),
        (b"HTTP/1.1 404 Not Found", b"GET", False),
    ],
)
def test_which_answers_have_no_body(line, method, bodiless):
    head = response(b"Content-Length: 5\r\n", line=line, method=method)
    assert head.bodiless is bodiless
    assert head.content_length == 5


def test_body_delimited_by_close_ends_the_connection():
    head = response()
    assert (head.content_length, head.chunked, head.keep_alive) == (None, False, False)


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        (b"HTTP/1.1 200 OK", 200, b"OK"),
        (b"HTTP/1.1 200 ", 200, b""),
        (b"HTTP/1.1 200", 200, b""),
        (b"HTTP/1.0 599 a  b", 599, b"a  b"),
        ("HTTP/1.1 200 très".encode("latin-1"), 200, "très".encode("latin-1")),
    ],
)
def test_status_lines(line, status, reason):
    head = response(line=line)
    assert (head.status, head.reason) == (status, reason)


@pytest.mark.parametrize(
    ("line", "host", "target"),
    [
        (b"GET http://X:80/a?b HTTP/1.1", b"Host: x:80\r\n", b"/a?b"),
        (b"GET HTTP://x HTTP/1.1", b"Host: x\r\n", b"/"),
        (b"GET http://x?q HTTP/1.1", b"Host: x\r\n", b"/?q"),
        (b"OPTIONS http://x HTTP/1.1", b"Host: x\r\n", b"*"),
        (b"OPTIONS * HTTP/1.1", b"Host: x\r\n", b"*"),
        (b"GET //x/ HTTP/1.1", b"Host: [::1]:80\r\n", b"//x/"),
        (b"GET http://x/ HTTP/1.0", b"", b"/"),
        (b"GET /%E4 HTTP/1.1", b"Host:\r\n", b"/%E4"),
    ],
)
def test_targets(line, host, target):
    assert request(line=line, host=host).target == target


def test_http10_needs_no_host():
    assert request(line=b"GET / HTTP/1.0", host=b"").fields == {}


def test_unknown_methods_are_taken_as_they_are():
    assert request(line=b"QUERY /x HTTP/1.1").method == b"QUERY"
    assert request(line=b"get /x HTTP/1.1").method == b"get"


def test_repeated_watched_values_are_a_list():
    head = request(b"X-QoS-Class: P0\r\nx-qos-class: P2\r\ntracestate: a=1\r\nTracestate: b=2\r\n")
    assert head.fields[b"x-qos-class"] == b"P0, P2"
    assert head.fields[b"tracestate"] == b"a=1, b=2"
    assert head.repeated == {b"x-qos-class", b"tracestate"}


def test_head_is_found_at_an_offset_and_ends_before_the_body():
    head = GET + b"\r\n"
    buffer = b"rest\n" + b"\r\n" + head + b"GET \x00\n\r\n\r\n"
    got = parse_request(buffer, LIMITS, 5)
    assert got is not None
    assert got.size == len(head) + 2
    answer = parse_response(b"xHTTP/1.1 200 OK\r\n\r\n\x00", LIMITS, b"GET", 1)
    assert answer is not None
    assert answer.size == 19


def test_many_odd_names_leave_no_trace():
    for i in range(3000):
        request(b"X-%d: 1\r\n" % i)
    request(b"X" * 3000 + b": 1\r\n")
    assert len(REQUEST.known) <= 1024
    assert max(map(len, REQUEST.known)) <= 64


NAMES = st.sampled_from(
    [b"Host", b"A", b"Content-Length", b"transfer-encoding", b"Connection", b"X-QoS-Class", b"te"]
)
VALUES = st.sampled_from([b"", b"x", b"5", b"chunked", b"close", b" a, b ", b"\xff", b"P0"])


@settings(UNHURRIED, max_examples=150)
@given(
    st.sampled_from([b"GET / HTTP/1.1", b"POST /v1 HTTP/1.0", b"HEAD http://x/ HTTP/1.1"]),
    st.lists(st.tuples(NAMES, VALUES), max_size=6),
)
def test_a_prefix_waits_when_the_whole_is_taken(line, pairs):
    head = b"\r\n".join([line, *(n + b": " + v for n, v in pairs)]) + b"\r\n\r\n"
    for cut in range(len(head)):
        assert parse_request(head[:cut], LIMITS) is None
    try:
        got = parse_request(head + b"\n\x00body", LIMITS)
    except HeadError:
        return
    assert got is not None
    assert got.size == len(head)
    # What goes on can be read again and says the same.
    again = parse_request(b"GET / HTTP/1.0\r\n" + got.lines + b"\r\n", LIMITS)
    assert again is not None
    assert again.lines == got.lines
    assert again.content_length is None
    assert not again.chunked


WORDS = (
    b"GET", b" ", b"/", b"HTTP/1.1", b"\r\n", b"\r", b"\n", b":", b"Host", b"x", b"\x00", b"5",
    b"Content-Length", b"Transfer-Encoding", b"chunked", b"\t", b"\xff", b"200", b"Connection",
)  # fmt: skip
PIECES = st.lists(st.sampled_from(WORDS), max_size=30).map(b"".join)
CODES = {"invalid_request", "headers_too_large", "method_not_allowed"}


@settings(UNHURRIED, max_examples=400)
@given(st.one_of(st.binary(max_size=200), PIECES, PIECES.map(lambda p: GET + p + b"\r\n\r\n")))
@example(b"\r\n")
@example(b"\r\n\r")
@example(b"\r\n\r\n")
def test_any_bytes_give_a_head_a_wait_or_a_refusal(data):
    for parse in (
        lambda b: parse_request(b, LIMITS),
        lambda b: parse_response(b, LIMITS, b"GET"),
        lambda b: parse_request(b, SMALL),
    ):
        try:
            head = parse(data)
        except HeadError as refused:
            assert refused.code in CODES  # noqa: PT017 - a refusal is one of three good ends
            continue
        if head is not None:
            assert head.size <= len(data)
            assert not (head.chunked and head.content_length is not None)
            lines = head.lines.split(b"\r\n")
            assert lines.pop() == b""
            assert all(line and not (set(line) & set(b"\r\n\x00")) for line in lines)
