"""Ask one question of an OpenAI-compatible server and follow the answer as it comes.

Behind `tongguan ask` and `tongguan up`. With a key file the request and the answer are sealed, else
they are plain. Errors are one line for a person.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from proxy.client import AnswerError, Sm4Transport
from proxy.keys.file import KeyFileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_TOKENS_DEFAULT = 256
CONNECT_S = 5.0
READ_S = 120.0
_ERROR_TEXT_MAX = 300
# What a door for clear requests answers to an envelope.
_CLEAR_DOOR_STATUS = frozenset({200, 400, 404, 405, 415})
_CLEAR_DOOR_CODES = frozenset({None, "invalid_request", "method_not_allowed"})
_NOT_OUR_KEYS = (
    "keys not of this sidecar? compare the kid with `tongguan keys show`; the sidecar's log has "
    "the reason"
)
_STALE = "clocks more than 60 s apart, or a sidecar younger than its 10 s start fence: try again"
_TAKES_CLEAR = "that door takes clear requests; --url of the sealed one"
_TAKES_SEALED = "that door takes sealed requests; give --keys, or --url of the plain one"


class AskError(Exception):
    """The question was not answered; the message is one line for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskResult:
    """An answer and how it came. Times in ms; hints of the sidecar are empty without one.

    `tokens` is the server's own count, or the number of pieces if it gave none. `tokens_per_s` is
    the rate after the first token; 0 below two tokens.
    """

    text: str = field(repr=False)
    model: str
    finish_reason: str
    tokens: int
    prompt_tokens: int
    ttft_ms: float
    total_ms: float
    tokens_per_s: float
    trace_id: str
    qos_class: str
    pool: str
    sealed: bool


def ask(
    question: str,
    *,
    base_url: str,
    keys_file: str | Path | None,
    on_text: Callable[[str], None],
    model: str | None = None,
    qos: str | None = None,
    max_tokens: int = MAX_TOKENS_DEFAULT,
    temperature: float = 0.0,
) -> AskResult:
    """Return the answer; `on_text` gets each piece of it as it comes.

    `base_url` is the server's, with or without `/v1`. Without `model` the first of `/v1/models` is
    asked. Raises `AskError`.
    """
    url = base_url.rstrip("/")
    if not url.endswith("/v1"):
        url += "/v1"
    try:
        transport = (
            Sm4Transport(keys_file)
            if keys_file is not None
            else httpx.HTTPTransport(trust_env=False)
        )
    except (KeyFileError, OSError) as problem:
        raise AskError(_os_text(problem)) from None
    headers = {"X-QoS-Class": qos} if qos else {}
    sealed = keys_file is not None
    timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
    try:
        with httpx.Client(transport=transport, headers=headers, timeout=timeout) as client:
            body = {
                "model": model or _first_model(client, url, sealed=sealed),
                "messages": [{"role": "user", "content": question}],
                "max_tokens": max_tokens,
                "temperature": temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            return _converse(client, url, body, on_text, sealed=sealed)
    except AnswerError as problem:
        raise AskError(f"{url}: {problem}{_hint(problem)}") from None
    except httpx.ConnectError as problem:
        host = httpx.URL(url).netloc.decode("ascii", "replace")
        raise AskError(
            f"{host}: cannot connect ({problem}); is the sidecar running? start: tongguan up"
        ) from None
    except httpx.InvalidURL as problem:
        raise AskError(f"{base_url}: {problem}") from None
    except httpx.TimeoutException:
        raise AskError(f"{url}: no answer in time ({READ_S:.0f} s)") from None
    except httpx.HTTPError as problem:
        raise AskError(f"{url}: {str(problem) or type(problem).__name__}") from None


def _hint(problem: AnswerError) -> str:
    """Return what to do about an answer that is no envelope for us, "" where nobody can tell."""
    if problem.reason is not None:
        return ""
    if problem.code == "envelope_rejected":
        return f"; {_NOT_OUR_KEYS}"
    if problem.code == "envelope_stale":
        return f"; {_STALE}"
    if problem.status in _CLEAR_DOOR_STATUS and problem.code in _CLEAR_DOOR_CODES:
        return f"; {_TAKES_CLEAR}"
    return ""


def _os_text(problem: Exception) -> str:
    if isinstance(problem, OSError):
        return f"{problem.filename}: {problem.strerror}"
    return str(problem)


def _first_model(client: httpx.Client, url: str, *, sealed: bool) -> str:
    response = client.get(f"{url}/models")
    if response.status_code != httpx.codes.OK:
        raise AskError(_status_text(f"{url}/models", response, sealed=sealed))
    try:
        return str(orjson.loads(response.content)["data"][0]["id"])
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        raise AskError(f"{url}/models: names no model; pass one with --model") from None


def _converse(
    client: httpx.Client,
    url: str,
    body: dict[str, Any],
    on_text: Callable[[str], None],
    *,
    sealed: bool,
) -> AskResult:
    answer = _Answer(on_text)
    started_ns = time.monotonic_ns()
    with client.stream(
        "POST",
        f"{url}/chat/completions",
        content=orjson.dumps(body),
        headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
    ) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            raise AskError(_status_text(f"{url}/chat/completions", response, sealed=sealed))
        for line in response.iter_lines():
            if line.startswith("data:"):
                answer.take(line.removeprefix("data:").strip(), time.monotonic_ns())
        hints = response.headers
    ended_ns = time.monotonic_ns()
    if not answer.done:
        raise AskError(f"{url}: the answer broke off")
    first_ns = answer.first_ns or ended_ns
    rate_ns = answer.latest_ns - first_ns
    tokens = answer.tokens or answer.pieces
    return AskResult(
        text="".join(answer.text),
        model=answer.model or str(body["model"]),
        finish_reason=answer.finish_reason,
        tokens=tokens,
        prompt_tokens=answer.prompt_tokens,
        ttft_ms=(first_ns - started_ns) / 1e6,
        total_ms=(ended_ns - started_ns) / 1e6,
        tokens_per_s=(tokens - 1) * 1e9 / rate_ns if tokens > 1 and rate_ns > 0 else 0.0,
        trace_id=hints.get("x-trace-id", ""),
        qos_class=hints.get("x-qos-class", ""),
        pool=hints.get("x-qos-pool", ""),
        sealed=sealed,
    )


class _Answer:
    """What the events of a streamed chat completion add up to."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self.text: list[str] = []
        self.pieces = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.first_ns = 0
        self.latest_ns = 0
        self.model = ""
        self.finish_reason = ""
        self.done = False

    def take(self, data: str, now_ns: int) -> None:
        """Take one event's data; raises `AskError` for an error event or one that is no JSON."""
        if data == "[DONE]":
            self.done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise AskError("the answer holds an event that is not JSON") from None
        if not isinstance(event, dict):
            raise AskError("the answer holds an event that is no object")
        if event.get("error"):
            raise AskError(f"the answer broke off: {_error_text(event)}")
        self.model = str(event.get("model") or self.model)
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.tokens = int(usage.get("completion_tokens") or 0)
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                self.first_ns = self.first_ns or now_ns
                self.latest_ns = now_ns
                self.pieces += 1
                self.text.append(text)
                self._on_text(text)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _error_text(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return "no reason given"
    text = f"{error.get('code') or error.get('type') or 'error'}: {error.get('message') or ''}"
    return " ".join(text.split())[:_ERROR_TEXT_MAX]


def _status_text(url: str, response: httpx.Response, *, sealed: bool) -> str:
    try:
        reason = _error_text(orjson.loads(response.content))
    except orjson.JSONDecodeError:
        reason = "no reason given"
    hint = ""
    # A sealed one names such a code where the envelope opened: then the keys are right.
    if not sealed and reason.startswith("envelope_"):
        hint = f"; {_TAKES_SEALED}"
    return f"{url}: HTTP {response.status_code}, {reason}{hint}"
