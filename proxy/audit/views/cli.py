"""`tongguan audit stats`, `report`, `follow`: looking at a log."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import click
import orjson

_EXIT_IO = 3


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def stats(directory: Path, as_json: bool) -> None:
    """Count what was asked and how it ended. Checks nothing: see verify."""
    from proxy.audit.views.stats import stats_of

    try:
        found = stats_of(directory).public()
    except OSError as problem:
        _fail(f"cannot read {directory}: {problem.strerror}")
    if as_json:
        click.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            rows = ", ".join(f"{key} {count}" for key, count in list(value.items())[:12])
            click.echo(f"{name:20}{rows or '-'}")
        else:
            shown = _moment(value) if name.endswith("_ns") else value
            click.echo(f"{name:20}{shown}")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--keys", "key_files", metavar="FILE", type=click.Path(path_type=Path), multiple=True,
              help="As for verify; may be repeated.")  # fmt: skip
@click.option("-o", "out", metavar="FILE", type=click.Path(path_type=Path), required=True,
              help="The page, one file of HTML.")  # fmt: skip
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True)
def report(directory: Path, key_files: tuple[Path, ...], out: Path, lang: str) -> None:
    """Verify DIR and write one page about it, for people: coverage, counts, findings.

    Exits as verify does.
    """
    from proxy.audit.epochs import MacKeys
    from proxy.audit.given import GivenError, open_escrows, read_keys
    from proxy.audit.verify import verify_directory
    from proxy.audit.views.page import page
    from proxy.audit.views.stats import stats_of

    try:
        given, unopened = open_escrows(read_keys(key_files), directory)
    except GivenError as problem:
        raise click.BadParameter(str(problem), param_hint="--keys") from None
    except OSError as problem:
        _fail(f"{problem.filename or directory}: {problem.strerror}")
    for row in unopened:
        click.echo(f"escrow {row}", err=True)
    seeds = MacKeys(given.seeds) if given.seeds else None
    result = verify_directory(directory, seeds, pinned=given.public)
    try:
        text = page(result, stats_of(directory), lang, int(time.time()))
        out.write_text(text, encoding="utf-8")
    except OSError as problem:
        _fail(f"{problem.filename or out}: {problem.strerror}")
    click.echo(f"audit {result.verdict}; wrote {out}")
    sys.exit(result.exit_code)


@click.command(name="follow")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--from-start", is_flag=True, help="The newest chain's earlier records first.")
@click.option("--json", "as_json", is_flag=True, help="Whole records, one a line.")
def follow_command(directory: Path, from_start: bool, as_json: bool) -> None:
    """Print records as they are written, until Ctrl-C."""
    from proxy.audit.views.follow import follow

    try:
        for line in follow(directory, from_start=from_start):
            data = line.partition(b"\t")[0]
            click.echo(data if as_json else _short(data))
    except KeyboardInterrupt:
        return
    except OSError as problem:
        _fail(f"cannot read {directory}: {problem.strerror}")


def _short(data: bytes) -> str:
    try:
        record = orjson.loads(data)
        head = f"{_moment(record['wall_ns'])} {record['seq']:>8} {record['kind']:<13}"
    except (ValueError, KeyError, TypeError):
        return "(no record)"
    names = ("status", "outcome", "qos", "tenant", "model", "trace_id", "what", "reason")
    return head + " ".join(str(record[name]) for name in names if name in record)


def _moment(wall_ns: str) -> str:
    seconds = int(wall_ns) / 1e9 if wall_ns.isdecimal() and len(wall_ns) <= 19 else 0
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="milliseconds")


def _fail(message: str) -> NoReturn:
    click.secho(message, fg="red", err=True)
    sys.exit(_EXIT_IO)
