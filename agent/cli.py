"""The agent's part of the `tongguan` command: `agent` and `up`.

Imports of the engine (torch) wait until a command needs them, so that `--help` and `up` are quick.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.config import Agent
    from agent.engine.types import Engine


_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=_HELP)
@click.option(
    "--config",
    "config_path",
    metavar="PATH",
    help="tongguan.toml, or a directory that holds it; its section [agent] is read.",
)
def agent(config_path: str | None) -> None:
    """Run the node agent: an OpenAI-compatible API on a model of this node.

    \b
    Settings come from section [agent] of the file and from TONGGUAN_AGENT_… variables, which win.
    docs/agent.md lists them. The API listens at once and answers 503 until the model is loaded.

    \b
    Exit codes: 0 stopped by a signal; 1 the model cannot be loaded; 2 a setting is wrong;
    3 an address or the token file cannot be used.
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    from agent.config import read
    from agent.lifecycle import EXIT_SETTINGS, log_to_stderr, serve
    from proxy.settings import SettingsError

    try:
        settings = read(config_path, os.environ)
    except SettingsError as problem:
        for line in problem.problems:
            click.echo(f"tongguan agent: {line}", err=True)
        sys.exit(EXIT_SETTINGS)
    log_to_stderr(settings.log_level)
    sys.exit(serve(settings, _load, console=sys.stderr))


def _load(settings: Agent, report: Callable[[str, float], None]) -> Engine:
    from agent.engine.threads import shorten_spin

    shorten_spin(os.environ)  # before torch, whose OpenMP reads it once
    import torch

    from agent.engine.compact import AVAILABLE
    from agent.engine.load import KV_TOKENS, load_engine

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "int4" if AVAILABLE else "float32"
    return load_engine(
        settings.model or None,
        device=device,
        threads=settings.threads,
        dtype=dtype,
        max_sequences=settings.max_sequences,
        max_waiting=settings.queue,
        reserved=settings.reserved_sequences,
        kv_tokens=settings.kv_tokens or KV_TOKENS,
        on_progress=report,
    )


@click.command(context_settings=_HELP)
@click.option("--oneshot", is_flag=True, help="Stop after the answer; exit 0 only if it verified.")
@click.option("--ask", "question", help="What to ask.  [default: the capital of France]")
@click.option(
    "--max-tokens",
    default=256,
    show_default=True,
    type=click.IntRange(min=1),
    help="Where to cut the answer.",
)
@click.option(
    "--state",
    default=".tongguan",
    show_default=True,
    envvar="TONGGUAN_UP_STATE",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keys, settings, logs and audit chains; made when absent, else used again.",
)
@click.option(
    "--base-port",
    type=click.IntRange(1, 65535 - 190),
    envvar="TONGGUAN_UP_BASE_PORT",
    help="Five ports: this + 80 app, 81 SM4, 90 admin, 100 agent, 190 agent admin.  "
    "[default: 14000, or what the settings say]",
)
@click.option(
    "--ready-s",
    default=180.0,
    show_default=True,
    envvar="TONGGUAN_UP_READY_S",
    type=click.FloatRange(min=1),
    help="Seconds until both must be ready.",
)
def up(
    oneshot: bool,
    question: str | None,
    max_tokens: int,
    state: Path,
    base_port: int | None,
    ready_s: float,
) -> None:
    """Start an agent and a sidecar here, ask one question over the SM4 channel, verify the record.

    Then serve until Ctrl-C. A second run uses the same keys, settings and chains.

    \b
    Exit codes: 0 the answer came, the audit verified, both ended cleanly; 1 one of these failed;
    2 a setting is wrong; 3 a port, a file or another `up` is in the way; 130 interrupted before
    the answer.
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    from importlib.util import find_spec

    from agent.up import QUESTION, run

    for name in ("httpx", "torch", "uvicorn"):  # say it before keys are made and children started
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    code = run(
        state=state,
        base_port=base_port,
        question=QUESTION if question is None else question,
        max_tokens=max_tokens,
        oneshot=oneshot,
        ready_s=ready_s,
    )
    sys.exit(code)


@click.group(short_help="Look at other engines: vLLM, SGLang, llama.cpp.")
def upstream() -> None:
    """Look at other engines: vLLM, SGLang, llama.cpp, any OpenAI-compatible server."""


@upstream.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--pools", "as_pools", is_flag=True, help="Print the sidecar's [pools] for them.")
def probe(urls: tuple[str, ...], as_pools: bool) -> None:
    """Ask engines how they are and what they can: one token, three times each.

    \b
    tongguan upstream probe http://127.0.0.1:8000
    tongguan upstream probe --pools http://10.0.0.1:8000 http://10.0.0.2:30000 >> tongguan.toml

    With --pools the first serves P0 alone and the others P1 and P2; one serves all.

    Exit codes: 0 all are healthy, 1 one is not, 2 wrong use.
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    import httpx

    from agent.config import upstream_targets
    from agent.upstream import pools
    from agent.upstream_watch import ASK_S, UpstreamWatch

    try:
        targets = upstream_targets(tuple(f"e{n}={url}" for n, url in enumerate(urls)))
    except ValueError as problem:
        click.echo(f"tongguan upstream: {problem}", err=True)
        sys.exit(2)
    watch = UpstreamWatch(targets, every_s=1.0)
    with httpx.Client(timeout=ASK_S, trust_env=False) as client:
        watch.turn(client)
    reports = list(watch.reports.values())
    for report in reports:
        click.echo(f"{report.url}  {'healthy' if report.healthy else report.why}", err=as_pools)
        facts = {"kind": report.load.kind if report.load else "no metrics"}
        facts |= {f"model {model.id}": f"context {model.context_tokens or 'unknown'}"
                  for model in report.models}  # fmt: skip
        seen = report.capabilities
        for name in ("token_ids", "usage", "stream_usage", "prefix_cache"):
            value = getattr(seen, name) if seen else None
            facts[name] = {True: "yes", False: "no", None: "unknown"}[value]
        for name, fact in facts.items():
            click.echo(f"  {name:14} {fact}", err=as_pools)
    if as_pools:
        click.echo(pools([(report.url, report.capabilities) for report in reports]), nl=False)
    sys.exit(0 if all(report.healthy for report in reports) else 1)
