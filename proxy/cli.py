"""The `tongguan` command: finds each subcommand by entry point, loads the room that owns it.

Exit codes, all commands: 0 done, 1 failed, 2 wrong usage or settings, 3 a file, port or peer
cannot be used, 4 that room is not in this image. `audit verify` has its own, 10-29 (docs/audit.md).
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

GROUP = "tongguan.commands"
SETTINGS_GROUP = "tongguan.settings"
EXIT_NOT_HERE = 4
PLAIN_URL = "http://127.0.0.1:14080"
SEALED_URL = "http://127.0.0.1:14081"


class Rooms(click.Group):
    """Subcommands are entry points; a room is imported only when its command is called."""

    def _points(self) -> dict[str, metadata.EntryPoint]:
        return {point.name: point for point in metadata.entry_points(group=GROUP)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order people need them."""
        del ctx
        order = ["up", "ask", "sidecar", "agent", "keys", "seal", "open", "audit"]
        order += ["model", "memory", "upstream", "config", "version"]
        names = self._points()
        return [n for n in order if n in names] + sorted(n for n in names if n not in order)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their summaries whole: click would cut what does not fit."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(n, command.get_short_help_str(limit=200)) for n, command in found if command]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

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
@click.version_option(package_name="tongguan", message="tongguan %(version)s")
def main() -> None:
    """SM4-protected, class-aware, auditable inference traffic.

    Begin with `tongguan up`: it starts an agent and a sidecar, asks one question over the SM4
    channel and shows the verified audit record.
    """


@click.command(short_help="Run the sidecar until SIGTERM.")
@click.option("--config", "path", metavar="PATH", help="settings file, or a directory of it")
def sidecar(path: str | None) -> None:
    """Run the sidecar in the foreground until SIGTERM.

    Plain requests on 14080, SM4 envelopes on 14081 (with a key file), probes and metrics on 14090.
    Settings come from --config and from TONGGUAN_… variables, which win; a tongguan.toml in the
    working directory is read only if --config names it.

    Exit codes: 0 drained, 1 failed, 2 bad settings, 3 a port, key file or directory cannot be used.
    """
    from proxy.run import main as run

    sys.exit(run(["--config", path] if path else []))


@click.command(short_help="Ask one question, plain or over the SM4 channel.")
@click.argument("question")
@click.option("--url", help=f"a door  [default: {PLAIN_URL}; with --keys {SEALED_URL}]")
@click.option("--keys", "keys_file", type=click.Path(), help="client.json: ask sealed")
@click.option("--model", help="model id; default: the first one served")
@click.option("--qos", type=click.Choice(["P0", "P1", "P2"]), help="class to ask for")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(min=1))
def ask(
    question: str,
    url: str | None,
    keys_file: str | None,
    model: str | None,
    qos: str | None,
    max_tokens: int,
) -> None:
    """Ask one question and stream the answer; with --keys over the SM4 channel.

    \b
    tongguan ask "Who are you?"
    tongguan ask --keys client.json "Who are you?"

    Exit codes: 0 answered, 2 wrong use, 3 no whole answer (docs/envelope.md, "When it fails").
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    from proxy.ask import AskError
    from proxy.ask import ask as ask_once

    try:
        result = ask_once(
            question,
            base_url=url if url is not None else SEALED_URL if keys_file else PLAIN_URL,
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
    if result.finish_reason == "length":
        facts += f"  finish length ({result.tokens} tokens)"
    click.echo(click.style(facts, dim=True), err=True)


@click.group()
def config() -> None:
    """Look at settings."""


@config.command("check")
@click.option("--config", "path", metavar="PATH", help="settings file, or a directory of it")
@click.option("--show", is_flag=True, help="print every setting with its value, as JSON")
def config_check(path: str | None, show: bool) -> None:
    """Check settings without starting; every mistake is listed.

    Checks the sidecar's settings and, where the agent is installed, section [agent] and the
    TONGGUAN_AGENT_… variables. A tongguan.toml in the working directory is read only if --config
    names it. With --show the JSON alone goes to stdout.

    Exit codes: 0 settings ok, 2 mistakes.
    """
    import msgspec

    from proxy.config import describe, load
    from proxy.settings import FILE_NAME, SettingsError, source

    shown: dict[str, Any] = {}
    problems: list[str] = []
    file: Path | None = None
    try:
        file, text = source(path)
    except SettingsError as problem:
        problems = problem.problems
    else:
        try:
            shown = describe(load(text, os.environ))
        except SettingsError as problem:
            problems = problem.problems
        for name, room in _rooms_with_settings():
            try:
                shown[name] = msgspec.to_builtins(room(text, os.environ))
            except SettingsError as problem:
                problems += [line for line in problem.problems if line not in problems]
    if path is None and Path(FILE_NAME).exists():
        click.echo(
            f"tongguan config: warning: ./{FILE_NAME} was not read; to read it: --config .",
            err=True,
        )
    if problems:
        for line in problems:
            click.echo(f"tongguan config: {line}", err=True)
        raise SystemExit(2)
    if show:
        import orjson

        click.echo(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    click.echo(f"settings ok: {file or 'no file, defaults and variables'}", err=show)


def _rooms_with_settings() -> Iterator[tuple[str, Callable[[str, Mapping[str, str]], Any]]]:
    """Yield the rooms that registered a check of their settings and are in this image."""
    for point in metadata.entry_points(group=SETTINGS_GROUP):
        try:
            yield point.name, point.load()
        except ImportError:
            continue


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"tongguan {metadata.version('tongguan')}")


if __name__ == "__main__":
    main()
