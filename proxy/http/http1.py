"""HTTP/1.1 heads as bytes: what is refused, how the body is framed, which fields go on.

Decides for one head, request or response, and never touches a socket. A head is read by a stricter
grammar than most peers use, because two readers that disagree about one byte are a smuggling hole
(RFC 9112 section 11.2). Field lines that are forwarded are the very bytes that came: case, order,
duplicates and inner whitespace kept.

Invariants: at most one of `content_length` and `chunked` is set; no line in `lines` holds a control
byte, a bare CR or a bare LF; no exception text holds a field's value.

Decisions where the specification leaves room:

- Request targets are visible ASCII. Origin form; `*` for OPTIONS; absolute form with `http` only,
  whose authority must equal Host byte for byte but for case (RFC 9112 section 3.2.2 lets Host be
  ignored; one that disagrees is refused instead). It is handed on in origin form.
- Connection may not name a field that is meant for every hop (RFC 9110 section 7.6.1): in a request
  that is refused, since it could strip Authorization or a class behind our back; in a response such
  an option is ignored and the field stays.
- Proxy-Authorization and Proxy-Authenticate go no further: RFC 9110 section 11.7 gives them to the
  proxy that asked, and this one never relays for another.
- `Upgrade: h2c` is treated as not asked for (RFC 9113 section 3.1 retired it; forwarding it opens a
  tunnel past every check). HTTP/1.0 cannot upgrade or expect (RFC 9110 sections 7.8 and 10.1.1).
- Expect is a list, in one line or several (RFC 9110 sections 5.3 and 10.1.1): 100-continue counts
  wherever it stands in it. Others are dropped; with no body to wait for so is 100-continue.
- One empty line before a request line is skipped (RFC 9112 section 2.2), never one before a
  status line.
- In `fields` the values of a repeated name are joined by ", ", so whoever forgets to look at
  `repeated` sees a list and not a silently chosen value.
"""

from __future__ import annotations

import re
from typing import Literal, NoReturn

import msgspec

from kernels import wire
from proxy.http.fields import (
    END_TO_END,
    PLAIN_OPTIONS,
    REQUEST,
    RESPONSE,
    TCHAR,
    UPSTREAM_ERROR,
    Names,
)

Buffer = bytes | bytearray

HeadCode = Literal["invalid_request", "headers_too_large", "method_not_allowed"]
INVALID: HeadCode = "invalid_request"
TOO_LARGE: HeadCode = "headers_too_large"
NOT_ALLOWED: HeadCode = "method_not_allowed"


class HeadError(Exception):
    """A head is refused; `code` is a row of proxy.errors (an upstream's head is a 502 whatever)."""

    def __init__(self, code: HeadCode, message: str) -> None:
        super().__init__(message)
        self.code: HeadCode = code


class HeadLimits(msgspec.Struct, frozen=True):
    """Bounds of one head: all of it and one line in bytes, the number of field lines."""

    head_bytes: int
    field_bytes: int
    fields: int


class RequestHead(msgspec.Struct):
    """A request's head, checked.

    `fields` has the watched names only, in lower case; `lines` what goes on, each ended by CRLF,
    without hop-by-hop fields and without those that the data path writes itself (Host,
    Content-Length, Expect, X-QoS-Class, X-Tenant-Id, traceparent). `size` is what the head takes of
    the buffer, an empty line before it included.
    """

    method: bytes
    target: bytes
    minor: int
    content_length: int | None
    chunked: bool
    keep_alive: bool
    expect: bool
    upgrade: bytes | None
    fields: dict[bytes, bytes]
    repeated: frozenset[bytes]
    lines: bytes
    size: int


class ResponseHead(msgspec.Struct):
    """A response's head, checked.

    `bodiless`: no body follows whatever the fields say (RFC 9112 section 6.3). With neither that
    nor a length nor chunks the body ends with the connection, and `keep_alive` is false.
    """

    status: int
    reason: bytes
    minor: int
    content_length: int | None
    chunked: bool
    keep_alive: bool
    bodiless: bool
    upgrade: bytes | None
    fields: dict[bytes, bytes]
    repeated: frozenset[bytes]
    lines: bytes
    size: int


# What a line may hold: HTAB, SP, VCHAR, obs-text (RFC 9110 section 5.5). bytes.translate deletes
# it in one pass of C; what is left are line ends and whatever must not be there.
_TEXT = bytes([9, *range(0x20, 0x7F), *range(0x80, 0x100)])
# RFC 3986 host and port, without the delimiters that could turn it into a list, path or userinfo.
_HOST = TCHAR + b"()=;:[]"
_VERSIONS = {b"HTTP/1.1": 1, b"HTTP/1.0": 0}
_METHODS = frozenset((b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"OPTIONS"))
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: (.*))?", re.DOTALL)
_ABSOLUTE = re.compile(rb"(?i:http)://([^/?#]*)(.*)", re.DOTALL)

# What nearly every peer sends, read without a split: whether the connection is kept.
_PLAIN_CONNECTION = {b"keep-alive": True, b"Keep-Alive": True, b"close": False, b"Close": False}

_NOTHING: frozenset[bytes] = frozenset()


def parse_request_pure(buffer: Buffer, limits: HeadLimits, start: int = 0) -> RequestHead | None:
    """Return the request head that begins at `start`, or None while it is incomplete.

    Raises HeadError as soon as the bytes so far cannot become a head that is taken. Each call looks
    at the whole head again; `limits.head_bytes` bounds that.
    """
    begin = start
    if buffer.startswith(b"\r\n", start):
        begin += 2
        if buffer.startswith(b"\r\n", begin):
            raise HeadError(INVALID, "more than one empty line before the request line")
    end = buffer.find(b"\r\n\r\n", begin, start + limits.head_bytes)
    if end < 0:
        _check_incomplete(buffer, begin, start, limits)
        return None
    rows = _rows(buffer, begin, end, limits)
    parts = rows[0].split(b" ")
    if len(parts) != 3:
        raise HeadError(INVALID, "request line is not: method SP target SP version")
    method, target, version = parts
    minor = _VERSIONS.get(version)
    if minor is None:
        _refuse_version(rows[0], version)
    if method not in _METHODS:
        _check_method(method)
    if not target.isascii() or b"\t" in target:
        raise HeadError(INVALID, "request target holds a byte outside 0x21-0x7e")

    fields, repeated, kept = _scan(rows, REQUEST)
    host = fields.get(b"host")
    if host is None:
        if minor:
            raise HeadError(INVALID, "Host is missing")
    elif b"host" in repeated:
        raise HeadError(INVALID, "Host came twice")
    elif host.translate(None, _HOST):
        raise HeadError(INVALID, "Host is not a host and port")
    if target[:1] != b"/":
        target = _origin_form(method, target, host)

    length, chunked = _framing(fields, repeated, minor)
    keep_alive = minor == 1
    upgrade = None
    connection = fields.get(b"connection")
    if connection is not None and (plain := _PLAIN_CONNECTION.get(connection)) is not None:
        keep_alive = plain
    elif connection is not None:
        options = _options(connection)
        keep_alive = b"close" not in options and (minor == 1 or b"keep-alive" in options)
        if not options <= PLAIN_OPTIONS:
            if options & END_TO_END:
                raise HeadError(INVALID, "Connection names a field that is meant for every hop")
            kept = _without(kept, options)
        if minor and b"upgrade" in options:
            upgrade = _upgrade(fields)
    expect = False
    if b"expect" in fields and minor and (length or chunked):
        expect = _expects(fields[b"expect"])
    kept.append(b"")
    return RequestHead(
        method,
        target,
        minor,
        length,
        chunked,
        keep_alive,
        expect,
        upgrade,
        fields,
        repeated,
        b"\r\n".join(kept),
        end + 4 - start,
    )


def parse_response_pure(
    buffer: Buffer, limits: HeadLimits, request_method: bytes, start: int = 0
) -> ResponseHead | None:
    """Return the response head that begins at `start`, or None while it is incomplete.

    An interim (1xx) answer is a head of its own. Raises HeadError.
    """
    end = buffer.find(b"\r\n\r\n", start, start + limits.head_bytes)
    if end < 0:
        _check_incomplete(buffer, start, start, limits)
        return None
    rows = _rows(buffer, start, end, limits)
    line = _STATUS.fullmatch(rows[0])
    if line is None:
        raise HeadError(INVALID, "status line is not: HTTP/1.x SP three digits SP reason")
    minor = 1 if line[1] == b"1" else 0
    status = int(line[2])

    fields, repeated, kept = _scan(rows, RESPONSE)
    length, chunked = _framing(fields, repeated, minor)
    bodiless = status < 200 or status in (204, 304) or request_method == b"HEAD"
    keep_alive = minor == 1
    upgrade = None
    connection = fields.get(b"connection")
    if connection is not None and (plain := _PLAIN_CONNECTION.get(connection)) is not None:
        keep_alive = plain
    elif connection is not None:
        options = _options(connection)
        keep_alive = b"close" not in options and (minor == 1 or b"keep-alive" in options)
        if not options <= PLAIN_OPTIONS:
            kept = _without(kept, options - END_TO_END)
        if minor and b"upgrade" in options:
            upgrade = _upgrade(fields)
    if length is None and not chunked and not bodiless:
        keep_alive = False
    if UPSTREAM_ERROR in fields:
        kept.append(b"X-Tongguan-Upstream-Error: " + fields.pop(UPSTREAM_ERROR))
        repeated -= {UPSTREAM_ERROR}
    kept.append(b"")
    return ResponseHead(
        status,
        line[3] or b"",
        minor,
        length,
        chunked,
        keep_alive,
        bodiless,
        upgrade,
        fields,
        repeated,
        b"\r\n".join(kept),
        end + 4 - start,
    )


def _rows(buffer: Buffer, begin: int, end: int, limits: HeadLimits) -> list[bytes]:
    """Return the head's lines: start line first, no line end left in any of them."""
    head = bytes(buffer[begin:end])
    rows = head.split(b"\r\n")
    # Line ends and bad bytes are left over. As many CR LF as the split found, and nothing else,
    # means that each CR and LF belongs to a pair.
    if head.translate(None, _TEXT) != b"\r\n" * (len(rows) - 1):
        _refuse_bytes(head)
    if len(rows) - 1 > limits.fields:
        raise HeadError(TOO_LARGE, f"more than {limits.fields} fields (limits.fields)")
    if len(head) > limits.field_bytes and max(map(len, rows)) > limits.field_bytes:
        raise HeadError(
            TOO_LARGE, f"a line is longer than {limits.field_bytes} bytes (limits.field_bytes)"
        )
    return rows


def _scan(
    rows: list[bytes], names: Names
) -> tuple[dict[bytes, bytes], frozenset[bytes], list[bytes]]:
    """Return watched values, watched names that came more than once, and the lines that go on."""
    fields: dict[bytes, bytes] = {}
    repeated = _NOTHING
    kept: list[bytes] = []
    known = names.known
    lines = iter(rows)
    next(lines)
    for row in lines:
        name, colon, value = row.partition(b":")
        try:
            watched, keep = known[name]
        except KeyError:
            rule = names.learn(name)
            if rule is None:
                _refuse_name(name)
            watched, keep = rule
        if not colon:
            raise HeadError(INVALID, "a field line has no colon")
        if keep:
            kept.append(row)
        if watched is not None:
            value = value.strip(b" \t")
            if watched in fields:
                repeated |= {watched}
                value = fields[watched] + b", " + value
            fields[watched] = value
    return fields, repeated, kept


def _expects(value: bytes) -> bool:
    """Say whether a list of expectations has 100-continue among them."""
    return any(member.strip(b" \t").lower() == b"100-continue" for member in value.split(b","))


def _framing(
    fields: dict[bytes, bytes], repeated: frozenset[bytes], minor: int
) -> tuple[int | None, bool]:
    """Return (Content-Length, chunked); raises HeadError on any doubt (RFC 9112 section 6.3)."""
    length = fields.get(b"content-length")
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        if length is not None:
            raise HeadError(INVALID, "Content-Length with Transfer-Encoding")
        if not minor:
            raise HeadError(INVALID, "Transfer-Encoding in HTTP/1.0")
        # A list, a repeated field ("chunked, chunked") and any other coding end here.
        if coding.lower() != b"chunked":
            raise HeadError(INVALID, "Transfer-Encoding is not: chunked")
        return None, True
    if length is None:
        return None, False
    if b"content-length" in repeated:
        raise HeadError(INVALID, "Content-Length came twice")
    if not length.isdigit() or len(length) > 18:
        raise HeadError(INVALID, "Content-Length is not a number of at most 18 digits")
    return int(length), False


def _options(connection: bytes) -> set[bytes]:
    """Return the connection options in lower case; what is no token names no field."""
    return {option.strip(b" \t") for option in connection.lower().split(b",")} - {b""}


def _upgrade(fields: dict[bytes, bytes]) -> bytes | None:
    value = fields.get(b"upgrade", b"")
    if not value or b"h2c" in _options(value):
        return None
    return value


def _without(kept: list[bytes], options: set[bytes]) -> list[bytes]:
    return [row for row in kept if row.partition(b":")[0].lower() not in options]


def _origin_form(method: bytes, target: bytes, host: bytes | None) -> bytes:
    """Return a target that does not begin with a slash in origin form, or refuse it."""
    if target == b"*" and method == b"OPTIONS":
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise HeadError(INVALID, "request target is neither a path nor an http URL")
    authority, path = absolute[1], absolute[2]
    if not authority or (host is not None and authority.lower() != host.lower()):
        raise HeadError(INVALID, "Host differs from the request target's host")
    if not path:
        # RFC 9112 section 3.2.4: the last proxy turns an empty path of OPTIONS into "*".
        return b"*" if method == b"OPTIONS" else b"/"
    return path if path[:1] == b"/" else b"/" + path


def _check_method(method: bytes) -> None:
    if method in (b"CONNECT", b"TRACE"):
        raise HeadError(NOT_ALLOWED, f"{method.decode()} is not served here")
    if not method or method.translate(None, TCHAR):
        raise HeadError(INVALID, "method is not a token")


def _check_incomplete(buffer: Buffer, begin: int, start: int, limits: HeadLimits) -> None:
    """Refuse an incomplete head that is already wrong or too large."""
    part = bytes(buffer[begin : start + limits.head_bytes])
    left = part.translate(None, _TEXT)
    ends = b"\r\n" * part.count(b"\r\n")
    if left != ends and (left != ends + b"\r" or not part.endswith(b"\r")):
        _refuse_bytes(part)
    if len(buffer) - start >= limits.head_bytes:
        raise HeadError(
            TOO_LARGE, f"head is larger than {limits.head_bytes} bytes (limits.head_bytes)"
        )


def _refuse_bytes(head: bytes) -> NoReturn:
    left = head.translate(None, _TEXT + b"\r\n")
    if left:
        raise HeadError(INVALID, f"head holds a control byte (0x{left[0]:02x})")
    raise HeadError(INVALID, "head holds a bare CR or a bare LF")


def _refuse_name(name: bytes) -> NoReturn:
    if name[:1] in (b" ", b"\t"):
        raise HeadError(INVALID, "a field line begins with whitespace (obs-fold)")
    if name.rstrip(b" \t") != name:
        raise HeadError(INVALID, "whitespace between field name and colon")
    raise HeadError(INVALID, "a field name is not a token")


def _refuse_version(line: bytes, version: bytes) -> NoReturn:
    if line == b"PRI * HTTP/2.0":
        raise HeadError(INVALID, "HTTP/2 without TLS is not served here; speak HTTP/1.1")
    if version.startswith(b"HTTP/"):
        raise HeadError(INVALID, "HTTP version is neither 1.1 nor 1.0")
    raise HeadError(INVALID, "request line does not end with an HTTP version")


_GRAMMAR = wire.Grammar(
    request=REQUEST.table,
    response=RESPONSE.table,
    doubtful=(UPSTREAM_ERROR,),
    token=TCHAR,
    host=_HOST,
    methods=_METHODS,
    connection=_PLAIN_CONNECTION,
)
# In C where it was built; that reads what is usual and hands all else to these two.
parse_request, parse_response = wire.heads(
    (RequestHead, ResponseHead, HeadLimits), _GRAMMAR, parse_request_pure, parse_response_pure
)
