"""The text of a request's record is that of its members, made the plain way."""

from __future__ import annotations

from operator import attrgetter

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.audit.canonical import INT_LIMIT, decode, fit
from proxy.audit.chain import ALGS, LINE_BYTES, Chain
from proxy.audit.record import OUTCOMES, PHASES, problem_with
from proxy.audit.request import request_text
from proxy.audit.tree import leaf_hash
from tests.unit.proxy.audit_chains import SEED, START_MS, request_members

HASHES = st.text("0123456789abcdef", min_size=64, max_size=64)
COUNTS = st.integers(0, INT_LIMIT - 1)
TEXTS = st.text(max_size=300) | st.text(st.characters(codec="ascii"), max_size=300)


def some(strategy):
    return st.none() | strategy


FACTS = st.fixed_dictionaries(
    {
        "trace_id": st.just(f"{START_MS}-00001-0001"),
        "tenant": TEXTS,
        "qos": st.sampled_from(["P0", "P1", "P2"]),
        "status": st.integers(0, 599),
        "outcome": st.sampled_from(sorted(OUTCOMES)),
        "phase": st.sampled_from(sorted(PHASES)),
    },
    optional={
        **dict.fromkeys(("queue_us", "first_byte_us", "total_us", "output_len"), some(COUNTS)),
        **dict.fromkeys(("traceparent", "model", "served_model", "qos_asked"), some(TEXTS)),
        **dict.fromkeys(("prompt_hash", "params_hash", "body_hash", "output_hash"), some(HASHES)),
        "pool": some(st.sampled_from(["dedicated", "shared", "best_effort"])),
        "envelope": some(st.tuples(TEXTS, st.sampled_from([1, 2]), st.booleans(), st.booleans())),
        "usage": some(
            st.dictionaries(
                st.sampled_from(["prompt", "completion", "total", "cached", "reasoning"]), COUNTS
            )
        ),
        "tunnelled": some(st.tuples(COUNTS, COUNTS)),
    },
)
IDS = st.none() | st.tuples(COUNTS, some(HASHES), some(COUNTS), some(st.lists(COUNTS, max_size=3)))


stands = attrgetter("head.seq", "head.prev", "head.turn")


def chain():
    return Chain("cluster/ns/pod/uid/1", "seed", "s256", SEED)


@given(FACTS, IDS, COUNTS, COUNTS)
def test_the_line_is_that_of_the_members(facts, ids, wall_ns, mono_ns):
    text, members = request_text(**facts), request_members(**facts)
    if ids is not None:
        text = text.with_ids(*ids)
        names = ("ids_n", "ids_commit", "ids_at", "ids")
        members |= {n: v for n, v in zip(names, ids, strict=True) if v is not None}
    line = chain().request_line(text, wall_ns, mono_ns)
    assert line == chain().line("request", members, wall_ns, mono_ns)
    data, _, rest = line.partition(b"\t")
    assert (len(rest), rest[-1:]) == (65, b"\n")
    assert problem_with(decode(data)) is None
    assert fit(members) is members


def test_strings_from_outside_are_cleaned_and_capped():
    bad = "\ud800" + "m" * 10_000
    text = request_text(
        trace_id="1-00001-0001", tenant=bad, qos="P1", status=200, outcome="ok", phase="done",
        model=bad, served_model=bad, traceparent=bad, qos_asked=bad, envelope=(bad, 1, False, True),
    )  # fmt: skip
    record = orjson.loads(chain().request_line(text, 1, 2).partition(b"\t")[0])
    clean = "\ufffd" + "m" * 253
    names = ("tenant", "model", "served_model", "traceparent", "qos_asked")
    assert [record[name] for name in names] == [clean] * 5
    assert record["envelope"]["kid"] == clean


def test_more_strings_than_are_remembered_are_written_all_the_same():
    for number in range(3000):
        text = request_text(
            trace_id="1-00001-0001", tenant=f't"{number}', qos="P1", status=200, outcome="ok",
            phase="done",
        )  # fmt: skip
        assert f'"tenant":"t\\"{number}"' in text.pieces[-1]


@pytest.mark.parametrize("wrong", [{"outcome": "fine"}, {"phase": "later"}])
def test_what_is_not_of_the_lists_is_our_own_bug(wrong):
    facts = {
        "trace_id": "1-00001-0001", "tenant": "t", "qos": "P1", "status": 200, "outcome": "ok",
        "phase": "done", **wrong,
    }  # fmt: skip
    with pytest.raises(AssertionError):
        request_text(**facts)


@given(st.lists(st.tuples(FACTS, COUNTS, COUNTS), min_size=1, max_size=5), st.sampled_from(ALGS))
def test_many_lines_in_one_go_are_those_made_one_by_one(given_facts, alg):
    rows = [(request_text(**facts), wall, mono) for facts, wall, mono in given_facts]
    one = Chain("cluster/ns/pod/uid/1", "seed", alg, SEED)
    two = Chain("cluster/ns/pod/uid/1", "seed", alg, SEED)
    for chained in (one, two):
        chained.line("heartbeat", {"in_flight": 0, "started_total": 0}, 1, 2)
    expected = [one.request_line(text, wall, mono) for text, wall, mono in rows]
    walls, monos = [wall for _, wall, _ in rows], [mono for _, _, mono in rows]
    lines, leaves = two.request_run(walls, monos, [text.pieces for text, _, _ in rows])
    assert lines == b"".join(expected)
    assert leaves == b"".join(leaf_hash(line[:-1]) for line in expected)
    assert all(
        len(line) <= row[0].bytes_most + two.around_bytes
        for line, row in zip(expected, rows, strict=True)
    )
    assert stands(two) == stands(one)


def test_many_lines_are_all_chained_or_none():
    chained = chain()
    text = request_text(
        trace_id="x" * LINE_BYTES, tenant="t", qos="P1", status=0, outcome="ok", phase="done"
    )
    short = request_text(trace_id="x", tenant="t", qos="P1", status=0, outcome="ok", phase="done")
    with pytest.raises(ValueError, match="a line holds"):
        chained.request_run([1, 1], [2, 2], [short.pieces, text.pieces])
    assert stands(chained) == stands(chain())
