"""OpenAI request bodies into a `Job`, or a 400 that names the parameter.

A parameter this engine cannot honour is refused by name unless it has its neutral value; names
nobody here knows are ignored, as OpenAI-compatible servers do. Pure: no socket, no engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import orjson

from agent.engine.types import PromptTooLong, Sampling, Tokenizer
from agent.errors import CONTEXT_EXCEEDED, INVALID, ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

STOPS_MAX = 4
STOP_CHARACTERS = 1024
MEMBERS_MAX = 256
# Messages, or content parts of all messages together; a model with a smaller context takes as many
# as that has tokens.
MESSAGES_MAX = 16384
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_INT64 = 2**63


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: Any = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    """Fields both endpoints share; the second half is only looked at to be refused."""

    model: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None

    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    length_penalty: Any = None
    top_k: Any = None
    min_p: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    echo: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


class _Completion(_Common, kw_only=True):
    # One array type a union is all msgspec takes; `_prompt` looks inside.
    prompt: str | list[Any]

    echo: Any = None
    suffix: Any = None
    prompt_embeds: Any = None


# Values that ask for nothing special; null never does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
}

_ROLES = ("system", "developer", "user", "assistant")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_AT = re.compile(r" - at `\$\.?([^`]*)`$")


@dataclass(frozen=True, slots=True)
class Job:
    """One request, understood.

    Exactly one of `messages`, `text` and `ids` is set. `max_tokens` None: what the context leaves.
    """

    chat: bool
    model: str | None
    messages: tuple[dict[str, str], ...] | None
    text: str | None
    ids: tuple[int, ...] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool

    @property
    def prompt_field(self) -> str:
        """Name of the member that holds the prompt."""
        return "messages" if self.chat else "prompt"

    def prompt_ids(self, tokenizer: Tokenizer, context_length: int) -> Sequence[int]:
        """Return the prompt as token ids; raises `ChatTemplateError`.

        Raises `ApiError` (400) for a text so long that it needs no tokeniser to know.
        """
        try:
            if self.messages is not None:
                return tokenizer.apply_chat(
                    self.messages, add_generation_prompt=True, tokens_max=context_length
                )
            if self.text is not None:
                return tokenizer.encode(self.text, tokens_max=context_length)
        except PromptTooLong as problem:
            raise _too_long(
                self.prompt_field, f"at least {problem.tokens_min}", context_length
            ) from None
        assert self.ids is not None
        return self.ids

    def sampling(self, prompt_tokens: int, context_length: int) -> Sampling:
        """Return how to sample; without `max_tokens` what the context leaves, at least 1."""
        return Sampling(
            max_tokens=self.max_tokens or max(1, context_length - prompt_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
        )


_Decoded = TypeVar("_Decoded")

_chat_decoder = msgspec.json.Decoder(_Chat)
_completion_decoder = msgspec.json.Decoder(_Completion)


def parse_chat(body: bytes, context_length: int) -> Job:
    """Read a body of `/v1/chat/completions`; raises `ApiError` (400) naming the parameter."""
    _members(body, _Chat)
    request = _decode(_chat_decoder, body)
    _refuse_unsupported(request)
    _check_count(request.messages, min(context_length, MESSAGES_MAX))
    messages = tuple(_message(index, message) for index, message in enumerate(request.messages))
    # max_tokens is the older name of the same limit; where both are given the newer one counts.
    max_tokens = request.max_completion_tokens or request.max_tokens
    return _job(request, max_tokens, messages=messages)


def parse_completion(body: bytes, context_length: int) -> Job:
    """Read a body of `/v1/completions`; raises `ApiError` (400) naming the parameter."""
    prompt = _members(body, _Completion).get("prompt", b"")
    if prompt[:1] == b"[" and b'"' not in prompt:
        # Millions of ids are counted before they are made into as many objects.
        count = prompt.count(b",") + 1
        if count > context_length:
            raise _too_long("prompt", str(count), context_length)
    request = _decode(_completion_decoder, body)
    _refuse_unsupported(request)
    text, ids = _prompt(request.prompt)
    return _job(request, request.max_tokens or COMPLETION_TOKENS, text=text, ids=ids)


def _job(
    request: _Common,
    max_tokens: int | None,
    *,
    messages: tuple[dict[str, str], ...] | None = None,
    text: str | None = None,
    ids: tuple[int, ...] | None = None,
) -> Job:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise ApiError(INVALID, "stream_options needs stream: true", param="stream_options")
    return Job(
        chat=messages is not None,
        model=request.model,
        messages=messages,
        text=text,
        ids=ids,
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=request.seed,
        stop=_stops(request.stop),
        stream=stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
    )


def _too_long(field: str, tokens: str, context_length: int) -> ApiError:
    return ApiError(
        CONTEXT_EXCEEDED,
        f"this model's maximum context length is {context_length} tokens, but the prompt has "
        f"{tokens} tokens; shorten it",
        param=field,
    )


_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
# JSON's white space (RFC 8259 section 2); possessive, so that no input makes them go back.
_OPENING = re.compile(rb"[ \t\r\n]*+\{[ \t\r\n]*+")
_NAME = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*+:[ \t\r\n]*+')
_AFTER = re.compile(rb"[ \t\r\n]*+([,}])[ \t\r\n]*+")


def _members(body: bytes, kind: type[_Common]) -> dict[str, bytes]:
    """Return the object's members as the bytes they are; raises `ApiError` (400).

    Refused is what two readers could read as two requests: a member given twice, of which one
    takes the first and another the last (RFC 8259 section 4), and bytes that are not UTF-8, also in
    members nobody looks at.
    """
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise ApiError(INVALID, "the body is not valid JSON: it is not UTF-8") from None
    raws = _decode(_members_decoder, body)
    if len(raws) > MEMBERS_MAX:
        raise ApiError(INVALID, f"the body: at most {MEMBERS_MAX} members")
    members = {name: bytes(raw) for name, raw in raws.items()}
    opening = _OPENING.match(body)
    assert opening is not None
    at = opening.end()
    # The decoder kept the last of each name, and the body is well formed. So a walk that steps
    # over each member by the value kept for it arrives at the end, or meets one given twice.
    unseen = dict(members)
    while unseen:
        name = _NAME.match(body, at)
        assert name is not None
        key = msgspec.json.decode(name[1], type=str)
        value = unseen.pop(key, None)
        after = None
        if value is not None and body.startswith(value, name.end()):
            after = _AFTER.match(body, name.end() + len(value))
        if after is None:
            raise _given_twice(key, kind)
        at = after.end()
        if not unseen and after[1] == b",":
            again = _NAME.match(body, at)
            assert again is not None
            raise _given_twice(msgspec.json.decode(again[1], type=str), kind)
    return members


def _given_twice(name: str, kind: type[_Common]) -> ApiError:
    # Only a name we know is named: another could hold anything.
    known = name if name in kind.__struct_fields__ else None
    return ApiError(INVALID, f"{known or 'the body'}: a member is given twice", param=known)


def _check_count(messages: list[_Message], most: int) -> None:
    if len(messages) > most:
        raise ApiError(INVALID, f"messages: at most {most} messages", param="messages")
    parts = sum(len(m.content) for m in messages if isinstance(m.content, list))
    if parts > most:
        raise ApiError(INVALID, f"messages: at most {most} content parts", param="messages")


def _decode(decoder: msgspec.json.Decoder[_Decoded], body: bytes) -> _Decoded:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as problem:
        message, param = _explain(str(problem))
        raise ApiError(INVALID, message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        reason = "it is not UTF-8" if isinstance(problem, UnicodeDecodeError) else str(problem)
        raise ApiError(INVALID, f"the body is not valid JSON: {reason}") from None
    except RecursionError:
        raise ApiError(INVALID, "the body is not valid JSON: nested too deeply") from None


def _explain(problem: str) -> tuple[str, str | None]:
    """Turn a validation message into (message, param)."""
    at = _AT.search(problem)
    param = at.group(1) if at else ""
    text = _AT.sub("", problem).replace("`", "")
    missing = _MISSING.search(problem)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return f"{param}: required", param
    if not param:
        return f"the body: {text}", None
    return f"{param}: {text[0].lower()}{text[1:]}", param


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # true equals 1 in Python; on the wire they differ.
    return value is None or any(
        value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral
    )


def _refuse_unsupported(request: _Common) -> None:
    for name, neutral in _NEUTRAL.items():
        if not _is_neutral(getattr(request, name, None), neutral):
            only = f" (only {orjson.dumps(neutral[0]).decode()})" if neutral else ""
            raise ApiError(INVALID, f"{name}: not supported by this engine{only}", param=name)


def _message(index: int, message: _Message) -> dict[str, str]:
    where = f"messages[{index}]"
    if message.role not in _ROLES:
        raise ApiError(
            INVALID, f"{where}.role: expected one of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    if message.tool_calls not in (None, []):
        param = f"{where}.tool_calls"
        raise ApiError(INVALID, f"{param}: not supported by this engine", param=param)
    content = message.content
    if content is None:
        param = f"{where}.content"
        raise ApiError(INVALID, f"{param}: required", param=param)
    if not isinstance(content, str):
        texts = []
        for number, part in enumerate(content):
            param = f"{where}.content[{number}]"
            if part.type != "text":
                raise ApiError(
                    INVALID, f"{param}.type: only text is supported", param=f"{param}.type"
                )
            if part.text is None:
                raise ApiError(INVALID, f"{param}.text: required", param=f"{param}.text")
            texts.append(part.text)
        content = "\n".join(texts)
    # developer is the newer name of system; chat templates know only that one.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content}


def _prompt(prompt: str | list[Any]) -> tuple[str | None, tuple[int, ...] | None]:
    if isinstance(prompt, str):
        return prompt, None
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0], None
    ids = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], list) else prompt
    if ids and all(type(token) is int and token >= 0 for token in ids):
        return None, tuple(ids)
    many = len(prompt) > 1 and isinstance(prompt[0], str | list)
    reason = "one prompt a request" if many else "expected a string or a list of token ids"
    raise ApiError(INVALID, f"prompt: {reason}", param="prompt")


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > STOPS_MAX:
        raise ApiError(INVALID, f"stop: at most {STOPS_MAX} strings", param="stop")
    if any(len(string) > STOP_CHARACTERS for string in stops):
        raise ApiError(
            INVALID, f"stop: at most {STOP_CHARACTERS} characters a string", param="stop"
        )
    if not all(stops):
        raise ApiError(INVALID, "stop: a string is empty", param="stop")
    return stops
