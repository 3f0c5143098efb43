"""The signature worker: beside the loop, bounded, one answer for each question."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from proxy.sm4.opener import SignatureCheck
from proxy.verifying import SignatureWorker


class Held:
    """A verifier whose answers a test lets go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: set[str] = set()

    def verify(self, signature: bytes, message: bytes) -> bool:
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(20)
        if message == b"broken":
            raise MemoryError
        return signature == message


def check(held: Held, message: bytes = b"x", signature: bytes = b"x") -> SignatureCheck:
    return SignatureCheck(held, signature, message)


def run(script: Any) -> None:
    asyncio.run(script)


def test_answers_come_on_the_loop_in_order_while_the_loop_goes_on() -> None:
    async def script() -> None:
        held, loop = Held(), asyncio.get_running_loop()
        worker = SignatureWorker(loop, 10)
        answers: list[tuple[int, bool, str]] = []
        over = asyncio.Event()

        def done(index: int, valid: bool) -> None:
            answers.append((index, valid, threading.current_thread().name))
            if index == 2:
                over.set()

        for index, signature in enumerate((b"x", b"y", b"x")):
            assert worker.submit(check(held, signature=signature), lambda v, i=index: done(i, v))
        assert (worker.pending, worker.verified, answers) == (3, 0, [])
        held.go.set()
        await over.wait()
        here = threading.current_thread().name
        assert answers == [(0, True, here), (1, False, here), (2, True, here)]
        assert (worker.pending, worker.verified) == (0, 3)
        assert held.threads == {"signatures"}
        worker.close()

    run(script())


def test_a_full_queue_takes_no_more_until_an_answer_was_given() -> None:
    async def script() -> None:
        held, loop = Held(), asyncio.get_running_loop()
        worker = SignatureWorker(loop, 2)
        first = loop.create_future()
        assert worker.submit(check(held), first.set_result)
        assert worker.submit(check(held), lambda _: None)
        assert not worker.submit(check(held), lambda _: None)
        assert worker.pending == 2
        held.go.set()
        assert await first
        assert worker.submit(check(held), lambda _: None)
        worker.close()

    run(script())


def test_a_verifier_that_breaks_is_no_yes_and_does_not_end_the_worker() -> None:
    async def script() -> None:
        held, loop = Held(), asyncio.get_running_loop()
        held.go.set()
        worker = SignatureWorker(loop, 2)
        for message, expected in ((b"broken", False), (b"x", True)):
            answer = loop.create_future()
            assert worker.submit(check(held, message), answer.set_result)
            assert await answer is expected
        worker.close()

    run(script())


def test_without_signatures_there_is_no_thread_and_an_ended_loop_ends_it() -> None:
    async def script() -> SignatureWorker:
        held, loop = Held(), asyncio.get_running_loop()
        before = set(threading.enumerate())
        worker = SignatureWorker(loop, 2)
        assert set(threading.enumerate()) <= before
        assert worker.submit(check(held), lambda _: None)
        (fresh,) = set(threading.enumerate()) - before
        assert fresh is worker._thread
        asyncio.get_running_loop().call_later(0, held.go.set)
        return worker

    worker = asyncio.run(script())
    worker.close()
    thread = worker._thread
    assert thread is not None
    thread.join(20)
    assert not thread.is_alive()
