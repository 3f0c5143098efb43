"""Asks the other engines on this node how they are, and, once, what they can do.

One thread asks all of them in turn, each within `ASK_S`; an engine that hangs costs the others its
share of a turn and nothing else. Readers take finished reports from any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from agent.upstream import (
    METRICS_BYTES_MAX,
    Capabilities,
    Load,
    Model,
    UpstreamError,
    has_token_ids,
    load_of,
    models_of,
    stream_has_usage,
    usage_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("tongguan.agent.upstream")
ASK_S: Final = 2.0
PROBE_S: Final = 60.0
_JOIN_S: Final = 5.0
# Longer than two blocks of any engine (vLLM on a CPU has blocks of 128 tokens).
_WORDS: Final = 320


@dataclass(frozen=True, slots=True)
class Report:
    """One engine at one time; `why` says what is wrong when it is not healthy."""

    name: str
    url: str
    healthy: bool
    why: str
    load: Load | None
    models: tuple[Model, ...]
    capabilities: Capabilities | None
    at_unix_s: float

    def plain(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return dataclasses.asdict(self)


def ask(name: str, url: str, client: httpx.Client, known: Report | None = None) -> Report:
    """Return how an engine is now; never raises for what an engine does."""
    healthy, why, load, models = False, "", None, known.models if known else ()
    try:
        healthy, why = _health(client, url)
        if healthy:
            load = _metrics(client, url)
            if not models or (known is not None and not known.healthy):
                models = models_of(_body(client, f"{url}/v1/models"))
    except (httpx.HTTPError, UpstreamError) as problem:
        healthy, why = False, str(problem) or type(problem).__name__
    seen = known.capabilities if known else None
    return Report(name, url, healthy, why, load, models, seen, round(time.time(), 3))


def _health(client: httpx.Client, url: str) -> tuple[bool, str]:
    answer = client.get(f"{url}/health")
    if answer.status_code == httpx.codes.NOT_FOUND:  # llama-cpp-python and others have none
        answer = client.get(f"{url}/v1/models")
    if answer.status_code == httpx.codes.OK:
        return True, ""
    return False, f"health answers {answer.status_code}"


def _metrics(client: httpx.Client, url: str) -> Load | None:
    """Return None where the engine serves none (SGLang and llama.cpp must be told to)."""
    with client.stream("GET", f"{url}/metrics") as answer:
        if answer.status_code != httpx.codes.OK:
            return None
        return load_of(_bounded(answer).decode("utf-8", "replace"))


def _body(client: httpx.Client, url: str) -> bytes:
    with client.stream("GET", url) as answer:
        answer.raise_for_status()
        return _bounded(answer)


def _bounded(answer: httpx.Response) -> bytes:
    body = b""
    for part in answer.iter_bytes():
        body += part
        if len(body) > METRICS_BYTES_MAX:
            raise UpstreamError(f"more than {METRICS_BYTES_MAX} bytes from {answer.url.path}")
    return body


def probe(url: str, model: str, client: httpx.Client, timeout_s: float = PROBE_S) -> Capabilities:
    """Ask for one token three times and return what could be seen.

    The prompt is some hundred words and new each time, so a prefix that is found is its own.
    Raises httpx.HTTPError where the engine does not answer.
    """
    salt = secrets.token_hex(4)
    words = "one two three four five " * (_WORDS // 5)
    body: dict[str, Any] = {"model": model, "prompt": f"{salt} {words}", "max_tokens": 1,
                            "temperature": 0}  # fmt: skip
    asked = f"{url}/v1/completions"
    first = client.post(asked, json=body | {"return_token_ids": True}, timeout=timeout_s)
    ids = first.is_success and has_token_ids(_json(first))
    if not first.is_success:  # an engine that refuses what it does not know
        first = client.post(asked, json=body, timeout=timeout_s)
        first.raise_for_status()
    hits_before = _hits(client, url)
    second = client.post(asked, json=body, timeout=timeout_s)
    second.raise_for_status()
    usage = usage_of(_json(second))
    hits_after = _hits(client, url)
    prefix: bool | None = None
    if usage is not None and usage[1] > 0:
        prefix = True
    elif hits_before is not None and hits_after is not None:
        prefix = hits_after > hits_before
    stream = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", asked, json=stream, timeout=timeout_s) as answer:
        streamed = answer.is_success and stream_has_usage(answer.iter_lines())
    return Capabilities(ids, usage is not None, streamed, prefix)


def _json(answer: httpx.Response) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return answer.json()
    return None


def _hits(client: httpx.Client, url: str) -> float | None:
    with contextlib.suppress(httpx.HTTPError, UpstreamError):
        load = _metrics(client, url)
        return load.prefix_hit if load else None
    return None


class UpstreamWatch:
    """Asks each of `targets` (name, URL) every `every_s`."""

    def __init__(self, targets: tuple[tuple[str, str], ...], *, every_s: float) -> None:
        self.reports: Mapping[str, Report] = {}
        self._targets = targets
        self._every_s = every_s
        # Probed since they were last unhealthy: one that cannot be is not asked for ever.
        self._probed: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upstreams", daemon=True)

    def start(self) -> None:
        """Start asking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; at most a few seconds."""
        self._stop.set()
        self._thread.join(_JOIN_S)

    def shares(self) -> dict[str, float]:
        """Return each engine's KV use for the heat map."""
        return {
            f"kv {name}": report.load.kv_share
            for name, report in self.reports.items()
            if report.load is not None and report.load.kv_share is not None
        }

    def section(self) -> dict[str, object]:
        """Return a line for each engine, for the page."""
        return {name: _words(report) for name, report in self.reports.items()}

    def _run(self) -> None:
        # No proxy of the environment's: these are this node's own engines.
        with httpx.Client(timeout=ASK_S, trust_env=False) as client:
            while True:
                self.turn(client)
                if self._stop.wait(self._every_s):
                    return

    def turn(self, client: httpx.Client) -> None:
        """Ask all once; probe those that have just become healthy."""
        for name, url in self._targets:
            before = self.reports.get(name)
            report = ask(name, url, client, before)
            if not report.healthy:
                self._probed.discard(name)
            elif report.models and name not in self._probed:
                self._probed.add(name)
                try:
                    seen = probe(url, report.models[0].id, client)
                    report = dataclasses.replace(report, capabilities=seen)
                except (httpx.HTTPError, UpstreamError) as problem:
                    log.info("upstream %s cannot be probed: %s", name, type(problem).__name__)
            if before is None or before.healthy != report.healthy:
                log.info("upstream %s: %s", name, report.why or "healthy")
            self.reports = {**self.reports, name: report}
            if self._stop.is_set():
                return


def _words(report: Report) -> str:
    if not report.healthy:
        return f"not healthy: {report.why}"
    load = report.load
    if load is None:
        return "healthy, no metrics"
    parts = [load.kind]
    if load.running is not None:
        parts.append(f"{load.running:.0f} running")
    if load.waiting is not None:
        parts.append(f"{load.waiting:.0f} waiting")
    if load.kv_share is not None:
        parts.append(f"KV {load.kv_share:.0%}")
    return ", ".join(parts)
