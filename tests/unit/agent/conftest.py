"""A scripted engine behind the engine's contract, and the real HTTP server in front of it.

The script stands where the model would: what it generates is written into the prompt, so a test
decides every delta. The API, uvicorn and the sockets are the real ones.
"""

import asyncio
import json
import queue
import socket
import threading
import time

import httpx
import msgspec
import pytest

from agent.api import Api
from agent.config import Agent
from agent.engine.types import (
    ChatTemplateError,
    ContextExceeded,
    Delta,
    EngineClosed,
    EngineStats,
    ModelInfo,
    PromptTooLong,
    QueueFull,
)
from agent.lifecycle import api_server
from agent.listen import open_tcp
from agent.metrics import Metrics
from agent.node import Node

CONTEXT = 64


class ByteTokenizer:
    """One token a byte; a chat is its contents, each after its role's first letter."""

    vocab_size = 256

    def encode(self, text, *, tokens_max=None):
        ids = list(text.encode())
        if tokens_max is not None and len(ids) > 100 * tokens_max:
            raise PromptTooLong(len(ids) // 100)
        return ids

    def decode(self, token_ids):
        return bytes(token_ids).decode()

    def apply_chat(self, messages, *, add_generation_prompt=True, tokens_max=None):
        assert add_generation_prompt
        if any(m["content"] == "refuse" for m in messages):
            raise ChatTemplateError("roles must alternate")
        text = "".join(m["role"][0] + m["content"] for m in messages)
        return self.encode(text, tokens_max=tokens_max)


class ScriptGeneration:
    def __init__(self, engine, prompt_ids, sampling, on_delta, qos_class):
        self.engine = engine
        self.prompt_ids = tuple(prompt_ids)
        self.prompt_tokens = len(prompt_ids)
        self.cached_tokens = 3
        self.sampling = sampling
        self.on_delta = on_delta
        self.qos_class = qos_class
        self.cancelled = threading.Event()
        self.ended = False

    def cancel(self):
        self.cancelled.set()

    def give(self, text, ids, finish=None, error=None):
        assert not self.ended
        self.ended = finish is not None
        self.on_delta(Delta(text, tuple(ids), finish, error))


class ScriptEngine:
    """`script(generation)` runs in a thread of its own and calls `generation.give`."""

    def __init__(self):
        self.reset()
        self.tokenizer = ByteTokenizer()
        self.info = ModelInfo(
            id="scripted",
            path="",
            architecture="none",
            context_length=CONTEXT,
            vocab_size=256,
            layers=0,
            dtype="none",
            device="cpu",
            parameters=0,
            created=1_700_000_000,
        )
        self.placement = {"schema": 1, "operators": []}

    def reset(self):
        self.generations = queue.Queue()
        self.script = lambda g: (g.give("Hel", [1]), g.give("lo", [2]), g.give("", [0], "stop"))
        self.full = False
        self.closed = False

    def submit(self, prompt_ids, sampling, on_delta, qos_class="P1", tenant=""):
        if self.closed:
            raise EngineClosed
        if self.full:
            raise QueueFull(7)
        if not prompt_ids:
            raise ValueError("the prompt is empty")
        if max(prompt_ids) >= 256:
            raise ValueError("a token id is outside the vocabulary")
        if len(prompt_ids) + sampling.max_tokens > CONTEXT:
            raise ContextExceeded(len(prompt_ids), sampling.max_tokens, CONTEXT)
        generation = ScriptGeneration(self, prompt_ids, sampling, on_delta, qos_class)
        generation.tenant = tenant
        self.generations.put(generation)
        threading.Thread(target=self.script, args=(generation,), daemon=True).start()
        return generation

    def stats(self):
        return EngineStats(
            running=2, waiting=1, waiting_limit=7, sequences_limit=4, kv_blocks_total=10,
            kv_blocks_used=5, kv_blocks_cached=1, prompt_tokens_total=11,
            generation_tokens_total=12, prefix_tokens_queried_total=13, prefix_tokens_hit_total=6,
            preemptions_total=0, steps_total=14, step_seconds_total=1.5,
            finished_total={"stop": 3, "length": 2, "cancelled": 1, "error": 0},
        )  # fmt: skip

    def close(self):
        self.closed = True


class Served:
    """An API on loopback; `client` speaks to it."""

    def __init__(self, settings, engine, token=b"", unix_path=None, chains=None):
        self.node = Node(time.monotonic_ns())
        self.metrics = Metrics(self.node)
        self.engine = engine
        self.api = Api(self.node, settings, self.metrics, token, chains)
        if engine is not None:
            self.node.loaded(engine, settings.model_names)
        self.sock = open_tcp("127.0.0.1:0", "agent.listen", 16)
        self.port = self.sock.getsockname()[1]
        sockets = [self.sock]
        if unix_path:
            unix = socket.socket(socket.AF_UNIX)
            unix.bind(unix_path)
            unix.listen()
            sockets.append(unix)
        self.server = api_server(settings, self.api, self.metrics)
        self.started = threading.Event()
        self.thread = threading.Thread(target=asyncio.run, args=(self._run(sockets),))
        self.thread.start()
        assert self.started.wait(10)
        self.connected = []
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=10)

    async def _run(self, sockets):
        self.loop = asyncio.get_running_loop()
        self.loop.call_soon(self.started.set)
        await self.server.serve(sockets=sockets)

    def stop(self):
        self.client.close()
        for sock in self.connected:
            sock.close()
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()

    def metric(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels)

    def connect(self, rcvbuf=None):
        sock = socket.socket()
        if rcvbuf:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        sock.settimeout(10)
        self.connected.append(sock)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def raw_post(self, path, body, sock=None):
        data = json.dumps(body).encode()
        sock = sock or self.connect()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        return sock


@pytest.fixture
def engine():
    return ScriptEngine()


@pytest.fixture
def start(engine):
    """Return a function that serves; keyword arguments are settings."""
    running = []

    def serve(engine=engine, token=b"", unix_path=None, chains=None, **settings):
        settings = msgspec.structs.replace(Agent(), **settings)
        served = Served(settings, engine, token, unix_path, chains)
        running.append(served)
        return served

    yield serve
    for served in running:
        served.stop()


@pytest.fixture(scope="module")
def _one_server():
    served = Served(Agent(), ScriptEngine())
    yield served
    served.stop()


@pytest.fixture
def served(_one_server):
    """One server a file: its counters run on, its engine starts afresh."""
    _one_server.engine.reset()
    _one_server.node.draining = False
    return _one_server


@pytest.fixture
def events():
    """Return a function that splits an SSE body into its data, parsed but for [DONE]."""

    def split(body):
        text = body.decode() if isinstance(body, bytes) else body
        assert text.endswith("\n\n")
        parts = text[:-2].split("\n\n")
        assert all(p.startswith("data: ") and "\n" not in p for p in parts)
        return [p[6:] if p == "data: [DONE]" else json.loads(p[6:]) for p in parts]

    return split
