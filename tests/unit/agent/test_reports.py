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
    assert len(heat["pools"][0]["max"]) == heat["columns"] == 240
    picture = client.get("/v1/node/heatmap.svg")
    assert picture.headers["content-type"].startswith("image/svg+xml")
    assert picture.text.startswith("<svg")
    assert client.get("/v1/node/heatmap.png").content.startswith(b"\x89PNG")
    assert "tongguan_agent_memory_headroom_bytes" in client.get("/metrics").text


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
