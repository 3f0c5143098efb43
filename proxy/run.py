"""Runs one sidecar: arguments, settings, supervisor if there are several workers, exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from proxy.config import Settings, read
from proxy.keys.memory import no_core_dumps
from proxy.settings import SettingsError, StartError, service_variables

if TYPE_CHECKING:
    from proxy.workers import Worker

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_IO = 0, 1, 2, 3

HELP = """\
usage: python -m proxy [--config PATH]

Run the sidecar: plaintext on 14080, SM4 envelopes on 14081, probes and metrics on 14090.
Settings come from --config (a tongguan.toml, or a directory that holds one) and from TONGGUAN_…
variables, which win. Exit codes: 0 drained, 1 failed, 2 bad settings, 3 a port, key file or
directory cannot be used.

  -h, --help     say this
  --config PATH  settings file, or a directory of it
"""


def main(argv: list[str] | None = None) -> int:
    """Parse arguments, load settings, run; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if "-h" in words or "--help" in words:
        print(HELP, end="")  # noqa: T201
        return EXIT_OK
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # see `__main__`, which not every start goes by
    try:
        path = _config_named(words)
    except ValueError as problem:
        print(f"tongguan sidecar: {problem}; see --help", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    try:
        settings = read(path, os.environ)
    except SettingsError as problem:
        for line in problem.problems:
            print(f"tongguan sidecar: {line}", file=sys.stderr)  # noqa: T201 - before logging
        return EXIT_USAGE
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    if settings.workers == 1:
        return serve(settings, path)
    gc.enable()  # for the one that stays and supervises
    from proxy.supervisor import supervise  # noqa: PLC0415 - only with several workers

    # Forks here, where nothing has threads, sockets or keys yet; each worker returns as itself.
    found = supervise(settings)
    if isinstance(found, int):
        return found
    from proxy.reload import newest  # noqa: PLC0415 - see above

    settings = newest(path, os.environ, settings)
    return serve(settings, path, found)


def _config_named(words: list[str]) -> str | None:
    """Return what `--config` names; raises ValueError for anything else.

    Neither argparse nor getopt: they load translations, in every start.
    """
    path, left = None, iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name != "--config":
            option = word.startswith("-")
            raise ValueError(
                f"option {word} not recognized" if option else f"no arguments are taken: {word}"
            )
        path = value if equals else next(left, None)
        if path is None:
            raise ValueError("option --config requires argument")
    return path


def serve(settings: Settings, path: str | None, worker: Worker | None = None) -> int:
    """Run a sidecar until a signal; return the exit code."""
    gc.disable()  # see `__main__`
    import uvloop  # noqa: PLC0415 - `--help` has no use for it

    from proxy.lifecycle import Sidecar  # noqa: PLC0415
    from proxy.reload import Source  # noqa: PLC0415

    ignored = service_variables(os.environ)
    if ignored:
        logging.getLogger("proxy").info("ignored, Kubernetes made them: %s", " ".join(ignored))
    no_core_dumps()
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        source = Source(path, dict(os.environ), settings)
        sidecar = Sidecar(settings, loop, source, worker)
        loop.run_until_complete(sidecar.run())
    except SettingsError as problem:
        logging.getLogger("proxy").critical("cannot start: %s", problem)
        return EXIT_USAGE
    except StartError as problem:
        logging.getLogger("proxy").critical("cannot start: %s", problem)
        return EXIT_IO
    finally:
        # Nor from here on: the closed loop leaves the signal to its default.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
        loop.close()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return EXIT_FAILED if sidecar.unwritten else EXIT_OK
