"""Real vLLM on a CPU, with the default model: `make interop`.

Engines differ in text, so shapes, counts and effects are compared, never words.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from agent.engine.load import default_model
from agent.engine.types import ModelFileError
from agent.upstream import Capabilities, load_of
from agent.upstream_watch import ask, probe
from tests.blackbox.node import environment, free_base
from tests.interop import vllm_env

START_S = 600
# An engine that runs already, started as below.
RUNNING = os.environ.get("INTEROP_URL")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (RUNNING or vllm_env.python().exists()),
        reason="capability: vLLM in .tongguan/vllm-venv (make interop)",
    ),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    if RUNNING:
        return None
    try:
        source = default_model()
    except ModelFileError as problem:
        pytest.skip(f"capability: {problem}")
    from tests.interop.to_hf import write

    return write(source, tmp_path_factory.mktemp("weights") / "smol")


@pytest.fixture(scope="module")
def vllm(weights, tmp_path_factory):
    if RUNNING:
        with httpx.Client(timeout=60, trust_env=False) as client:
            yield RUNNING, client
        return
    port, log = free_base() + 100, tmp_path_factory.mktemp("vllm") / "log"
    command = [
        vllm_env.python(), "-m", "vllm.entrypoints.openai.api_server", "--model", weights,
        "--served-model-name", "smol", "--dtype", "bfloat16", "--host", "127.0.0.1",
        "--port", str(port), "--max-model-len", "2048", "--enforce-eager",
        "--enable-prefix-caching", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    offline = environment(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=offline, stdout=file, stderr=file,
                                   start_new_session=True)  # fmt: skip
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with httpx.Client(timeout=60, trust_env=False) as client:
        try:
            while not ask("vllm", url, client).healthy:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.5)
            yield url, client
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def test_it_is_seen_as_what_it_is(vllm):
    url, client = vllm
    report = ask("vllm", url, client)
    assert [(model.id, model.context_tokens) for model in report.models] == [("smol", 2048)]
    load = report.load
    assert (load.kind, load.running, load.waiting) == ("vllm", 0, 0)
    assert load.kv_share == 0
    for name in ("prefix_queried", "prefix_hit", "preemptions", "prompt_tokens"):
        assert getattr(load, name) is not None, name


def test_what_it_can(vllm):
    url, client = vllm
    before = ask("vllm", url, client).load
    assert probe(url, "smol", client, 300) == Capabilities(
        token_ids=True, usage=True, stream_usage=True, prefix_cache=True
    )
    after = ask("vllm", url, client).load
    assert after.prefix_hit > before.prefix_hit
    assert after.generated_tokens >= before.generated_tokens + 3


def test_its_metrics_are_kept_as_a_vector(vllm):
    url, client = vllm
    text = client.get(f"{url}/metrics").text
    histogram = re.compile(r"_(bucket|sum|count|created)[{ ]|histogram")
    kept = [line for line in text.splitlines() if "vllm:" in line and not histogram.search(line)]
    assert load_of("\n".join(kept) + "\n").kind == "vllm"
    if where := os.environ.get("INTEROP_METRICS"):
        Path(where).write_text("\n".join(kept) + "\n")
