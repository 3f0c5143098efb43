import dataclasses
import itertools

import pytest

from proxy.spans import conventions as names
from proxy.spans.build import spans
from proxy.spans.finished import Finished, pseudonym

TRACE, NAMED = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
DONE = Finished(
    why="ratio",
    traceparent=b"00-%032x-%016x-01" % (TRACE, NAMED),
    came=True,
    trace_id="1-00001-0001",
    door="app",
    method="POST",
    route="/v1/chat/completions",
    operation="chat",
    qos="P1",
    asked="",
    pool="shared",
    status=200,
    outcome="ok",
    phase="done",
    tenant="0123456789abcdef",
    model="m",
    served_model="m-1",
    usage={"prompt": 3, "completion": 0},
    start_ns=1000,
    place_ns=1100,
    dispatch_ns=1200,
    first_byte_ns=1300,
    end_ns=1400,
    recorded_ns=1500,
    durable_ns=1600,
)


def made(**changes):
    counter = itertools.count(1)
    found = spans(dataclasses.replace(DONE, **changes), lambda _: next(counter))
    assert len({span.span_id for span in found}) == len(found)
    assert {span.trace_id for span in found} == {TRACE}
    return {span.name: span for span in found}


def times(found):
    return {name: (span.start_ns, span.end_ns) for name, span in found.items()}


def test_a_whole_request():
    assert times(made()) == {
        "POST /v1/chat/completions": (1000, 1400),
        names.QUEUE: (1000, 1100),
        names.WAIT: (1100, 1200),
        "chat m": (1200, 1400),
        names.FIRST_BYTE: (1200, 1300),
        names.STREAM: (1300, 1400),
        names.AUDIT: (1500, 1600),
    }


def test_the_parent_is_the_clients_span_or_none():
    found = made()
    root = found["POST /v1/chat/completions"]
    assert (root.parent_id, root.remote) == (NAMED, True)
    assert found["chat m"].span_id != NAMED
    found = made(came=False)
    root = found["POST /v1/chat/completions"]
    assert (root.parent_id, root.remote) == (0, False)
    assert found["chat m"].span_id == NAMED  # what the upstream was told


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # refused in the queue: `dispatch_ns` is when it was turned away
        ({"place_ns": 0, "dispatch_ns": 1200, "first_byte_ns": 0}, {names.QUEUE: (1000, 1200)}),
        # refused before it waited
        ({"place_ns": 0, "dispatch_ns": 0, "first_byte_ns": 0}, {names.QUEUE: (1000, 1400)}),
        # nobody took the connection
        (
            {"dispatch_ns": 0, "first_byte_ns": 0},
            {names.QUEUE: (1000, 1100), names.WAIT: (1100, 1400)},
        ),
        # no answer came
        (
            {"first_byte_ns": 0},
            {
                names.QUEUE: (1000, 1100),
                names.WAIT: (1100, 1200),
                "chat m": (1200, 1400),
                names.FIRST_BYTE: (1200, 1400),
            },
        ),
    ],
    ids=["turned away", "refused", "not connected", "not answered"],
)
def test_what_never_came_has_no_span(changes, expected):
    found = times(made(recorded_ns=0, status=503, outcome="shed", **changes))
    del found["POST /v1/chat/completions"]
    assert found == expected


def test_a_record_that_was_lost_is_an_error_of_the_audit_write():
    span = made(lost=True, durable_ns=0)[names.AUDIT]
    assert (span.start_ns, span.end_ns, span.error) == (1500, 1500, "audit_unavailable")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, ""),
        ({"outcome": "client_gone"}, ""),
        ({"outcome": "timeout", "status": 504}, "timeout"),
        ({"status": 500}, "500"),
        ({"status": 429}, ""),
    ],
)
def test_what_is_an_error(changes, error):
    found = made(**changes)
    for span in (found["POST /v1/chat/completions"], found["chat m"]):
        assert span.error == error
        assert span.attributes.get(names.ERROR_TYPE, "") == error


def test_unknown_is_absent_and_a_reported_zero_stays():
    model = made()["chat m"].attributes
    assert (model[names.INPUT_TOKENS], model[names.OUTPUT_TOKENS]) == (3, 0)
    model = made(usage={}, model="", served_model="")["chat"].attributes
    assert set(model) == {names.OPERATION, names.PROVIDER, names.POOL}
    assert set(made(route="", operation="", model="")) >= {"POST"}


def test_a_pseudonym_needs_the_tenants_key_and_is_its_own():
    keys = bytes(32), bytes(31) + b"\1"
    told = {pseudonym(key, tenant) for key in keys for tenant in ("a", "b")}
    assert len(told) == 4
    assert {len(one) for one in told} == {16}
    assert pseudonym(None, "a") == ""


def test_model_spans_of_unnamed_paths_have_a_name_of_their_own():
    found = spans(dataclasses.replace(DONE, route="", operation="", model=""), iter_bits())
    assert [span.kind for span in found].count("client") == 1


def iter_bits():
    counter = itertools.count(1)
    return lambda _: next(counter)
