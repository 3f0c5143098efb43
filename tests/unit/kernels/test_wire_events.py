"""Plain events in C: which are taken, what they say, and where the reader stops."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import wire
from proxy.http.event import UNREADABLE, decode

pytestmark = pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire: no extension built here")
WHOLE = 1 << 20
PLAIN = b'data: {"model":"m","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'


def none(data: bytes, event_bytes: int) -> tuple[int, bytes, str | None]:
    """Take nothing."""
    del data, event_bytes
    return 0, b"", None


plain_events = wire.events(none)


def event(choice: object, **more: object) -> bytes:
    """Return one event as engines write it."""
    text = json.dumps({"id": "c", "choices": [choice], **more}, ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"


def test_many_are_taken_at_once_with_their_texts_and_the_first_model():
    named = event({"index": 0, "delta": {"role": "assistant", "content": "Pa"}}, model="one")
    again = event(
        {"delta": {"content": "r\u00eds \n"}, "finish_reason": None}, model="two", usage=None
    )
    data = named + again + event({"index": 0, "text": "."})
    assert plain_events(data, WHOLE) == (len(data), "Par\u00eds \n.".encode(), "one")


@pytest.mark.parametrize(
    "other",
    [
        b"data: [DONE]\n\n",
        b": ping\n\n",
        b"event: x\n" + PLAIN,
        PLAIN[:-1],
        PLAIN[:-2] + b"\r\n\r\n",
        PLAIN.replace(b'"hi"', b'"hi"\r'),
        PLAIN.replace(b"}]}", b"}]\n}"),
        PLAIN.replace(b'"hi"', b"1"),
        PLAIN.replace(b'"hi"', b'"\\ud800"'),
        PLAIN.replace(b'"hi"', b'"\xff"'),
        PLAIN.replace(b'"m"', b"1"),
        PLAIN.replace(b'"m"', b'"\\ud800"'),
        PLAIN.replace(b'"index":0', b'"index":1'),
        PLAIN.replace(b'"index":0', b'"index":00'),
        PLAIN.replace(b'"index":0', b'"finish_reason":"stop"'),
        PLAIN.replace(b'"index":0', b'"token_ids":[1]'),
        PLAIN.replace(b'"index":0', b'"prompt_token_ids":[1]'),
        PLAIN.replace(b'"index":0', b'"delta":{}'),  # a name twice: which counts is the twin's
        PLAIN.replace(b'"index":0', b'"text":1'),
        PLAIN.replace(b'"model":"m"', b'"usage":{}'),
        PLAIN.replace(b'"model":"m"', b'"token_ids":[]'),
        PLAIN.replace(b'"model":"m"', b'"x":"\\udfff"'),
        PLAIN.replace(b"}]}", b"},{}]}"),
        b'data: {"choices":[]}\n\n',
        b'data: {"choices":null}\n\n',
        b'data: {"model":"m"}\n\n',
        b'data: {"choices":[{"delta":"hi"}]}\n\n',
    ],
)
def test_any_other_event_is_where_it_stops(other):
    assert plain_events(PLAIN + other + PLAIN, WHOLE) == (len(PLAIN), b"hi", "m")


@pytest.mark.parametrize("event_bytes", [len(PLAIN) - 1, len(PLAIN)])
def test_an_event_longer_than_the_bound_is_not_taken(event_bytes):
    end = len(PLAIN) if event_bytes == len(PLAIN) else 0
    assert plain_events(PLAIN, event_bytes)[0] == end


@given(st.text(max_size=40), st.text(max_size=10), st.booleans())
def test_what_is_taken_is_what_the_decoder_reads(text, model, as_ascii):
    whole = json.dumps(
        {"model": model, "choices": [{"index": 0, "delta": {"content": text}}]},
        ensure_ascii=as_ascii,
    )
    try:
        raw = whole.encode()
        seen = decode(raw)
    except UNREADABLE:
        return
    data = b"data: " + raw + b"\n\n"
    end, said, named = plain_events(data, WHOLE)
    assert end == len(data)
    assert seen.choices is not None
    assert said.decode() == (seen.choices[0].delta.content if seen.choices[0].delta else "")
    assert (named or "") == seen.model


@given(st.integers(0, len(PLAIN) - 3), st.binary(max_size=3))
def test_a_damaged_event_is_taken_only_where_the_decoder_takes_it(at, put):
    data = PLAIN[:at] + put + PLAIN[at + len(put) :]
    end, said, _ = plain_events(data, WHOLE)
    if end:
        seen = decode(data[6:end].rstrip())
        assert seen.choices is not None
        choice = seen.choices[0]
        text = choice.text if choice.delta is None else choice.delta.content
        assert said.decode() == (text or "")


@pytest.mark.parametrize("wrong", [(), (PLAIN,), ("text", 1), (PLAIN, None)])
def test_other_arguments_raise(wrong):
    with pytest.raises(TypeError):
        plain_events(*wrong)
