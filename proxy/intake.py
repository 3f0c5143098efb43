"""The sealed door's intake.

An envelope is collected under a shared budget and opened in the order the format demands; nothing
unverified leaves this file. What the outer request line and fields say is not forwarded, but for
trace context and request id (docs/envelope.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from proxy.errors import RequestError
from proxy.sm4.envelope import EnvelopeError

if TYPE_CHECKING:
    from proxy.context import Context
    from proxy.http.http1 import RequestHead
    from proxy.sm4.opener import OpenedRequest, RequestOpener
    from proxy.sm4.replay import Verdict

_MESSAGES = {
    "envelope_rejected": "the envelope was not accepted",
    "envelope_stale": "the envelope is outside the time window; see Date",
    "envelope_cache_full": "no room to remember this envelope; try again",
    "envelope_busy": "too many sealed bodies are waiting to be verified; try again",
}
SMALL_BYTES = 64 << 10
_CARRIED = (
    (b"accept", b"Accept"),
    (b"x-request-id", b"X-Request-Id"),
    (b"tracestate", b"tracestate"),
)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


class Waiter(Protocol):
    """Who an intake tells that it can go on."""

    def envelope_ready(self) -> None:
        """Ask again: `problem` is set, or `finish` has something to return."""


class SealedIntake:
    """Collects one envelope. Every failure of it is counted by reason and answered by code.

    `problem` is a refusal found between two calls; it is raised by the next one.
    """

    __slots__ = (
        "_asked",
        "_context",
        "_held",
        "_noted",
        "_opened",
        "_opener",
        "_peer",
        "_shared",
        "_waiter",
        "content_type",
        "lines",
        "problem",
    )

    def __init__(self, context: Context, peer: str, head: RequestHead) -> None:
        self._context = context
        self._peer = peer
        self._held = 0
        self._waiter: Waiter | None = None
        self._opened: OpenedRequest | None = None
        self._noted = False  # among those lately taken
        self._asked = False  # the store that replicas share
        self.problem: RequestError | None = None
        self.content_type = b""
        self.lines = b"".join(
            b"%b: %b\r\n" % (name, head.fields[key]) for key, name in _CARRIED if key in head.fields
        )
        fields = head.fields
        receiver = context.receiver
        assert receiver is not None, "the sealed door is open only with keys"
        self._shared = receiver.shared_store
        if head.method != b"POST":
            raise self._failure(EnvelopeError("bad_carrier"))
        try:
            self._opener: RequestOpener = receiver.begin(
                # A list of types is no type of ours.
                content_type=None
                if b"content-type" in head.repeated
                else _text(fields.get(b"content-type")),
                content_encoding=_text(fields.get(b"content-encoding")),
                model_id=_text(fields.get(b"x-model-id")),
                model_id_repeated=b"x-model-id" in head.repeated,
                tenant_id=_text(fields.get(b"x-tenant-id")),
            )
        except EnvelopeError as problem:
            raise self._failure(problem) from None

    def feed(self, data: bytes, waiter: Waiter) -> None:
        """Take body bytes. Raises RequestError."""
        context = self._context
        if self._held + len(data) > context.budget.share_bytes:
            raise too_large_sealed(context)
        if not context.budget.take(self._peer, len(data)):
            context.counters.limit_hits["envelope.unverified_bytes"] += 1
            raise self._failure(EnvelopeError("busy"))
        self._held += len(data)
        try:
            self._opener.feed(data, context.clock.wall_ms())
        except EnvelopeError as problem:
            raise self._failure(problem, self._opener.envelope) from None
        if self._opener.admitted and not self._noted:  # a stream's frame 0
            self._note()
        if self._shared:
            self._ask_store(waiter)

    def finish(self, waiter: Waiter) -> OpenedRequest | None:
        """Open what was collected. Raises RequestError, or SealedRefusalError from step 7 on.

        None: somebody else has to say something first; `waiter` is told when it may call again.
        """
        context = self._context
        opened = self._opened
        if opened is None:
            if self.problem is not None:
                raise self.problem
            try:
                opened = self._opener.finish(context.clock.wall_ms())
            except EnvelopeError as problem:
                raise self._failure(problem, self._opener.envelope) from None
            if not self._noted:
                self._note()
            if opened is None:
                self._ask(waiter)
                return None
        self._opened = None
        context.counters.envelopes_opened += 1
        self.content_type = opened.content_type.encode()
        if self.content_type:
            self.lines += b"Content-Type: " + self.content_type + b"\r\n"
        return opened

    def _note(self) -> None:
        """Remember for a moment that this peer's envelope was taken: see `alarms`."""
        self._noted = True
        context = self._context
        context.lately_taken.add(self._opener.envelope, self._peer, context.clock.mono_ns())

    def _ask(self, waiter: Waiter) -> None:
        """Ask for what the opener waits for. Raises RequestError where nobody can say."""
        if self._shared and not self._asked:
            self._ask_store(waiter)
            return
        check = self._opener.check
        if check is None:
            self._waiter = waiter  # the store has been asked
        elif self._context.signatures.submit(check, self._checked):
            self._waiter = waiter
        else:
            self._context.counters.limit_hits["envelope.signature_queue"] += 1
            raise self._failure(EnvelopeError("busy"))

    def _ask_store(self, waiter: Waiter) -> None:
        """Ask the shared store, once, when the tag of a single or of frame 0 was good."""
        asked = self._opener.to_insert
        if asked is None or self._asked:
            return
        self._asked = True
        self._waiter = waiter
        store = self._context.shared_replay
        assert store is not None, "a receiver with a shared store has one"
        store.insert(*asked, self._inserted)

    def _inserted(self, verdict: Verdict) -> None:
        """Take the shared store's word."""
        waiter = self._waiter
        if waiter is None:
            return  # over by now
        try:
            self._opened = self._opener.inserted(verdict, self._context.clock.wall_ms())
            if self._opener.check is not None:
                self._ask(waiter)
                return
            if self._opened is None:
                return  # the body is still coming
        except EnvelopeError as problem:
            self.problem = self._failure(problem, self._opener.envelope)
        except RequestError as problem:
            self.problem = problem
        self._waiter = None
        waiter.envelope_ready()

    def _checked(self, valid: bool) -> None:  # noqa: FBT001 - as the worker calls
        """Take the answer to the opener's check."""
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return  # over by now
        try:
            self._opened = self._opener.checked(valid=valid)
        except EnvelopeError as problem:
            self.problem = self._failure(problem)
        waiter.envelope_ready()

    def facts(self, opened: OpenedRequest) -> tuple[str, int, bool, bool]:
        """Return what the audit record says: kid, suite, whether signed, whether with a MAC."""
        return opened.kid.hex(), opened.suite, opened.signature, opened.mac

    def check_time(self) -> None:
        """Refuse what is slower than the window before it is verified. Raises RequestError."""
        if self._opener.overdue(self._context.clock.wall_ms()):
            raise self._failure(EnvelopeError("stale"))

    def opened(self) -> None:
        """Give the share of a small body back; a large one keeps it until it has been taken."""
        if self._held <= SMALL_BYTES:
            self.release()

    def release(self) -> None:
        """Give the budget's share back; what is still asked for is of no use any more."""
        self._waiter = None
        self._context.budget.give_back(self._peer, self._held)
        self._held = 0

    def _failure(self, problem: EnvelopeError, envelope: bytes = b"") -> RequestError:
        self._context.envelope_failed(self._peer, problem.reason, envelope)
        refusal = RequestError(problem.code, _MESSAGES[problem.code])
        if problem.sealer is not None:
            return SealedRefusalError(refusal, problem)
        return refusal


def too_large_sealed(context: Context) -> RequestError:
    """Return the refusal of a sealed body over a peer's share, counted: trying again is no use."""
    context.counters.limit_hits["envelope.unverified_bytes"] += 1
    share = context.budget.share_bytes
    return RequestError(
        "payload_too_large",
        f"a sealed body is at most {share} bytes, an eighth of envelope.unverified_bytes",
    )


class SealedRefusalError(RequestError):
    """A refusal from step 7 on: its answer is sealed."""

    def __init__(self, refusal: RequestError, problem: EnvelopeError) -> None:
        super().__init__(refusal.code, refusal.message)
        self.sealer = problem.sealer
