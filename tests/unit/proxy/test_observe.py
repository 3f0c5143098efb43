"""What the record says of a request and its answer; hashes are computed a second way."""

from __future__ import annotations

import gc
import hashlib
import hmac
import json
import struct

import pytest

from proxy.http.http1 import HeadLimits, parse_response
from proxy.observe import WHOLE_ANSWER_BYTES, Observation, Observing

KEY = b"prompt key of a tenant, 32 bytes"
LIMITS = HeadLimits(head_bytes=64 << 10, field_bytes=32 << 10, fields=128)
JSON = b"application/json"
BODY = (
    b'{"model": "qwen3-8b",\n "messages": [{"role":"user","content":"h\xc3\xa9llo"}],'
    b' "temperature": 0.70, "top_p": 1}'
)
PROMPT = b'[{"role":"user","content":"h\xc3\xa9llo"}]'
REST = b'{"model": ,\n "messages": , "temperature": , "top_p": 1}'
HELD_MAX = 1 << 20


def observing(**changes):
    values = {
        "enabled": True,
        "plain_hashes": False,
        "held_bytes_max": HELD_MAX,
        "event_bytes": 1 << 16,
        **changes,
    }
    return Observing(**values)


def observation(shared=None, key=KEY):
    made = Observation()
    made.shared = shared or observing()
    made.prompt_key = key
    return made


def independent(key, data):
    if key is None:
        return hashlib.sha256(data).hexdigest()
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def framed(*parts):
    return b"".join(struct.pack(">I", len(p)) + p for p in parts)


def head(content_type=JSON, status=200, **fields):
    lines = [b"HTTP/1.1 %d OK" % status, b"Content-Type: " + content_type]
    lines += [b"%b: %b" % (n.replace("_", "-").encode(), v) for n, v in fields.items()]
    found = parse_response(b"\r\n".join(lines) + b"\r\n\r\n", LIMITS, b"POST")
    assert found is not None
    return found


def answer_of(*texts, **more):
    choices = [
        {"index": i, "message": {"role": "assistant", "content": t}} for i, t in enumerate(texts)
    ]
    return json.dumps({"model": "served", "choices": choices, **more}).encode()


def event(index, text, **more):
    choice = {"index": index, "delta": {"content": text}, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def test_a_stream_that_is_over_leaves_nothing_to_the_collector():
    """A cycle would keep all that a request held until the collector comes by, minutes later."""
    made = observation()
    made.observe_answer(head(b"text/event-stream"))
    made.observe_data(event(0, "x"))
    made.observe_end()
    assert made.output()[1] == 1
    gc.collect()
    gc.disable()
    try:
        del made
        assert gc.collect() == 0
    finally:
        gc.enable()


def run_whole(body, *, seen=None, request=BODY, cut=None, response=None):
    seen = seen or observation()
    assert seen.observe_request(request, ask_ids=False) == request
    seen.observe_answer(response or head())
    size = cut or len(body)
    out = b"".join(seen.observe_data(body[i : i + size]) for i in range(0, len(body), size))
    assert out + seen.observe_end() == body
    seen.complete()
    return seen


def run_stream(events, *, seen=None, cut=None, response=None):
    seen = seen or observation()
    seen.observe_request(BODY, ask_ids=False)
    seen.observe_answer(response or head(b"text/event-stream"))
    size = cut or len(events)
    out = b"".join(seen.observe_data(events[i : i + size]) for i in range(0, len(events), size))
    assert out + seen.observe_end() == events
    seen.complete()
    return seen


# --- the request


@pytest.mark.parametrize("plain", [False, True])
def test_prompt_and_params_are_hashed_as_the_exact_bytes_that_came(plain):
    seen = observation(observing(plain_hashes=plain))
    run_whole(answer_of("x"), seen=seen)
    key = None if plain else KEY
    assert seen.prompt_hash == independent(key, framed(PROMPT, b"qwen3-8b", b"0.70"))
    assert seen.params_hash == independent(key, framed(REST))
    assert seen.model == "qwen3-8b"


@pytest.mark.parametrize("cut", [1, 7, 100, 1000])
def test_a_streamed_body_hashes_as_a_whole_one(cut):
    seen = observation()
    pieces = [BODY[i : i + cut] for i in range(0, len(BODY), cut)]
    seen.observe_begins(pieces[:1])
    for piece in pieces[1:]:
        seen.observe_piece(piece)
    seen.observe_whole()
    seen.complete()
    assert seen.prompt_hash == independent(KEY, framed(PROMPT, b"qwen3-8b", b"0.70"))
    assert seen.params_hash == independent(KEY, framed(REST))


def test_a_streamed_body_that_never_became_whole_has_no_hash():
    seen = observation()
    seen.observe_begins([BODY[:20]])
    seen.complete()
    assert (seen.prompt_hash, seen.params_hash, seen.model) == (None, None, None)


def test_a_prompt_without_model_and_temperature():
    seen = observation()
    run_whole(answer_of("x"), seen=seen, request=b'{"prompt":"p"}')
    assert seen.prompt_hash == independent(KEY, framed(b'"p"', b"", b""))
    assert seen.params_hash == independent(KEY, framed(b'{"prompt":}'))
    assert seen.model is None


def test_without_a_tenants_key_there_are_facts_but_no_hashes():
    seen = observation(key=None)
    run_whole(answer_of("x", usage={"prompt_tokens": 3}), seen=seen)
    assert (seen.prompt_hash, seen.params_hash, seen.output()) == (None, None, (None, None))
    assert (seen.model, seen.served_model, seen.usage()) == ("qwen3-8b", "served", {"prompt": 3})


@pytest.mark.parametrize(
    "body", [b"not json", b'{"model":"a"', b"[1]", b'{"a":1}', b'{"model":1,"model":2}', b"\xff"]
)
def test_a_body_that_cannot_be_read_goes_on_untouched_and_unhashed(body):
    seen = observation()
    assert seen.observe_request(body, ask_ids=True) == body
    seen.complete()
    assert (seen.prompt_hash, seen.params_hash) == (None, None)


def hmac_of(data):
    return hmac.new(KEY, data, "sha256").hexdigest()


@pytest.mark.parametrize(
    "body", [b"not json", b'{"model":"a"', b"[1]", b'{"messages":1,"messages":2}']
)
def test_a_body_whose_prompt_cannot_be_told_is_hashed_as_a_whole(body):
    seen = observation()
    seen.observe_request(body, ask_ids=False)
    seen.complete()
    assert (seen.prompt_hash, seen.body_hash) == (None, hmac_of(body))


def test_without_an_audit_nothing_is_held_or_asked():
    seen = observation(observing(enabled=False))
    assert seen.observe_request(BODY, ask_ids=True) == BODY
    seen.observe_begins([BODY])
    seen.observe_answer(head(b"text/event-stream"))
    data = event(0, "text")
    assert seen.observe_data(data) + seen.observe_end() == data
    seen.complete()
    assert seen.shared.held_bytes == 0
    assert (seen.prompt_hash, seen.output()) == (None, (None, None))


# --- token ids are asked for, and cut out again


def test_asked_ids_are_cut_out_of_a_whole_answer_and_kept():
    seen = observation()
    sent = seen.observe_request(BODY, ask_ids=True)
    assert sent == BODY[:-1] + b',"return_token_ids":true}'
    assert seen.changes_length
    answer = b'{"choices":[{"index":0,"message":{"content":"hi"},"token_ids":[5,6]}],"id":"a"}'
    seen.observe_answer(head(Content_Length=b"%d" % len(answer)))
    assert seen.needs_whole_answer
    assert seen.without_ids(answer) == answer.replace(b',"token_ids":[5,6]', b"")
    seen.complete()
    assert seen.token_ids == [5, 6]
    assert seen.output() == (independent(KEY, b"hi"), 2)
    # The hash is of the client's bytes, without what we added.
    assert seen.params_hash == independent(KEY, framed(REST))


def test_an_answer_too_large_to_hold_is_not_waited_for():
    seen = observation()
    seen.observe_request(BODY, ask_ids=True)
    seen.observe_answer(head(Content_Length=b"%d" % (WHOLE_ANSWER_BYTES + 1)))
    assert not seen.needs_whole_answer


def test_nothing_is_cut_where_nothing_was_asked():
    seen = observation()
    seen.observe_request(BODY, ask_ids=False)
    answer = b'{"choices":[{"index":0,"message":{"content":"hi"},"token_ids":[5,6]}]}'
    seen.observe_answer(head())
    assert not seen.changes_length
    assert not seen.needs_whole_answer
    assert seen.without_ids(answer) is answer


def test_asked_ids_are_cut_out_of_a_stream_and_kept():
    seen = observation()
    body = BODY[:-1] + b',"stream":true}'
    sent = seen.observe_request(body, ask_ids=True)
    assert sent.endswith(b',"return_token_ids":true,"stream_options":{"include_usage":true}}')
    seen.observe_answer(head(b"text/event-stream"))
    assert not seen.needs_whole_answer
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\n'
    stream = event(0, "hi", token_ids=[7]) + event(0, "!", token_ids=[8]) + usage
    stream += b"data: [DONE]\n\n"
    out = seen.observe_data(stream) + seen.observe_end()
    assert b"token_ids" not in out
    assert b"usage" not in out
    assert out.endswith(b"data: [DONE]\n\n")
    assert seen.token_ids == [7, 8]
    assert seen.usage() == {"prompt": 2, "completion": 1}
    assert seen.output() == (independent(KEY, b"hi!"), 3)


# --- the answer


@pytest.mark.parametrize("cut", [None, 1, 10])
@pytest.mark.parametrize("text", ["hello", "h\u00e9llo \u4e2d\u56fd", "", "\U0001f600"])
def test_the_output_of_a_whole_answer(text, cut):
    seen = run_whole(answer_of(text), cut=cut)
    assert seen.output() == (independent(KEY, text.encode()), len(text.encode()))
    assert seen.served_model == "served"


@pytest.mark.parametrize("cut", [None, 1, 33])
def test_the_output_of_a_stream_is_that_of_the_whole_answer(cut):
    text = "h\u00e9llo \u4e2d\u56fd"
    events = b"".join(event(0, c) for c in text) + b"data: [DONE]\n\n"
    seen = run_stream(events, cut=cut)
    assert seen.output() == (independent(KEY, text.encode()), len(text.encode()))


def test_several_choices_are_joined_by_a_zero_byte_in_index_order():
    whole = run_whole(answer_of("one", "", "three"))
    events = event(2, "thr") + event(0, "on") + event(2, "ee") + event(0, "e") + event(1, "")
    stream = run_stream(events)
    joined = b"one\0\0three"
    assert whole.output() == stream.output() == (independent(KEY, joined), len(joined))


def test_a_choice_of_completions_is_text():
    body = json.dumps({"choices": [{"index": 0, "text": "plain"}]}).encode()
    assert run_whole(body).output() == (independent(KEY, b"plain"), 5)
    events = b'data: {"choices":[{"index":0,"text":"plain"}]}\n\n'
    assert run_stream(events).output() == (independent(KEY, b"plain"), 5)


def test_half_a_character_makes_an_answer_unreadable_not_wrongly_hashed():
    body = b'{"choices":[{"index":0,"message":{"content":"a\\ud83d"}}]}'
    events = b'data: {"choices":[{"index":0,"delta":{"content":"a\\ud83d"}}]}\n\n'
    assert run_whole(body).output() == (None, None)
    assert run_stream(event(0, "before") + events).output() == (None, None)


def test_plain_mode_hashes_the_output_bare():
    seen = run_stream(event(0, "hi"), seen=observation(observing(plain_hashes=True), key=None))
    assert seen.output() == (hashlib.sha256(b"hi").hexdigest(), 2)


def test_a_stream_that_was_cut_hashes_what_was_handed_on():
    seen = observation()
    seen.observe_answer(head(b"text/event-stream"))
    seen.observe_data(event(0, "half") + b'data: {"choices":[{"index":0,"delta":{"con')
    assert not seen.between_events
    seen.complete()
    assert seen.output() == (independent(KEY, b"half"), 4)
    assert seen.usage() is None


def test_output_is_given_once():
    seen = run_stream(event(0, "hi"))
    assert seen.output()[1] == 2
    assert seen.output() == (None, None)


@pytest.mark.parametrize("status", [300, 400, 500])
def test_an_error_in_an_event_stream_has_no_output(status):
    seen = run_stream(event(0, "hi"), response=head(b"text/event-stream", status))
    assert seen.output() == (None, None)


@pytest.mark.parametrize("body", [b"", b"not json", b'{"choices":[{"ind', b"[]", b"\xff\xfe"])
def test_a_whole_answer_that_cannot_be_read_is_unknown(body):
    seen = observation()
    seen.observe_request(BODY, ask_ids=False)
    seen.observe_answer(head())
    assert seen.observe_data(body) == body
    assert seen.observe_end() == b""
    seen.complete()
    assert seen.output() == (None, None)
    assert (seen.usage(), seen.served_model, seen.token_ids) == (None, None, None)
    assert seen.prompt_hash is not None


def test_a_compressed_answer_is_unknown_and_goes_by_untouched():
    data = b"\x1f\x8b\x08 not for us"
    seen = run_whole(data, response=head(content_encoding=b"gzip"))
    assert seen.output() == (None, None)
    stream = run_stream(data, response=head(b"text/event-stream", content_encoding=b"gzip"))
    # Not the hash of nothing: something was said that nobody here can read.
    assert stream.output() == (None, None)
    assert stream.event_stream
    assert not stream.between_events


@pytest.mark.parametrize(
    "lost",
    [
        event(0, "x" * 70_000),  # beyond limits.event_bytes
        b'data: {"choices": oops\n\n',
        event(128, "beyond the choices that are followed"),
    ],
)
def test_a_stream_of_which_something_was_missed_has_no_hash(lost):
    seen = run_stream(event(0, "seen") + lost + event(0, "more"))
    assert seen.output() == (None, None)
    assert seen.token_ids is None


def test_an_answer_to_a_request_without_a_body_is_not_held():
    seen = observation()
    assert seen.observe_request(b"", ask_ids=True) == b""
    seen.observe_answer(head())
    assert seen.observe_data(b'{"data":[]}') == b'{"data":[]}'
    assert seen.shared.held_bytes == 0


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        (
            {},
            b"X-Accel-Buffering: no\r\nCache-Control: no-cache, no-transform\r\n",
        ),
        ({"Cache_Control": b"no-store"}, b"X-Accel-Buffering: no\r\n"),
        ({"X_Accel_Buffering": b"yes"}, b"Cache-Control: no-cache, no-transform\r\n"),
    ],
)
def test_an_event_stream_gets_the_fields_that_it_lacks(fields, added):
    seen = observation()
    seen.observe_answer(head(b"text/event-stream", **fields))
    assert seen.stream_fields == added


def test_what_is_no_event_stream_gets_no_such_fields():
    seen = observation()
    seen.observe_answer(head())
    assert seen.stream_fields == b""


# --- usage


@pytest.mark.parametrize(
    ("reported", "kept"),
    [
        ({"prompt_tokens": 0, "completion_tokens": 2}, {"prompt": 0, "completion": 2}),
        (
            {
                "total_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 5},
            },
            {"total": 9, "cached": 4, "reasoning": 5},
        ),
        ({"prompt_tokens": -1, "total_tokens": 1 << 60}, {}),
        ({"prompt_tokens": True, "completion_tokens": 1.5, "total_tokens": "3"}, {}),
        ({"prompt_tokens_details": [1], "completion_tokens_details": "x"}, {}),
    ],
)
def test_usage_is_as_reported_and_what_is_no_count_is_absent(reported, kept):
    assert run_whole(answer_of("x", usage=reported)).usage() == kept
    events = event(0, "x") + b"data: " + json.dumps({"usage": reported}).encode() + b"\n\n"
    assert run_stream(events).usage() == kept


@pytest.mark.parametrize("usage", [None, 3, [1], "x", {}])
def test_usage_of_another_shape_is_unknown(usage):
    assert run_whole(answer_of("x", usage=usage)).usage() is None


# --- the bound on held bytes


def test_held_bytes_are_given_back_exactly():
    shared = observing()
    first, second = observation(shared), observation(shared)
    first.observe_request(BODY, ask_ids=False)
    second.observe_begins([BODY])
    second.observe_whole()
    assert shared.held_bytes == 2 * len(BODY)
    answer = answer_of("x")
    first.observe_answer(head())
    first.observe_data(answer)
    assert shared.held_bytes == 2 * len(BODY) + len(answer)
    first.release()
    assert shared.held_bytes == len(BODY)
    first.release()
    assert shared.held_bytes == len(BODY)
    second.release()
    assert (shared.held_bytes, shared.unobserved) == (0, 0)


def test_beyond_the_bound_a_request_is_looked_at_at_once():
    shared = observing(held_bytes_max=len(BODY))
    first, second = observation(shared), observation(shared)
    assert first.observe_request(BODY, ask_ids=False) == BODY
    assert second.observe_request(BODY, ask_ids=False) == BODY
    assert shared.held_bytes == len(BODY)
    for seen in (first, second):
        seen.complete()
        seen.release()
    assert first.prompt_hash is not None
    assert (first.prompt_hash, first.params_hash) == (second.prompt_hash, second.params_hash)
    assert shared.held_bytes == 0


def test_a_streamed_body_that_meets_the_bound_has_a_hash_of_the_whole():
    shared = observing(held_bytes_max=30)
    seen = observation(shared)
    seen.observe_begins([BODY[:10]])
    seen.observe_piece(BODY[10:])
    assert shared.held_bytes == 0
    seen.observe_whole()
    seen.complete()
    assert (seen.prompt_hash, seen.body_hash) == (None, hmac_of(BODY))
    seen.release()
    assert shared.held_bytes == 0


def test_streamed_bodies_leave_room_for_others():
    shared = observing(held_bytes_max=2 * len(BODY) + 2)
    streamed, late = observation(shared), observation(shared)
    streamed.observe_begins([BODY])
    late.observe_begins([BODY])
    assert shared.held_bytes == len(BODY)
    whole = observation(shared)
    whole.observe_request(BODY, ask_ids=False)
    assert shared.held_bytes == 2 * len(BODY)


def test_an_answer_that_meets_the_bound_is_given_up_and_given_back():
    # What fits before and after the piece that does not would read as a whole answer.
    start = b'{"choices":[{"index":0,"message":{"content":"a"}}'
    pieces = [start, b',{"index":1,"message":{"content":"' + b"b" * 200 + b'"}}', b"]}"]
    shared = observing(held_bytes_max=len(BODY) + 100)
    seen = observation(shared)
    seen.observe_request(BODY, ask_ids=False)
    seen.observe_answer(head())
    assert [seen.observe_data(piece) for piece in pieces] == pieces
    seen.complete()
    assert seen.output() == (None, None)
    assert shared.unobserved == 1
    seen.release()
    assert shared.held_bytes == 0
