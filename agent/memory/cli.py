"""`tongguan memory`: why memory ran out, from a pasted error or from figures."""

from __future__ import annotations

import json
import sys
from typing import BinaryIO

import click

EXIT_UNKNOWN = 1
EXIT_USAGE = 2
READ_BYTES_MAX = 16 << 20


@click.group(short_help="Explain where memory goes and why it ran out.")
def memory() -> None:
    """Explain where memory goes and why it ran out."""


@memory.command()
@click.argument("source", metavar="[FILE|-]", type=click.File("rb"), default="-")
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as JSON.")
def explain(source: BinaryIO, as_json: bool) -> None:
    """Say why memory ran out: the cause, how sure that is, the figures, and one change to make.

    \b
    FILE is an error text (torch, vLLM, SGLang, llama.cpp, NCCL, the kernel's log, ...), or a JSON
    object of figures in bytes: {"total_bytes": ..., "floor": [[seconds, bytes], ...], ...}
    docs/memory.md lists them. Without FILE, or with -, the standard input is read.

    Exit codes: 0 explained, 1 no known cause, 2 the figures cannot be read.
    """  # noqa: D301 - click's mark
    from agent.memory.evidence import EvidenceError, from_stats, from_text
    from agent.memory.oom import explain as diagnose
    from agent.memory.oom import size

    if source.isatty():
        click.echo("paste the error text, then Ctrl-D", err=True)
    text = source.read(READ_BYTES_MAX).decode("utf-8", "replace")
    try:
        evidence = from_stats(_object(text)) if text.lstrip().startswith("{") else from_text(text)
    except EvidenceError as problem:
        click.echo(f"tongguan memory: {problem}", err=True)
        sys.exit(EXIT_USAGE)
    diagnosis = diagnose(evidence)
    verdict = diagnosis.verdict
    if as_json:
        click.echo(json.dumps(diagnosis.plain(), indent=1))
    else:
        click.echo(f"cause       {verdict.cause}")
        click.echo(f"confidence  {verdict.confidence:.2f}")
        click.echo(f"why         {verdict.why}")
        click.echo(f"change      {verdict.change}")
        for name, value in diagnosis.figures.items():
            shown = size(value) if name.endswith("_bytes") else str(value)
            click.echo(f"figure      {name} {shown}")
        for other in diagnosis.others:
            click.echo(f"also        {other.cause} {other.confidence:.2f}: {other.why}")
    sys.exit(EXIT_UNKNOWN if verdict.confidence == 0 else 0)


def _object(text: str) -> dict[str, object]:
    from agent.memory.evidence import EvidenceError

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise EvidenceError(f"figures: no JSON: {problem}") from None
    if not isinstance(value, dict):
        raise EvidenceError("figures: expected one JSON object")
    return value
