"""JSON bodies as byte ranges: looked at, added to and cut, never written anew.

Decides where the top members of a request lie, which model a body names, what an engine is asked
for on audit's behalf, and how that is taken out of its answer again. The bytes that are kept are
the bytes that came; whatever cannot be done exactly is not done.

JSON is RFC 8259. Its grammar allows an unpaired surrogate escape, which clients that cut a text in
mid emoji do send: it is taken. A body nested deeper than the decoder's stack (about 1 000) is
refused like a malformed one.

Invariants: `members` accepts no text that RFC 8259 refuses; ranges lie in document order and never
overlap; no exception text holds a part of the body.
"""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from kernels import wire

if TYPE_CHECKING:
    from collections.abc import Mapping

Span = tuple[int, int]

IDS = "return_token_ids"
OPTIONS = "stream_options"
CHOICES_MAX = 128
"""Choices of an answer that are followed, by index; OpenAI's own bound of `n`."""
TEXT_MAX = 256
"""Characters kept of a model name or finish reason that an engine reports."""

_ID_MEMBERS = frozenset(("token_ids", "prompt_token_ids"))
_MAX_TOKENS_MAX = 2**53 - 1


class BodyError(ValueError):
    """A body is not what its type says; the message says why."""


class RequestView(msgspec.Struct, frozen=True):
    """What a JSON request shows, as ranges of its bytes.

    `prompt`: the value of `messages`, else of `prompt`. `model` is empty when the member is absent
    or no string. `max_tokens`: `max_completion_tokens`, else `max_tokens`, if a whole number of at
    least 0. `end`: offset of the closing brace of the top object. `rest`: all of the body but the
    values of prompt, model and temperature, as ranges in order; the concatenation of these ranges
    is what params_hash covers (names, commas and whitespace included, also around what is cut).
    """

    model: str
    model_span: Span | None
    prompt: Span | None
    temperature: Span | None
    stream: bool
    max_tokens: int | None
    end: int
    rest: tuple[Span, ...]
    members: Mapping[str, Span]


class AnswerFacts(msgspec.Struct):
    """What a JSON answer says, for audit and metrics; absent things are None or missing.

    `texts` and `finish` are by choice index, below `CHOICES_MAX`; `token_ids` are choice 0's.
    """

    texts: dict[int, str] = msgspec.field(default_factory=dict)
    finish: dict[int, str] = msgspec.field(default_factory=dict)
    usage: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    model: str = ""


_decode_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_WS = rb"[ \t\r\n]*"
_MEMBER = _WS + rb'("[^"\\]*(?:\\.[^"\\]*)*")' + _WS + b":" + _WS
_FIRST = re.compile(_WS + rb"\{" + _MEMBER, re.DOTALL)
_NEXT = re.compile(_WS + b"," + _MEMBER, re.DOTALL)
_EMPTY = re.compile(_WS + rb"\{")
_CLOSE = re.compile(_WS + rb"(\})" + _WS)
_ITEM = re.compile(rb"[ \t\r\n]*[\[,][ \t\r\n]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def members_pure(body: bytes) -> dict[str, Span]:
    """Return the byte range of each value of the top object, by decoded name, in order.

    Raises BodyError: not JSON, not UTF-8, not an object, a name that comes twice.
    """
    found, _ = _walk(body)
    return {name: (start, end) for name, _, start, end in found}


def view_pure(body: bytes) -> RequestView | None:
    """Return what a request shows; None when it is no JSON object or shows nothing of use."""
    try:
        found, end = _walk(body)
    except BodyError:
        return None
    spans = {name: (start, stop) for name, _, start, stop in found}
    model = spans.get("model")
    prompt = spans.get("messages") or spans.get("prompt")
    if model is None and prompt is None:
        return None
    temperature = spans.get("temperature")
    rest: list[Span] = []
    pos = 0
    for start, stop in sorted(span for span in (model, prompt, temperature) if span):
        rest.append((pos, start))
        pos = stop
    rest.append((pos, len(body)))
    stream = spans.get("stream")
    name = _value(body, model)
    limit = _value(body, spans.get("max_completion_tokens") or spans.get("max_tokens"))
    return RequestView(
        model=name if isinstance(name, str) else "",
        model_span=model,
        prompt=prompt,
        temperature=temperature,
        stream=stream is not None and body[stream[0] : stream[1]] == b"true",
        max_tokens=limit if type(limit) is int and 0 <= limit <= _MAX_TOKENS_MAX else None,
        end=end,
        rest=tuple(rest),
        members=spans,
    )


def model_of(body: bytes, content_type: str) -> str:
    """Return the model id a body names (the envelope's rule), empty if its type has none.

    JSON: the top member `model`; an empty body (a sealed GET) names none. multipart/form-data: the
    one part of that name. Raises BodyError where the envelope says `model_mismatch`.
    """
    media = content_type
    if media != "application/json":
        media = content_type.partition(";")[0].strip().lower()
    if media == "application/json" or media.endswith("+json"):
        if not body:
            return ""
        span = members(body).get("model")
        if span is None:
            return ""
        value = _value(body, span)
        if not isinstance(value, str):
            raise BodyError("model is not a string")
        return value
    if media == "multipart/form-data":
        from proxy.http.multipart import MultipartError, form_values  # noqa: PLC0415 - few send one

        try:
            values = form_values(body, content_type, b"model")
            if len(values) > 1:
                raise BodyError("model comes twice")
            return str(values[0], "utf-8") if values else ""
        except MultipartError as problem:
            raise BodyError(str(problem)) from None
        except UnicodeDecodeError:
            raise BodyError("model is not UTF-8") from None
    return ""


def ask_token_ids(
    body: bytes, view: RequestView, *, stream: bool
) -> tuple[bytes, frozenset[str]] | None:
    """Return the body that also asks for token ids (and a stream's usage), and what was added.

    What the client has in its body already is its own wish and stays. None: the body has no prompt,
    or its top object does not end at the last byte.
    """
    if view.prompt is None or view.end != len(body) - 1:
        return None
    extra: list[bytes] = []
    added: set[str] = set()
    if IDS not in view.members:
        extra.append(b'"return_token_ids":true')
        added.add(IDS)
    if stream and OPTIONS not in view.members:
        extra.append(b'"stream_options":{"include_usage":true}')
        added.add(OPTIONS)
    if not extra:
        return body, frozenset()
    return b"%b,%b}" % (body[: view.end], b",".join(extra)), frozenset(added)


def cut_answer_pure(body: bytes, added: frozenset[str]) -> tuple[bytes, AnswerFacts]:
    """Return a JSON answer without what was asked for on audit's behalf, and its facts.

    Only byte ranges of whole members go; an answer in which they cannot be found exactly is
    returned as it came. Never raises.
    """
    return (cut_ids(body) if IDS in added else body), _facts(body)


def cut_ids(body: bytes) -> bytes:
    """Return `body` less the members token_ids and prompt_token_ids of the top and its choices."""
    # A name may be written with escapes.
    if b"token_ids" not in body and b"\\u" not in body:
        return body
    try:
        found, _ = _walk(body)
        cuts = _cuts(found, 0)
        for name, _, start, end in found:
            if name == "choices":
                for first, last in _items(body, start, end):
                    if body[first : first + 1] == b"{":
                        cuts += _cuts(_walk(body[first:last])[0], first)
    except BodyError:
        return body
    kept: list[bytes] = []
    pos = 0
    for start, end in sorted(cuts):
        kept.append(body[pos:start])
        pos = end
    kept.append(body[pos:])
    return b"".join(kept)


# A member's name, where its key begins, where its value begins and ends.
_Member = tuple[str, int, int, int]


def _cuts(found: list[_Member], base: int) -> list[Span]:
    """Return the ranges to cut of one object's members, each with the comma it needs no more."""
    cuts: list[Span] = []
    lead = 0
    while lead < len(found) and found[lead][0] in _ID_MEMBERS:
        lead += 1
    if lead:
        upto = found[lead][1] if lead < len(found) else found[-1][3]
        cuts.append((base + found[0][1], base + upto))
    for before, member in zip(found[lead:], found[lead + 1 :], strict=False):
        if member[0] in _ID_MEMBERS:
            cuts.append((base + before[3], base + member[3]))
    return cuts


def _walk(body: bytes) -> tuple[list[_Member], int]:
    """Return the members of the top object and the offset of its closing brace.

    The decoder says how long each value is, the walk finds where it is. That is exact: what stands
    at a value's place and equals a value of the object up to a comma or brace *is* that value,
    since no JSON value is a proper prefix of another there; and a name that comes twice leaves
    fewer values than members, so the walk ends before the closing brace.
    """
    text, raws = _raws(body)
    found: list[_Member] = []
    pos = 0
    key_at = _FIRST.match
    for name, raw in raws.items():
        key = key_at(text, pos)
        value = memoryview(raw)
        if key is None or not text.startswith(value, start := key.end()):
            raise BodyError("a member name comes twice")
        pos = start + value.nbytes
        found.append((name, key.start(1), start, pos))
        key_at = _NEXT.match
    if not found and (opening := _EMPTY.match(text)):
        pos = opening.end()
    closing = _CLOSE.fullmatch(text, pos)
    if closing is None:
        raise BodyError("a member name comes twice")
    return found, closing.start(1)


def _raws(body: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """Return the top values as they stand in the returned text, which has the body's layout."""
    text = body
    try:
        if not body.isascii():
            # The decoder skips values without a look at their encoding.
            str(body, "utf-8")
        try:
            return text, _decode_raws(text)
        except msgspec.ValidationError:
            raise BodyError("body is not a JSON object") from None
        except msgspec.DecodeError:
            # Unpaired surrogates are the one thing in the grammar that the decoder refuses. Other
            # hex digits, as many, leave every range where it is.
            text = _SURROGATE.sub(rb"\\u0020", body)
            if text == body:
                raise
            return text, _decode_raws(text)
    except UnicodeDecodeError:
        raise BodyError("body is not UTF-8") from None
    except RecursionError:
        raise BodyError("body is nested too deeply") from None
    except msgspec.DecodeError:
        raise BodyError("body is not valid JSON") from None


def _items(body: bytes, start: int, end: int) -> list[Span]:
    """Return the ranges of an array's items; none if the value is no array."""
    if body[start : start + 1] != b"[":
        return []
    spans: list[Span] = []
    pos = start
    try:
        raws = _decode_items(body[start:end])
    except (msgspec.DecodeError, RecursionError):
        raise BodyError("an array is not valid JSON") from None
    for raw in raws:
        gap = _ITEM.match(body, pos)
        if gap is None:
            raise BodyError("an array is not valid JSON")
        pos = gap.end() + memoryview(raw).nbytes
        spans.append((gap.end(), pos))
    return spans


def _value(body: bytes, span: Span | None) -> object:
    """Return a member's decoded value; None if absent or not to be decoded."""
    if span is None:
        return None
    try:
        value: object = orjson.loads(body[span[0] : span[1]])
    except orjson.JSONDecodeError:
        return None
    return value


class _Message(msgspec.Struct):
    content: Any = None


class _Choice(msgspec.Struct):
    index: Any = 0
    message: _Message | None = None
    text: Any = None
    finish_reason: Any = None
    token_ids: Any = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    model: Any = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def _facts(body: bytes) -> AnswerFacts:
    try:
        answer = _decode_answer(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return AnswerFacts()
    texts: dict[int, str] = {}
    finish: dict[int, str] = {}
    ids: list[int] | None = None
    for choice in answer.choices or ():
        index = choice.index
        if type(index) is not int or not 0 <= index < CHOICES_MAX:
            continue
        text = choice.message.content if choice.message else choice.text
        if isinstance(text, str):
            texts[index] = text
        if isinstance(choice.finish_reason, str):
            finish[index] = choice.finish_reason[:TEXT_MAX]
        if index == 0 and (checked := u32_ids(choice.token_ids)) is not None:
            ids = checked.tolist()
    return AnswerFacts(
        texts=texts,
        finish=finish,
        usage=answer.usage if isinstance(answer.usage, dict) else None,
        token_ids=ids,
        model=answer.model[:TEXT_MAX] if isinstance(answer.model, str) else "",
    )


def u32_ids(value: object) -> array[int] | None:
    """Return a reported list of token ids; None if it is no list of 32-bit numbers."""
    if not isinstance(value, list):
        return None
    try:
        return array("I", value)
    except (TypeError, OverflowError):
        return None


# In C where it was built; that reads what is usual and hands all else to these three.
members, view, cut_answer = wire.bodies(
    (RequestView, AnswerFacts), IDS, members_pure, view_pure, cut_answer_pure
)
