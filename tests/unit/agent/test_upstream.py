import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

import proxy.config
from agent.config import upstream_targets
from agent.metrics import Metrics
from agent.node import Node
from agent.upstream import (
    Capabilities,
    UpstreamError,
    has_token_ids,
    load_of,
    models_of,
    pools,
    stream_has_usage,
    usage_of,
)
from agent.upstream_watch import UpstreamWatch, ask, probe

VECTORS = Path(__file__).parents[2] / "vectors" / "engines"
SEEN = Capabilities(token_ids=True, usage=True, stream_usage=True, prefix_cache=True)


def recorded(name):
    return load_of((VECTORS / f"{name}.txt").read_text(encoding="utf-8"))


def test_vllm_of_before():
    load = recorded("vllm-0.6")
    assert (load.kind, load.running, load.waiting, load.kv_share) == ("vllm", 5, 12, 0.35)
    assert (load.preemptions, load.prompt_tokens) == (3, 1_234_500)
    assert load.prefix_share is None, "-1 says that there is no prefix cache"
    assert load.prefix_queried is None


def test_vllm_of_today_as_it_was_recorded():
    load = recorded("vllm-0.32")
    assert (load.kind, load.running, load.waiting, load.kv_share) == ("vllm", 0, 0, 0)
    assert (load.prefix_queried, load.prefix_hit, load.prefix_share) == (0, 0, None)
    assert (load.preemptions, load.prompt_tokens, load.generated_tokens) == (0, 0, 0)


def test_vllm_of_several_engines():
    load = recorded("vllm-dp2")
    assert (load.running, load.waiting) == (7, 2)
    assert load.kv_share == 0.75, "shares do not add up: the fullest counts"
    assert load.prefix_share == 0.25


def test_sglang_and_its_breakdown_by_priority():
    load = recorded("sglang")
    assert (load.kind, load.running, load.waiting, load.kv_share) == ("sglang", 162, 2826, 0.28)
    assert load.generated_tokens == 7_557_572


def test_llama_cpp_today_and_before():
    load = recorded("llamacpp")
    assert (load.kind, load.running, load.waiting, load.kv_share) == ("llama.cpp", 2, 1, None)
    assert recorded("llamacpp-before").kv_share == 0.5


def test_an_agent_is_one_though_it_has_vllms_names():
    load = load_of('vllm:num_requests_running{model_name="m"} 2.0\ntongguan_agent_ready 1.0\n')
    assert (load.kind, load.running, load.waiting) == ("tongguan", 2, None)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("", "openai"), ("process_cpu_seconds_total 1.0\n", "openai"), ("<html>", "openai")],
)
def test_others_are_just_openai(text, kind):
    assert load_of(text).kind == kind


@pytest.mark.parametrize("value", ["NaN", "-3", "+Inf"])
def test_numbers_that_are_none_are_left_out(value):
    assert load_of(f'vllm:num_requests_running{{model_name="m"}} {value}\n').running is None


def test_a_percentage_is_read_as_the_share_it_is():
    assert load_of('vllm:gpu_cache_usage_perc{model_name="m"} 55.0\n').kv_share == 0.55


@pytest.mark.parametrize("text", ["vllm:num_requests_running{ 2.0\n", "vllm:x 1\n" * 600_000])
def test_what_is_no_metrics_text_is_named(text):
    with pytest.raises(UpstreamError):
        load_of(text)


@pytest.mark.parametrize(
    ("row", "context"),
    [({"id": "m", "max_model_len": 8192}, 8192), ({"id": "m", "meta": {"n_ctx_train": 2048}}, 2048),
     ({"id": "m"}, None), ({"id": "m", "meta": None}, None), ({"id": "m", "max_model_len": "x"},
                                                             None)],
)  # fmt: skip
def test_models_of_each_engine(row, context):
    (model,) = models_of(json.dumps({"data": [row]}).encode())
    assert (model.id, model.context_tokens) == ("m", context)


DEEP = b"[" * 100_000


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"data": 3}', b'{"data": [{}]}', DEEP])
def test_models_that_cannot_be_read_are_named(body):
    with pytest.raises(UpstreamError, match="/v1/models"):
        models_of(body)


@pytest.mark.parametrize(
    ("answer", "found"),
    [({"choices": [{"token_ids": [1], "prompt_token_ids": [2]}]}, True),
     ({"prompt_token_ids": [2], "choices": [{"token_ids": [1]}]}, True),
     ({"choices": [{"token_ids": None}]}, False), ({"choices": [{"token_ids": [1]}]}, False),
     ({"choices": []}, False), (None, False), ({"choices": [{"token_ids": ["a"],
                                                             "prompt_token_ids": [1]}]}, False)],
)  # fmt: skip
def test_token_ids_are_seen_only_where_they_are(answer, found):
    assert has_token_ids(answer) is found


def test_usage_and_what_was_cached():
    details = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    assert usage_of({"usage": details}) == (9, 4)
    assert usage_of({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}) == (9, 0)
    assert usage_of({"usage": None}) is None
    assert usage_of([]) is None


def test_a_streams_usage():
    assert stream_has_usage(["data: {}", "", 'data: {"usage": {"prompt_tokens": 3}}'])
    assert not stream_has_usage(['data: {"usage": null}', "data: [DONE]"])
    assert not stream_has_usage(["data: no json"])
    assert not stream_has_usage(["data: " + DEEP.decode()])


def test_pools_are_settings_of_a_sidecar():
    def made(*endpoints):
        return proxy.config.load(pools(endpoints), {}).pools

    one = made(("http://127.0.0.1:8000", SEEN))
    assert {p.endpoints for p in (one.dedicated, one.shared, one.best_effort)} == {
        ("http://127.0.0.1:8000",)
    }
    assert one.dedicated.token_ids
    three = made(("http://a:1", SEEN), ("http://b:2", SEEN), ("http://c:3", None))
    assert three.dedicated.endpoints == ("http://a:1",)
    assert three.shared.endpoints == three.best_effort.endpoints == ("http://b:2", "http://c:3")
    assert three.dedicated.token_ids
    assert not three.shared.token_ids


@pytest.mark.parametrize(
    "items", [("x",), ("=http://a:1",), ("a=ftp://b",), ("a=http://b/path",), ("a b=http://c",),
              ("a=http://b:1", "a=http://c:1"), ("a=http://user@b",)],
)  # fmt: skip
def test_a_target_that_is_none_is_refused(items):
    with pytest.raises(ValueError, match=r"expected|twice"):
        upstream_targets(items)


# --- over HTTP: an engine that says what a test wants --------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    answers: dict

    def do_GET(self):
        self.reply(*self.server.answers.get(self.path, (404, b"")))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.reply(*self.server.complete(body))

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.answers = {
        "/health": (200, b""),
        "/v1/models": (200, b'{"data": [{"id": "m", "max_model_len": 99}]}'),
        "/metrics": (200, (VECTORS / "vllm-dp2.txt").read_bytes()),
    }
    server.asked = []
    server.complete = lambda _body: (200, b'{"choices": [{"text": "x"}]}')
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    with httpx.Client(timeout=5, trust_env=False) as server.client:
        yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_a_healthy_engine(served):
    report = ask("a", served.url, served.client)
    assert (report.healthy, report.load.running, report.models[0].context_tokens) == (True, 7, 99)
    assert report.plain()["load"]["kind"] == "vllm"


@pytest.mark.parametrize(
    ("change", "healthy", "why"),
    [
        ({"/health": (503, b"")}, False, "health answers 503"),
        ({"/health": (404, b"")}, True, ""),
        ({"/metrics": (404, b"")}, True, ""),
        ({"/metrics": (200, b"vllm:num_requests_running{ x")}, False, "no Prometheus text"),
        ({"/metrics": (200, b"x" * (5 << 20))}, False, "more than"),
        ({"/v1/models": (200, b"nonsense")}, False, "/v1/models"),
        ({"/v1/models": (500, b"")}, False, "500"),
    ],
)
def test_an_engine_that_is_not_well(served, change, healthy, why):
    served.answers |= change
    report = ask("a", served.url, served.client)
    assert report.healthy is healthy
    assert why in report.why


def test_an_engine_that_is_not_there():
    with httpx.Client(timeout=1, trust_env=False) as client:
        report = ask("a", "http://127.0.0.1:9", client)
    assert not report.healthy
    assert report.why


def test_a_probe_of_an_engine_that_refuses_what_it_does_not_know(served):
    def complete(body):
        if "return_token_ids" in body:
            return 400, b"{}"
        return 200, b'{"choices": [{"text": "x"}], "usage": {"prompt_tokens": 5}}'

    served.complete = complete
    served.answers["/metrics"] = (404, b"")
    seen = probe(served.url, "m", served.client)
    assert seen == Capabilities(token_ids=False, usage=True, stream_usage=False, prefix_cache=None)
    assert {body["max_tokens"] for body in served.asked} == {1}
    assert len(served.asked) == 4


def test_an_engine_is_probed_once_until_it_was_gone(served):
    watch = UpstreamWatch((("a", served.url),), every_s=1)
    served.complete = lambda _body: (500, b"")
    for _ in range(3):
        watch.turn(served.client)
    asked = len(served.asked)
    assert watch.reports["a"].capabilities is None
    served.answers["/health"] = (503, b"")
    watch.turn(served.client)
    assert not watch.reports["a"].healthy
    served.answers["/health"] = (200, b"")
    served.complete = lambda _body: (200, b'{"choices": [], "usage": {"prompt_tokens": 5}}')
    watch.turn(served.client)
    assert watch.reports["a"].capabilities.usage
    assert len(served.asked) > asked
    asked = len(served.asked)
    watch.turn(served.client)
    assert len(served.asked) == asked
    assert watch.shares() == {"kv a": 0.75}
    assert watch.section() == {"a": "vllm, 7 running, 2 waiting, KV 75%"}


def test_the_watchs_thread_and_its_metrics(served):
    node = Node(0)
    node.upstreams = UpstreamWatch((("a", served.url), ("gone", "http://127.0.0.1:9")), every_s=9)
    node.upstreams.start()
    end = time.monotonic() + 20
    while len(node.upstreams.reports) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    value = Metrics(node).registry.get_sample_value
    assert value("tongguan_agent_upstream_up", {"upstream": "a", "kind": "vllm"}) == 1
    assert value("tongguan_agent_upstream_up", {"upstream": "gone", "kind": "unknown"}) == 0
    assert (
        value("tongguan_agent_upstream_kv_usage_ratio", {"upstream": "a", "kind": "vllm"}) == 0.75
    )
    node.upstreams.stop()
    assert not node.upstreams._thread.is_alive()
