"""`tongguan seal` and `tongguan open` (docs/files.md).

Exit codes: 0 done, 1 the envelope is refused, 2 wrong use or keys, 3 a file or pipe cannot be used.
"""

from __future__ import annotations

import datetime as dt
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.files import sealing
    from proxy.files.ends import Sink, Source
    from proxy.files.progress import Progress
    from proxy.files.sealing import Facts
    from proxy.sm4.keyring import EnvelopeKey, Keyring

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_IO = 3
AHEAD_MS = 5_000
# What a reason means to who holds the keys; a peer is never told.
_REASONS = {
    "bad_magic": "this is no envelope, or a damaged one",
    "stale": "it was sealed longer ago than --max-age allows",
    "future": "it was sealed in the future by this clock",
    "unknown_kid": "the key it was sealed with is not in the key file",
    "kid_expired": "it was sealed at a time for which its key was not valid",
    "bad_tag": "it was changed, is for another audience or model (--model), or the key differs",
    "truncated": "its end is missing",
    "trailing_data": "there is something behind its end",
    "bad_flags": "it is an answer (give --request), or a request where an answer was expected",
    "bad_mac": "its SM3-HMAC is wrong",
    "missing_mac": "its key demands an SM3-HMAC, or the request had one, and it has none",
    "bad_signature": "its signature is wrong, or its key allows none",
    "missing_signature": "its key demands a signature, and it has none",
    "bad_carrier": "it is neither an envelope nor events that carry one",
}
_KEYS = click.option(
    "--keys",
    "keys_file",
    required=True,
    type=click.Path(path_type=Path),
    help="client.json or sidecar.json; signatures need client.json.",
)
_OUTPUT = click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to; it appears whole or not at all. Default: standard output; -: that, in any "
    "case.",
)
_FORCE = click.option("-f", "--force", is_flag=True, help="Replace FILE if it is there.")
_KID = click.option("--kid", metavar="HEX", help="This key and no other.")
_AUDIENCE = click.option("--audience", help="A key for this receiver and no other.")
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
_VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Say on stderr what was done.")
_INPUT = click.argument("source", metavar="[FILE]", default="-")


@click.command(
    short_help="Seal a file or pipe into an SM4 envelope.",
    epilog="Exit codes: 0 done, 2 wrong use or keys, 3 a file or pipe cannot be used. "
    "More: docs/files.md",
)
@_INPUT
@_KEYS
@_OUTPUT
@_FORCE
@_KID
@_AUDIENCE
@click.option(
    "--form",
    type=click.Choice(["auto", "single", "stream"]),
    default="auto",
    show_default=True,
    help="auto: single up to 1 MiB, else a stream.",
)
@click.option("--type", "content_type", default="application/octet-stream", show_default=True)
@click.option("--method", default="POST", show_default=True, help="Of the request inside.")
@click.option("--target", default="/", show_default=True, help="Of the request inside.")
@click.option("--qos", type=click.Choice(["P0", "P1", "P2"]), help="Class of the request inside.")
@click.option("--model", help="What X-Model-Id will say; default: what the body names.")
@click.option("--mac", is_flag=True, help="Add an SM3-HMAC.")
@click.option("--no-sign", is_flag=True, help="Do not sign, though the key file could.")
@_QUIET
@_VERBOSE
def seal(
    source: str,
    keys_file: Path,
    output: str | None,
    force: bool,
    kid: str | None,
    audience: str | None,
    form: str,
    content_type: str,
    method: str,
    target: str,
    qos: str | None,
    model: str | None,
    mac: bool,
    no_sign: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Seal FILE, or standard input, into one envelope.

    \b
    tongguan seal --keys client.json -o report.smx report.pdf
    tar c data | tongguan seal --keys client.json | ssh host 'cat > data.smx'

    The envelope is a request's: what it is for (--target, --type) is inside. Sent by POST within a
    minute to the receiver that the key is for, it is served.
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    from proxy.files import sealing
    from proxy.files.ends import UsageError
    from proxy.sm4.envelope import RequestPrelude

    prelude = RequestPrelude(method, target, content_type, qos or "")
    order = sealing.Order(prelude, cast("sealing.Form", form), model, mac, not no_sign)
    with _told("seal", source), _ends(source, output, force, quiet, sealing=True) as ends:
        keys, ring = _keys(keys_file, kid, audience)
        derived = ring.sealing_key(time.time_ns() // 1_000_000)
        if derived is None:
            raise UsageError(f"{keys_file}: no key is valid now: {_validity(keys)}")
        facts = sealing.seal(ends.source, ends.sink, derived, order, ends.progress.at)
    if verbose:
        _tell(facts)


@click.command(
    name="open",
    short_help="Open an SM4 envelope from a file or pipe.",
    epilog="Exit codes: 0 done, 1 the envelope is refused, 2 wrong use or keys, 3 a file or pipe "
    "cannot be used. More: docs/files.md",
)
@_INPUT
@_KEYS
@_OUTPUT
@_FORCE
@_KID
@_AUDIENCE
@click.option("--model", default="", help="What X-Model-Id said; default: nothing.")
@click.option(
    "--request",
    type=click.Path(path_type=Path),
    help="Open the answer to the request sealed in this file; both carriers are read.",
)
@click.option(
    "--max-age",
    "max_age_s",
    metavar="S",
    type=click.IntRange(min=0),
    help="Refuse what was sealed longer ago, in seconds. Default: its key's validity decides.",
)
@_QUIET
@_VERBOSE
def open_(
    source: str,
    keys_file: Path,
    output: str | None,
    force: bool,
    kid: str | None,
    audience: str | None,
    model: str,
    request: Path | None,
    max_age_s: int | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Open the envelope in FILE, or on standard input.

    \b
    tongguan open --keys sidecar.json -o report.pdf report.smx
    ssh host 'cat data.smx' | tongguan open --keys sidecar.json | tar x

    With -o the file appears when everything was verified, or not at all. A pipe gets each frame
    when that frame was verified: if the command fails, what came before is not the whole.
    """  # noqa: D301 - click's mark for a paragraph that is not wrapped
    from proxy.files import sealing
    from proxy.sm4.keyring import is_id

    if not is_id(model, empty=True):
        raise click.UsageError("--model: expected at most 255 printable characters, no space")
    facts: Facts | None = None
    with _told("open", source), _ends(source, output, force, quiet, sealing=False) as ends:
        _, ring = _keys(keys_file, kid, audience)
        report = ends.progress.at
        if request is None:
            now_ms = time.time_ns() // 1_000_000
            times = None if max_age_s is None else (now_ms - max_age_s * 1000, now_ms + AHEAD_MS)
            facts = sealing.open_request(
                ends.source, ends.sink, ring, model=model, times_ms=times, progress=report
            )
        else:
            bound = sealing.asked(request, ring, model=model)
            status, kind = sealing.open_answer(ends.source, ends.sink, bound, report)
    if facts is None:
        if verbose or status >= 400:
            click.echo(f"answer: status {status}, type {kind or '(none)'}", err=True)
    elif verbose:
        _tell(facts)


@dataclass(slots=True)
class _Ends:
    source: Source
    sink: Sink
    progress: Progress


@contextmanager
def _ends(
    source: str, output: str | None, force: bool, quiet: bool, *, sealing: bool
) -> Iterator[_Ends]:
    """Give both ends; what went in is committed if nothing is raised, else gone."""
    from proxy.files.ends import Source, UsageError, sink_for
    from proxy.files.progress import Progress

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    with ExitStack() as stack:
        begin = Source(None if source == "-" else Path(source))
        stack.callback(begin.close)
        if not sealing and begin.is_terminal():
            raise UsageError("an envelope is not typed: give FILE, or a pipe")
        sink = sink_for(output, force=force, private=not sealing, binary=sealing)
        stack.callback(sink.close)
        progress = Progress(begin.size_bytes, quiet=quiet)
        stack.callback(progress.end)
        yield _Ends(begin, sink, progress)
        sink.commit()


def _on_signal(number: int, frame: object) -> NoReturn:
    """End by an exception, so that half a file is taken away."""
    del frame
    raise SystemExit(128 + number)


@contextmanager
def _told(name: str, source: str) -> Iterator[None]:
    """End with the promised code and one line that says why."""
    from proxy.files.ends import EndError, UsageError
    from proxy.keys.file import KeyFileError
    from proxy.sm4.envelope import EnvelopeError
    from proxy.sm4.keyring import KeyringError

    try:
        yield
    except EnvelopeError as problem:
        what = "standard input" if source == "-" else source
        _fail(
            name,
            f"{what}: refused: {_REASONS.get(problem.reason, '')}".rstrip(": ")
            + f" ({problem.reason})",
            EXIT_REFUSED,
        )
    except (UsageError, KeyFileError, KeyringError) as problem:
        _fail(name, str(problem), EXIT_USAGE)
    except EndError as problem:
        _fail(name, str(problem), EXIT_IO)
    except OSError as problem:
        _fail(name, f"{problem.filename or 'input or output'}: {problem.strerror}", EXIT_IO)


def _keys(path: Path, kid: str | None, audience: str | None) -> tuple[list[EnvelopeKey], Keyring]:
    """Return the keys that were asked for, and a ring of them."""
    from proxy.files.ends import UsageError
    from proxy.keys.file import read
    from proxy.sm4.keyring import Keyring

    found = list(read(path).envelope_keys)
    if not found:
        raise UsageError(f"{path}: has no envelope keys; give client.json or sidecar.json")
    if audience is not None:
        named = ", ".join(sorted({key.audience for key in found}))
        found = [key for key in found if key.audience == audience]
        if not found:
            raise UsageError(f"{path}: no key for audience {audience}; it has keys for: {named}")
    if kid is not None:
        found = [key for key in found if key.kid.hex() == kid.lower()]
        if not found:
            raise UsageError(f"{path}: no key {kid}; see: tongguan keys show {path}")
    return found, Keyring(found)


def _validity(keys: list[EnvelopeKey]) -> str:
    rows = (f"{k.kid.hex()} {_date(k.not_before_ms)} to {_date(k.not_after_ms)}" for k in keys[:4])
    return "; ".join(rows)


def _date(time_ms: int) -> str:
    at = dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC)
    return at.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + " UTC"


def _tell(facts: Facts) -> None:
    rows = [
        f"kid {facts.kid}",
        f"client {facts.client}",
        f"audience {facts.audience}",
        f"sealed {_date(facts.time_ms)}",
        "stream" if facts.stream else "single",
        f"signature {facts.signature or 'none'}",
        f"SM3-HMAC {'yes' if facts.mac else 'no'}",
        f"request {facts.line}",
    ]
    if facts.model:
        rows.append(f"X-Model-Id: {facts.model}")
    click.echo("\n".join(rows), err=True)


def _fail(name: str, text: str, code: int) -> NoReturn:
    click.echo(f"tongguan {name}: {text}", err=True)
    raise SystemExit(code)
