"""`tongguan keys`: make key files, and show what is in one without showing secrets.

What changes a set, or looks at a source of keys, is in `proxy/keys/change/cli.py`. Exit codes: 0
ok, 1 `check` found problems, 2 usage or bad input, 3 I/O.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from proxy.keys.change.cli import check, revoke, rotate, wrap

if TYPE_CHECKING:
    from proxy.keys.file import KeyFile
    from proxy.sm4.keyring import EnvelopeKey

EXIT_BAD_INPUT = 2
EXIT_IO = 3
YEAR_10000_MS = 253_402_300_800_000


@click.group(
    short_help="Make key files and look at them.",
    epilog="Exit codes: 0 ok, 1 check found problems, 2 usage or bad input, 3 I/O. "
    "More: docs/keys.md",
)
def keys() -> None:
    """Make key files for sidecar, client and auditor, change them, and look at them."""


for _command in (rotate, revoke, wrap, check):
    keys.add_command(_command)


@keys.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Where the files go; made with mode 0700 if it is not there.",
)
@click.option(
    "--audience",
    help="The one receiver these keys are for, as <trust domain>/<namespace>/<pod uid>; "
    "default: a fresh one under local/default/.",
)
@click.option("--client", default="client", show_default=True, help="Who seals requests.")
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    default=("default",),
    show_default=True,
    help="Tenant with a prompt key; may be repeated, the first is the client's.",
)
@click.option(
    "--suite",
    type=click.Choice(["1", "2"]),
    default="1",
    show_default=True,
    help="1: SM4-128-GCM, 2: AES-256-GCM.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=30,
    show_default=True,
    help="Validity of the envelope key; rotate daily where many share it.",
)
@click.option(
    "--sign",
    type=click.Choice(["ed25519", "sm2"]),
    help="Make a pair for signatures too; the private key is in client.json alone.",
)
@click.option("--require-signature", is_flag=True, help="Take no unsigned request; needs --sign.")
@click.option("--require-mac", is_flag=True, help="Take no request without an SM3-HMAC.")
@click.option(
    "--digest",
    type=click.Choice(["sha256", "sm3"]),
    default="sha256",
    show_default=True,
    help="The hash that signature and SM3-HMAC are over.",
)
@click.option(
    "--checkpoints",
    type=click.Choice(["ed25519", "sm2", "both"]),
    default="ed25519",
    show_default=True,
    help="Who signs the audit log's checkpoints; both: two signatures on each.",
)
@click.option(
    "--auditor",
    type=click.Choice(["x25519", "sm2"]),
    default="x25519",
    show_default=True,
    help="The auditor's pair, to which token ids and chain seeds are sealed.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace files that are there: the envelope key and the chain seed are fresh; the "
    "auditor's pair, the tenants' prompt keys and the auditor's earlier chain seeds stay.",
)
def new(
    directory: Path,
    audience: str | None,
    client: str,
    tenants: tuple[str, ...],
    suite: str,
    days: int,
    sign: str | None,
    require_signature: bool,
    require_mac: bool,
    digest: str,
    checkpoints: str,
    auditor: str,
    force: bool,
) -> None:
    """Draw fresh keys and write sidecar.json, client.json and auditor.json, mode 0600.

    \b
    sidecar.json  everything a receiver needs; TONGGUAN_KEYS_FILE points to it
    client.json   a caller's envelope key: Sm4Transport("client.json"), tongguan ask --keys
    auditor.json  verifies and opens audit records; keep it away from the other two

    With --force the new auditor.json verifies old chains and new ones; give clients the new
    client.json and restart the sidecar. To begin wholly anew, take another directory.
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    from proxy.keys.file import KeyFileError
    from proxy.keys.issue import Order, earlier, issue, write

    if require_signature and not sign:
        _fail("--require-signature needs --sign ed25519 or --sign sm2", EXIT_BAD_INPUT)
    order = Order(
        audience=audience or f"local/default/{uuid.uuid4()}",
        client=client,
        tenants=tenants,
        suite=int(suite),
        days=days,
        digest=digest,
        sign=sign or "",
        require_mac=require_mac,
        require_signature=require_signature,
        checkpoints=("ed25519", "sm2") if checkpoints == "both" else (checkpoints,),
        auditor=auditor,
    )
    now_ms = time.time_ns() // 1_000_000
    try:
        before = earlier(directory) if force else None
        files = issue(order, now_ms=now_ms, random=os.urandom, before=before)
        paths = write(directory, files, force=force, suffix=f"{now_ms}.{os.getpid()}")
    except (KeyFileError, ValueError) as problem:
        _fail(str(problem), EXIT_BAD_INPUT)
    except OSError as problem:
        _fail(f"{problem.filename or directory}: {problem.strerror}", EXIT_IO)
    for path in paths:
        click.echo(f"wrote {path}")
    if before is not None:
        click.echo("kept: the auditor's pair, prompt keys and earlier chain seeds")


@keys.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def show(file: Path, as_json: bool) -> None:
    """Show kids, audience, tenant, suite and validity of a key file; never a secret."""
    from proxy.keys.check import state
    from proxy.keys.file import KeyFileError, read

    try:
        contents = read(file)
    except KeyFileError as problem:
        _fail(str(problem), EXIT_BAD_INPUT)
    except OSError as problem:
        _fail(f"{file}: {problem.strerror}", EXIT_IO)
    now_ms = time.time_ns() // 1_000_000
    rows = [
        {
            "kid": key.kid.hex(),
            "state": state(key.not_before_ms, key.not_after_ms, now_ms),
            "suite": {1: "SM4-128-GCM", 2: "AES-256-GCM"}[key.suite],
            "client": key.client,
            "audience": key.audience,
            "tenant": key.tenant,
            "not_before": _utc(key.not_before_ms),
            "not_after": _utc(key.not_after_ms),
            "mac": "required" if key.require_mac else "optional",
            "signature": _signature(key),
        }
        for key in contents.envelope_keys
    ]
    facts = {
        "role": contents.role,
        "envelope_keys": rows,
        "prompt_keys_for": sorted(contents.prompt_keys),
        "chain_seed_ids": [seed_id for seed_id, _ in contents.chain_seeds],
        "auditor_public": contents.auditor_public.hex() if contents.auditor_public else None,
        "auditor_private": "present" if contents.auditor_private else None,
        "public_keys": public_lines(contents),
        "revoked": [kid.hex() for kid in contents.revoked],
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"role            {contents.role}")
    for row in rows:
        click.echo(f"kid             {row['kid']}  {row['state']}")
        for name in (
            "suite",
            "client",
            "audience",
            "tenant",
            "not_before",
            "not_after",
            "mac",
            "signature",
        ):
            click.echo(f"  {name:<13} {row[name]}")
    for kid in contents.revoked:
        click.echo(f"kid             {kid.hex()}  revoked")
    if contents.prompt_keys:
        click.echo(f"prompt keys for {', '.join(sorted(contents.prompt_keys))}")
    for seed_id, _ in contents.chain_seeds:
        click.echo(f"chain seed      {seed_id}")
    if contents.auditor_public:
        click.echo(f"auditor public  {contents.auditor_public.hex()}")
    if contents.auditor_private:
        click.echo("auditor private present")
    for line in public_lines(contents):
        click.echo(f"checkpoints by  {line}")


@keys.command("export-public")
@click.argument("file", type=click.Path(path_type=Path))
def public(file: Path) -> None:
    """Print the public keys that checkpoints of the audit log are verified with, a line each.

    These lines are no secret: give them to whoever checks proofs or an exported bundle.
    """
    from proxy.keys.file import KeyFileError, read

    try:
        contents = read(file)
    except KeyFileError as problem:
        _fail(str(problem), EXIT_BAD_INPUT)
    except OSError as problem:
        _fail(f"{file}: {problem.strerror}", EXIT_IO)
    lines = public_lines(contents)
    if not lines:
        _fail(f"{file}: no keys of checkpoints in it", EXIT_BAD_INPUT)
    for line in lines:
        click.echo(line)


# As it was called before.
keys.add_command(public, "public")


def public_lines(contents: KeyFile) -> list[str]:
    """Return the public keys of checkpoints that a key file holds or signs with."""
    from proxy.audit.signing import NoteSigner

    return [
        *contents.verify_keys,
        *(NoteSigner(*row).key.line() for row in contents.checkpoint_keys),
    ]


def _signature(key: EnvelopeKey) -> str:
    if not key.scheme:
        return "refused"
    policy = "required" if key.require_signature else "optional"
    private = ", private key present" if key.sign_private else ""
    return f"{policy}, {key.scheme} {key.sign_public.hex()}{private}"


def _utc(time_ms: int) -> str:
    if time_ms >= YEAR_10000_MS:  # what a datetime cannot hold
        return f"{time_ms} ms"
    moment = dt.datetime.fromtimestamp(time_ms / 1000, tz=dt.UTC)
    return moment.isoformat(timespec="seconds")


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"tongguan keys: {message}", err=True)
    sys.exit(code)
