"""`tongguan audit`: verify chains, show a record."""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import click
import orjson

from proxy.audit.keys_cli import erase, escrow, rotate
from proxy.audit.views.cli import follow_command, report, stats
from proxy.audit.views.text import counted, print_result

if TYPE_CHECKING:
    from proxy.audit.given import Given
    from proxy.audit.resume import Saved
    from proxy.keys.file import KeyFile

NOT_FOUND = 1
CONTENT_MISMATCH = 13


@click.group(short_help="Check what the sidecar wrote down about each request.")
def audit() -> None:
    """Check what the sidecar wrote down about each request.

    \b
    tongguan audit verify DIR --keys auditor.json    is anything changed or missing?
    tongguan audit show DIR --trace-id ID            what happened to one request?
    tongguan audit export DIR --from T --to T ...    a bundle that anybody can check
    tongguan audit prove DIR ORIGIN SEQ              one record, for who may not see the others

    DIR is the audit directory (setting audit.dir), a copy of it, or one chain in it. These commands
    only read it, and work while the sidecar writes.
    """  # noqa: D301 - \\b is click's mark


audit.add_command(stats)
audit.add_command(report)
audit.add_command(follow_command)
audit.add_command(rotate)
audit.add_command(erase)
audit.add_command(escrow)

_keys_option = click.option(
    "--keys",
    "key_files",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Key file (auditor.json, sidecar.json) or public key lines; may be repeated.",
)


@audit.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@_keys_option
@click.option(
    "--checkpoint",
    "checkpoints",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A checkpoint kept elsewhere, or the list of a witness.",
)
@click.option("--escrow", "escrows", metavar="FILE", type=click.Path(path_type=Path), multiple=True,
              help="Escrows of chain seeds that an agent kept.")  # fmt: skip
@click.option("--live", is_flag=True, help="Also demand that open chains are fresh right now.")
@click.option("--since", metavar="T", help="Skip what ended before T (RFC 3339 with offset).")
@click.option("--jobs", metavar="N", type=click.IntRange(1, 64), default=1, show_default=True,
              help="Processes that read segments ahead; the findings are the same.")  # fmt: skip
@click.option("--resume", metavar="FILE", type=click.Path(path_type=Path),
              help="Go on where FILE says, and keep there how far it is.")  # fmt: skip
@click.option("--merged", metavar="FILE", type=click.Path(path_type=Path),
              help="Also write the records of all chains in one order, as JSON.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(
    directory: Path,
    key_files: tuple[Path, ...],
    checkpoints: tuple[Path, ...],
    escrows: tuple[Path, ...],
    live: bool,
    since: str | None,
    jobs: int,
    resume: Path | None,
    merged: Path | None,
    as_json: bool,
) -> None:
    """Say whether the chains in DIR are whole and unaltered.

    Without chain seeds (auditor.json) MACs are not checked: the best verdict is then ok_public. A
    chain that a running sidecar holds is open, which is fine. With --checkpoint the chains must
    also hold what somebody else saw of them: a cut end, a lost chain, an older copy are found.
    Seeds that an agent gave are opened from their escrow with auditor.json and the agent's key.

    \b
    Exit codes:
      0  ok, ok_public                 16 key_unknown
      2  wrong use                     17 malformed
      3  io_error                      18 half_line
      10 truncated                     19 two_records_one_line
      11 gap                           20 version_unknown
      12 duplicate_seq                 21 checkpoint_mismatch
      13 content_mismatch              22 fork
      14 link_mismatch                 23 heartbeat_missing
      15 unsigned_range

    \b
    tongguan audit verify /var/lib/tongguan/audit --keys auditor.json
    tongguan audit verify copy/ --since 2026-01-01T00:00:00+08:00 --json
    tongguan audit verify copy/ --keys auditor.json --jobs 8 --resume verified.json
    """  # noqa: D301 - \\b is click's mark
    from proxy.audit.epochs import MacKeys
    from proxy.audit.given import GivenError, read_checkpoints
    from proxy.audit.progress import Progress
    from proxy.audit.verify import verify_directory

    since_ns = _since_ns(since)
    given = _given(key_files, directory, escrows)
    try:
        expected = [e for path in checkpoints for e in read_checkpoints(path, given.public)]
    except GivenError as problem:
        raise click.BadParameter(str(problem), param_hint="--checkpoint") from None
    saved = _saved(resume, given, since) if resume is not None else None
    total = _bytes_in(directory)
    progress = Progress(sys.stderr, total)
    shown = sys.stderr.isatty() and not as_json and total > 1 << 20
    result = verify_directory(
        directory,
        MacKeys(given.seeds) if given.seeds else None,
        live_now_ns=time.time_ns() if live else None,
        since_ns=since_ns,
        progress=progress.add if shown else lambda _done: None,
        pinned=given.public,
        expected=expected,
        jobs=jobs,
        saved=saved,
    )
    if shown:
        progress.end()
    if merged is not None:
        _write_merged(directory, merged)
    if as_json:
        click.echo(orjson.dumps(result.public(), option=orjson.OPT_INDENT_2))
    else:
        print_result(result, key_files)
    sys.exit(result.exit_code)


def _saved(path: Path, given: Given, since: str | None) -> Saved:
    from proxy.audit.resume import ResumeError, Saved, fingerprint

    if since is not None:
        raise click.UsageError("--resume and --since exclude each other")
    try:
        saved = Saved(path, fingerprint(given.seeds, given.public))
        saved.write()  # before the work, not behind it, if that cannot be
    except ResumeError as problem:
        raise click.BadParameter(str(problem), param_hint="--resume") from None
    except OSError as problem:
        _fail(f"{path}: {problem.strerror}", 3)
    return saved


def _write_merged(directory: Path, out: Path) -> None:
    from proxy.audit.merge import merged

    try:
        with out.open("wb") as file:
            for row in merged(directory):
                file.write(orjson.dumps(row.public()) + b"\n")
    except OSError as problem:
        _fail(f"{problem.filename or out}: {problem.strerror}", 3)


@audit.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--trace-id", required=True, metavar="ID", help="The X-Trace-Id of the answer.")
@click.option("--auditor-key", metavar="FILE", type=click.Path(path_type=Path),
              help="auditor.json: checks the MAC and opens the token ids.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def show(directory: Path, trace_id: str, auditor_key: Path | None, as_json: bool) -> None:
    """Print the record of one request, and its token ids if you are the auditor.

    \b
    Exit codes: 0 found, 1 no such record, 2 wrong use (also the key of another auditor),
    3 cannot read, 13 the record's MAC or its token ids do not hold.
    """  # noqa: D301 - \\b is click's mark
    from proxy.audit.epochs import MacKeys
    from proxy.audit.ids import OTHER_AUDITOR
    from proxy.audit.show import find_record

    key_file = _read_keys(auditor_key, "--auditor-key") if auditor_key else None
    private = key_file.auditor_private if key_file else None
    if key_file and private is None:
        raise click.BadParameter(
            "the file has no auditor's private key; it is in auditor.json",
            param_hint="--auditor-key",
        )
    try:
        seeds = _read_given((auditor_key,), directory).seeds if auditor_key else None
        shown = find_record(directory, trace_id, MacKeys(seeds) if seeds else None, private)
    except OSError as problem:
        _fail(f"cannot read {directory}: {problem.strerror}", 3)
    if shown is None:
        _fail(f"no request with trace id {trace_id} in {directory}", NOT_FOUND)
    if key_file and (
        shown.ids_note == OTHER_AUDITOR or (shown.mac == "not checked" and not shown.ids)
    ):
        raise click.BadParameter(
            f"{auditor_key}: not the auditor's key of this chain; the record itself is shown "
            "without a key",
            param_hint="--auditor-key",
        )
    if as_json:
        click.echo(orjson.dumps(shown.public(), option=orjson.OPT_INDENT_2))
    else:
        click.echo(orjson.dumps(shown.record, option=orjson.OPT_INDENT_2))
        click.echo(f"\nin {shown.file} at byte {shown.offset}; MAC {shown.mac}")
        if shown.ids is not None:
            click.echo(f"token ids: {' '.join(map(str, shown.ids))}")
        click.secho(f"token ids: {shown.ids_note}", fg=None if shown.ids_hold else "red")
        for row in shown.erased:
            moment = datetime.fromtimestamp(int(row["wall_ns"]) // 10**9, tz=UTC).isoformat()
            click.echo(
                f"erased: {row['key_ref']}, the tenant's prompt key, was destroyed by {moment} "
                f"(record {row['seq']} of {row['origin']})"
            )
    if shown.mac == "mismatch" or not shown.ids_hold:
        sys.exit(CONTENT_MISMATCH)


@audit.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("origin", metavar="ORIGIN")
@click.argument("seq", metavar="SEQ", type=click.IntRange(0))
def prove(directory: Path, origin: str, seq: int) -> None:
    """Print a proof that record SEQ of ORIGIN is in the signed log, for `audit check`.

    The proof holds that one record and no other; who checks it needs the public keys alone.

    \b
    tongguan audit prove DIR ORIGIN SEQ > proof.json
    """  # noqa: D301 - \\b is click's mark
    from proxy.audit.findings import EXIT_CODES
    from proxy.audit.prove import NoProofError
    from proxy.audit.prove import prove as make_proof

    try:
        proof = make_proof(directory, origin, seq)
    except NoProofError as problem:
        _fail(str(problem), EXIT_CODES[problem.cls])
    except OSError as problem:
        _fail(f"cannot read {directory}: {problem.strerror}", 3)
    click.echo(orjson.dumps(proof))


@audit.command()
@click.argument("proof", metavar="PROOF", type=click.File("rb"))
@_keys_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check(proof: BinaryIO, key_files: tuple[Path, ...], as_json: bool) -> None:
    """Say whether a proof holds, and print its record. Needs public keys only.

    Exit codes: 0 it holds, 2 wrong use, 16 not signed by a key that was given, 17 no proof, 21 it
    does not hold.
    """
    from proxy.audit.findings import EXIT_CODES
    from proxy.audit.prove import PROOF_BYTES_MAX, NoProofError
    from proxy.audit.prove import check as check_proof

    given = _given(key_files)
    if not len(given.public):
        raise click.UsageError("give the public keys of who signs checkpoints with --keys")
    try:
        proven = check_proof(proof.read(PROOF_BYTES_MAX + 1), given.public)
    except NoProofError as problem:
        _fail(f"audit {problem.cls}: {problem}", EXIT_CODES[problem.cls])
    if as_json:
        result = {"record": proven.record, "size": proven.size, "signed_by": proven.signers,
                  "cosigned_by": proven.witnesses}  # fmt: skip
        click.echo(orjson.dumps(result, option=orjson.OPT_INDENT_2))
        return
    click.echo(orjson.dumps(proven.record, option=orjson.OPT_INDENT_2))
    click.secho(f"\nrecord {proven.record['seq']} of {proven.origin} is in the log", fg="green")
    click.echo(f"  of {proven.size} records, signed by {', '.join(proven.signers)}")
    for name, seconds in proven.witnesses:
        moment = datetime.fromtimestamp(seconds, tz=UTC).isoformat()
        click.echo(f"  cosigned by {name} at {moment}")


@audit.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--from", "begin", metavar="T", required=True, help="RFC 3339 with offset.")
@click.option("--to", "end", metavar="T", required=True, help="RFC 3339 with offset.")
@click.option("-o", "out", metavar="FILE", type=click.Path(path_type=Path), required=True,
              help="The bundle, a tar file; must not be there.")  # fmt: skip
@click.option("--tenant", metavar="NAME", help="Only this tenant's records, each with a proof.")
@_keys_option
def export(
    directory: Path,
    begin: str,
    end: str,
    out: Path,
    tenant: str | None,
    key_files: tuple[Path, ...],
) -> None:
    """Write a bundle for an auditor: records, proofs, public keys, and a verifier to read.

    \b
    tongguan audit export DIR --from 2026-01-01T00:00:00Z --to 2026-02-01T00:00:00Z \\
        -o bundle.tar --keys auditor.json
    tar xf bundle.tar -C there && cd there && env -i python3 -I -S verify.py .
    """  # noqa: D301 - \\b is click's mark
    from proxy.audit.export import ExportError, export_lines, export_segments
    from proxy.audit.findings import EXIT_CODES
    from proxy.audit.prove import NoProofError

    given = _given(key_files)
    if not len(given.public):
        raise click.UsageError("give the public keys of who signs checkpoints with --keys")
    from_ns, to_ns = _moment_ns(begin, "--from"), _moment_ns(end, "--to")
    period = f" from {begin} to {end}" + (f", tenant {tenant}" if tenant else "")
    try:
        if tenant is None:
            count = export_segments(directory, out, given.public, from_ns, to_ns, period)
            click.echo(f"wrote {out}: {counted(count, 'chain')}")
        else:
            count = export_lines(directory, out, given.public, from_ns, to_ns, period, tenant)
            click.echo(f"wrote {out}: {counted(count, 'record')} with proofs")
    except ExportError as problem:
        _fail(str(problem), NOT_FOUND)
    except NoProofError as problem:
        _fail(str(problem), EXIT_CODES[problem.cls])
    except OSError as problem:
        _fail(f"{problem.filename or out}: {problem.strerror}", 3)


def _fail(message: str, code: int) -> NoReturn:
    click.secho(message, fg="red", err=True)
    sys.exit(code)


def _given(
    paths: tuple[Path, ...], directory: Path | None = None, escrows: tuple[Path, ...] = ()
) -> Given:
    given = _read_given(paths, directory, escrows)
    for path, file in given.files:
        if not file.chain_seeds and not file.verify_keys:
            raise click.BadParameter(
                f"{path}: a {file.role}'s file without chain seeds; they are in auditor.json",
                param_hint="--keys",
            )
    return given


def _read_given(
    paths: tuple[Path, ...], directory: Path | None, escrows: tuple[Path, ...] = ()
) -> Given:
    """Read keys; with `directory` the seeds of escrows in and beside it, too."""
    from proxy.audit.given import GivenError, open_escrows, read_keys

    problems: list[str] = []
    try:
        given = read_keys(paths)
        if directory is not None:
            with contextlib.suppress(OSError):  # the check says what cannot be read
                given, problems = open_escrows(given, directory, escrows)
    except GivenError as problem:
        raise click.BadParameter(str(problem), param_hint="--keys") from None
    for text in problems:
        click.echo(f"escrow {text}", err=True)
    return given


def _read_keys(path: Path, option: str) -> KeyFile:
    from proxy.keys.file import KeyFileError, read

    try:
        return read(path)
    except KeyFileError as problem:
        raise click.BadParameter(str(problem), param_hint=option) from None
    except OSError as problem:
        raise click.BadParameter(f"{path}: {problem.strerror}", param_hint=option) from None


def _since_ns(text: str | None) -> int | None:
    return None if text is None else _moment_ns(text, "--since")


def _moment_ns(text: str, option: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise click.BadParameter(
            "expected RFC 3339 with an offset, such as 2026-01-31T08:00:00+08:00",
            param_hint=option,
        )
    return int(moment.timestamp()) * 10**9


def _bytes_in(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in directory.rglob("*.*") if path.is_file())
    except OSError:
        return 0  # the check says what cannot be read
