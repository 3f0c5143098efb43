"""From finished exchanges to records on disk: batches, order, what cannot be written."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from proxy.audit.layout import segments
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from proxy.exchange import Progress
from proxy.http.http1 import HeadLimits, parse_response
from proxy.observe import Observation, Observing
from proxy.recorder import BATCH, WAIT_S, Recorder
from tests.unit.proxy.audit_chains import START_MS, config, run, verdict

KEY = b"k" * 32
BODY = b'{"model":"m","messages":[1]}'
ANSWER = b'{"model":"served","choices":[{"index":0,"message":{"content":"hi"}}],"usage":{}}'
TOO_LONG = "x" * 200_000  # no line of a chain holds it


@pytest.fixture
def shared():
    return Observing(enabled=True, plain_hashes=False, held_bytes_max=1 << 20, event_bytes=1 << 16)


def exchange(shared, number=0, **facts):
    made = Observation()
    made.shared = shared
    made.prompt_key = KEY
    made.trace_id = f"{START_MS}-00001-{number:04d}"
    made.traceparent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    made.tenant = "team-a"
    made.progress = Progress.DONE
    made.status = 200
    made.start_ns, made.dispatch_ns, made.first_byte_ns = 1_000, 3_000, 1_001_000
    made.end_ns = 2_001_999
    for name, value in facts.items():
        setattr(made, name, value)
    return made


class Turn:
    """A loop's timers, turned by hand; everything else is the loop's own."""

    def __init__(self, loop):
        self._loop = loop
        self.timers = []
        self.now_s = 0.0

    def time(self):
        return self.now_s

    def call_soon(self, callback):
        return self.call_later(0.0, callback)

    def call_later(self, delay, callback):
        timer = self._loop.call_later(3600, callback)
        self.timers.append((delay, timer, callback))
        return timer

    def due(self):
        return [callback for _, timer, callback in self.timers if not timer.cancelled()]


def start(directory):
    loop = asyncio.get_running_loop()
    writer = AuditWriter.start(config(directory), ManualClock(START_MS), loop)
    turn = Turn(loop)
    return Recorder(turn, writer), writer, turn


def requests(chain):
    lines = [
        json.loads(line.split(b"\t")[0])
        for _, path in segments(chain)
        for line in path.read_bytes().splitlines()
    ]
    return [record for record in lines if record["kind"] == "request"]


def numbers(chain):
    return [int(record["trace_id"][-4:]) for record in requests(chain)]


def test_a_record_says_what_was_seen(tmp_path, shared):
    async def scene():
        recorder, writer, _ = start(tmp_path)
        seen = exchange(shared, asked="P0", qos="P1")
        seen.observe_request(BODY, ask_ids=False)
        head = parse_response(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n",
            HeadLimits(4096, 4096, 16),
            b"POST",
        )
        seen.observe_answer(head)
        seen.observe_data(ANSWER)
        seen.envelope = "aa" * 8, 2, False, True
        recorder.add(seen, "ok")
        recorder.flush()
        await writer.close()
        return writer.dir

    chain = run(scene)
    (record,) = requests(chain)
    assert verdict(tmp_path)[0] == "ok"
    for name, value in {
        "trace_id": f"{START_MS}-00001-0000",
        "tenant": "team-a",
        "qos": "P1",
        "qos_asked": "P0",
        "pool": "shared",
        "status": 200,
        "outcome": "ok",
        "phase": "done",
        "model": "m",
        "served_model": "served",
        "times_us": {"queue": 2, "first_byte": 1000, "total": 2000},
        "envelope": {"kid": "aa" * 8, "suite": 2, "signature": False, "mac": True},
        "output_len": 2,
    }.items():
        assert record[name] == value, name
    assert {"prompt_hash", "params_hash", "output_hash", "traceparent"} <= record.keys()
    assert "usage" not in record  # nothing was reported in it
    assert shared.held_bytes == 0


def test_what_never_came_is_absent(tmp_path, shared):
    async def scene():
        recorder, writer, _ = start(tmp_path)
        gone = exchange(shared, dispatch_ns=0, first_byte_ns=0, progress=Progress.WAITING, status=0)
        recorder.add(gone, "client_gone")
        recorder.flush()
        await writer.close()
        return writer.dir

    (record,) = requests(run(scene))
    assert record["times_us"] == {"total": 2000}
    assert (record["phase"], record["status"]) == ("before_first_byte", 0)
    unknown = {
        "model",
        "prompt_hash",
        "output_hash",
        "output_len",
        "usage",
        "envelope",
        "qos_asked",
    }
    assert not unknown & record.keys()


def test_a_batch_is_recorded_by_count_without_a_timer(tmp_path, shared):
    async def scene():
        recorder, writer, turn = start(tmp_path)
        for number in range(BATCH - 1):
            recorder.add(exchange(shared, number), "ok")
        assert len(writer._pending) == 0
        assert len(turn.due()) == 1
        recorder.add(exchange(shared, BATCH - 1), "ok")
        assert len(writer._pending) == BATCH
        assert turn.due() == []
        await writer.close()
        return writer.dir

    assert numbers(run(scene)) == list(range(BATCH))


def test_fewer_are_recorded_by_time_with_one_timer(tmp_path, shared):
    async def scene():
        recorder, writer, turn = start(tmp_path)
        for number in range(3):
            recorder.add(exchange(shared, number), "ok")
        assert [delay for delay, _, _ in turn.timers] == [WAIT_S]
        (callback,) = turn.due()
        callback()
        assert len(writer._pending) == 3
        assert turn.due() == []
        recorder.add(exchange(shared, 3), "ok")
        assert len(turn.timers) == 2
        turn.due()[0]()
        await writer.close()
        return writer.dir

    assert numbers(run(scene)) == [0, 1, 2, 3]


def test_one_that_comes_alone_is_recorded_in_the_same_turn(tmp_path, shared):
    async def scene():
        recorder, writer, turn = start(tmp_path)
        turn.now_s = 10.0
        recorder.add(exchange(shared, 0), "ok")
        recorder.add(exchange(shared, 1), "ok")  # of the same turn
        ((first, *_),) = turn.timers
        for flush in turn.due():
            flush()
        turn.now_s += 0.001
        recorder.add(exchange(shared, 2), "ok")
        second = turn.timers[-1][0]
        for flush in turn.due():
            flush()
        await writer.close()
        return writer.dir, first, second

    chain, first, second = run(scene)
    assert numbers(chain) == [0, 1, 2]
    assert first == 0.0
    assert second > 0


def test_the_loops_own_timer_does_it_too(tmp_path, shared):
    async def scene():
        loop = asyncio.get_running_loop()
        writer = AuditWriter.start(config(tmp_path), ManualClock(START_MS), loop)
        Recorder(loop, writer).add(exchange(shared), "ok")
        async with asyncio.timeout(10):
            while not writer.stats.records > 1:  # noqa: ASYNC110 - the disk's thread has no event
                await asyncio.sleep(0)
        await writer.close()
        return writer.dir

    assert numbers(run(scene)) == [0]


def test_order_is_the_order_of_ends_over_many_batches(tmp_path, shared):
    async def scene():
        recorder, writer, _ = start(tmp_path)
        for number in range(3 * BATCH + 5):
            recorder.add(exchange(shared, number), "ok" if number % 2 else "client_gone")
        recorder.flush()
        await writer.close()
        return writer.dir

    chain = run(scene)
    assert numbers(chain) == list(range(3 * BATCH + 5))
    assert [r["outcome"] for r in requests(chain)[:3]] == ["client_gone", "ok", "client_gone"]
    assert verdict(tmp_path)[0] == "ok"


def test_a_flush_with_nothing_waiting_writes_nothing(tmp_path):
    async def scene():
        recorder, writer, _ = start(tmp_path)
        recorder.flush()
        recorder.flush()
        await writer.close()
        return writer.dir

    assert requests(run(scene)) == []


def test_a_record_that_cannot_be_written_does_not_take_the_rest_with_it(tmp_path, shared, caplog):
    async def scene():
        recorder, writer, _ = start(tmp_path)
        failures = writer.stats.failures
        for number in range(5):
            seen = exchange(shared, number)
            seen.observe_request(BODY, ask_ids=False)
            if number in {1, 3}:
                seen.trace_id = TOO_LONG
            recorder.add(seen, "ok")
        with caplog.at_level(logging.ERROR):
            recorder.flush()
        assert writer.stats.failures == failures + 2
        await writer.close()
        return writer.dir

    assert numbers(run(scene)) == [0, 2, 4]
    assert verdict(tmp_path)[0] == "ok"
    assert shared.held_bytes == 0
    assert len(caplog.records) == 1
    assert "could not be chained: 2" in caplog.text
    assert TOO_LONG[:20] not in caplog.text


def test_hostile_texts_make_no_record_unwritable(tmp_path, shared, caplog):
    texts = ["\ud800", "\x00\x1f", "\u4e2d" * 5000, "x" * 100_000, '"\\']

    async def scene():
        recorder, writer, _ = start(tmp_path)
        for number, text in enumerate(texts):
            body = json.dumps({"model": text, "messages": [], "temperature": text}).encode()
            seen = exchange(shared, number)
            seen.observe_request(body, ask_ids=False)
            recorder.add(seen, "ok")
        recorder.flush()
        await writer.close()
        return writer.dir

    assert numbers(run(scene)) == list(range(len(texts)))
    assert verdict(tmp_path)[0] == "ok"
    assert not caplog.records
    assert shared.held_bytes == 0
