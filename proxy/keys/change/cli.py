"""`tongguan keys rotate`, `revoke`, `wrap`, `check`.

Exit codes: 0 ok, 1 `check` found problems, 2 usage or bad input, 3 I/O: a file, a key service or a
token that cannot be reached.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import re
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from proxy.keys.wrapped import converted, is_wrapped, split

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from proxy.keys.check import Report
    from proxy.keys.provider import KeyProvider
    from proxy.keys.token import Token

EXIT_PROBLEMS = 1
EXIT_BAD_INPUT = 2
EXIT_IO = 3
YEAR_10000_MS = 253_402_300_800_000

_directory = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Where sidecar.json and client.json are.",
)


def _token_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, text in (
        ("pin-file", "File that holds the token's user PIN."),
        ("token", "Label of the token."),
        ("module", "PKCS#11 library of the token that wraps the sidecar's file."),
    ):
        variable = f"TONGGUAN_KEYS_PKCS11_{name.replace('-', '_').upper()}"
        command = click.option(
            f"--{name}", envvar=variable, default="", help=f"{text}  [{variable}]"
        )(command)
    return command


@click.command()
@_directory
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    help="Validity of the next key; default: that of the key it follows.",
)
@click.option(
    "--now", "at_once", is_flag=True, help="Begin at once: for a key that is to be revoked."
)
@_token_options
def rotate(
    directory: Path, days: int | None, at_once: bool, module: str, token: str, pin_file: str
) -> None:
    """Announce the client's next envelope key: it begins in ten minutes.

    Both files get it, the sidecar's first; the keys before serve on until their grace is over, and
    then leave the files. A sidecar that runs takes the new file by itself; give clients theirs
    within the ten minutes. A sidecar's file that is wrapped needs the token's three options.
    """
    from proxy.keys.file import KeyFileError, parse, read, read_bytes
    from proxy.keys.issue import FILE_NAMES, write
    from proxy.keys.provider import KeySourceError
    from proxy.keys.rotate import rotate as rotated

    now_ms = time.time_ns() // 1_000_000
    path = directory / FILE_NAMES["sidecar"]
    try:
        data = read_bytes(path)
        if is_wrapped(data) and not (module and token and pin_file):
            raise KeyFileError(f"{path}: wrapped; --module, --token and --pin-file are needed")
        with _session(module, token, pin_file, needed=is_wrapped(data)) as session:
            plain = data if session is None else converted(path, data, session.unwrap)

            def finish(role: str, made: bytes) -> bytes:
                if session is None or role != "sidecar":
                    return made
                return converted(path, made, session.wrap)

            files, fresh = rotated(
                parse(path, plain),
                read(directory / FILE_NAMES["client"]),
                now_ms=now_ms,
                random=os.urandom,
                days=days,
                at_once=at_once,
            )
            suffix = f"{now_ms}.{os.getpid()}"
            paths = write(directory, files, force=True, suffix=suffix, finish=finish)
    except (KeySourceError, ValueError) as problem:
        _fail(str(problem), _exit_code(problem))
    except OSError as problem:
        _fail(f"{problem.filename or directory}: {problem.strerror}", EXIT_IO)
    for written in paths:
        click.echo(f"wrote {written}")
    click.echo(f"kid {fresh.kid.hex()} begins {_utc(fresh.not_before_ms)}")


def _session(
    module: str, token: str, pin_file: str, *, needed: bool
) -> AbstractContextManager[Token | None]:
    if not needed:
        return nullcontext()
    from proxy.keys.token import opened

    return opened(module, token, pin_file, write=True)


@click.command()
@_directory
@click.argument("kid")
def revoke(directory: Path, kid: str) -> None:
    """Take a key out at once: a sidecar that runs refuses it within a second.

    The kid leaves sidecar.json and client.json; sidecar.json names it as revoked, so that no other
    file of a directory or of a key service brings it back. What a request under it began is
    answered. Give the client another key first: keys rotate --now.
    """
    from proxy.keys.file import KeyFileError
    from proxy.keys.issue import replace_file

    if not re.fullmatch("[0-9a-f]{16}", kid):
        _fail(f"{kid}: expected a kid, 16 hexadecimal digits", EXIT_BAD_INPUT)
    now_ms = time.time_ns() // 1_000_000
    try:
        made, some_left = _without_kid(directory, bytes.fromhex(kid), now_ms)
        for path, data in made.items():
            replace_file(path, data, suffix=f"{now_ms}.{os.getpid()}")
            click.echo(f"wrote {path}")
    except KeyFileError as problem:
        _fail(str(problem), EXIT_BAD_INPUT)
    except OSError as problem:
        _fail(f"{problem.filename or directory}: {problem.strerror}", EXIT_IO)
    click.echo(f"kid {kid} is revoked")
    if not some_left:
        click.echo("no live key is left; nothing sealed is taken until there is one", err=True)


def _without_kid(directory: Path, kid: bytes, now_ms: int) -> tuple[dict[Path, bytes], bool]:
    """Return the files to write, the receiver's first, and whether a live key is left in it.

    Both are known to be good before one is written.
    """
    from proxy.keys.check import state
    from proxy.keys.file import KeyFileError, parse, read_bytes
    from proxy.keys.issue import FILE_NAMES
    from proxy.keys.rotate import revoke as revoked

    made: dict[Path, bytes] = {}
    found = some_left = False
    for role in ("sidecar", "client"):
        path = directory / FILE_NAMES[role]
        if role == "client" and not path.exists():
            continue
        data, was_in = revoked(path, read_bytes(path), kid)
        # Of a wrapped file nothing but the roots is hidden, and they are not asked for here.
        keys = parse(path, converted(path, data, _blank)).envelope_keys
        if role == "sidecar":
            some_left = any(
                state(key.not_before_ms, key.not_after_ms, now_ms) == "live" for key in keys
            )
        found |= was_in
        if was_in or role == "sidecar":
            made[path] = data
    if not found:
        raise KeyFileError(f"{directory}: no key {kid.hex()} in sidecar.json or client.json")
    return made, some_left


def _blank(_name: str, text: str) -> str:
    return "00" * 32 if split(text) is not None else text


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@_token_options
def wrap(file: Path, module: str, token: str, pin_file: str) -> None:
    """Wrap every secret of a sidecar's key file by a PKCS#11 token, in place.

    The token draws the root by itself, the first time, and never gives it out. Serve the file with
    keys.provider = "pkcs11". Copies of the file from before are as secret as ever: destroy them.
    """
    from proxy.keys.file import KeyFileError, encode, parse, read_bytes
    from proxy.keys.issue import replace_file
    from proxy.keys.provider import KeySourceError
    from proxy.keys.token import opened

    if not (module and token and pin_file):
        _fail("wrap needs --module, --token and --pin-file", EXIT_BAD_INPUT)
    try:
        data = read_bytes(file)
        with opened(module, token, pin_file, write=True) as session:
            contents = parse(file, converted(file, data, session.unwrap))
            if contents.role != "sidecar":
                raise KeyFileError(f"{file}: made for the {contents.role}; wrap a sidecar's file")
            made = converted(file, encode(contents), session.wrap)
            # What cannot be opened again is not written.
            assert parse(file, converted(file, made, session.unwrap)) == contents
        replace_file(file, made, suffix=f"{time.time_ns()}.{os.getpid()}")
    except (KeySourceError, ValueError) as problem:
        _fail(str(problem), _exit_code(problem))
    except OSError as problem:
        _fail(f"{problem.filename or file}: {problem.strerror}", EXIT_IO)
    click.echo(f"wrote {file}: {made.count(b'pkcs11:')} secrets, wrapped")


@click.command()
@click.argument("source", required=False, type=click.Path(path_type=Path))
@click.option("--config", "path", metavar="PATH", help="Settings file, or a directory of it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def check(source: Path | None, path: str | None, as_json: bool) -> None:
    """Ask a source of keys as a sidecar would: what is live, what ends when, what is wrong.

    SOURCE is a sidecar's key file or a directory of them; without it the settings say where keys
    come from (--config and TONGGUAN_KEYS_…), whichever provider that is. Changes nothing, and shows
    no secret.
    """
    from proxy.keys.check import report
    from proxy.keys.provider import KeySourceError

    try:
        provider, alarm_s = _provider(source, path)
        with closing(provider):
            now_ms = time.time_ns() // 1_000_000
            found = report(provider.load(), now_ms, alarm_ahead_ms=int(alarm_s * 1000))
    except KeySourceError as problem:
        _fail(str(problem), _exit_code(problem))
    if as_json:
        click.echo(json.dumps({"provider": provider.kind} | dataclasses.asdict(found)))
    else:
        _print_report(provider.kind, found)
    raise SystemExit(EXIT_PROBLEMS if found.problems else 0)


def _provider(source: Path | None, path: str | None) -> tuple[KeyProvider, float]:
    from proxy.config import Keys, read
    from proxy.keys.directory import DirectoryProvider
    from proxy.keys.local import FileProvider
    from proxy.keys.sources import open_provider
    from proxy.settings import SettingsError

    if source is not None:
        alarm_s = Keys().expiry_alarm_s
        return (DirectoryProvider if source.is_dir() else FileProvider)(source), alarm_s
    try:
        row = read(path, os.environ).keys
    except SettingsError as problem:
        _fail(str(problem), EXIT_BAD_INPUT)
    provider = open_provider(row)
    if provider is None:
        _fail("no keys are set: give a SOURCE, or set keys.file or keys.provider", EXIT_BAD_INPUT)
    return provider, row.expiry_alarm_s


def _print_report(kind: str, found: Report) -> None:
    from proxy.keys.check import KEYS_SHOWN_MAX

    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items())
    click.echo(f"provider        {kind}")
    click.echo(f"envelope keys   {counts}")
    for row in found.keys[:KEYS_SHOWN_MAX]:
        ends = f"{_utc(row['not_before_ms'])} to {_utc(row['not_after_ms'])}"
        click.echo(f"  {row['kid']}  {row['state']:<8} {ends}  {row['client']}")
    if len(found.keys) > KEYS_SHOWN_MAX:
        click.echo(f"  and {len(found.keys) - KEYS_SHOWN_MAX} more")
    click.echo(f"prompt keys for {', '.join(found.prompt_keys_for[:KEYS_SHOWN_MAX]) or '-'}")
    click.echo(f"chain seed      {found.chain_seed_id or '-'}")
    for text in found.notes:
        click.echo(f"note: {text}")
    for text in found.problems:
        click.echo(f"problem: {text}")
    click.echo("ok" if not found.problems else f"{len(found.problems)} problems")


def _exit_code(problem: Any) -> int:
    """A source that cannot be reached is I/O; one that gives what is refused is bad input."""
    from proxy.keys.file import KeyFileError

    unreachable = getattr(problem, "reason", "")
    if isinstance(problem, KeyFileError) and "Errno" in str(problem):
        return EXIT_IO
    return EXIT_IO if unreachable else EXIT_BAD_INPUT


def _utc(time_ms: int) -> str:
    if time_ms >= YEAR_10000_MS:  # what a datetime cannot hold
        return f"{time_ms} ms"
    moment = dt.datetime.fromtimestamp(time_ms / 1000, tz=dt.UTC)
    return moment.isoformat(timespec="seconds")


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"tongguan keys: {message}", err=True)
    sys.exit(code)
