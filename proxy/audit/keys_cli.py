"""`tongguan audit rotate`, `erase`, `escrow`: keys of the log, for operators and auditors."""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path
from typing import NoReturn

import click
import orjson

EXIT_NOT_THERE, EXIT_USAGE, EXIT_IO = 1, 2, 3
_ADMIN_TIMEOUT_S = 10


@click.command()
@click.option("--admin", default="127.0.0.1:14090", show_default=True, metavar="HOST:PORT",
              help="The sidecar's admin door.")  # fmt: skip
@click.option("--token-file", metavar="FILE", type=click.Path(path_type=Path),
              help="The admin door's token, where it is not asked over loopback.")  # fmt: skip
def rotate(admin: str, token_file: Path | None) -> None:
    """Let the running sidecar go on to the next key of its chain, now.

    Whoever takes its memory from here on alters nothing that was written before. It does so by
    itself after audit.rotate_s and audit.rotate_records.

    Exit codes: 0 it does, 2 wrong use, 3 it could not be asked, or cannot write now.
    """
    from proxy.config import split_address

    try:
        host, port = split_address(admin)
        token = token_file.read_text(encoding="ascii").strip() if token_file else ""
    except (ValueError, OSError) as problem:
        raise click.UsageError(str(problem)) from None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    wire = http.client.HTTPConnection(host, port, timeout=_ADMIN_TIMEOUT_S)
    try:
        wire.request("POST", "/audit/rotate", headers=headers)
        answer = wire.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as problem:
        _fail(f"{admin}: {problem}", EXIT_IO)
    finally:
        wire.close()
    if answer.status != http.HTTPStatus.OK:
        try:
            why = orjson.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            why = "no answer of a sidecar"
        _fail(f"{admin}: {answer.status}: {why}", EXIT_IO)
    click.echo("the chain goes on to its next key")


@click.command()
@click.option("--tenant", required=True, metavar="NAME", help="Whose prompt key is destroyed.")
@click.option("--config", "config_path", metavar="PATH",
              help="The sidecar's settings (keys.*, audit.dir); variables win.")  # fmt: skip
@click.option("--dir", "directory", metavar="DIR", type=click.Path(path_type=Path),
              help="The audit directory, where it is another one than audit.dir.")  # fmt: skip
@click.option("--keys", "key_files", metavar="FILE", type=click.Path(path_type=Path), multiple=True,
              help="A file that holds the key too (auditor.json); may be repeated.")  # fmt: skip
@click.option("--wait", "wait_s", default=10.0, show_default=True, metavar="SECONDS",
              help="How long a running sidecar has to say it in its own chain.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def erase(
    tenant: str,
    config_path: str | None,
    directory: Path | None,
    key_files: tuple[Path, ...],
    wait_s: float,
    as_json: bool,
) -> None:
    """Destroy a tenant's prompt key, and say so in the log.

    What the log holds of the tenant's prompts and answers are hashes under that key: without it
    nobody can try a dictionary on them. The chain still verifies. The key is destroyed in the
    sidecar's provider (keys.provider) and in every file given by --keys; copies elsewhere, backups
    and what a file system keeps of an old file are yours to destroy.

    \b
    Exit codes: 0 destroyed and said, 1 there is no such key, 2 wrong use, 3 not all could be done:
    ask again.

    \b
    tongguan audit erase --tenant t1 --config tongguan.toml --keys auditor.json
    """  # noqa: D301 - \\b is click's mark
    from proxy.audit import erase as work
    from proxy.config import read
    from proxy.keys.provider import KeySourceError
    from proxy.keys.sources import open_provider
    from proxy.settings import SettingsError

    try:
        settings = read(config_path, os.environ)
    except SettingsError as problem:
        raise click.UsageError(str(problem)) from None
    folder = directory or (Path(settings.audit.dir) if settings.audit.dir else None)
    if folder is None:
        raise click.UsageError("where is the log? give --dir, or --config with audit.dir")
    try:
        provider = open_provider(settings.keys)
        keys = provider.load() if provider is not None else None
        held = work.held_in(keys, tenant)
        found = [held] if held is not None else []
        found += [key for path in key_files if (key := work.peek(path, tenant)) is not None]
        refs = work.begin(folder, tenant, found)
        if not refs:
            _fail(f"there is no prompt key of tenant {tenant}", EXIT_NOT_THERE)
        if held is not None:
            work.destroy(provider, tenant)
        for path in key_files:
            work.destroy_in_file(path, tenant)
        rows = []
        for ref in refs:
            row = work.say(settings.audit, folder, tenant, ref, keys, wait_s=wait_s)
            work.finish(folder, ref)
            rows.append({"key_ref": row.key_ref, "origin": row.origin, "seq": row.seq})
    except (KeySourceError, work.EraseError) as problem:
        _fail(str(problem), EXIT_IO)
    except OSError as problem:
        _fail(f"{problem.filename or folder}: {problem.strerror}", EXIT_IO)
    if as_json:
        click.echo(orjson.dumps({"tenant": tenant, "erased": rows}))
        return
    for said in rows:
        where = f"record {said['seq']} of {said['origin']} says so"
        click.echo(f"destroyed {said['key_ref']} of tenant {tenant}; {where}")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--keys", "key_files", metavar="FILE", type=click.Path(path_type=Path), multiple=True,
              required=True, help="auditor.json and agents' keys; may be repeated.")  # fmt: skip
@click.option("--escrow", "escrows", metavar="FILE", type=click.Path(path_type=Path), multiple=True,
              help="Escrows that an agent kept, besides those in DIR.")  # fmt: skip
@click.option("-o", "out", metavar="FILE", type=click.Path(path_type=Path), required=True,
              help="The key file to write; must not be there.")  # fmt: skip
def escrow(
    directory: Path, key_files: tuple[Path, ...], escrows: tuple[Path, ...], out: Path
) -> None:
    """Open the escrows of chain seeds that agents made, into a key file.

    It holds the seeds and the public keys, for the verifier that a bundle brings along; `verify`
    opens escrows by itself. Keep it as you keep auditor.json.

    \b
    Exit codes: 0 all were opened, 1 none, or not all, 2 wrong use, 3 it cannot be read or written.

    \b
    tongguan audit escrow audit --keys auditor.json --keys agent.keys -o seeds.json
    """  # noqa: D301 - \b is click's mark
    from proxy.audit.given import GivenError, open_escrows, read_keys
    from proxy.keys.file import KeyFile, encode
    from proxy.keys.issue import write_new

    try:
        given = read_keys(key_files)
        if not any(file.auditor_private for _, file in given.files):
            raise click.UsageError("no auditor's private key in --keys; it is in auditor.json")
        opened, problems = open_escrows(given, directory, escrows)
        found = len(opened.seeds) - len(given.seeds)
        seeds, lines = tuple(opened.seeds.items()), tuple(given.public.lines())
        write_new(out, encode(KeyFile("auditor", (), {}, seeds, None, None, (), lines)))
    except GivenError as problem:
        raise click.UsageError(str(problem)) from None
    except OSError as problem:
        _fail(f"{problem.filename or directory}: {problem.strerror}", EXIT_IO)
    for text in problems:
        click.secho(text, fg="red", err=True)
    click.echo(f"opened {found} of {found + len(problems)}")
    if problems or not found:
        sys.exit(EXIT_NOT_THERE)


def _fail(message: str, code: int) -> NoReturn:
    click.secho(message, fg="red", err=True)
    sys.exit(code)
