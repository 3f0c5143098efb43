"""For `tongguan up`: the agent and the auditor of this machine are told of each other's keys.

The agent seals the seed of each chain to the auditor's public key, which is in the settings. The
auditor believes an escrow, or a cosignature, that an agent signed whose public key stands in
`auditor.json`: that is put there here, once, before the first chain begins.
"""

from __future__ import annotations

import http.client
import os
import socket
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from agent.children import POLL_S, Child, ChildError
from agent.plan import EXIT_IO, EXIT_SETTINGS, Plan, UpError, say
from proxy.audit.note import NoteError, parse_keys
from proxy.keys.file import KeyFileError, encode, read
from proxy.keys.issue import replace_file

if TYPE_CHECKING:
    from pathlib import Path

_PATHS = ("/chains/keys", "/witness/keys")
_ANSWER_BYTES_MAX = 16 << 10
_TIMEOUT_S = 2.0


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("agent", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def acquaint(plan: Plan, agent: Child, deadline_s: float) -> None:
    """Wait until the agent answers, and put its keys into the auditor's file.

    Raises `ChildError` when it ends or does not answer in `deadline_s` seconds, `UpError` for an
    auditor that its seeds are not for.
    """
    check_auditor(plan)
    end = time.monotonic() + deadline_s
    while True:
        agent.check()
        try:
            lines = [line for path in _PATHS for line in _public_keys(plan.agent.socket, path)]
            break
        except (OSError, http.client.HTTPException) as problem:
            if time.monotonic() > end:
                raise ChildError(
                    f"the agent does not answer after {deadline_s:g} s ({problem}); "
                    f"its log: {agent.log}",
                    agent.last_lines(),
                ) from None
        time.sleep(POLL_S)
    try:
        if teach(plan.auditor_keys, lines):
            say(f"the agent's public keys are in {plan.auditor_keys}")
    except (OSError, KeyFileError) as problem:
        raise UpError(f"{plan.auditor_keys}: {problem}", EXIT_IO) from None


def teach(auditor: Path, lines: list[str]) -> bool:
    """Add public keys to those that the auditor believes; False: they were there.

    Raises `KeyFileError`, OSError.
    """
    contents = read(auditor)
    known = tuple(dict.fromkeys((*contents.verify_keys, *lines)))
    if known == contents.verify_keys:
        return False
    data = encode(replace(contents, verify_keys=known))
    replace_file(auditor, data, suffix=f"{time.time_ns()}.{os.getpid()}")
    return True


def check_auditor(plan: Plan) -> None:
    """Refuse, with `UpError`, an auditor's file that what is written now is not for."""
    try:
        public = read(plan.auditor_keys).auditor_public
    except FileNotFoundError:
        raise UpError(
            f"{plan.auditor_keys} is not there; bring it back from where it is kept: "
            "`tongguan up` verifies with it",
            EXIT_IO,
        ) from None
    except (OSError, KeyFileError) as problem:
        raise UpError(f"{plan.auditor_keys}: {problem}", EXIT_IO) from None
    if public is None or public.hex() != plan.agent.auditor_public:
        raise UpError(
            f"agent.auditor_public is not the key of {plan.auditor_keys}, which could not verify "
            f"what is written now; remove {plan.file} and run again: it is written anew for those "
            "keys",
            EXIT_SETTINGS,
        )


def _public_keys(path: str, where: str) -> list[str]:
    """Return the lines of public keys that the agent shows; none where it has none of that kind."""
    connection = _UnixConnection(path)
    try:
        connection.request("GET", where)
        answer = connection.getresponse()
        text = answer.read(_ANSWER_BYTES_MAX).decode("ascii", "replace")
    finally:
        connection.close()
    if answer.status == http.client.NOT_FOUND:
        return []
    if answer.status != http.client.OK:
        raise http.client.HTTPException(f"{where}: {answer.status}")
    try:
        return [key.line() for key in parse_keys(text)]
    except NoteError as problem:
        raise http.client.HTTPException(f"{where}: {problem}") from None
