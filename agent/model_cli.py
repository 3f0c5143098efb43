"""`tongguan model`: quantise a model, plan its precision, check a quantised folder.

Imports of the engine (torch) wait until a command needs them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.engine.precision import Plan

_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_EXIT_WRONG, _EXIT_BUDGET = 2, 3
_THREADS = click.option(
    "--threads", type=click.IntRange(0, 1024), default=0,
    help="CPU threads; one where other work has the cores.  [default: torch's choice]",
)  # fmt: skip
_GROUP = click.option(
    "--group", type=click.Choice(["32", "64", "128"]), default="128", show_default=True,
    help="Weights that share a scale and a zero point; with --plan or --table what that says.",
)  # fmt: skip
_TEXT = click.option(
    "--text", "text_path", type=click.Path(path_type=Path),
    help="UTF-8 text to calibrate and measure on.  [default: the shipped ones]",
)  # fmt: skip


@click.group(
    short_help="Quantise a model to four bits, plan its precision.", context_settings=_HELP
)
def model() -> None:
    """Quantise a model to four bits, plan its precision, check a quantised folder."""


class Progress:
    """Says on stderr how far a long command is and how long it will still take.

    On a terminal one line that is written over; elsewhere a line for each tenth.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        echo: Callable[..., None] = click.echo,
    ) -> None:
        self._clock = clock
        self._echo = echo
        self._began = clock()
        self._first: float | None = None
        self._tenth = -1
        self._terminal = sys.stderr.isatty()

    def __call__(self, phase: str, share: float) -> None:
        """Take a phase and the share done, 0 to 1."""
        if self._first is None:
            self._first = share
        line = f"{phase}: {share:4.0%}{self._left(share - self._first, 1.0 - share)}"
        if self._terminal:
            self._echo(f"\r\x1b[K{line}", err=True, nl=share >= 1.0)
        elif int(share * 10 + 1e-9) > self._tenth:
            self._tenth = int(share * 10 + 1e-9)
            self._echo(line, err=True)

    def _left(self, done: float, to_do: float) -> str:
        if done <= 0.0 or to_do <= 0.0:
            return ""
        seconds = (self._clock() - self._began) / done * to_do
        unit, value = ("min", seconds / 60) if seconds >= 90 else ("s", seconds)
        return f", about {value:.0f} {unit} left"


def _fail(problem: object, code: int = 1) -> NoReturn:
    click.echo(f"tongguan model: {problem}", err=True)
    sys.exit(code)


def _use(threads: int) -> None:
    from agent.engine.threads import shorten_spin

    shorten_spin(os.environ)  # before torch, whose OpenMP reads it once
    import torch

    if threads:
        torch.set_num_threads(threads)


def _source(name: str | None) -> Path:
    from agent.engine.load import default_model

    return default_model() if name is None else Path(name)


def _read_json(path: Path) -> dict[str, Any]:
    import json

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise click.BadParameter(f"{path}: {problem}") from None
    if not isinstance(value, dict):
        raise click.BadParameter(f"{path}: not an object")
    return value


def _read_text(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path}: {problem}") from None


def _read_plan(path: Path | None) -> Plan | None:
    from agent.engine.precision import parse

    if path is None:
        return None
    value = _read_json(path)
    try:
        return parse(value.get("plan", value))
    except ValueError as problem:
        raise click.BadParameter(f"{path}: {problem}") from None


@model.command(short_help="Write a model's folder with four-bit weights.")
@click.argument("source", required=False)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@_GROUP
@click.option(
    "--plan", "plan_path", type=click.Path(path_type=Path),
    help="What `tongguan model plan --json` wrote.  [default: FFN four bits, the rest FP16]",
)  # fmt: skip
@click.option("--plain", is_flag=True, help="Choose codes by the weights alone, without a text.")
@_TEXT
@click.option("--no-report", is_flag=True, help="Do not measure the perplexity before and after.")
@_THREADS
def quantize(
    source: str | None,
    out: Path,
    group: str,
    plan_path: Path | None,
    plain: bool,
    text_path: Path | None,
    no_report: bool,
    threads: int,
) -> None:
    """Write the model SOURCE (GGUF file or Hugging Face folder; none: the default model) to --out.

    \b
    Killed, it goes on where it was when the same command is repeated. Beside the weights lie
    quality.txt, quality.json and quantization.json (the plan, every file's SHA-256).
    Serve it with TONGGUAN_AGENT_MODEL=DIR; docs/kernels.md says what is chosen how.

    \b
    Exit codes: 0 written; 1 the model cannot be read or the folder not be written; 2 wrong use;
    3 written, but its perplexity is beyond the plan's budget.
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    _use(threads)
    from agent.engine.convert import WINDOWS, Options, convert
    from agent.engine.quality import text_of
    from agent.engine.types import EngineError

    plan = _read_plan(plan_path)
    try:
        text = _read_text(text_path)
        options = Options(int(group), plan, plain, text, 0 if no_report else WINDOWS)
        manifest = convert(_source(source), out, options, Progress())
    except EngineError as problem:
        _fail(problem)
    except OSError as problem:
        _fail(f"{problem.filename or out}: {problem.strerror}; repeat the command to go on")
    except ValueError as problem:
        _fail(problem, _EXIT_WRONG)
    size = sum(facts["bytes"] for facts in manifest["files"].values())
    click.echo(f"{out}: {size / 1e6:.0f} MB in {len(manifest['files'])} files")
    quality = manifest.get("quality")
    if quality:
        click.echo(text_of(quality | {"output_errors": []}).split("\n\n", 1)[0])
        sys.exit(0 if quality["within_budget"] else _EXIT_BUDGET)


@model.command(short_help="Say which products to keep in four bits.")
@click.argument("source", required=False)
@click.option(
    "--budget", type=click.FloatRange(min=1), default=1.15, show_default=True,
    help="Ratio of perplexities to FP16 that the plan may cost by its own estimate.",
)  # fmt: skip
@_GROUP
@click.option(
    "--table", "table_path", type=click.Path(path_type=Path),
    help="Read the sensitivities from what an earlier run wrote with --json.",
)  # fmt: skip
@_TEXT
@click.option("--json", "as_json", is_flag=True, help="Print table and plan as JSON.")
@_THREADS
def plan(
    source: str | None,
    budget: float,
    group: str,
    table_path: Path | None,
    text_path: Path | None,
    as_json: bool,
    threads: int,
) -> None:
    """Measure how sensitive the products of SOURCE are to four bits, and choose a plan.

    \b
    SOURCE: GGUF file or Hugging Face folder; none: the default model. Of each product of each
    layer the table has the relative error of its output, and by how much the perplexity of the
    calibration text grows, if it alone is in four bits; * marks what the plan puts there.

    \b
    tongguan model plan --json > plan.json
    tongguan model quantize --plan plan.json --out DIR

    Exit codes: 0 planned; 1 the model cannot be read; 2 wrong use.
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    import json

    from agent.engine.precision import choose, saved_bytes
    from agent.engine.precision import parse as parse_plan
    from agent.engine.types import EngineError

    width = int(group)
    if table_path is not None:
        from agent.engine.sensitivity import parse, plain, table_text

        value = _read_json(table_path)
        try:
            table = parse(value.get("table"))
            width = parse_plan(value.get("plan")).group
        except ValueError as problem:
            raise click.BadParameter(f"{table_path}: {problem}") from None
    else:
        _use(threads)
        from agent.engine import reading
        from agent.engine.opened import opened
        from agent.engine.sensitivity import measure, plain, table_text

        try:
            own = _read_text(text_path)
            texts = reading.shipped("calibration") if own is None else [own]
            with opened(_source(source)) as found:
                table = measure(found, texts, width, Progress())
        except EngineError as problem:
            _fail(problem)
        except OSError as problem:
            _fail(f"{problem.filename}: {problem.strerror}")
        except ValueError as problem:
            _fail(problem, _EXIT_WRONG)
    try:
        chosen = choose(table, budget=budget, group=width)
    except ValueError as problem:
        raise click.BadParameter(str(problem), param_hint="--budget") from None
    if as_json:
        click.echo(json.dumps({"plan": chosen.plain(), "table": plain(table)}, indent=1))
        return
    click.echo(table_text(table, chosen.int4))
    whole = sum(row.fp16_bytes for row in table)
    click.echo(
        f"{len(chosen.int4)} of {len(table)} products in four bits at group {width}: "
        f"{(whole - saved_bytes(chosen, table)) / 1e6:.0f} MB in place of {whole / 1e6:.0f}"
    )
    click.echo(f"Perplexity x {chosen.estimate:.4f} by estimate, {budget:g} allowed")


@model.command(short_help="Compare a quantised folder with its manifest.")
@click.argument("folder", type=click.Path(path_type=Path))
def check(folder: Path) -> None:
    """Compare every file of a quantised FOLDER with the hashes in its manifest.

    Exit codes: 0 all are the same; 1 one is not, or there is no manifest.
    """
    from agent.engine.model_folder import changed
    from agent.engine.types import EngineError

    try:
        lines = changed(folder)
    except (EngineError, OSError) as problem:
        _fail(problem)
    for line in lines:
        click.echo(line)
    click.echo("as written" if not lines else f"{len(lines)} files are not as written")
    sys.exit(1 if lines else 0)
