"""multipart/form-data (RFC 7578), just far enough to read one named field without a copy.

Strict: CR LF line ends, a closing delimiter, each part with one Content-Disposition of type
form-data and one name. What two readers could split in two ways is an error.
"""

from __future__ import annotations

import re

PARTS_MAX = 1024
"""Parts of one body."""
PART_HEAD_BYTES = 16 << 10
"""Header section of one part."""

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - RFC 9110's token
_PARAM = re.compile(rf'[ \t]*;[ \t]*({_TOKEN})[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|({_TOKEN}))')
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_QUOTED = re.compile(r"\\(.)", re.DOTALL)
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")


class MultipartError(ValueError):
    """The body is not well-formed multipart/form-data; the message holds nothing of it."""


def form_values(body: bytes, content_type: str, name: bytes) -> list[bytes]:
    """Return the values of all parts called `name`, in order; raises MultipartError."""
    boundary = _params(content_type.partition(";")[1] + content_type.partition(";")[2]).get(
        "boundary"
    )
    if boundary is None or not _BOUNDARY.fullmatch(boundary):
        raise MultipartError("multipart body without a good boundary")
    mark = b"\r\n--" + boundary.encode("ascii")
    # The first delimiter may stand at the very beginning, without a line end before it.
    pos = len(mark) - 2 if body.startswith(mark[2:]) else -1
    if pos < 0:
        at = body.find(mark)
        if at < 0:
            raise MultipartError("multipart body without its first delimiter")
        pos = at + len(mark)
    values: list[bytes] = []
    for _ in range(PARTS_MAX):
        if body.startswith(b"--", pos):
            return values
        line = body.find(b"\r\n", pos, pos + 256)
        if line < 0 or body[pos:line].strip(b" \t"):
            raise MultipartError("multipart delimiter line is bad")
        end = body.find(mark, line)
        if end < 0:
            raise MultipartError("multipart body without its closing delimiter")
        # The blank line may follow at once, or be the delimiter's own line end.
        head_end = body.find(b"\r\n\r\n", line, min(end, line + PART_HEAD_BYTES))
        if head_end < 0:
            raise MultipartError("multipart part without a header section")
        if _part_name(body[line + 2 : head_end]) == name:
            values.append(body[head_end + 4 : end])
        pos = end + len(mark)
    raise MultipartError(f"more than {PARTS_MAX} multipart parts")


def _part_name(head: bytes) -> bytes:
    found: bytes | None = None
    for row in head.split(b"\r\n"):
        header = _FIELD.fullmatch(row)
        if header is None:
            raise MultipartError("multipart part has a bad header")
        if header[1].lower() != b"content-disposition":
            continue
        # latin-1 keeps every byte as one character; names are compared as bytes.
        kind, colon, rest = header[2].decode("latin-1").partition(";")
        if found is not None or kind.strip().lower() != "form-data":
            raise MultipartError("multipart part is not one form-data field")
        value = _params(colon + rest).get("name")
        if value is None:
            raise MultipartError("multipart part without a name")
        found = value.encode("latin-1")
    if found is None:
        raise MultipartError("multipart part without Content-Disposition")
    return found


def _params(text: str) -> dict[str, str]:
    """Return parameters by lower-case name; raises MultipartError on a second one or on rubbish."""
    params: dict[str, str] = {}
    pos, text = 0, text.rstrip(" \t;")
    while pos < len(text):
        param = _PARAM.match(text, pos)
        if param is None or param[1].lower() in params:
            raise MultipartError("multipart parameters are bad")
        quoted = param[2]
        params[param[1].lower()] = param[3] if quoted is None else _QUOTED.sub(r"\1", quoted)
        pos = param.end()
    return params
