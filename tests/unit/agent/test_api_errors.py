import json

import httpx
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def check(answer, status, code, param=None, *words):
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()
    assert set(error) == {"error"}
    error = error["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    for word in words:
        assert word in error["message"]
    return error


BAD_CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
]
BAD_BOTH = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"model": 5}, "model"),
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_k": 40}, "top_k"),
    ({"ignore_eos": True}, "ignore_eos"),
    ({"guided_json": {}}, "guided_json"),
    ({"echo": True}, "echo"),
]
BAD_TEXT = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 0}, "logprobs"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHAT + BAD_BOTH)
def test_a_bad_chat_parameter_is_named(served, change, param):
    answer = served.client.post(CHAT, json={"messages": HI} | change)
    error = check(answer, 400, "invalid_request", param)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith((param, "the model's chat template"))
    assert served.engine.generations.empty()


@pytest.mark.parametrize(("change", "param"), BAD_TEXT + BAD_BOTH)
def test_a_bad_completion_parameter_is_named(served, change, param):
    answer = served.client.post(TEXT, json={"prompt": "a"} | change)
    check(answer, 400, "invalid_request", param)
    assert served.engine.generations.empty()


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (TEXT, "prompt")])
def test_a_missing_prompt_is_named(served, path, param):
    check(served.client.post(path, json={}), 400, "invalid_request", param, "required")


NEUTRAL = {
    "n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "frequency_penalty": 0.0,
    "presence_penalty": 0, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto",
    "top_k": -1, "stop": [], "seed": None, "metadata": {"a": "b"}, "store": False, "anything": [1],
}  # fmt: skip


def test_neutral_and_unknown_parameters_are_taken(served):
    assert served.client.post(CHAT, json={"messages": HI} | NEUTRAL).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"{'a': 1}", b'{"messages": [NaN]}', b"\xff\xfe", b'{"a": "\xff"}',
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"{} x", b"[" * 100_000],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(served, body):
    answer = served.client.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"
    assert served.client.post(TEXT, json={"prompt": "a"}).status_code == 200


def test_an_error_never_shows_the_prompt(served):
    secret = "correct horse battery"
    body = {"messages": [{"role": "user", "content": secret}, {"role": secret, "content": ""}]}
    assert secret not in served.client.post(CHAT, json=body).text
    assert secret not in served.client.post(TEXT, json={"prompt": {"x": secret}}).text
    assert secret not in served.client.post(TEXT, content=b'{"prompt": "' + secret.encode()).text


def test_an_unknown_model_is_404_and_named(served):
    answer = served.client.post(CHAT, json={"model": "gpt-4", "messages": HI})
    check(answer, 404, "model_not_found", "model", "'gpt-4'", "scripted")
    check(served.client.get("/v1/models/gpt-4"), 404, "model_not_found", "model")


def test_context_exceeded_names_both_numbers(served):
    answer = served.client.post(CHAT, json={"messages": HI, "max_tokens": 62})
    check(answer, 400, "context_length_exceeded", "messages", " 3 tokens", " 62", " 64 ")
    answer = served.client.post(TEXT, json={"prompt": "x" * 64})
    check(answer, 400, "context_length_exceeded", "prompt", " 64 tokens", " 16", " 64 ")
    long_chat = [{"role": "user", "content": "x" * 100}]
    answer = served.client.post(CHAT, json={"messages": long_chat, "stream": True})
    check(answer, 400, "context_length_exceeded", "messages", " 101 ", " 64 ")


def test_a_full_queue_is_503_with_retry_after(start):
    served = start()
    served.engine.full = True
    answer = served.client.post(CHAT, json={"messages": HI, "stream": True})
    check(answer, 503, "queue_full", None, "7", "agent.queue")
    assert int(answer.headers["retry-after"]) >= 1
    assert served.metric("tongguan_agent_limit_hits_total", setting="queue") == 1
    assert served.metric("tongguan_agent_errors_total", code="queue_full") == 1


def test_a_closed_engine_is_503(served):
    served.engine.close()
    answer = served.client.post(CHAT, json={"messages": HI})
    check(answer, 503, "draining")


def test_an_engine_failure_before_the_first_token_is_500(served, events):
    served.engine.script = lambda g: g.give("", [], "error", "out of KV blocks")
    for stream in (False, True):
        answer = served.client.post(CHAT, json={"messages": HI, "stream": stream})
        check(answer, 500, "internal_error", None, "out of KV blocks")


def test_an_engine_failure_in_a_stream_is_an_error_event_and_no_done(start, engine, events):
    import threading

    seen = threading.Event()

    def script(generation):
        generation.give("Hel", [1])
        assert seen.wait(10)
        generation.give("", [], "error", "out of KV blocks")

    engine.script = script
    client = start().client
    with client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as answer:
        chunks = answer.iter_bytes()
        body = next(chunks)
        seen.set()
        body += b"".join(chunks)
    *_, last = events(body)
    assert last["error"]["code"] == "internal_error"
    assert b"[DONE]" not in body


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/completions/", "/metrics"])
def test_an_unknown_path_is_404(served, path):
    check(served.client.get(path), 404, "unknown_url", None, f"GET {path}")


def test_a_wrong_method_is_405_with_allow(served):
    answer = served.client.get(CHAT)
    check(answer, 405, "method_not_allowed", None, "POST")
    assert answer.headers["allow"] == "POST"


def test_a_declared_body_too_large_is_413_before_it_is_read(start):
    served = start(body_bytes=2048)
    answer = served.client.post(CHAT, content=b"x" * 2049)
    check(answer, 413, "payload_too_large", None, "2048", "agent.body_bytes")
    assert served.metric("tongguan_agent_limit_hits_total", setting="body_bytes") == 1
    # The rest was read and dropped, so that the answer is not lost in a reset.
    assert served.client.post(TEXT, json={"prompt": "a"}).status_code == 200


def test_a_chunked_body_too_large_is_413(start):
    served = start(body_bytes=2048)
    answer = served.client.post(CHAT, content=iter([b"x" * 1024] * 3))
    check(answer, 413, "payload_too_large")
    assert answer.headers["connection"] == "close"


def test_bodies_that_are_too_many_together_are_503_and_give_their_room_back(start):
    served = start(bodies_bytes=4096)
    held = served.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n"
    held.sendall(head + b" " * 3900)
    while served.api._bodies.held < 3900:
        pass
    answer = served.client.post(TEXT, json={"prompt": "a" * 300})
    check(answer, 503, "queue_full", None, "agent.bodies_bytes")
    assert int(answer.headers["retry-after"]) >= 1
    held.sendall(b" " * 86 + b'{"prompt":"a"}')
    assert held.recv(65536).startswith(b"HTTP/1.1 200")
    assert served.client.post(TEXT, json={"prompt": "a" * 30}).status_code == 200
    assert served.api._bodies.held == 0
    assert served.metric("tongguan_agent_limit_hits_total", setting="bodies_bytes") == 1


def test_a_body_that_stops_coming_is_408(start):
    served = start(body_idle_s=0.05)
    sock = served.connect()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert sock.recv(65536).startswith(b"HTTP/1.1 408 ")
    sock.close()
    assert served.metric("tongguan_agent_limit_hits_total", setting="body_idle_s") == 1


def test_a_head_that_stops_coming_is_closed(start):
    served = start(head_s=0.05)
    sock = served.connect()
    sock.sendall(b"POST /v1/completions HTT")
    assert sock.recv(65536) == b""
    sock.close()
    assert served.metric("tongguan_agent_limit_hits_total", setting="head_s") == 1


def test_a_second_head_that_stops_coming_is_closed(start):
    served = start(head_s=0.05)
    sock = served.raw_post(TEXT, {"prompt": "a"})
    answer = b""
    while b'"total_tokens"' not in answer:
        answer += sock.recv(65536)
    sock.sendall(b"POST /v1/completions HTT")
    rest = sock.recv(65536)
    while rest:
        rest = sock.recv(65536)
    sock.close()
    assert served.metric("tongguan_agent_limit_hits_total", setting="head_s") == 1


@pytest.mark.parametrize(
    "head",
    [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
     b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\n",
     b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
     b"GET / HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 70_000],
)  # fmt: skip
def test_a_malformed_head_is_400_in_openais_form(served, head):
    sock = served.connect()
    sock.sendall(head)
    answer = b""
    while data := sock.recv(65536):
        answer += data
    sock.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert served.client.get("/v1/models").status_code == 200


def test_connections_beyond_the_bound_get_503(start):
    served = start(connections=2)
    held = [served.connect(), served.connect()]
    # Both must have been accepted before the third.
    for sock in held:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
    check(served.client.get("/v1/models"), 503, "connection_limit", None, "agent.connections")
    for sock in held:
        sock.close()
    assert served.metric("tongguan_agent_limit_hits_total", setting="connections") == 1


def test_while_the_model_loads_the_api_answers_503(start):
    served = start(engine=None)
    served.node.stage, served.node.progress = "weights", 0.43
    for answer in (
        served.client.post(CHAT, json={"messages": HI}),
        served.client.get("/v1/models"),
    ):
        check(answer, 503, "model_loading", None, "weights", "43%")
        assert int(answer.headers["retry-after"]) >= 1


def test_after_a_failed_load_the_api_answers_500(start):
    served = start(engine=None)
    served.node.failure = "the file is truncated"
    check(served.client.post(CHAT, json={"messages": HI}), 500, "internal_error")


def test_while_draining_new_requests_get_503(served):
    served.node.draining = True
    answer = served.client.post(CHAT, json={"messages": HI})
    check(answer, 503, "draining")
    assert int(answer.headers["retry-after"]) >= 1


def test_a_bug_is_500_in_openais_form_and_the_next_request_works(served):
    def broken(*_args, **_more):
        raise ZeroDivisionError

    submit, served.engine.submit = served.engine.submit, broken
    with httpx.Client(base_url=str(served.client.base_url)) as other:
        check(other.post(CHAT, json={"messages": HI}), 500, "internal_error")
    served.engine.submit = submit
    assert served.client.post(CHAT, json={"messages": HI}).status_code == 200
