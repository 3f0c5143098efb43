import json
import re

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
HI_IDS = [ord("u"), ord("h"), ord("i")]


def test_a_chat_is_answered_whole(served):
    answer = served.client.post(CHAT, json={"model": "scripted", "messages": HI})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    value = answer.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", value.pop("id"))
    assert value.pop("created") > 1_700_000_000
    assert value == {
        "object": "chat.completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def test_a_completion_is_answered_whole(served):
    answer = served.client.post(TEXT, json={"prompt": "ab", "max_tokens": 9, "user": "u"})
    value = answer.json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", value["id"])
    assert value["object"] == "text_completion"
    assert value["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    ]
    assert value["usage"]["total_tokens"] == 5


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_every_form_of_one_prompt_is_taken(served, prompt):
    assert served.client.post(TEXT, json={"prompt": prompt}).status_code == 200
    assert served.engine.generations.get_nowait().prompt_ids == (97, 98)


def test_parameters_reach_the_engine(served):
    served.client.post(
        CHAT,
        json={
            "messages": HI, "temperature": 0, "top_p": 0.5, "seed": -3, "stop": ["x", "y"],
            "max_tokens": 5, "max_completion_tokens": 6,
        },
    )  # fmt: skip
    sampling = served.engine.generations.get_nowait().sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, -3)
    assert sampling.stop == ("x", "y")
    assert sampling.max_tokens == 6


def test_defaults_are_those_of_openai(served):
    served.client.post(TEXT, json={"prompt": "ab", "temperature": None, "stop": None})
    sampling = served.engine.generations.get_nowait().sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.0, 1.0, None)
    assert (sampling.stop, sampling.max_tokens) == ((), 16)


def test_a_chat_without_max_tokens_gets_what_the_context_leaves(served):
    served.client.post(CHAT, json={"messages": HI})
    assert served.engine.generations.get_nowait().sampling.max_tokens == 64 - 3


def test_text_parts_are_joined_by_lines_and_developer_is_system(served):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    served.client.post(CHAT, json={"messages": [{"role": "developer", "content": parts}]})
    assert bytes(served.engine.generations.get_nowait().prompt_ids) == b"sa\nb"


def test_a_long_prompt_is_tokenised_off_the_loop_and_answered_the_same(served):
    body = {"prompt": "ab", "padding": "x" * 20_000}
    assert served.client.post(TEXT, json=body).json()["choices"][0]["text"] == "Hello"


def test_a_chat_stream_has_openais_frames(served, events):
    answer = served.client.post(CHAT, json={"messages": HI, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    *chunks, done = events(answer.content)
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    choices = [c["choices"][0] for c in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in c["delta"] for c in choices[1:])
    assert "".join(c["delta"].get("content", "") for c in choices) == "Hello"
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "stop"
    assert not any("usage" in c or "token_ids" in c["choices"][0] for c in chunks)


def test_a_completion_stream_has_openais_frames(served, events):
    answer = served.client.post(TEXT, json={"prompt": "ab", "stream": True})
    *chunks, done = events(answer.content)
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_usage_is_the_last_chunk_and_null_before(served, events):
    options = {"include_usage": True}
    body = {"messages": HI, "stream": True, "stream_options": options}
    *chunks, usage, done = events(served.client.post(CHAT, json=body).content)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert [c["usage"] for c in chunks] == [None] * len(chunks)


def test_a_chat_returns_token_ids_as_vllm_does(served):
    body = {"messages": HI, "return_token_ids": True}
    value = served.client.post(CHAT, json=body).json()
    assert value["prompt_token_ids"] == HI_IDS
    assert value["choices"][0]["token_ids"] == [1, 2, 0]


def test_a_chat_stream_returns_token_ids_as_vllm_does(served, events):
    body = {"messages": HI, "return_token_ids": True, "stream": True}
    *chunks, _done = events(served.client.post(CHAT, json=body).content)
    assert chunks[0]["prompt_token_ids"] == HI_IDS
    assert not any("prompt_token_ids" in c for c in chunks[1:])
    assert "token_ids" not in chunks[0]["choices"][0]
    assert [i for c in chunks[1:] for i in c["choices"][0]["token_ids"]] == [1, 2, 0]


def test_a_completion_returns_token_ids_in_the_choice_as_vllm_does(served, events):
    body = {"prompt": "ab", "return_token_ids": True}
    value = served.client.post(TEXT, json=body).json()
    assert value["choices"][0]["prompt_token_ids"] == [97, 98]
    assert value["choices"][0]["token_ids"] == [1, 2, 0]
    assert "prompt_token_ids" not in value
    *chunks, _ = events(served.client.post(TEXT, json=body | {"stream": True}).content)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    assert not any("prompt_token_ids" in c["choices"][0] for c in chunks[1:])
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [1, 2, 0]


def test_steps_without_text_lose_no_ids_and_make_no_empty_chunk(start, engine, events):
    engine.script = lambda g: (
        g.give("", [7]), g.give("", [8]), g.give("é", [9]), g.give("", [0], "length")
    )  # fmt: skip
    body = {"messages": HI, "return_token_ids": True, "stream": True}
    *chunks, _ = events(start().client.post(CHAT, json=body).content)
    later = [c["choices"][0] for c in chunks[1:]]
    assert [i for c in later for i in c["token_ids"]] == [7, 8, 9, 0]
    assert all(c["delta"].get("content") != "" or c["finish_reason"] for c in later)
    assert later[-1]["finish_reason"] == "length"


def test_text_that_is_no_ascii_passes_as_utf8(start, engine, events):
    engine.script = lambda g: (g.give("你", [1]), g.give("好🙂", [2]), g.give("", [0], "stop"))
    served = start()
    assert "你好🙂".encode() in served.client.post(CHAT, json={"messages": HI}).content
    *chunks, _ = events(served.client.post(CHAT, json={"messages": HI, "stream": True}).content)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "你好🙂"


def test_models_are_listed(served):
    (row,) = served.client.get("/v1/models").json()["data"]
    assert (row["id"], row["object"], row["created"]) == ("scripted", "model", 1_700_000_000)
    assert row["max_model_len"] == 64
    assert served.client.get("/v1/models/scripted").json() == row


def test_a_model_can_have_several_names(start):
    served = start(model_names=("org/a", "b"))
    assert [r["id"] for r in served.client.get("/v1/models").json()["data"]] == ["org/a", "b"]
    assert served.client.get("/v1/models/org/a").json()["id"] == "org/a"
    answer = served.client.post(TEXT, json={"model": "b", "prompt": "ab"})
    assert answer.json()["model"] == "org/a"
    assert served.client.post(TEXT, json={"model": "scripted", "prompt": "a"}).status_code == 404


def test_the_openai_package_understands_the_answers(served):
    import openai

    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1", api_key="x", max_retries=0
    ) as client:
        whole = client.chat.completions.create(model="scripted", messages=HI)
        assert whole.choices[0].message.content == "Hello"
        stream = client.chat.completions.create(
            model="scripted", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello"
        assert chunks[-1].usage.completion_tokens == 3
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-4", messages=HI)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="scripted", messages=HI, n=2)
        assert caught.value.param == "n"


def test_a_request_id_is_kept_or_made(served):
    given = served.client.post(TEXT, json={"prompt": "a"}, headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = served.client.post(TEXT, json={"prompt": "a"}, headers={"X-Request-Id": "a b"})
    assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])


def _class(client, **headers):
    return client.post(TEXT, json={"prompt": "a"}, headers=headers).headers["x-qos-class"]


def test_a_class_is_not_believed_from_just_anybody(start):
    client = start(token=b"0123456789abcdef").client
    assert _class(client, **{"X-QoS-Class": "P0"}) == "P1"
    wrong = {"X-QoS-Class": "P0", "Authorization": "Bearer 0123456789abcdeg"}
    assert _class(client, **wrong) == "P1"


def test_a_class_is_believed_with_the_sidecars_token(start):
    served = start(token=b"0123456789abcdef")
    right = {"X-QoS-Class": "p0", "Authorization": "Bearer 0123456789abcdef"}
    assert _class(served.client, **right) == "P0"
    assert served.engine.generations.get_nowait().qos_class == "P0"
    assert _class(served.client, **right | {"X-QoS-Class": "P9"}) == "P1"
    twice = [*right.items(), ("X-QoS-Class", "P0")]
    answer = served.client.post(TEXT, json={"prompt": "a"}, headers=twice)
    assert answer.headers["x-qos-class"] == "P1"
    assert served.metric("tongguan_agent_requests_total", qos_class="P0") == 1


def test_a_tenant_is_believed_where_the_class_is(start):
    served = start(token=b"0123456789abcdef")
    right = {"Authorization": "Bearer 0123456789abcdef"}

    def tenant(headers):
        served.client.post(TEXT, json={"prompt": "a"}, headers=headers)
        return served.engine.generations.get_nowait().tenant

    assert tenant(right | {"X-Tenant-Id": "acme"}) == "acme"
    assert tenant({"X-Tenant-Id": "acme"}) == ""
    assert tenant(right) == ""
    assert tenant(right | {"X-Tenant-Id": "a b"}) == ""
    assert tenant([*right.items(), ("X-Tenant-Id", "a"), ("X-Tenant-Id", "b")]) == ""


def test_without_a_token_no_bearer_is_believed(start):
    client = start(token=b"").client
    for bearer in ("Bearer x", "Bearer", "x"):
        assert _class(client, **{"X-QoS-Class": "P0", "Authorization": bearer}) == "P1"


def test_a_class_is_believed_over_the_unix_socket(start, tmp_path):
    import httpx

    path = str(tmp_path / "a.sock")
    start(unix_path=path, default_class="P2")
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://agent") as client:
        assert _class(client, **{"X-QoS-Class": "P0"}) == "P0"
        assert _class(client) == "P2"


def test_metrics_have_vllms_names(start):
    served = start()
    served.client.post(CHAT, json={"messages": HI})
    served.engine.generations.get(timeout=10)
    names = []
    for line in (
        'vllm:num_requests_running{model_name="scripted"} 2.0',
        'vllm:num_requests_waiting{model_name="scripted"} 1.0',
        'vllm:kv_cache_usage_perc{model_name="scripted"} 0.5',
        'vllm:prompt_tokens_total{model_name="scripted"} 11.0',
        'vllm:generation_tokens_total{model_name="scripted"} 12.0',
        'vllm:prefix_cache_queries_total{model_name="scripted"} 13.0',
        'vllm:prefix_cache_hits_total{model_name="scripted"} 6.0',
        'vllm:request_success_total{finished_reason="abort",model_name="scripted"} 1.0',
        'vllm:time_to_first_token_seconds_count{model_name="scripted"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="scripted"} 2.0',
        'vllm:e2e_request_latency_seconds_count{model_name="scripted"} 1.0',
    ):
        name, labels, value = re.fullmatch(r"(\S+)\{(.*)\} (\S+)", line).groups()
        pairs = dict(re.findall(r'(\w+)="(\w+)"', labels))
        assert served.metric(name, **pairs) == float(value), line
        names.append(name)
    text = served.metrics.render().decode()
    assert [name for name in names if name not in text] == []
    for bound in ("0.2", "0.22", "0.5", "0.8"):
        assert f'vllm:time_to_first_token_seconds_bucket{{le="{bound}"' in text


def test_a_second_request_uses_the_same_connection(served):
    sock = served.raw_post(TEXT, {"prompt": "a"})
    first = sock.recv(65536)
    while b'"total_tokens"' not in first:
        first += sock.recv(65536)
    served.raw_post(TEXT, {"prompt": "a"}, sock)
    second = sock.recv(65536)
    sock.close()
    assert second.startswith(b"HTTP/1.1 200")
    assert json.loads(first.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "Hello"
