import socket
import time

import httpx
import pytest

from agent.admin import AdminThread
from agent.listen import open_tcp
from agent.memory.nvml import NvmlError
from agent.memory.watch import MemoryWatch
from agent.metrics import Metrics
from agent.node import Node
from tests.unit.agent.conftest import ScriptEngine


def no_gpu():
    raise NvmlError("NVML: no driver")


@pytest.fixture
def served():
    node = Node(time.monotonic_ns())
    node.memory = MemoryWatch(node, sample_s=1, window_s=240, nvml=no_gpu)
    sock = open_tcp("127.0.0.1:0", "agent.admin", 16)
    admin = AdminThread(sock, node, Metrics(node))
    admin.start()
    host, port = sock.getsockname()
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, port)) == 0:
                break
    with httpx.Client(base_url=f"http://{host}:{port}", timeout=10) as client:
        yield node, client
    admin.stop()


def test_reports_of_a_real_door(served):
    node, client = served
    assert client.get("/v1/node/topology").status_code == 503
    node.memory.look()
    report = client.get("/v1/node/topology")
    assert report.headers["cache-control"] == "no-store"
    assert report.json()["schema"] == 1
    assert report.json()["missing"] == ["NVML: no driver"]
    heat = client.get("/v1/node/heatmap").json()
    assert "process" in {row["pool"] for row in heat["pools"]}
    assert len(heat["pools"][0]["max"]) == heat["columns"] == 120
    picture = client.get("/v1/node/heatmap.svg")
    assert picture.headers["content-type"].startswith("image/svg+xml")
    assert picture.text.startswith("<svg")
    assert client.get("/v1/node/heatmap.png").content.startswith(b"\x89PNG")
    assert "tongguan_agent_memory_headroom_bytes" in client.get("/metrics").text


def test_the_summary_before_and_after_a_model(served):
    node, client = served
    empty = client.get("/v1/node/summary").json()
    assert empty["ready"] is False
    assert empty["reasons"] == ["model loading: starting 0%"]
    assert (empty["model"], empty["engine"], empty["memory"]) == (None, None, None)
    assert [row["class"] for row in empty["classes"]] == ["P0", "P1", "P2"]
    node.loaded(ScriptEngine(), ("m",))
    node.memory.look()
    node.sections = {"guard": lambda: {"state": "closed"}, "sync": lambda: None}
    full = client.get("/v1/node/summary").json()
    assert full["ready"] is True
    assert full["model"]["id"] == "scripted"
    assert full["model"]["path"] is None, "a path is nobody's business here"
    assert full["engine"]["running"] == 2
    assert full["memory"]["backend"] == "cpu"
    assert full["sections"] == {"guard": {"state": "closed"}, "sync": None}


def test_the_plan_before_and_after_a_model(served):
    node, client = served
    before = client.get("/v1/node/plan")
    assert before.status_code == 503
    assert before.json() == {"reasons": ["model loading: starting 0%"]}
    node.loaded(ScriptEngine(), ("m",))
    after = client.get("/v1/node/plan")
    assert after.headers["cache-control"] == "no-store"
    assert after.json() == {"model": "scripted", **node.engine.placement}


def test_the_page_and_its_parts(served):
    _, client = served
    for path, kind in (
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
    ):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.post("/").status_code in {404, 405}


def test_without_samples_the_reason_is_said(served):
    node, client = served
    node.memory = None
    for path in ("/v1/node/topology", "/v1/node/heatmap", "/v1/node/heatmap.svg"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "agent.memory_sample_s" in answer.json()["reasons"][0]


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/node/topology"), ("GET", "/v1/node/x")])
def test_other_requests_are_refused(served, method, path):
    _, client = served
    assert client.request(method, path).status_code in {404, 405}
