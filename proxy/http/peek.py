"""What the first bytes of a JSON request show, when the rest has not come: model, prompt's length.

A walk over the top object's members that stops where the bytes do. It is not the reader that
decides what is valid (`body.members` is) and takes what is malformed for as long as it can follow
it. Pure; looks at `PEEK_BYTES` at most.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

PEEK_BYTES = 64 << 10
_PROMPTS = frozenset(("messages", "prompt", "input"))
_LIMITS = frozenset(("max_completion_tokens", "max_tokens"))
# A whole string, a mark, or a quote that opens a string whose end has not come.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]:,]|"', re.DOTALL)


class Glimpse:
    """What was seen. `prompt_bytes`: of the member, as it stands; of the body where it has none.

    `readable`: a model was found, or the body was seen to its end. `max_tokens` is 0 if unknown.
    """

    __slots__ = ("max_tokens", "model", "prompt_bytes", "readable")

    def __init__(self, model: str, prompt_bytes: int, max_tokens: int, *, readable: bool) -> None:
        self.model: Final = model
        self.prompt_bytes: Final = prompt_bytes
        self.max_tokens: Final = max_tokens
        self.readable: Final = readable


def peek(body: bytes, length: int, named: str = "") -> Glimpse:
    """Look at a body, or at its beginning; `length`: of all of it, as far as is known.

    `named`: the model, where it is known from elsewhere.
    """
    seen = body[:PEEK_BYTES]
    whole = len(seen) == length
    model, prompt, limit = _walk(seen, length)
    model = named or model
    size = length if prompt is None else prompt
    return Glimpse(model, size, limit, readable=bool(model) or whole)


def _walk(body: bytes, length: int) -> tuple[str, int | None, int]:
    model, limit = "", 0
    prompt: int | None = None
    depth = start = 0
    name = key = ""  # the member whose value is open; a string that may be a member's name
    for match in _TOKEN.finditer(body):
        token = match.group()
        if len(token) > 1:
            if depth == 1 and not name:
                key = _text(token)
            continue
        if token == b'"':
            break
        if token in b"{[":
            depth += 1
            continue
        if token == b":":
            if depth == 1 and not name:
                name, start = key, match.end()
            continue
        if depth == 1 and name:  # a comma, or the end of the object
            value = body[start : match.start()].strip()
            if name == "model":
                model = _text(value)
            elif name in _PROMPTS:
                prompt = len(value)
            elif name in _LIMITS and value.isdigit() and len(value) < 16:
                limit = int(value)
            name = ""
        if token != b",":
            depth -= 1
            if depth <= 0:
                break
    if name in _PROMPTS and prompt is None:
        prompt = max(0, length - start)  # it goes on: at most to the body's end
    return model, prompt, limit


def _text(token: bytes) -> str:
    try:
        value: object = orjson.loads(token)
    except orjson.JSONDecodeError:
        return ""
    return value if isinstance(value, str) else ""
