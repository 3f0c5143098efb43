import threading

from proxy.clock import ManualClock
from proxy.config import load
from proxy.exchange import Progress
from proxy.observe import Observation, Observing
from proxy.spans.outbox import BATCH, Outbox
from proxy.spans.tracer import NO_RECORD, Tracer

QUEUE = 4
HIGH = b"00-0000000000000000ffffffffffffffff-b7ad6b7169203331-00"


class Taker:
    """A collector that holds each export until it is let go."""

    def __init__(self):
        self.spans, self.ended = [], threading.Event()
        self.go, self.takes = threading.Event(), True

    def export(self, batch):
        self.go.wait(5)
        self.spans += batch
        return self.takes

    def shutdown(self):
        self.ended.set()


def tracer(taker=None, queue=QUEUE, **variables):
    names = {f"TONGGUAN_TRACING_{name}": str(value) for name, value in variables.items()}
    settings = load("", names | {"TONGGUAN_TRACING_QUEUE": str(queue)}).tracing
    return Tracer(settings, ManualClock(), Outbox(taker or Taker(), queue))


def exchange(traceparent=HIGH):
    made = Observation()
    made.shared = Observing(enabled=True, plain_hashes=False, held_bytes_max=0, event_bytes=0)
    made.progress = Progress.DONE
    made.method, made.target = b"POST", b"/v1/completions?secret=1"
    made.traceparent, made.status = traceparent, 200
    made.start_ns, made.place_ns, made.dispatch_ns = 10, 20, 30
    made.first_byte_ns, made.end_ns = 40, 50
    return made


def test_one_that_is_not_kept_costs_no_place():
    made = tracer(RATIO=0.5)
    made.closed(exchange(), "ok")
    assert (made.pending, made.kept["ratio"]) == (0, 0)


def test_it_waits_until_its_record_is_on_disk():
    made = tracer(RATIO=1)
    for ticket in (3, 4, 6):
        made.closed(exchange(), "ok", ticket)
    assert (len(made.outbox), made.pending) == (0, 3)
    made.durable(2)
    assert len(made.outbox) == 0
    made.durable(5)
    assert (len(made.outbox), made.pending) == (2, 3)
    made.close()
    assert len(made.outbox) == 3
    assert [done.lost for done in made.outbox._queue] == [False, False, True]


def test_one_without_a_record_or_whose_record_was_lost_goes_at_once():
    made = tracer(RATIO=1)
    made.closed(exchange(), "ok", NO_RECORD)
    made.closed(exchange(), "ok", -1)
    first, second = made.outbox._queue
    assert (first.recorded_ns, first.lost) == (0, False)
    assert second.lost


def test_a_disk_that_stands_makes_no_queue_without_bound():
    made = tracer(RATIO=1)
    for ticket in range(3 * QUEUE):
        made.closed(exchange(), "ok", ticket)
    assert made.pending <= 2 * QUEUE
    assert made.outbox.dropped["full"] == QUEUE


def test_no_path_is_told_but_a_known_one_without_its_query():
    made = tracer(RATIO=1)
    made.closed(exchange(), "ok", NO_RECORD)
    assert made.outbox._queue[0].route == "/v1/completions"


def test_what_is_left_goes_out_at_the_end():
    taker = Taker()
    made = tracer(taker, queue=3 * BATCH, RATIO=1)
    taker.go.set()
    for _ in range(2 * BATCH + 1):
        made.closed(exchange(), "ok", NO_RECORD)
    made.outbox.start()
    made.outbox.stop(5)
    assert made.outbox.exported == 2 * BATCH + 1
    assert sum(made.outbox.dropped.values()) == 0
    assert len([span for span in taker.spans if span.kind == "server"]) == 2 * BATCH + 1
    assert taker.ended.is_set()


def test_a_collector_that_hangs_does_not_hold_the_end_up_and_what_it_holds_is_counted():
    taker = Taker()
    made = tracer(taker, queue=3 * BATCH, RATIO=1)
    for _ in range(BATCH + 2):
        made.closed(exchange(), "ok", NO_RECORD)
    made.outbox.start()
    made.outbox.stop(0.05)
    assert made.outbox.dropped["shutdown"] == BATCH + 2
    taker.go.set()


def test_what_is_refused_is_counted():
    taker = Taker()
    taker.takes = False
    taker.go.set()
    made = tracer(taker, RATIO=1)
    made.closed(exchange(), "ok", NO_RECORD)
    made.outbox.start()
    made.outbox.stop(5)
    assert (made.outbox.exported, made.outbox.dropped["refused"]) == (0, 1)
