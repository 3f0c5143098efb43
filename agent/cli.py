"""The agent's part of the `tongguan` command: `agent` and `up`.

Imports of the engine (torch) wait until a command needs them, so that `--help` and `up` are quick.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.config import Agent
    from agent.engine.types import Engine


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True),
    help="tongguan.toml, or a directory that holds it; its section [agent] is read.",
)
def agent(config_path: str | None) -> None:
    r"""Run the node agent: an OpenAI-compatible API on a model of this node.

    \b
    Settings come from section [agent] of the file and from TONGGUAN_AGENT_… variables, which win.
    docs/agent.md lists them. The API listens at once and answers 503 until the model is loaded.

    \b
    Exit codes: 0 stopped by a signal; 1 an address is taken or the model cannot be loaded;
    2 a setting is wrong.
    """
    from agent.config import read
    from agent.lifecycle import EXIT_SETTINGS, log_to_stderr, serve
    from proxy.config import SettingsError

    try:
        settings = read(config_path, os.environ)
    except SettingsError as problem:
        for line in problem.problems:
            click.echo(f"agent: {line}", err=True)
        sys.exit(EXIT_SETTINGS)
    log_to_stderr(settings.log_level)
    sys.exit(serve(settings, _load, console=sys.stderr))


def _load(settings: Agent, report: Callable[[str, float], None]) -> Engine:
    from agent.engine.load import load_engine

    return load_engine(settings, report)
