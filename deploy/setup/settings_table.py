"""Print docs/settings.md: every setting of the sidecar and of the agent, as the code declares it.

    python -m deploy.setup.settings_table > docs/settings.md

tests/test_docs.py holds the file to what this prints.
"""

from __future__ import annotations

import sys
import typing
from typing import Any

from agent.config import Agent
from proxy.config import Pool, Settings, UpperPool
from proxy.settings import ENV_PREFIX, Section, Setting, is_section, members

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = """\
# Settings

Made by `python -m deploy.setup.settings_table`; do not edit. Meanings are explained in
[sidecar.md](sidecar.md), [agent.md](agent.md), [envelope.md](envelope.md) and [audit.md](audit.md).

Later wins: the default, `tongguan.toml` (`--config FILE`, or a directory that holds it), the
variable. `section.name` stands in the file as `name` below `[section]`. A list is a TOML list in
the file, separated by commas in a variable. Bounds are inclusive. An unknown name, in the file or
among the variables, is a mistake: `tongguan config check --config FILE` lists every mistake of both
rooms at once. Nothing here is a secret: secrets are files that settings point to.
"""
UNITS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_tokens": "tokens"}
KINDS = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text"}


def takes(name: str, kind: Any, declared: Setting) -> str:
    """Return what values a setting takes: choices, or kind, unit and inclusive bounds."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" if value else "empty" for value in typing.get_args(kind))
    if origin is tuple:
        return "list of text"
    text = KINDS[kind]
    if kind in (int, float):
        text = next((unit for end, unit in UNITS.items() if name.endswith(end)), text)
    least, most = declared.ge, declared.le
    if least is not None and most is not None:
        return f"{text}, {least} to {most}"
    if least is not None:
        return f"{text}, {least} or more"
    return text if most is None else f"{text}, at most {most}"


def shown(name: str, value: Any) -> str:
    """Return a default as a reader wants it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value) or "empty"
    if isinstance(value, int) and "bytes" in name and value >= 1024:
        mebi = value >= 1 << 20
        return f"{value} ({value >> 20} MiB)" if mebi else f"{value} ({value >> 10} KiB)"
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{value}`" if isinstance(value, str) and value else str(value) or "empty"


def rows(kind: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (section, line of the table) for every setting below `kind`."""
    for name, hint, declared in members(kind):
        path = f"{prefix}{name}"
        if is_section(hint):
            if hint is UpperPool and name == "shared":  # the three are alike: one table
                yield from rows(UpperPool, f"{prefix}<pool>.")
            elif not issubclass(hint, Pool):
                yield from rows(hint, f"{path}.")
        elif declared is None:
            inner = typing.get_args(hint)
            if typing.get_origin(hint) is tuple:  # a list of tables
                yield from rows(inner[0], f"{path}[].")
            else:  # a table of tables, a name each
                yield from rows(inner[1], f"{path}.<name>.")
        else:
            mapped = ".<name>." in path or "[]." in path
            variable = f"`{ENV_PREFIX}{path.replace('.', '_').upper()}`"
            cells = (
                f"`{path}`",
                shown(name, declared.default),
                takes(name, hint, declared),
                declared.doc.replace("|", "\\|"),
                "file only" if mapped else variable,
            )
            section = path.partition(".")[0] if "." in path else ""
            yield section, f"| {' | '.join(cells)} |"


def table(kind: type[Section], prefix: str) -> Iterator[str]:
    """Yield the lines of the tables of one room, a heading for each section."""
    last: str | None = None
    for section, line in rows(kind, prefix):
        if section != last:
            yield ""
            if kind is Settings:
                yield f"### {section or 'above all sections'}"
                yield ""
            if section == "pools":
                yield "`<pool>` is `dedicated` (P0), `shared` (P1) or `best_effort` (P2)."
                yield ""
            yield "| setting | default | takes | meaning | variable |"
            yield "| --- | --- | --- | --- | --- |"
            last = section
        yield line


def page() -> str:
    """Return docs/settings.md."""
    lines = [HEAD, "## Sidecar", *table(Settings, ""), "", "## Agent", *table(Agent, "agent.")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
