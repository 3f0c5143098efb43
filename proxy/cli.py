"""The `tongguan` command: finds each subcommand by entry point, loads the room that owns it.

Exit codes, all commands: 0 done, 1 failed, 2 wrong usage or settings, 3 a file, port or peer
cannot be used, 4 that room is not in this image. `audit verify` has its own, 10-29 (docs/audit.md).
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any

import click

GROUP = "tongguan.commands"
EXIT_NOT_HERE = 4


class Rooms(click.Group):
    """Subcommands are entry points; a room is imported only when its command is called."""

    def _points(self) -> dict[str, metadata.EntryPoint]:
        return {point.name: point for point in metadata.entry_points(group=GROUP)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order people need them."""
        del ctx
        order = ["up", "ask", "sidecar", "agent", "keys", "audit", "config", "version"]
        names = self._points()
        return [n for n in order if n in names] + sorted(n for n in names if n not in order)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one command; a room that is missing gives a command that says so."""
        del ctx
        point = self._points().get(cmd_name)
        if point is None:
            return None
        try:
            command = point.load()
        except ImportError as problem:
            return _absent(cmd_name, problem.name or "a module")
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; a library that is not installed is one line, not a traceback."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as problem:
            name = ctx.invoked_subcommand
            click.echo(f"tongguan: not in this image: {name} needs {problem.name}", err=True)
            raise SystemExit(EXIT_NOT_HERE) from None


def _absent(name: str, module: str) -> click.Command:
    text = f"not in this image: {name} needs {module}"

    @click.command(name, help=text, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def absent(arguments: Any) -> None:
        del arguments
        click.echo(f"tongguan: {text}", err=True)
        raise SystemExit(EXIT_NOT_HERE)

    return absent


@click.command(cls=Rooms, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """SM4-protected, class-aware, auditable inference traffic.

    Begin with `tongguan up`: it starts an agent and a sidecar, asks one question over the SM4
    channel and shows the verified audit record.
    """


@click.command()
@click.option("--config", "path", metavar="PATH", help="settings file, or a directory of it")
def sidecar(path: str | None) -> None:
    """Run the sidecar in the foreground until SIGTERM."""
    from proxy.__main__ import main as run

    sys.exit(run(["--config", path] if path else []))


@click.command()
@click.argument("question")
@click.option("--url", default="http://127.0.0.1:14080", show_default=True, help="a door")
@click.option("--keys", "keys_file", type=click.Path(), help="client.json: ask sealed, on 14081")
@click.option("--model", help="model id; default: the first one served")
@click.option("--qos", type=click.Choice(["P0", "P1", "P2"]), help="class to ask for")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(min=1))
def ask(
    question: str,
    url: str,
    keys_file: str | None,
    model: str | None,
    qos: str | None,
    max_tokens: int,
) -> None:
    """Ask one question and stream the answer; with --keys over the SM4 channel.

    Example: tongguan ask --keys client.json --url http://127.0.0.1:14081 "Who are you?"
    """
    from proxy.ask import AskError
    from proxy.ask import ask as ask_once

    try:
        result = ask_once(
            question,
            base_url=url,
            keys_file=keys_file,
            model=model,
            qos=qos,
            max_tokens=max_tokens,
            on_text=lambda text: click.echo(text, nl=False),
        )
    except AskError as problem:
        click.echo(f"tongguan ask: {problem}", err=True)
        raise SystemExit(3) from None
    click.echo()
    rate = f"{result.tokens_per_s:.1f}" if result.tokens_per_s else "-"
    facts = (
        f"trace_id {result.trace_id}  qos {result.qos_class}  pool {result.pool}  "
        f"ttft {result.ttft_ms:.0f} ms  tokens/s {rate}"
    )
    click.echo(click.style(facts, dim=True), err=True)


@click.group()
def config() -> None:
    """Look at settings."""


@config.command("check")
@click.option("--config", "path", metavar="PATH", help="settings file, or a directory of it")
@click.option("--show", is_flag=True, help="print every setting with its value")
def config_check(path: str | None, show: bool) -> None:
    """Check settings without starting; every mistake is listed, exit 2."""
    from proxy.config import SettingsError, describe, read

    try:
        settings = read(path, os.environ)
    except SettingsError as problem:
        for line in problem.problems:
            click.echo(f"tongguan config: {line}", err=True)
        raise SystemExit(2) from None
    if show:
        import orjson

        click.echo(orjson.dumps(describe(settings), option=orjson.OPT_INDENT_2).decode())
    click.echo("settings ok")


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"tongguan {metadata.version('tongguan')}")


if __name__ == "__main__":
    main()
