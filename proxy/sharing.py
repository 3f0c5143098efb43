"""The replay store that replicas of one audience share: Redis, asked over a connection of its own.

Who may take an envelope is who gets `SET key NX PX` answered with OK. Questions of the same moment
travel in one pipeline; nothing is ever asked twice, since a repeated question would find its own
entry. What is not answered in time is refused, and so is everything while the store is lost: no
answer is never a yes.

A store that has lost entries is not the store it was. One that came back as another process
(restarted, or failed over) starts a fence as a sidecar's own start does; one that may evict keys
is not used at all.

One task owns the connection; all else is called on the loop. Never imported without
`envelope.replay_store = "redis"`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.sm4.replay import Verdict

# What waits for an answer, together; beyond it 503 envelope_busy.
PENDING_MAX = 4096
BATCH_MAX = 256
RECONNECT_S = 0.5
IDLE_S = 1.0  # a store that is not asked is asked whether it is there
# An entry outlives what could be accepted by this: 130 s for a window of 60 s.
SLACK_MS = 10_000
_PREFIX = b"smx1:"

log = logging.getLogger(__name__)


class StoreUnfitError(Exception):
    """The store is there, but cannot be relied on."""


class _Question(NamedTuple):
    key: bytes
    done: Callable[[Verdict], None]


class SharedReplay:
    """See the module. `on_renewed` is called when the store came back as another process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        url: str,
        password: str | None,
        *,
        window_ms: int,
        timeout_s: float,
        on_renewed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._url = url
        self._password = password
        self._life_ms = 2 * window_ms + SLACK_MS
        self._timeout_s = timeout_s
        self._on_renewed = on_renewed
        self._run_id = ""
        self._questions: list[_Question] = []
        self._asked = 0  # questions on their way
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.available = False
        self.losses = 0
        self.refusals = 0

    @property
    def pending(self) -> int:
        """Questions not answered yet."""
        return len(self._questions) + self._asked

    def insert(self, kid: bytes, nonce: bytes, done: Callable[[Verdict], None]) -> None:
        """Ask for `(kid, nonce)`; `done` is called later, never within this call."""
        if not self.available:
            self._loop.call_soon(done, "store_lost")
        elif self.pending >= PENDING_MAX:
            self.refusals += 1
            self._loop.call_soon(done, "busy")
        else:
            key = b"%b%b:%b" % (_PREFIX, kid.hex().encode(), nonce.hex().encode())
            self._questions.append(_Question(key, done))
            self._wake.set()

    def start(self) -> None:
        """Connect, and keep connected."""
        self._task = self._loop.create_task(self._run(), name="shared replay store")

    async def close(self) -> None:
        """End the task; what was asked is answered as lost."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._connected()
                except (RedisError, OSError, StoreUnfitError) as problem:
                    self._lost(problem)
                await asyncio.sleep(RECONNECT_S)
        finally:
            self._give_up()

    def _lost(self, problem: Exception) -> None:
        if self.available or not self.losses:
            self.losses += 1
            log.critical("replay store lost, sealed requests are refused: %s", problem)
        self._give_up()

    def _give_up(self) -> None:
        """Answer all that waits with the store's loss."""
        self.available = False
        questions, self._questions = self._questions, []
        for question in questions:
            self._loop.call_soon(question.done, "store_lost")

    async def _connected(self) -> None:
        """Serve one connection until it is lost, which raises."""
        client = Redis.from_url(
            self._url,
            password=self._password,
            single_connection_client=True,
            socket_timeout=self._timeout_s,
            socket_connect_timeout=self._timeout_s,
            # A repeated SET NX would find what it has set itself.
            retry=Retry(NoBackoff(), 0),
        )
        try:
            await self._examine(client)
            if not self.available:
                log.info("replay store is there")
            self.available = True
            while True:
                await self._serve(client)
        finally:
            await client.aclose()

    async def _examine(self, client: Redis) -> None:
        """Raise `StoreUnfitError` for a store that may forget; note one that has."""
        facts: dict[str, Any] = await client.info()
        policy = facts.get("maxmemory_policy", "noeviction")
        if facts.get("maxmemory") and policy != "noeviction":
            raise StoreUnfitError(
                f"maxmemory-policy is {policy}: an entry that was evicted could be taken again; "
                "set noeviction"
            )
        if facts.get("role", "master") != "master":
            raise StoreUnfitError("a replica takes no entries; name the master")
        run_id = str(facts.get("run_id", ""))
        if self._run_id and run_id != self._run_id:
            log.warning("replay store is another process now; it may have lost entries: fence")
            self._on_renewed()
        self._run_id = run_id

    async def _serve(self, client: Redis) -> None:
        """Ask what is to be asked, or after a moment whether the store is there."""
        try:
            async with asyncio.timeout(IDLE_S):
                await self._wake.wait()
        except TimeoutError:
            await client.ping()
            return
        batch, self._questions = self._questions[:BATCH_MAX], self._questions[BATCH_MAX:]
        if not self._questions:
            self._wake.clear()
        self._asked = len(batch)
        try:
            pipeline = client.pipeline(transaction=False)
            for question in batch:
                pipeline.set(question.key, b"1", nx=True, px=self._life_ms)
            answers = await pipeline.execute(raise_on_error=False)
        except BaseException:
            self._questions = batch + self._questions  # `_give_up` answers them
            raise
        finally:
            self._asked = 0
        for question, answer in zip(batch, answers, strict=True):
            question.done(_verdict(answer))


def _verdict(answer: object) -> Verdict:
    if answer is True:
        return "ok"
    if answer is None:
        return "replayed"
    return "cache_full" if isinstance(answer, OutOfMemoryError) else "store_lost"
