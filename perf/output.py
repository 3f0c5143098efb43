"""Where a measurement goes: its table out, its whole result to `--json FILE`.

A bare `--json` is for programs: the result goes out, and the table to stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

OUT = Path("-")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Let a measurement take `--json [FILE]`."""
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=OUT,
        metavar="FILE",
        help="also write the whole result to FILE; without FILE: print it, the table to stderr",
    )


def keep(where: Path, result: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Write a result to a file, whole or not at all; `default` as for `json.dumps`."""
    where.parent.mkdir(parents=True, exist_ok=True)
    draft = where.with_suffix(".part")
    draft.write_text(json.dumps(result, indent=1, default=default) + "\n", encoding="utf-8")
    draft.replace(where)


def put(
    where: Path | None, result: Any, table: str, default: Callable[[Any], Any] | None = None
) -> None:
    """Print the table and keep the result where `--json` says."""
    if where == OUT:
        sys.stderr.write(f"{table}\n")
        sys.stdout.write(json.dumps(result, indent=1, default=default) + "\n")
        return
    sys.stdout.write(f"{table}\n")
    if where is not None:
        keep(where, result, default)
