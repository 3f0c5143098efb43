"""Token ids asked of the engine on audit's behalf: in its request, not in the client's answer."""

import json

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Sidecar,
    chunk,
    ok,
    post,
    tongguan,
)

MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'
PLAIN = b'{"model":"m", ' + MESSAGES + b"}"
STREAMING = b'{"model":"m","stream" : true,' + MESSAGES + b"}"
PROMPT_IDS, IDS = [1, 2, 3], [10, 11, 12, 2]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory, backend, keys):
    folder = tmp_path_factory.mktemp("tokens")
    with Sidecar(folder, backend.url, keys=keys, POOLS_SHARED_TOKEN_IDS="true") as sidecar:
        yield sidecar


def whole(asked):
    """A chat completion as an engine reports it, token ids if it was asked."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "Paris."}}
    if asked:
        choice["token_ids"] = IDS
    answer = {"id": "c", "model": "served", "choices": [choice | {"finish_reason": "stop"}]}
    if asked:
        answer["prompt_token_ids"] = PROMPT_IDS
    answer["usage"] = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return json.dumps(answer).encode()


def events(asked, usage):
    deltas = ["Par", "is", "."]
    for i, text in enumerate(deltas):
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        event = {"id": "c", "model": "served", "choices": [choice]}
        if asked:
            choice["token_ids"] = [IDS[i]]
            if not i:
                event["prompt_token_ids"] = PROMPT_IDS
        yield event
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    if asked:
        last["token_ids"] = [IDS[3]]
    yield {"id": "c", "model": "served", "choices": [last]}
    if usage:
        counts = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        yield {"id": "c", "model": "served", "choices": [], "usage": counts}


def stream(asked, usage):
    parts = [b"data: " + json.dumps(e).encode() + b"\n\n" for e in events(asked, usage)]
    return [*parts, b"data: [DONE]\n\n"]


def engine(coding="length"):
    """Return a script that answers as an engine that understands return_token_ids."""

    def script(seen):
        body = json.loads(seen.body())
        asked = body.get("return_token_ids") is True
        if body.get("stream"):
            usage = (body.get("stream_options") or {}).get("include_usage") is True
            seen.reply(SSE_HEAD, *map(chunk, stream(asked, usage)), LAST_CHUNK)
        elif coding == "length":
            answer = whole(asked)
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            )
            seen.reply(head % len(answer) + answer)
        else:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            answer = whole(asked)
            body = chunk(answer[:40]) + chunk(answer[40:]) + LAST_CHUNK
            seen.reply(head + b"Transfer-Encoding: chunked\r\n\r\n" + body)

    return script


@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_whole_answer_is_as_if_nothing_had_been_asked(sidecar, upstream, coding):
    upstream.answering(engine(coding))
    answer = sidecar.ask(post(PLAIN))
    assert json.loads(upstream.last().payload)["return_token_ids"] is True
    assert answer.body == whole(asked=False)
    assert sidecar.record(answer.trace_id)["ids_n"] == len(IDS)


def test_stream_is_as_if_nothing_had_been_asked(sidecar, upstream):
    upstream.answering(engine())
    answer = sidecar.ask(post(STREAMING))
    sent = json.loads(upstream.last().payload)
    assert sent["return_token_ids"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert answer.body == b"".join(stream(asked=False, usage=False))
    record = sidecar.record(answer.trace_id)
    assert record["ids_n"] == len(IDS)
    assert record["usage"] == {"prompt": 3, "completion": 4, "total": 7}


def test_only_the_inserted_members_differ_upstream(sidecar, upstream):
    upstream.answering(engine())
    sidecar.ask(post(PLAIN))
    payload = upstream.last().payload
    assert payload.startswith(PLAIN[:-1])
    added = json.loads(payload)
    del added["return_token_ids"]
    assert added == json.loads(PLAIN)


@pytest.mark.parametrize("streaming", [False, True])
def test_client_that_asked_itself_sees_what_it_asked_for(sidecar, upstream, streaming):
    upstream.answering(engine())
    ask = (STREAMING if streaming else PLAIN)[:-1] + b',"return_token_ids":true}'
    answer = sidecar.ask(post(ask))
    expected = b"".join(stream(True, usage=False)) if streaming else whole(asked=True)
    assert answer.body == expected
    assert sidecar.record(answer.trace_id)["ids_n"] == len(IDS)


def test_client_that_asked_for_usage_gets_its_usage(sidecar, upstream):
    upstream.answering(engine())
    ask = STREAMING[:-1] + b',"stream_options":{"include_usage":true}}'
    answer = sidecar.ask(post(ask))
    assert answer.body == b"".join(stream(asked=False, usage=True))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m",' + MESSAGES + b"} \n",
        b'{"model":"m",' + MESSAGES + b',"model":"n"}',
        b'{"model":"m","messages":[}',
        b'["messages"]',
        b'{"input":"no prompt"}',
    ],
    ids=["does not end at its brace", "twice", "no JSON", "no object", "no prompt"],
)
def test_body_that_cannot_be_extended_exactly_is_left_alone(sidecar, upstream, body):
    upstream.answering(ok)
    sidecar.ask(post(body))
    assert upstream.last().payload == body


def test_nothing_is_asked_of_a_pool_that_did_not_declare_it(sidecar, upstream):
    sidecar.ask(post(PLAIN, b"X-QoS-Class: P2"))
    assert upstream.last().payload == PLAIN


def test_the_auditor_opens_the_ids_of_an_answer(sidecar, upstream, keys):
    upstream.answering(engine())
    answer = sidecar.ask(post(STREAMING))
    sidecar.record(answer.trace_id)
    arguments = ("audit", "show", sidecar.audit_dir, "--trace-id", answer.trace_id, "--json")
    shown = tongguan(*arguments, "--auditor-key", keys / "auditor.json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["ids"] == IDS


@pytest.mark.parametrize("size", [10, 2 << 20])
def test_sealed_answer_is_cut_too(sidecar, upstream, keys, size):
    def script(seen):
        asked = json.loads(seen.body()).get("return_token_ids") is True
        answer = whole(asked).replace(b"Paris.", b"x" * size)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        seen.reply(head % len(answer) + answer)

    upstream.answering(script)
    sealed = Channel(keys / "client.json").seal(PLAIN)
    with Client(sidecar.sealed) as client:
        answer = client.send(sealed.request()).answer()
    body = sealed.open(answer)[2]
    assert body == whole(asked=False).replace(b"Paris.", b"x" * size)
    assert sidecar.record(answer.trace_id)["ids_n"] == len(IDS)
