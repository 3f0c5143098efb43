"""SSE: any split gives the same events, observations and bytes; upstream bytes never raise."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.http import sse
from proxy.http.body import IDS, OPTIONS
from proxy.http.sse import EventSplitter, StreamObserver

# Two shared cores: slow is no finding.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NONE: frozenset[str] = frozenset()
ALL = frozenset([IDS, OPTIONS])
BIG = 1 << 20


class Watch:
    """One observer with what it said and what it handed on."""

    def __init__(self, added=NONE, event_bytes=BIG):
        self.content = []
        self.observer = StreamObserver(
            lambda index, text: self.content.append((index, text)), added, event_bytes
        )
        self.out = b""

    def run(self, data, cuts=()):
        edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
        for a, b in itertools.pairwise(edges):
            self.out += self.observer.feed(data[a:b])
        self.between = self.observer.between_events
        self.out += self.observer.finish_feed()
        assert self.observer.finish_feed() == b""
        return self

    def facts(self):
        seen = self.observer
        return (
            self.content,
            seen.usage,
            seen.token_ids,
            seen.finish,
            seen.model,
            seen.done,
            seen.lost,
            self.between,
        )


def chunk(text=None, *, eol=b"\n", index=0, **more):
    choice = {"index": index, "delta": {} if text is None else {"content": text}, **more}
    event = {"id": "x", "model": "m", "choices": [choice]}
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    return b"data: " + data + eol + eol


USAGE = b'data: {"id":"x","choices":[],"usage":{"total_tokens":9}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("eol", [b"\n", b"\r\n", b"\r"])
def test_a_stream_is_observed(eol):
    data = (
        b": ping" + eol + eol + chunk("Par", eol=eol) + chunk("is", eol=eol)
        + chunk(None, eol=eol, finish_reason="stop") + USAGE.replace(b"\n", eol)
        + DONE.replace(b"\n", eol)
    )  # fmt: skip
    watch = Watch().run(data)
    assert watch.out == data
    assert watch.content == [(0, "Par"), (0, "is")]
    seen = watch.observer
    assert (seen.usage, seen.finish, seen.model) == ({"total_tokens": 9}, "stop", "m")
    assert seen.done
    assert not seen.lost
    assert watch.between


def test_observation_hands_on_the_very_same_object_at_once():
    observer = Watch().observer
    for data in (chunk("a"), b"data: {", b'"x"', b":1}\n", b"\n", b""):
        assert observer.feed(data) is data


def test_completions_and_several_choices():
    data = b'data: {"choices":[{"index":1,"text":"b"},{"index":0,"text":"a"}]}\n\n'
    assert Watch().run(data).content == [(1, "b"), (0, "a")]


def test_data_on_several_lines_is_joined():
    data = b'event: x\ndata: {"choices":\ndata:[{"index":0,"text":"a"}]}\nid: 1\n\n'
    assert Watch().run(data).content == [(0, "a")]
    assert Watch(ALL).run(data).out == data


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"choices":[{"text":"a"}]}\nid: 5\r\n\r\n',
        b'data: {"choices":[{"text":"a"}]}\rid: 5\n\n',
        b'data: {"choices":[{"text":"a"}]}\r\nid: 5\r\n\r\n',
        b'id: 5\rdata: {"choices":[{"text":"a"}]}\n\n',
    ],
)
def test_fields_with_other_line_ends_are_no_data(data):
    assert Watch().run(data).content == [(0, "a")]


def test_byte_order_mark_is_skipped():
    assert Watch().run(b"\xef\xbb\xbf" + chunk("a")).content == [(0, "a")]


EVENTS = {
    "LF": (b"data: a\n\ndata: b\n\n", [b"data: a\n\n", b"data: b\n\n"], b""),
    "CR LF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"data: a\r\n\r\n", b"data: b\r\n\r\n"], b""),
    "CR": (b"data: a\r\rdata: b\r\r", [b"data: a\r\r"], b"data: b\r\r"),
    "mixed": (b"a\n\r\nb\r\n\nc\r\n\rd", [b"a\n\r\n", b"b\r\n\n", b"c\r\n\r"], b"d"),
    "one line end is no blank line": (b"a\r\nb\nc\rd", [], b"a\r\nb\nc\rd"),
    "blank lines between": (b"a\n\n\nb\n\n", [b"a\n\n", b"\nb\n\n"], b""),
    "empty events": (b"a\n\n\n\n", [b"a\n\n", b"\n\n"], b""),
    "rest": (b"a\n\ndata", [b"a\n\n"], b"data"),
    "last CR waits": (b"a\r\n\r", [], b"a\r\n\r"),
    "nothing": (b"", [], b""),
}


@pytest.mark.parametrize(("data", "events", "rest"), EVENTS.values(), ids=EVENTS.keys())
def test_events_end_with_their_blank_line(data, events, rest):
    splitter = EventSplitter(BIG)
    assert splitter.feed(data) == events
    assert splitter.pending == rest


@pytest.mark.parametrize(
    ("data", "between"),
    [
        (b"", True),
        (b"data: a\n\n", True),
        (b"data: a\n\n\n", True),
        (b"data: a\r\r", True),
        (b"data: a\r\n\r", True),
        (b"data: a\r\n\r\n\r", True),
        (b"data: a\n", False),
        (b"data: a\r\n", False),
        (b"data: a\r", False),
        (b"data: a\n\nd", False),
        (b"data: a\n\n\nd", False),
        (b":", False),
    ],
)
@pytest.mark.parametrize("event_bytes", [BIG, 8])
def test_between_events(data, between, event_bytes):
    splitter = EventSplitter(event_bytes)
    splitter.feed(data)
    assert splitter.between_events is between
    slow = EventSplitter(event_bytes)
    for i in range(len(data)):
        slow.feed(data[i : i + 1])
    assert slow.between_events is between
    assert slow.lost == splitter.lost


def test_a_large_event_is_given_up_and_everything_passes():
    large = chunk("x" * 300)
    data = chunk("a") + large + chunk("b") + DONE
    for added in (NONE, ALL):
        watch = Watch(added, 200).run(data)
        assert watch.out == data
        assert watch.content == [(0, "a")]
        assert watch.observer.lost
        assert not watch.observer.done
        assert watch.between


def test_an_event_at_the_bound_is_followed():
    data = chunk("x" * 100)
    assert Watch(ALL, len(data)).run(data + data).content == [(0, "x" * 100)] * 2
    assert Watch(ALL, len(data) - 1).run(data + data).content == []


def test_what_is_held_is_bounded():
    observer = Watch(ALL, 1000).observer
    out = b""
    for _ in range(5000):
        out += observer.feed(b"x")
    assert observer.lost
    assert out == b"x" * 5000


IDS_EVENT = chunk("a", token_ids=[1, 2], finish_reason=None)


def test_ids_are_cut_to_the_byte():
    watch = Watch(frozenset([IDS])).run(IDS_EVENT + USAGE)
    assert watch.out == IDS_EVENT.replace(b',"token_ids":[1,2]', b"") + USAGE
    assert watch.observer.token_ids == [1, 2]


def test_ids_stay_when_the_client_asked_for_them():
    assert Watch(frozenset([OPTIONS])).run(IDS_EVENT).out == IDS_EVENT
    watch = Watch().run(IDS_EVENT)
    assert watch.out == IDS_EVENT
    assert watch.observer.token_ids == [1, 2]


CUTS = {
    "prompt ids at the top": (
        b'data: {"a":1,"choices":[],"prompt_token_ids":[1, 2]}\n\n',
        b'data: {"a":1,"choices":[]}\n\n',
    ),
    "both in a choice": (
        b'data: {"choices":[{"index":0,"token_ids":null,"prompt_token_ids":[3],"text":""}]}\n\n',
        b'data: {"choices":[{"index":0,"text":""}]}\n\n',
    ),
    "first member": (
        b'data: {"choices":[{"token_ids":[1],"text":"a"}]}\n\n',
        b'data: {"choices":[{"text":"a"}]}\n\n',
    ),
    "blanks": (
        b'data: {"choices":[{"text":"a" , "token_ids" : [ 1 ] }]}\n\n',
        b'data: {"choices":[{"text":"a" }]}\n\n',
    ),
    "escaped name": (
        b'data: {"choices":[{"text":"\\u4f60","token\\u005fids":[1],"token_id":2}]}\n\n',
        b'data: {"choices":[{"text":"\\u4f60","token_id":2}]}\n\n',
    ),
    "escaped text": (
        b'data: {"choices":[{"text":"\\u4f60","token_ids":[1]}]}\n\n',
        b'data: {"choices":[{"text":"\\u4f60"}]}\n\n',
    ),
    "text that looks like it": (
        b'data: {"choices":[{"text":",\\"token_ids\\":[1]","token_ids":[1]}]}\n\n',
        b'data: {"choices":[{"text":",\\"token_ids\\":[1]"}]}\n\n',
    ),
    "another object's member stays": (
        b'data: {"choices":[{"text":"a","x":{"a":1,"token_ids":[5]},"token_ids":[1]}]}\n\n',
        b'data: {"choices":[{"text":"a","x":{"a":1,"token_ids":[5]}}]}\n\n',
    ),
    "only another object's has the usual form": (
        b'data: {"choices":[{"token_ids" : [1],"text":"a","x":{"a":1,"token_ids":[5]}}]}\n\n',
        b'data: {"choices":[{"text":"a","x":{"a":1,"token_ids":[5]}}]}\n\n',
    ),
    "only another object's": (
        b'data: {"choices":[{"x":{"a":1,"token_ids":[5]},"token\\u005fids":[1],"y":0}]}\n\n',
        b'data: {"choices":[{"x":{"a":1,"token_ids":[5]},"y":0}]}\n\n',
    ),
    "no data space": (
        b'data:{"choices":[{"a":1,"token_ids":[1]}]}\r\n\r\n',
        b'data:{"choices":[{"a":1}]}\r\n\r\n',
    ),
    "between other fields": (
        b'id: ,"token_ids":[1]}\ndata: {"choices":[{"a":1,"token_ids":[1]}]}\nretry: 5\n\n',
        b'id: ,"token_ids":[1]}\ndata: {"choices":[{"a":1}]}\nretry: 5\n\n',
    ),
    "twice is left alone": (
        b'data: {"choices":[{"a":1,"token_ids":[1],"token_ids":[2]}]}\n\n',
        b'data: {"choices":[{"a":1,"token_ids":[1],"token_ids":[2]}]}\n\n',
    ),
    "no JSON is left alone": (b'data: {,"token_ids":[1]}\n\n', b'data: {,"token_ids":[1]}\n\n'),
    "usage of our own": (USAGE, b""),
    "usage with CR LF": (USAGE.replace(b"\n", b"\r\n"), b""),
    "usage beside content": (
        b'data: {"choices":[{"text":"a"}],"usage":{"a":1}}\n\n',
        b'data: {"choices":[{"text":"a"}],"usage":{"a":1}}\n\n',
    ),
    "no choices, no usage": (
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
    ),
    "error event": (b'data: {"error":{"message":"x"}}\n\n', b'data: {"error":{"message":"x"}}\n\n'),
    "comment": (b": token_ids\n\n", b": token_ids\n\n"),
    "done": (DONE, DONE),
    "cut event at the end": (b'data: {"token_ids":[1]', b'data: {"token_ids":[1]'),
    "event that waits for LF": (
        b'data: {"a":1,"token_ids":[1]}\r\r',
        b'data: {"a":1}\r\r',
    ),
}


@pytest.mark.parametrize(("data", "expected"), CUTS.values(), ids=CUTS.keys())
def test_what_is_cut_of_an_event(data, expected):
    assert Watch(ALL).run(data).out == expected


HOSTILE = [
    b'data: {"choices":[{"index":-1,"text":"a"}]}\n\n',
    b'data: {"choices":[{"index":128,"text":"a"}]}\n\n',
    b'data: {"choices":[{"index":99999999999999999999,"text":"a"}]}\n\n',
    b'data: {"choices":[{"index":"0","text":"a"}]}\n\n',
    b'data: {"choices":[{"index":true,"text":"a"}]}\n\n',
    b'data: {"choices":5}\n\n',
    b'data: {"choices":[5]}\n\n',
    b'data: {"choices":[{"delta":5}]}\n\n',
    b'data: {"choices":[{"text":"\\ud800"}]}\n\n',
    b'data: {"choices":[{"text":"\xff"}]}\n\n',
    b'data: {"choices":[{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}\n\n",
    b"data: {\n\n",
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_what_cannot_be_followed_is_passed_and_said(data):
    for added in (NONE, ALL):
        watch = Watch(added).run(data + chunk("b"))
        assert watch.out == data + chunk("b")
        assert watch.content == [(0, "b")]
        assert watch.observer.lost


ODD = [
    b"data: hello\n\n",
    b"data\n\n",
    b"data:\n\n",
    b"\n\n",
    b'data: {"choices":[{"index":0,"text":5,"finish_reason":[],"token_ids":{}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":["a"]}}],"usage":5,"model":[]}\n\n',
    b'data: {"choices":null,"usage":null,"model":null}\n\n',
    b'data: {"choices":[{"token_ids":[-1]}]}\n\n',
    b'data: {"choices":[{"token_ids":[4294967296,1.5,"a"]}]}\n\n',
    b'data: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
    b"data: [1]\n\n",
    b"database: 5\n\n",
]


@pytest.mark.parametrize("data", ODD, ids=range(len(ODD)))
def test_odd_events_show_nothing(data):
    watch = Watch().run(data)
    assert watch.facts() == ([], None, [], None, "", False, False, True)


def test_too_many_ids_are_not_kept(monkeypatch):
    monkeypatch.setattr(sse, "TOKEN_IDS_MAX", 3)
    watch = Watch(ALL).run(IDS_EVENT * 3 + DONE)
    assert watch.observer.token_ids == []
    assert watch.observer.lost
    assert watch.observer.done
    assert b"token_ids" not in watch.out


def test_only_choice_zero_gives_ids_and_finish():
    data = chunk("a", index=1, token_ids=[5], finish_reason="length")
    seen = Watch().run(data).observer
    assert (seen.token_ids, seen.finish) == ([], None)


SCRAPS = (b": ping\n\n", DONE, USAGE, b"\n", b"\r", b"\r\n", b"data: x\r\r", b"a\n\r\n")
PARTS = st.one_of(
    st.sampled_from([*SCRAPS, *(data for data, _ in CUTS.values())]),
    st.builds(
        chunk,
        st.one_of(st.none(), st.text(st.sampled_from('ab你\n\r"{'), max_size=6)),
        eol=st.sampled_from([b"\n", b"\r\n", b"\r"]),
        index=st.integers(0, 2),
        token_ids=st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=3)),
    ),
    st.binary(max_size=6),
)  # fmt: skip


@settings(UNHURRIED, max_examples=300)
@given(
    st.lists(PARTS, max_size=6).map(b"".join),
    st.lists(st.integers(0, 600), max_size=12),
    st.sampled_from([NONE, ALL, frozenset([IDS]), frozenset([OPTIONS])]),
    st.sampled_from([BIG, 120, 40]),
)
def test_any_split_gives_the_same_facts_and_bytes(data, cuts, added, event_bytes):
    whole = Watch(added, event_bytes).run(data)
    parts = Watch(added, event_bytes).run(data, cuts)
    bytewise = Watch(added, event_bytes).run(data, range(len(data)))
    assert parts.out == whole.out == bytewise.out
    assert parts.facts() == whole.facts() == bytewise.facts()
    if not added:
        assert whole.out == data


@settings(UNHURRIED, max_examples=200)
@given(st.lists(PARTS, max_size=6).map(b"".join), st.lists(st.integers(0, 600), max_size=12))
def test_events_and_rest_are_the_stream(data, cuts):
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    splitter, events = EventSplitter(BIG), []
    for a, b in itertools.pairwise(edges):
        events += splitter.feed(data[a:b])
    assert b"".join(events) + splitter.pending == data
    for event in events:
        # One blank line, at the end.
        lines = event.splitlines()
        assert lines[-1] == b""
        assert b"" not in lines[1:-1]


@settings(UNHURRIED, max_examples=200)
@given(st.binary(max_size=80))
def test_any_bytes_pass(data):
    assert Watch().run(data).out == data
    framed = b"data: " + data + b"\n\n"
    assert Watch().run(framed).out == framed
    Watch(ALL).run(framed)
