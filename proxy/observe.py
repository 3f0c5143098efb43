"""What is seen of a request and its answer, for the record: hashes, usage, token ids.

Looks at bytes that pass and never changes them, with one exception: where the engine can report
token ids it is asked for them, and what that adds to the answer is cut out again
(docs/sidecar.md, "What the engine is asked"). What cannot be seen exactly is left unknown.

Bounds: bodies held for hashing count against one limit for all requests; beyond it a request goes
on unobserved, and that is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.audit.hashes import OutputHasher, output_hash, params_hash, prompt_hash, whole_hash
from proxy.audit.record import usage_members
from proxy.exchange import Exchange
from proxy.http.body import ask_token_ids, cut_answer, view
from proxy.http.sse import StreamObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.http.http1 import ResponseHead

WHOLE_ANSWER_BYTES = 8 << 20  # an answer is held back for cutting up to this length
NO_FIELDS: frozenset[str] = frozenset()
_ACCEL = b"X-Accel-Buffering: no\r\n"
_CACHE = b"Cache-Control: no-cache, no-transform\r\n"


class Observing:
    """What observations share: whether there is a record to fill, and the bound on held bytes."""

    __slots__ = (
        "enabled",
        "event_bytes",
        "held_bytes",
        "held_bytes_max",
        "long_events",
        "plain_hashes",
        "unobserved",
    )

    def __init__(
        self, *, enabled: bool, plain_hashes: bool, held_bytes_max: int, event_bytes: int
    ) -> None:
        self.enabled = enabled
        self.plain_hashes = plain_hashes
        self.held_bytes_max = held_bytes_max
        self.event_bytes = event_bytes
        self.held_bytes = 0
        self.unobserved = 0
        self.long_events = 0

    def roomy(self, size: int) -> bool:
        """Say whether a body that streams through may be kept: half the bound is for others."""
        return self.held_bytes + size <= self.held_bytes_max // 2

    def hold(self, size: int) -> bool:
        """Take `size` bytes of the bound; False (and counted) when they are not there."""
        if self.held_bytes + size > self.held_bytes_max:
            self.unobserved += 1
            return False
        self.held_bytes += size
        return True


class Observation(Exchange):
    """The layer that looks: at one request, and at its answer."""

    shared: Observing

    model: str | None = None
    served_model: str | None = None
    prompt_hash: str | None = None
    params_hash: str | None = None
    body_hash: str | None = None  # where the prompt could not be told from the rest
    token_ids: Sequence[int] | None = None
    envelope: tuple[str, int, bool, bool] | None = None  # kid, suite, signed, with a MAC
    answer_head: ResponseHead | None = None
    content_type = ""
    event_stream = False
    _event_begun = False  # in a stream that cannot be read

    prompt_key: bytes | None = None
    _held = 0
    _observed = False
    _request_body = b""
    _unasked = b""
    _body_hasher: OutputHasher | None = None
    _request_pieces: list[bytes] | None = None
    _answer_pieces: list[bytes] | None = None
    _hasher: OutputHasher | None = None
    _output: tuple[str | None, int | None] = (None, None)
    _stream: StreamObserver | None = None
    _reported: dict[str, Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._added = NO_FIELDS

    # -- the request

    def observe_request(self, body: bytes, *, ask_ids: bool) -> bytes:
        """Keep a whole request body to look at, and return it as it is to be sent.

        Whatever its type says: an engine may read JSON that calls itself something else. Where no
        room is left to keep it, it is looked at here and now.
        """
        if not body or not self.shared.enabled:
            return body
        self._observed = True
        shared, size = self.shared, len(body)
        if shared.held_bytes + size <= shared.held_bytes_max:
            shared.held_bytes += size
            self._held += size
            self._request_body = body
        else:
            self._look(body)
        if not ask_ids:
            return body
        seen = view(body)
        if seen is None or seen.prompt is None:
            return body
        asked = ask_token_ids(body, seen, stream=seen.stream)
        if asked is None:
            return body
        self._unasked = body
        body, self._added = asked
        return body

    def unask(self) -> bytes:
        """Return the request body as it came: who gets it now is not to be asked for ids."""
        self._added = NO_FIELDS
        return self._unasked

    def observe_begins(self, pieces: list[bytes]) -> None:
        """Follow a body that streams through; `pieces` have come already."""
        if not self.shared.enabled:
            return
        self._observed = True
        self._request_pieces = []
        if self._keyed():
            self._body_hasher = OutputHasher(self._hash_key())
        for piece in pieces:
            self.observe_piece(piece)

    def observe_piece(self, data: bytes) -> None:
        """Follow one more piece."""
        if self._body_hasher is not None:
            self._body_hasher.feed_bytes(data)
        if self._request_pieces is None:
            return
        if self.shared.roomy(len(data)) and self._hold(len(data)):
            self._request_pieces.append(data)
        else:
            self._drop_pieces()

    def _drop_pieces(self) -> None:
        """Too much to keep: there will be a hash of the whole body, none of its prompt."""
        self._request_pieces = None
        self.shared.held_bytes -= self._held
        self._held = 0

    def observe_whole(self) -> None:
        """Note that a body that streamed through is whole."""
        pieces, self._request_pieces = self._request_pieces, None
        if pieces:
            self._request_body = b"".join(pieces)

    # -- the answer

    def observe_answer(self, head: ResponseHead) -> None:
        """Take the answer's head and decide how its body is followed."""
        self.answer_head = head
        kind = head.fields.get(b"content-type", b"")
        self.content_type = kind.decode("latin-1")
        lower = kind.lower()
        readable = b"content-encoding" not in head.fields
        if lower.startswith(b"text/event-stream"):
            self.event_stream = True
            if readable:
                hasher = None
                if self._keyed() and head.status < 300:
                    hasher = OutputHasher(self._hash_key())
                follow: Callable[[int, str], None] | None = None
                if self.shared.enabled:
                    # Not a method of ours: with that, each stream would be a cycle of references,
                    # which stays until the collector comes by.
                    follow = _unheard if hasher is None else hasher.feed
                self._stream = StreamObserver(follow, self._added, self.shared.event_bytes)
                self._hasher = hasher
        elif self._observed and readable and b"json" in lower:
            self._answer_pieces = []

    @property
    def changes_length(self) -> bool:
        """Say whether bytes may be cut out of the answer as it goes by."""
        return bool(self._added)

    @property
    def needs_whole_answer(self) -> bool:
        """Say whether the answer has to be whole before a part of it is cut out."""
        head = self.answer_head
        return (
            bool(self._added)
            and not self.event_stream
            and head is not None
            and (head.content_length or 0) <= WHOLE_ANSWER_BYTES
        )

    @property
    def stream_fields(self) -> bytes:
        """Header fields that an event stream gets when the upstream gave none of that name."""
        head = self.answer_head
        if not self.event_stream or head is None:
            return b""
        fields = head.fields
        return (b"" if b"x-accel-buffering" in fields else _ACCEL) + (
            b"" if b"cache-control" in fields else _CACHE
        )

    def observe_data(self, data: bytes) -> bytes:
        """Follow answer bytes; return those to hand on now."""
        stream = self._stream
        if stream is not None:
            return stream.feed(data)
        pieces = self._answer_pieces
        if pieces is not None:
            shared, size = self.shared, len(data)
            if shared.held_bytes + size <= shared.held_bytes_max:
                shared.held_bytes += size
                self._held += size
                pieces.append(data)
            else:
                shared.unobserved += 1
                self._answer_pieces = None
        elif self.event_stream:
            self._event_begun = True  # nobody can say where it ends
        return data

    @property
    def between_events(self) -> bool:
        """Say whether the last byte handed on closed an event, or none was begun."""
        stream = self._stream
        return not self._event_begun if stream is None else stream.between_events

    def observe_end(self) -> bytes:
        """Note the regular end of an answer that was handed on as it came; return the rest."""
        stream = self._stream
        if stream is not None:
            rest = stream.finish_feed()
            self._reported = stream.usage
            self.served_model = stream.model or None
            if stream.token_ids and not stream.lost:
                self.token_ids = stream.token_ids
            return rest
        return b""

    def without_ids(self, body: bytes) -> bytes:
        """Look at an answer that was held back and return it without what we asked for."""
        if not self._added:
            return body
        self._answer_pieces = None
        return self._read_answer(body)

    def _read_answer(self, body: bytes) -> bytes:
        cut, facts = cut_answer(body, self._added)
        self._reported = facts.usage
        self.served_model = facts.model or None
        if facts.texts and self._keyed():
            self._output = output_hash(self._hash_key(), facts.texts)
        self.token_ids = facts.token_ids or None
        return cut

    # -- the record

    def complete(self) -> None:
        """Do what can wait until the client has its answer: hash the request, read the answer."""
        if self._request_body:
            self._look(self._request_body)
        if self._body_hasher is not None and self.prompt_hash is None:
            self.body_hash = self._body_hasher.finish()[0]
        if self._answer_pieces:
            self._read_answer(b"".join(self._answer_pieces))

    def _look(self, body: bytes) -> None:
        """Hash a request: prompt and the rest apart, or all of it where that cannot be done."""
        seen = view(body)
        if seen is not None:
            self.model = seen.model or None
        if not self._keyed():
            return
        key = self._hash_key()
        if seen is None or seen.prompt is None:
            self.body_hash = whole_hash(key, body)
            return
        start, end = seen.prompt
        heat = seen.temperature
        model = seen.model.encode("utf-8", "replace")
        temperature = b"" if heat is None else body[heat[0] : heat[1]]
        self.prompt_hash = prompt_hash(key, body[start:end], model, temperature)
        rest = b"".join([body[a:b] for a, b in seen.rest])
        self.params_hash = params_hash(key, rest)

    def output(self) -> tuple[str | None, int | None]:
        """Return the output's hash and length, once; None: nothing was handed on, or unknown."""
        hasher, self._hasher = self._hasher, None
        if hasher is None:
            return self._output
        stream = self._stream
        if stream is not None and stream.lost:
            self.shared.long_events += stream.too_long
            return None, None  # content went by that was not read
        return hasher.finish()

    def usage(self) -> dict[str, int] | None:
        """Return usage as the upstream reported it."""
        reported = self._reported
        return _usage(reported) if reported else None

    def _keyed(self) -> bool:
        """Say whether there are hashes: not without the tenant's key, but in plain mode."""
        shared = self.shared
        return shared.enabled and (self.prompt_key is not None or shared.plain_hashes)

    def _hash_key(self) -> bytes | None:
        return None if self.shared.plain_hashes else self.prompt_key

    def _hold(self, size: int) -> bool:
        if not self.shared.hold(size):
            return False
        self._held += size
        return True

    def release(self) -> None:
        """Give the held bytes back."""
        if self._held:
            self.shared.held_bytes -= self._held
            self._held = 0
        self._answer_pieces = self._request_pieces = None
        self._request_body = b""


def _unheard(index: int, text: str) -> None:
    """Content that is not hashed."""


def _usage(reported: dict[str, Any]) -> dict[str, int]:
    get = reported.get
    prompt, completion = get("prompt_tokens_details"), get("completion_tokens_details")
    return usage_members(
        get("prompt_tokens"),
        get("completion_tokens"),
        get("total_tokens"),
        prompt.get("cached_tokens") if isinstance(prompt, dict) else None,
        completion.get("reasoning_tokens") if isinstance(completion, dict) else None,
    )
