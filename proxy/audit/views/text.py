"""The result of a verification, as a terminal shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.audit.findings import ChainEnd, Result

_SHOWN_FINDINGS = 20
_SHOWN_CHAINS = 20
_SHOWN = 5


def print_result(result: Result, key_files: tuple[Path, ...]) -> None:
    """Print verdict, chains and the first findings."""
    public = result.public()
    first = result.first
    good = result.exit_code == 0
    click.secho(f"audit {result.verdict}", fg="green" if good else "red", bold=True)
    if first is not None and (first.origin or first.place.file):
        chain_dir = first.place.file.partition("/")[0]
        click.echo(f"  first at seq {first.seq} of {first.origin or f'chain {chain_dir}'}")
    if result.chains:
        counts = f"{counted(len(result.chains), 'chain')}, {counted(result.records, 'record')}"
        click.echo(f"  {counts}; MACs {_macs(result, key_files)}")
    for chain in result.chains[-_SHOWN_CHAINS:]:
        records = counted(chain.records, "record")
        click.echo(f"  chain {chain.dir}: {records}, {chain.end}{_signed(chain)}")
        if chain.unfinished:
            begun = counted(chain.unfinished, "request")
            click.echo(f"    {begun} begun, and no record of the end: its process ended first")
            for notice in [row for row in result.notices if row.origin == chain.origin][:_SHOWN]:
                click.echo(f"      seq {notice.seq}, trace id {notice.trace_id}")
    if len(result.chains) > _SHOWN_CHAINS:
        click.echo(f"  (the last {_SHOWN_CHAINS} chains are shown; --json gives all)")
    for finding in public["findings"][:_SHOWN_FINDINGS]:
        where = f" ({finding['file']} byte {finding['offset']})" if finding["file"] else ""
        seq = f" seq {finding['seq']}" if finding["file"] or finding["origin"] else ""
        if seq and finding["last_seq"] > finding["seq"]:
            seq += f" to {finding['last_seq']}"
        click.echo(f"  {finding['class']}{seq}: {finding['note']}{where}")
        _print_evidence(finding)
    hidden = len(public["findings"]) - _SHOWN_FINDINGS + result.omitted
    if hidden > 0:
        click.echo(f"  and {counted(hidden, 'more finding')}")


def _print_evidence(finding: dict[str, Any]) -> None:
    shown = [
        f"{name} {finding[name][:16]}.."
        for name in ("expected", "found")
        if finding[name] is not None
    ]
    if finding["proved_to"] is not None:
        shown.append(f"records to {finding['proved_to']} can still be proved")
    if shown:
        click.echo(f"    {', '.join(shown)}")


def _signed(chain: ChainEnd) -> str:
    if chain.signers == "none":
        return ", not signed"
    whose = "" if chain.signers == "pinned" else " by keys of its own word"
    signed = f", signed to {chain.signed_to}{whose}" if chain.signed_to >= 0 else ", nothing signed"
    witnessed = f", witnessed to {chain.witnessed_to}" if chain.witnessed_to >= 0 else ""
    return signed + witnessed


def _macs(result: Result, key_files: tuple[Path, ...]) -> str:
    if result.mac_checked:
        some = any(finding.cls == "key_unknown" for finding in result.findings)
        return "checked, but for records whose seed is not there" if some else "checked"
    if not key_files:
        return "not checked (give --keys)"
    files = ", ".join(map(str, key_files))
    return f"not checked: no record here is of a seed in {files}"


def counted(number: int, name: str) -> str:
    """Return a number of things."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
