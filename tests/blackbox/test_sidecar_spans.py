"""Spans of a real sidecar at a real collector: which, of what, and at whose cost."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.collector import Collector
from tests.blackbox.harness import (
    SSE_HEAD,
    Client,
    Sidecar,
    Upstream,
    chunk,
    new_keys,
    post,
    until,
)
from tests.blackbox.node import free_base

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HIGH = "ffffffffffffffff"  # the end of a trace id that no ratio below 1 keeps
SECRET = "the prompt nobody may read"
BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}).encode()
ANSWER = json.dumps(
    {
        "model": "tiny-1",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "an answer in private"}}
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7},
    }
).encode()
PLACE = {
    "IDENTITY_CLUSTER": "lab",
    "IDENTITY_NAMESPACE": "serving",
    "IDENTITY_POD": "pod-7",
    "IDENTITY_POD_UID": "0d9c",
    "IDENTITY_NODE": "node-3",
    "IDENTITY_TENANT": "acme-in-clear",
}


def ok(seen):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    seen.reply(head % len(ANSWER) + ANSWER)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("keys"), "--tenant", "acme-in-clear")


@pytest.fixture(scope="module")
def backend():
    with Upstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def collector():
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def all_kept(tmp_path_factory, keys, backend, collector):
    """A sidecar that keeps every request's spans."""
    folder = tmp_path_factory.mktemp("all")
    secret = folder / "authorization"
    secret.write_text("Bearer of-the-collector\n")
    options = PLACE | {"TRACING_ENDPOINT": collector.url, "TRACING_RATIO": 1}
    options["TRACING_AUTHORIZATION_FILE"] = secret
    with Sidecar(folder, backend.url, keys=keys, **options) as sidecar:
        yield sidecar


def came(trace_id=TRACE, flags="01"):
    return f"traceparent: 00-{trace_id}-{SPAN}-{flags}".encode()


def test_a_trace_goes_from_the_client_through_record_and_upstream_to_the_spans(
    all_kept, backend, collector
):
    backend.answering(ok)
    answer = all_kept.ask(post(BODY, came(), b"X-QoS-Class: P1"))
    record = all_kept.record(answer.trace_id)
    assert record["traceparent"].encode() == backend.last().get("traceparent") == came()[13:]
    spans = until(lambda: collector.of(TRACE), "spans")
    assert set(spans) == {
        "POST /v1/chat/completions", "tongguan.queue", "tongguan.upstream.wait", "chat tiny",
        "tongguan.first_byte", "tongguan.stream", "tongguan.audit.write",
    }  # fmt: skip
    root, model = spans["POST /v1/chat/completions"], spans["chat tiny"]
    assert root.parent_id == SPAN
    assert {spans[n].parent_id for n in ("tongguan.first_byte", "tongguan.stream")} == {
        model.span_id
    }
    assert {
        spans[n].parent_id
        for n in ("chat tiny", "tongguan.queue", "tongguan.upstream.wait", "tongguan.audit.write")
    } == {root.span_id}
    assert (root.kind, model.kind, spans["tongguan.queue"].kind) == (2, 3, 1)
    assert not any(span.failed for span in spans.values())
    assert len({span.span_id for span in spans.values()} | {SPAN}) == 8


def test_times_and_attributes_are_the_records(all_kept, backend, collector):
    backend.answering(ok)
    trace_id = "1" * 32
    before_ns = time.time_ns()
    answer = all_kept.ask(post(BODY, came(trace_id)))
    record = all_kept.record(answer.trace_id)
    spans = until(lambda: collector.of(trace_id), "spans")
    root, model = spans["POST /v1/chat/completions"], spans["chat tiny"]
    times = record["times_us"]
    assert before_ns <= root.start_ns <= root.end_ns <= time.time_ns()
    assert (root.end_ns - root.start_ns) // 1000 == times["total"]
    assert (model.start_ns - root.start_ns) // 1000 == times["queue"]
    assert (spans["tongguan.first_byte"].end_ns - root.start_ns) // 1000 == times["first_byte"]
    assert spans["tongguan.queue"].end_ns == spans["tongguan.upstream.wait"].start_ns
    assert spans["tongguan.audit.write"].start_ns >= root.end_ns
    assert spans["tongguan.audit.write"].end_ns > spans["tongguan.audit.write"].start_ns
    assert model.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny-1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 0,  # reported, so told
        "tongguan.pool": "shared",
    }
    tenant = root.attributes.pop("tongguan.tenant")
    assert len(tenant) == 16
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "tongguan.trace_id": answer.trace_id,
        "tongguan.door": "app",
        "tongguan.qos": "P1",
        "tongguan.pool": "shared",
        "tongguan.outcome": "ok",
        "tongguan.phase": "done",
        "tongguan.kept": "ratio",
    }
    resource = root.resource
    assert resource["service.name"] == "tongguan-proxy"
    assert (resource["k8s.pod.name"], resource["k8s.pod.uid"]) == ("pod-7", "0d9c")
    assert (resource["k8s.node.name"], resource["k8s.cluster.name"]) == ("node-3", "lab")
    assert resource["k8s.namespace.name"] == "serving"
    assert root.scope == ("tongguan.proxy", "https://opentelemetry.io/schemas/1.37.0")
    path, head = collector.heads[-1]
    assert (path, head["authorization"]) == ("/v1/traces", "Bearer of-the-collector")


def test_a_traceparent_of_our_own_makes_the_upstream_the_models_child(all_kept, backend, collector):
    backend.answering(ok)
    all_kept.ask(post(BODY))
    _, trace_id, span_id, flags = backend.last().get("traceparent").decode().split("-")
    spans = until(lambda: collector.of(trace_id), "spans")
    assert spans["chat tiny"].span_id == span_id
    assert spans["POST /v1/chat/completions"].parent_id == ""
    assert flags == "01"  # kept by its id: the upstream is told


def test_neither_prompt_nor_tenant_nor_key_nor_path_gets_out(all_kept, keys, backend, collector):
    backend.answering(ok)
    trace_id = "2" * 32
    sealed = Channel(keys / "client.json").seal(BODY)
    with Client(all_kept.sealed) as client:
        client.send(sealed.request())
        sealed.open(client.answer("POST"))
    all_kept.ask(post(BODY, came(trace_id), target=b"/private/path?api_key=sk-123"))
    spans = until(lambda: collector.of(trace_id), "spans")
    assert "POST" in spans
    assert "http.route" not in spans["POST"].attributes
    until(lambda: any(s.attributes.get("tongguan.door") == "sealed" for s in collector.spans))
    told = b"".join(collector.raw)
    secrets = [SECRET, "an answer in private", "acme-in-clear", "sk-123", "private/path"]
    secrets += [
        word for file in keys.iterdir() for word in file.read_text().split('"') if len(word) >= 32
    ]
    assert [word for word in secrets if word.encode() in told] == []


def test_a_stream_that_breaks_is_an_error_of_its_time(all_kept, backend, collector):
    trace_id = "3" * 32
    event = b'data: {"model":"tiny-1","choices":[{"index":0,"delta":{"content":"one"}}]}\n\n'

    def script(seen):
        seen.reply(SSE_HEAD + chunk(event))
        time.sleep(0.05)
        seen.wire.close()

    backend.answering(script)
    body = BODY[:-1] + b',"stream":true}'
    with all_kept.client() as client:
        client.send(post(body, came(trace_id))).answer("POST")
    spans = until(lambda: collector.of(trace_id), "spans")
    root, stream = spans["POST /v1/chat/completions"], spans["tongguan.stream"]
    assert root.failed
    assert spans["chat tiny"].failed
    assert root.attributes["error.type"] == root.attributes["tongguan.outcome"] == "truncated"
    assert root.attributes["tongguan.kept"] == "error"
    assert stream.end_ns - stream.start_ns >= 45_000_000


def test_a_share_is_kept_and_what_went_wrong_always(tmp_path, keys, backend, collector):
    ids = [f"{n:016x}{n * 0x0A3D70A3D70A3D7 & (1 << 64) - 1:016x}" for n in range(1, 401)]
    expected = {i for i in ids if int(i[16:], 16) < (1 << 64) // 10}
    assert 20 <= len(expected) <= 60
    toml = '[tenants.acme-in-clear]\nmax_class = "P0"\n'
    options = PLACE | {"TRACING_ENDPOINT": collector.url, "TRACING_P0_LATE_MS": 100}
    late, failed, own_5xx = (f"{n}" * 16 + HIGH for n in (4, 5, 6))

    def script(seen):
        seen.body()
        kind = seen.get("X-Test")
        if kind == b"late":
            time.sleep(0.15)
        if kind == b"failed":
            seen.wire.close()
        elif kind == b"500":
            seen.reply(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")
        else:
            ok(seen)

    backend.answering(script)
    with Sidecar(tmp_path / "s", backend.url, keys=keys, toml=toml, **options) as sidecar:
        with sidecar.client() as client:
            for trace_id in ids:
                client.send(post(BODY, came(trace_id))).answer("POST")
            client.send(post(BODY, came(late), b"X-QoS-Class: P0", b"X-Test: late")).answer("POST")
            client.send(post(BODY, came("7" * 16 + HIGH), b"X-Test: late")).answer("POST")
            client.send(post(BODY, came(own_5xx), b"X-Test: 500")).answer("POST")
            client.send(post(BODY, came(failed), b"X-Test: failed")).answer("POST")
        whole = expected | {late, failed, own_5xx}
        until(lambda: sidecar.metric("tongguan_proxy_traces_exported_total") == len(whole))
        mine = set(ids) | whole | {"7" * 16 + HIGH}
        assert {span.trace_id for span in collector.spans} & mine == whole
        for trace_id, why in ((late, "p0_late"), (failed, "error"), (own_5xx, "error")):
            root = collector.of(trace_id)["POST /v1/chat/completions"]
            assert root.attributes["tongguan.kept"] == why
        assert sidecar.metric("tongguan_proxy_traces_kept_total", why="ratio") == len(expected)


@pytest.mark.parametrize("trouble", ["down", "slow", 500, 503])
def test_a_collector_in_trouble_costs_spans_and_nothing_else(tmp_path, keys, backend, trouble):
    backend.answering(ok)
    with Collector() as collector:
        options = {"TRACING_RATIO": 1, "TRACING_QUEUE": 8, "TRACING_FLUSH_S": 0.3}
        options["TRACING_TIMEOUT_S"] = 0.5
        options["TRACING_ENDPOINT"] = collector.url
        if trouble == "down":
            options["TRACING_ENDPOINT"] = f"http://127.0.0.1:{free_base()}"
        elif trouble == "slow":
            collector.delay_s = 30.0
        else:
            collector.answer = trouble
        with Sidecar(tmp_path, backend.url, keys=keys, **options) as sidecar:
            with sidecar.client() as client:
                begun = time.monotonic()
                for _ in range(200):
                    assert client.send(post(BODY)).answer("POST").status == 200
                assert time.monotonic() - begun < 15
            until(lambda: sidecar.metric("tongguan_proxy_traces_dropped_total", reason="full") > 0)
            until(lambda: sidecar.metric("tongguan_proxy_traces_dropped_total", reason="refused"))
            assert sidecar.metric("tongguan_proxy_traces_pending") <= 16
            assert len([r for r in sidecar.records() if r["kind"] == "request"]) == 200
            assert sidecar.log.count("the collector does not take them") == 1
            begun = time.monotonic()
            sidecar.signal(signal.SIGTERM)
            assert sidecar.ended() == 0
            assert time.monotonic() - begun < 15  # a slow export takes 30


def test_the_end_brings_over_what_is_left(tmp_path, keys, backend, collector):
    backend.answering(ok)
    trace_id = "8" * 32
    options = {"TRACING_ENDPOINT": collector.url, "TRACING_RATIO": 1}
    with Sidecar(tmp_path, backend.url, keys=keys, **options) as sidecar:
        sidecar.ask(post(BODY, came(trace_id)))
        sidecar.signal(signal.SIGTERM)
        assert sidecar.ended() == 0
        assert "tongguan.audit.write" in collector.of(trace_id)


def test_without_a_chain_there_are_spans_all_the_same(tmp_path, backend, collector):
    backend.answering(ok)
    trace_id = "9" * 32
    with Sidecar(tmp_path, backend.url, TRACING_ENDPOINT=collector.url, TRACING_RATIO=1) as sidecar:
        sidecar.ask(post(BODY, came(trace_id)))
        spans = until(lambda: collector.of(trace_id), "spans")
    assert "tongguan.first_byte" in spans
    assert "tongguan.audit.write" not in spans


def libraries(sidecar):
    maps = Path(f"/proc/{sidecar.process.pid}/maps").read_text()
    return {"/" + line.partition("/")[2] for line in maps.splitlines()}


def test_off_nothing_of_it_is_loaded(tmp_path, keys, backend, all_kept):
    backend.answering(ok)
    protobuf = {name for name in libraries(all_kept) if "google/_upb" in name}
    assert protobuf
    with Sidecar(tmp_path, backend.url, keys=keys) as sidecar:
        sidecar.ask(post(BODY))
        assert backend.last().get("traceparent").endswith(b"-00")
        assert libraries(sidecar).isdisjoint(protobuf)
        assert "traces" not in sidecar.admin_ask("GET", "/metrics").body.decode()
