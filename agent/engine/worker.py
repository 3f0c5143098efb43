"""The engine thread: takes requests, runs steps, delivers deltas.

    submit (any thread) -> inbox -> [ cancel | plan | forward | pick | deliver ] -> on_delta

All of the scheduler and the model belong to this one thread; the lock guards the inbox and the
counters alone. A step that fails ends its sequences with "error" and nothing else. Every generation
gets exactly one final delta, after its slot and blocks have been freed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING

import torch

from agent.engine.blocks import tenant_root
from agent.engine.model import Span
from agent.engine.sampler import pick
from agent.engine.scheduler import Seq
from agent.engine.text import TextStream
from agent.engine.types import (
    QOS_CLASSES,
    ContextExceeded,
    Delta,
    EngineClosed,
    EngineStats,
    QueueFull,
)
from agent.memory.admission import predicted_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.engine.model import Model
    from agent.engine.scheduler import Scheduler, Work
    from agent.engine.tokenizer import TextTokenizer
    from agent.engine.types import ModelInfo, Sampling

_log = logging.getLogger(__name__)
_JOIN_S = 30.0


class _Request:
    """A generation, as the submitter and the engine thread share it."""

    __slots__ = ("_wake", "cancelled", "on_delta", "sampling", "seed", "seq", "text")

    def __init__(
        self,
        seq: Seq,
        sampling: Sampling,
        on_delta: Callable[[Delta], None],
        wake: Callable[[], None],
    ) -> None:
        self.seq = seq
        self.sampling = sampling
        self.on_delta = on_delta
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self.text = TextStream(sampling.stop)
        self.cancelled = False
        self._wake = wake

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return self.seq.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache; final once the first delta has come."""
        return self.seq.cached_tokens

    def cancel(self) -> None:
        """Ask for an end before the next step; idempotent, any thread."""
        self.cancelled = True
        self._wake()


class TorchEngine:
    """Implements `types.Engine` on a `Model`, a `Scheduler` and one thread.

    `max_waiting` bounds requests that are accepted and not running; `threads`: CPU threads a step
    may use; `placement`: what `/v1/node/plan` shows.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: TextTokenizer,
        model: Model,
        scheduler: Scheduler,
        *,
        max_sequences: int,
        max_waiting: int,
        threads: int,
        placement: Mapping[str, object] | None = None,
    ) -> None:
        self.info = info
        self.placement = placement or {}
        self.tokenizer = tokenizer
        self._model = model
        self._scheduler = scheduler
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._threads = threads
        capacity = scheduler.pool.total * scheduler.pool.block_size
        self._context = min(info.context_length, capacity)
        kv = model.kv
        self._block_bytes = kv.element_size() * kv.numel() // scheduler.pool.total
        # An accelerator's pool is there from the start; a CPU's pages come when they are written.
        self._all_touched = model.device.type != "cpu"
        self._promised = 0
        self._classes = scheduler.by_class()
        self._requests: dict[Seq, _Request] = {}
        self._condition = threading.Condition()
        self._inbox: list[_Request] = []
        self._closing = False
        self._arrivals = 0
        self._waiting = 0
        self._running = 0
        self._prompt_tokens = 0
        self._generated = 0
        self._steps = 0
        self._step_seconds = 0.0
        self._finished: dict[str, int] = {
            "stop": 0,
            "length": 0,
            "cancelled": 0,
            "error": 0,
        }
        self._thread = threading.Thread(target=self._run, name="tongguan-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_delta: Callable[[Delta], None],
        qos_class: str = "P1",
        tenant: str = "",
    ) -> _Request:
        """Queue a request and return at once; see `types.Engine.submit`."""
        if qos_class not in QOS_CLASSES:
            raise ValueError(f"qos_class: one of {', '.join(QOS_CLASSES)}")
        tokens = list(prompt_ids)
        if not tokens:
            raise ValueError("prompt: must have at least one token")
        # First what costs nothing: the caller may be an event loop.
        total = len(tokens) + sampling.max_tokens
        if total > self._context:
            raise ContextExceeded(len(tokens), sampling.max_tokens, self._context)
        if min(tokens) < 0 or max(tokens) >= self.info.vocab_size:
            raise ValueError(f"prompt: token ids must be from 0 to {self.info.vocab_size - 1}")
        with self._condition:
            if self._closing:
                raise EngineClosed("the engine is closed")
            if len(self._inbox) + self._waiting >= self._max_waiting:
                raise QueueFull(self._max_waiting)
            self._arrivals += 1
            seq = Seq(
                rank=QOS_CLASSES.index(qos_class),
                arrival=self._arrivals,
                tokens=tokens,
                prompt_tokens=len(tokens),
                tokens_max=total,
                tenant=tenant,
                root=tenant_root(self._scheduler.pool.root, tenant),
            )
            request = _Request(seq, sampling, on_delta, self._wake)
            self._promised += self._predicted_blocks(request)
            self._inbox.append(request)
            self._condition.notify()
        return request

    def stats(self) -> EngineStats:
        """Return counters and gauges; see `types.Engine.stats`."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        with self._condition:
            return EngineStats(
                running=self._running,
                waiting=self._waiting + len(self._inbox),
                waiting_limit=self._max_waiting,
                sequences_limit=self._max_sequences,
                kv_blocks_total=pool.total,
                kv_blocks_used=pool.held,
                kv_blocks_cached=pool.cached,
                prompt_tokens_total=self._prompt_tokens,
                generation_tokens_total=self._generated,
                prefix_tokens_queried_total=scheduler.prefix_queried,
                prefix_tokens_hit_total=scheduler.prefix_hit,
                preemptions_total=scheduler.preemptions,
                steps_total=self._steps,
                step_seconds_total=self._step_seconds,
                finished_total=dict(self._finished),
                kv_block_bytes=self._block_bytes,
                kv_block_tokens=pool.block_size,
                kv_blocks_touched=pool.total if self._all_touched else pool.touched,
                kv_blocks_promised=self._promised,
                classes=self._classes,
                recomputed_tokens_total=scheduler.recomputed_tokens,
            )

    def close(self) -> None:
        """End every generation as cancelled and stop the engine thread; idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _predicted_blocks(self, request: _Request) -> int:
        tokens = predicted_tokens(request.prompt_tokens, request.sampling.max_tokens)
        return self._scheduler.pool.blocks_for(tokens)

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)
            while self._turn():
                pass
        except Exception as problem:  # noqa: BLE001 - a shell's top: nobody must wait for ever
            _log.critical("the engine thread failed with %s", type(problem).__name__)
        finally:
            with self._condition:
                self._closing = True
                left = [*self._requests.values(), *self._inbox]
                self._inbox.clear()
            self._requests.clear()
            self._send([(r, Delta("", (), "error", "the engine has stopped")) for r in left])

    def _turn(self) -> bool:
        """Take what has arrived, drop what was cancelled, run one step; False when closed."""
        with self._condition:
            while not (self._inbox or self._requests or self._closing):
                self._condition.wait()
            for request in self._inbox:
                self._requests[request.seq] = request
                self._scheduler.add(request.seq)
            self._inbox.clear()
            self._count()
            closing = self._closing
        gone = [r for r in self._requests.values() if closing or r.cancelled]
        self._finish([(r, Delta(r.text.finish(), (), "cancelled")) for r in gone])
        if self._requests and not closing:
            self._guarded_step()
        return not closing

    def _guarded_step(self) -> None:
        work: list[Work] = []
        try:
            work = self._scheduler.plan()
            deltas = self._step(work)
        except Exception as problem:  # noqa: BLE001 - a shell's top: the engine outlives a step
            # The type alone: a message might quote what was computed on.
            kind = type(problem).__name__
            _log.error("a model step failed with %s", kind)
            failed = [self._requests[w.seq] for w in work] or list(self._requests.values())
            delta = Delta("", (), "error", f"the model step failed ({kind})")
            self._finish([(request, delta) for request in failed])
        else:
            self._finish(deltas)

    def _step(self, work: list[Work]) -> list[tuple[_Request, Delta]]:
        began = time.perf_counter()
        spans = [
            Span(w.seq.tokens[w.start : w.start + w.count], w.start, w.seq.table, w.samples)
            for w in work
        ]
        logits = self._model.forward(spans)
        for piece in work:
            self._scheduler.computed(piece)
        sampled = [self._requests[w.seq] for w in work if w.samples]
        deltas = [(r, self._next(r, row)) for r, row in zip(sampled, logits, strict=True)]
        with self._condition:
            self._steps += 1
            self._step_seconds += time.perf_counter() - began
        return deltas

    def _next(self, request: _Request, logits: torch.Tensor) -> Delta:
        """Pick a sequence's next token, append it and return what to send."""
        seq, sampling = request.seq, request.sampling
        index = len(seq.tokens) - seq.prompt_tokens
        if index == 0:
            self._prompt_tokens += seq.prompt_tokens
        try:
            token = pick(logits, sampling, request.seed, index)
        except ArithmeticError as problem:
            return Delta("", (), "error", str(problem))
        seq.tokens.append(token)
        self._generated += 1
        if token in self.tokenizer.ends:
            return Delta(request.text.finish(), (token,), "stop")
        text = request.text.push(self.tokenizer.piece(token))
        if request.text.stopped:
            return Delta(text, (token,), "stop")
        if index + 1 == sampling.max_tokens:
            return Delta(text + request.text.finish(), (token,), "length")
        return Delta(text, (token,))

    def _finish(self, deltas: list[tuple[_Request, Delta]]) -> None:
        """Free what ended, then send: who sees an end finds the slot and the blocks free."""
        with self._condition:
            for request, delta in deltas:
                if delta.finish_reason is not None:
                    self._finished[delta.finish_reason] += 1
                    self._promised -= self._predicted_blocks(request)
                    self._scheduler.remove(request.seq)
                    del self._requests[request.seq]
            self._count()
        self._send(deltas)

    def _send(self, deltas: list[tuple[_Request, Delta]]) -> None:
        for request, delta in deltas:
            try:
                request.on_delta(delta)
            except Exception as problem:  # noqa: BLE001 - the callback is the caller's code
                _log.error("a delta callback failed with %s", type(problem).__name__)
                request.cancelled = True

    def _count(self) -> None:
        self._waiting = self._scheduler.waiting
        self._running = len(self._scheduler.running)
        self._classes = self._scheduler.by_class()
