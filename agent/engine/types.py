"""What the engine promises to the HTTP surface: types only, no torch.

A prompt goes in as token ids, text comes out as a stream of `Delta`s. `Engine.submit` never blocks;
every generation ends with exactly one delta whose `finish_reason` is set, whatever happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FinishReason = Literal["stop", "length", "cancelled", "error"]
QOS_CLASSES = ("P0", "P1", "P2")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request picks its tokens.

    `max_tokens` >= 1; `temperature` 0..2, 0 is greedy; `top_p` in (0, 1]; `seed` any integer, None
    draws a fresh one; `stop` up to 16 non-empty strings. Raises ValueError naming the field.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError("max_tokens: must be at least 1")
        # Written so that NaN fails too.
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError("temperature: must be from 0 to 2")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError("top_p: must be above 0 and at most 1")
        if len(self.stop) > 16 or not all(self.stop):
            raise ValueError("stop: at most 16 strings, none empty")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded; `created` is Unix seconds of the model file, `dtype` that of the weights."""

    id: str
    path: str
    architecture: str
    context_length: int
    vocab_size: int
    layers: int
    dtype: str
    device: str
    parameters: int
    created: int


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of one generation.

    `text` is whole characters only and free of stop strings; it may be empty while a character or a
    possible stop string is incomplete. `token_ids` are this step's tokens, the end token included.
    `error` is set exactly when `finish_reason` is "error".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start (`_total`) and gauges of now.

    `prefix_tokens_queried_total` counts prompt tokens looked up in the prefix cache,
    `prefix_tokens_hit_total` those found. `step_seconds_total` is time spent in model steps.
    `kv_blocks_touched` were ever written; `kv_blocks_promised` is what all requests together may
    need in the end; `classes`: how many run and wait, by class. `recomputed_tokens_total` were
    dropped from the KV cache by preemption; the prefix cache may have given some of them back.
    """

    running: int
    waiting: int
    waiting_limit: int
    sequences_limit: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_tokens_queried_total: int
    prefix_tokens_hit_total: int
    preemptions_total: int
    steps_total: int
    step_seconds_total: float
    finished_total: Mapping[str, int]
    kv_block_bytes: int = 0
    kv_block_tokens: int = 0
    kv_blocks_touched: int = 0
    kv_blocks_promised: int = 0
    classes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    recomputed_tokens_total: int = 0


class EngineError(Exception):
    """Base of what the engine raises on purpose."""


class ModelFileError(EngineError):
    """A model file or folder is truncated, malformed or of a kind this engine does not run."""


class QueueFull(EngineError):  # noqa: N818 - a state, as queue.Full is
    """The bounded waiting queue is full; try again later."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the waiting queue is full ({limit} requests)")
        self.limit = limit


class ContextExceeded(EngineError):  # noqa: N818 - named as OpenAI names it
    """Prompt plus `max_tokens` do not fit in the context."""

    def __init__(self, prompt_tokens: int, max_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}; "
            f"together they may be at most {context_length}"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context_length = context_length


class PromptTooLong(EngineError):  # noqa: N818 - a state
    """A text has so many bytes that it is at least `tokens_min` tokens, whatever they are."""

    def __init__(self, tokens_min: int) -> None:
        super().__init__(f"the prompt has at least {tokens_min} tokens")
        self.tokens_min = tokens_min


class EngineClosed(EngineError):  # noqa: N818 - a state
    """The engine has been closed; nothing more is taken."""


class Generation(Protocol):
    """A submitted request."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache; final once the first delta has come."""
        ...

    def cancel(self) -> None:
        """Ask for an end before the next step; idempotent, any thread.

        The last delta then says "cancelled", unless the generation had ended by itself.
        """
        ...


class Tokenizer(Protocol):
    """Text to ids and back, as the model file says."""

    @property
    def vocab_size(self) -> int:
        """Count of ids, added tokens included."""
        ...

    def encode(self, text: str, *, tokens_max: int | None = None) -> list[int]:
        """Return ids of `text`, with a leading BOS where the model wants one.

        Raises `PromptTooLong` where the length alone says that `tokens_max` is passed.
        """
        ...

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokens_max: int | None = None,
    ) -> list[int]:
        """Return ids of a conversation; raises `ChatTemplateError` with the template's message.

        Raises `PromptTooLong` as `encode` does.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text of `token_ids`; special tokens give nothing."""
        ...


class ChatTemplateError(EngineError):
    """The model's chat template refused the messages, or there is no template."""


class Engine(Protocol):
    """A loaded model that generates."""

    @property
    def info(self) -> ModelInfo:
        """What is loaded."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; thread safe."""
        ...

    @property
    def placement(self) -> Mapping[str, object]:
        """How operators are held and where they run (`placement.placement`); never changes."""
        ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_delta: Callable[[Delta], None],
        qos_class: str = "P1",
        tenant: str = "",
    ) -> Generation:
        """Queue a request and return at once; thread safe.

        Tenants of a class share it fairly, and share no prefixes.

        `on_delta` is called from the engine thread and must not block. Raises `QueueFull`,
        `ContextExceeded`, `EngineClosed`, and ValueError for an empty prompt, an id outside the
        vocabulary or an unknown class.
        """
        ...

    def stats(self) -> EngineStats:
        """Return counters and gauges; thread safe."""
        ...

    def close(self) -> None:
        """End every generation as cancelled and stop the engine thread; idempotent."""
        ...
