"""Results into OpenAI's JSON and SSE bytes.

`return_token_ids` follows vLLM: for chat `prompt_token_ids` stands at the top of the answer or of
the first chunk, for completions it stands in the choice (of the first chunk); `token_ids` stand in
the choice, in a stream only those of that chunk. Pure: no socket, no clock, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.engine.types import FinishReason
    from agent.openai import Job


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def plain(self) -> dict[str, Any]:
        """Return it in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return one SSE event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class Answer:
    """Builds the answer to one job: `whole`, or `first`, `chunk`…, `usage` and `DONE`."""

    __slots__ = ("_created", "_first", "_id", "_job", "_model", "_prompt_ids")

    def __init__(
        self, job: Job, *, request_id: str, created: int, model: str, prompt_ids: Sequence[int]
    ) -> None:
        self._job = job
        self._id = ("chatcmpl-" if job.chat else "cmpl-") + request_id
        self._created = created
        self._model = model
        self._prompt_ids = prompt_ids
        self._first = True

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def whole(
        self, text: str, token_ids: Sequence[int], finish_reason: FinishReason, usage: Usage
    ) -> bytes:
        """Return the JSON body of a finished generation."""
        job = self._job
        choice: dict[str, Any] = {"index": 0}
        if job.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        if job.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if not job.chat:
                choice["prompt_token_ids"] = list(self._prompt_ids)
        answer = self._envelope("chat.completion" if job.chat else "text_completion", [choice])
        answer["usage"] = usage.plain()
        if job.return_token_ids and job.chat:
            answer["prompt_token_ids"] = list(self._prompt_ids)
        return orjson.dumps(answer)

    def first(self) -> bytes:
        """Return the event a chat stream opens with: the role; completions have none."""
        if not self._job.chat:
            return b""
        return self._event({"delta": {"role": "assistant", "content": ""}}, None, ())

    def chunk(
        self, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> bytes:
        """Return the event of one step; `finish_reason` is set in the last one."""
        body: dict[str, Any]
        if self._job.chat:
            body = {"delta": {"content": text} if text or finish_reason is None else {}}
        else:
            body = {"text": text}
        return self._event(body, finish_reason, token_ids)

    def _event(
        self, body: dict[str, Any], finish_reason: FinishReason | None, token_ids: Sequence[int]
    ) -> bytes:
        job = self._job
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": finish_reason}
        opens, self._first = self._first, False
        # vLLM's role chunk carries the prompt's ids and none of its own.
        role_only = job.chat and opens
        if job.return_token_ids and not role_only:
            choice["token_ids"] = list(token_ids)
        if job.return_token_ids and opens and not job.chat:
            choice["prompt_token_ids"] = list(self._prompt_ids)
        value = self._envelope("chat.completion.chunk" if job.chat else "text_completion", [choice])
        if job.return_token_ids and role_only:
            value["prompt_token_ids"] = list(self._prompt_ids)
        if job.include_usage:
            value["usage"] = None  # OpenAI: null in every chunk but the last
        return event(value)

    def usage(self, usage: Usage) -> bytes:
        """Return the event that carries usage; its choices are empty."""
        kind = "chat.completion.chunk" if self._job.chat else "text_completion"
        return event({**self._envelope(kind, []), "usage": usage.plain()})


def model_list(names: Sequence[str], created: int, context_length: int) -> bytes:
    """Return the body of `/v1/models`."""
    return orjson.dumps(
        {
            "object": "list",
            "data": [model_card(name, created, context_length, root=names[0]) for name in names],
        }
    )


def model_card(name: str, created: int, context_length: int, *, root: str) -> dict[str, Any]:
    """Return one row of `/v1/models`; `max_model_len` as vLLM has it."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tongguan",
        "root": root,
        "parent": None,
        "max_model_len": context_length,
    }
