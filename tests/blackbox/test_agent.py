"""The agent as a process: real sockets, real engine, a tiny random model."""

import asyncio
import json
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from agent.upstream import Capabilities, Model, load_of
from agent.upstream_watch import ask, probe
from tests.blackbox import tiny_model
from tests.blackbox.node import WAIT_S, AgentProcess

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def agent(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("agent")
    with AgentProcess(folder / "log", model=model, socket=folder / "s") as process:
        yield process.ready()


def events(text):
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]


def test_while_loading_it_answers_503_and_is_not_ready(tmp_path, model):
    with AgentProcess(tmp_path / "log", model=model) as process:
        first = process.until(lambda: process.client.get("/v1/models"))
        assert first.status_code == 503
        assert first.json()["error"]["code"] == "model_loading"
        assert int(first.headers["retry-after"]) >= 1
        ready = process.admin.get("/readyz")
        assert ready.status_code == 503
        assert "model loading" in ready.json()["reasons"][0]
        assert process.admin.get("/livez").status_code == 200
        process.ready()
        assert process.client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_greedy_answers_are_the_same_streamed_and_whole(agent):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    whole = agent.client.post(TEXT, json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(agent.client.post(TEXT, json=body | options).text)
    chunks = [json.loads(c)["choices"][0] for c in chunks]
    assert done == "[DONE]"
    (choice,) = whole["choices"]
    assert "".join(c["text"] for c in chunks) == choice["text"]
    assert [i for c in chunks for i in c["token_ids"]] == choice["token_ids"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    usage = json.loads(usage)["usage"]
    assert usage["completion_tokens"] == len(choice["token_ids"])
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == len(choice["prompt_token_ids"])
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_probe_sees_what_the_agent_can(agent):
    report = ask("tiny", agent.url, agent.client)
    assert (report.healthy, report.load) == (True, None), "its metrics are on the admin door"
    assert report.models == (Model("tiny", 4096),)
    assert probe(agent.url, "tiny", agent.client) == Capabilities(
        token_ids=True, usage=True, stream_usage=True, prefix_cache=True
    )
    load = load_of(agent.admin.get("/metrics").text)
    assert (load.kind, load.running, load.waiting) == ("tongguan", 0, 0)
    assert load.prefix_hit > 0


def test_max_tokens_ends_with_length(agent):
    value = agent.client.post(TEXT, json={"prompt": PROMPT, "max_tokens": 3, "seed": 1}).json()
    if value["choices"][0]["finish_reason"] == "length":
        assert value["usage"]["completion_tokens"] == 3
    else:
        assert value["usage"]["completion_tokens"] <= 3


def test_a_seed_repeats_a_sampled_answer(agent):
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1.5, "seed": 7}
    one, two = (agent.client.post(TEXT, json=body).json()["choices"] for _ in range(2))
    other = agent.client.post(TEXT, json=body | {"seed": 8}).json()["choices"]
    assert one == two
    assert one != other


def test_context_exceeded_names_both_numbers(agent):
    answer = agent.client.post(TEXT, json={"prompt": "x" * 5000, "max_tokens": 7})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    for number in ("5000", "7", "4096"):
        assert number in error["message"]


def test_a_token_id_outside_the_vocabulary_is_400(agent):
    answer = agent.client.post(TEXT, json={"prompt": [1, 10_000]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_many_at_once_get_what_each_gets_alone(agent):
    bodies = [{"prompt": f"{PROMPT} {n}", "max_tokens": 24, "temperature": 0} for n in range(8)]
    alone = [agent.client.post(TEXT, json=b).json()["choices"][0]["text"] for b in bodies]

    async def together():
        async with httpx.AsyncClient(base_url=agent.url, timeout=WAIT_S) as client:
            return await asyncio.gather(*(client.post(TEXT, json=b) for b in bodies))

    answers = asyncio.run(together())
    assert [a.json()["choices"][0]["text"] for a in answers] == alone


def test_a_client_that_leaves_frees_its_place(agent):
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "temperature": 2}
    with agent.client.stream("POST", CHAT, json=body) as answer:
        assert next(answer.iter_lines())
    agent.until(lambda: agent.metric("vllm:num_requests_running") == 0)
    assert agent.client.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_metrics_count_what_was_done(agent):
    before = agent.metric("vllm:generation_tokens_total")
    value = agent.client.post(TEXT, json={"prompt": PROMPT, "max_tokens": 11}).json()
    after = agent.metric("vllm:generation_tokens_total")
    assert after - before == value["usage"]["completion_tokens"]
    assert agent.metric("vllm:time_to_first_token_seconds_count") > 0
    assert agent.metric("tongguan_agent_model_info") == 1


def test_the_unix_socket_speaks_the_same_and_is_believed(agent):
    path = agent.environ["TONGGUAN_AGENT_SOCKET"]
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=path), base_url="http://agent", timeout=WAIT_S
    ) as client:
        body = {"prompt": "a", "max_tokens": 1}
        answer = client.post(TEXT, json=body, headers={"X-QoS-Class": "P0"})
    assert (answer.status_code, answer.headers["x-qos-class"]) == (200, "P0")


def test_the_admin_door_knows_three_paths(agent):
    assert agent.admin.get("/livez").json() == {"alive": True}
    assert agent.admin.get("/nothing").status_code == 404
    assert agent.admin.get("/v1/models").status_code == 404
    assert agent.admin.post("/livez").status_code == 405


def test_sigterm_ends_it_cleanly_and_no_prompt_is_in_the_log(tmp_path, model):
    path = tmp_path / "s"
    with AgentProcess(tmp_path / "log", model=model, socket=path, log_level="debug") as process:
        process.ready()
        body = {"prompt": "correct horse battery staple", "max_tokens": 4}
        assert process.client.post(TEXT, json=body).status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(WAIT_S) == 0
        assert "horse" not in process.log
        assert "the model runs on the CPU" in process.log
        assert not path.exists()


def test_a_signal_while_loading_ends_it_cleanly(tmp_path, model):
    with AgentProcess(tmp_path / "log", model=model) as process:
        process.until(lambda: process.admin.get("/readyz").status_code == 503)
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(WAIT_S) == 0


LONG = {
    "messages": [{"role": "user", "content": PROMPT}],
    "stream": True,
    "temperature": 0,
    "max_tokens": 4000,
}


def test_when_grace_is_over_a_stream_gets_an_error_ending(tmp_path, model):
    with AgentProcess(tmp_path / "log", model=model, grace_s=0.1) as process:
        process.ready()
        with process.client.stream("POST", CHAT, json=LONG) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            process.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "draining"
        assert process.process.wait(WAIT_S) == 0


def test_a_second_signal_ends_it_now(tmp_path, model):
    with AgentProcess(tmp_path / "log", model=model, grace_s=1000) as process:
        process.ready()
        with process.client.stream("POST", CHAT, json=LONG) as answer:
            assert next(answer.iter_lines())
            process.process.send_signal(signal.SIGTERM)
            process.until(lambda: not process.admin.get("/readyz").json()["ready"])
            process.process.send_signal(signal.SIGTERM)
            assert process.process.wait(WAIT_S) == 128 + signal.SIGTERM


def run(tmp_path, **settings):
    process = AgentProcess(tmp_path / "log", **settings)
    return subprocess.run(
        [sys.executable, "-m", "agent"],
        env=process.environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_wrong_settings_end_it_with_2_and_every_line(tmp_path):
    done = run(tmp_path, queue=0, shape="round", listen="nowhere")
    assert done.returncode == 2
    assert sorted(line.split(":")[1].strip() for line in done.stderr.splitlines()) == [
        "TONGGUAN_AGENT_QUEUE",
        "TONGGUAN_AGENT_SHAPE",
        "agent.listen",
    ]


def test_a_taken_port_ends_it_with_3_and_its_name(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        done = run(tmp_path, listen=address)
    assert done.returncode == 3
    assert f"agent.listen: {address} is in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_token_file_others_can_read_ends_it_with_3(tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    done = run(tmp_path, token_file=token)
    assert done.returncode == 3
    assert "chmod 600" in done.stderr
    assert "0123456789" not in done.stderr


def test_a_truncated_model_ends_it_with_1_and_says_so(tmp_path, model):
    short = tmp_path / "short.gguf"
    short.write_bytes(model.read_bytes()[:-1000])
    done = run(tmp_path, model=short)
    assert done.returncode == 1
    assert "truncated" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_ends_it_with_1_and_its_name(tmp_path):
    done = run(tmp_path, model=tmp_path / "none.gguf")
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_socket_left_behind_is_replaced_and_a_living_one_is_not(tmp_path, model):
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with AgentProcess(tmp_path / "log", model=model, socket=path) as process:
        process.ready()
        second = run(tmp_path, socket=path)
        assert second.returncode == 3
        assert "agent.socket" in second.stderr
        assert process.client.get("/v1/models").status_code == 200


@pytest.mark.model
def test_the_default_model_names_paris_through_the_openai_package(tmp_path):
    import openai

    with AgentProcess(tmp_path / "log") as process:
        process.ready()
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", max_retries=0) as client:
            question = [{"role": "user", "content": "What is the capital of France?"}]
            model = client.models.list().data[0].id
            whole = client.chat.completions.create(model=model, messages=question, temperature=0)
            stream = client.chat.completions.create(
                model=model, messages=question, temperature=0, stream=True
            )
            text = "".join(c.choices[0].delta.content or "" for c in stream)
        assert "Paris" in text
        assert whole.choices[0].message.content == text
        assert whole.choices[0].finish_reason == "stop"
