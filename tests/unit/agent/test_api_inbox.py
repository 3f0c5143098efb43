import asyncio
import threading

import pytest

from agent.engine.types import Delta
from agent.inbox import AbandonedError, Inbox


class Cancellable:
    prompt_tokens = 0
    cached_tokens = 0

    def __init__(self):
        self.cancels = 0

    def cancel(self):
        self.cancels += 1


def make(behind=lambda: None):
    counts = []
    inbox = Inbox(asyncio.get_running_loop(), on_tokens=counts.append, on_behind=behind)
    return inbox, counts


def test_deltas_that_came_meanwhile_are_joined():
    async def main():
        inbox, counts = make()
        inbox.put(Delta("a", (1,)))
        inbox.put(Delta("", (2,)))
        inbox.put(Delta("b", (3, 4)))
        batch = await inbox.take()
        assert (batch.text, batch.token_ids, batch.finish_reason) == ("ab", (1, 2, 3, 4), None)
        assert counts == [1, 1, 2]

    asyncio.run(main())


def test_many_deltas_make_one_wake_up():
    async def main():
        calls = []
        loop = asyncio.get_running_loop()
        inbox, _ = make()
        inbox._loop = type("L", (), {"call_soon_threadsafe": lambda _s, f: calls.append(f)})()
        for _ in range(1000):
            inbox.put(Delta("a", (1,)))
        assert len(calls) == 1
        loop.call_soon(calls[0])
        assert len((await inbox.take()).text) == 1000
        inbox.put(Delta("b", (1,)))
        assert len(calls) == 2

    asyncio.run(main())


def test_nothing_is_lost_between_threads():
    async def main():
        inbox, _ = make()

        def produce():
            for i in range(20_000):
                inbox.put(Delta("x", (i,)))
            inbox.put(Delta("", (), "stop"))

        thread = threading.Thread(target=produce)
        thread.start()
        ids, finish = [], None
        while finish is None:
            batch = await inbox.take()
            ids.extend(batch.token_ids)
            finish = batch.finish_reason
        thread.join()
        assert ids == list(range(20_000))

    asyncio.run(main())


def test_beyond_the_bound_the_generation_is_cancelled_and_all_is_dropped():
    async def main():
        behind = []
        inbox, _ = make(lambda: behind.append(1))
        generation = Cancellable()
        inbox.attach(generation)
        inbox.bound(10)
        for _ in range(10):
            inbox.put(Delta("x", (1,)))
        assert generation.cancels == 0
        for _ in range(90):
            inbox.put(Delta("x", (1,)))
        assert generation.cancels == 1
        with pytest.raises(AbandonedError) as caught:
            await inbox.take()
        assert caught.value.why == "behind"
        assert inbox._texts == []
        assert inbox._ids == []
        assert behind

    asyncio.run(main())


def test_without_a_bound_everything_is_kept():
    async def main():
        inbox, _ = make()
        for _ in range(50_000):
            inbox.put(Delta("x", (1,)))
        assert len((await inbox.take()).token_ids) == 50_000

    asyncio.run(main())


def test_the_first_reason_to_give_up_stays_and_later_deltas_are_not_kept():
    async def main():
        inbox, _ = make()
        generation = Cancellable()
        inbox.attach(generation)
        inbox.abandon("gone")
        inbox.abandon("draining")
        inbox.put(Delta("x", (1,)))
        assert generation.cancels >= 1
        assert inbox._texts == []
        with pytest.raises(AbandonedError, match="gone"):
            await inbox.take()
        with pytest.raises(AbandonedError, match="gone"):
            inbox.check()

    asyncio.run(main())


def test_a_generation_attached_too_late_is_cancelled():
    async def main():
        inbox, _ = make()
        inbox.abandon("gone")
        generation = Cancellable()
        inbox.attach(generation)
        assert generation.cancels == 1

    asyncio.run(main())


def test_a_delta_after_the_loop_has_closed_is_harmless():
    async def main():
        return make()[0]

    inbox = asyncio.run(main())
    inbox.put(Delta("x", (1,), "stop"))
    assert inbox._texts == ["x"]
