"""Child processes of `tongguan up`: start, wait until ready, stop; the last lines of their logs."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

POLL_S = 0.1
LAST_LINES = 12
_LINE_CHARS = 400
_TAIL_BYTES = 16 << 10
LOG_BYTES_MAX = 8 << 20
_KILL_WAIT_S = 5.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


class ChildError(Exception):
    """A child died or never became ready; `lines` are the last of its log."""

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


@dataclass(slots=True)
class Child:
    """One process in a session of its own: Ctrl-C reaches only its parent, which ends it in order.

    `grace_s` is how long it may take to end by itself; then it is killed.
    """

    name: str
    argv: Sequence[str]
    ready_at: tuple[str, int]
    log: Path
    grace_s: float
    environ: Mapping[str, str]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _log_start: int = field(default=0, init=False)

    def start(self) -> None:
        """Start it; its output goes to the end of `log`, or of a fresh one when that is long."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.replace(self.log.with_name(self.log.name + ".old"))
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            # A killed parent must not leave two servers on the ports.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self.environ),
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code of a process that has ended, else None."""
        return self._process.poll() if self._process else None

    def last_lines(self) -> list[str]:
        """Return the last lines this run of it logged."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [line[:_LINE_CHARS] for line in text.splitlines()[-LAST_LINES:]]

    def check(self) -> None:
        """Raise `ChildError` if it has ended."""
        code = self.exit_code
        if code is not None:
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
            raise ChildError(f"the {self.name} {how}; its log: {self.log}", self.last_lines())

    def readiness(self) -> str | None:
        """Return why it is not ready, None if it is."""
        connection = http.client.HTTPConnection(*self.ready_at, timeout=2)
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            value = json.loads(answer.read(1 << 16))
        except (OSError, http.client.HTTPException, ValueError):
            return "starting"
        finally:
            connection.close()
        if answer.status == http.client.OK:
            return None
        reasons = value.get("reasons", ()) if isinstance(value, dict) else ()
        return ", ".join(in_words(str(reason)) for reason in reasons) or "not ready"

    def stop(self) -> int | None:
        """End it, kindly at first; return its exit code, None if it was never started."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(self.grace_s)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_WAIT_S)
        return process.returncode


_WORDS = {
    "audit_unavailable": "audit records cannot be written",
    "no_live_kid": "no key is valid now",
}
_MODEL_LOADING = re.compile(r"model loading: .* (\d+)%")


def in_words(reason: str) -> str:
    """Return a reason of `/readyz`, the sidecar's or the agent's, for a person."""
    name, _, value = reason.partition("=")
    if name == "start_fence_ms" and value.isdecimal():
        return f"start fence, {-(-int(value) // 1000)} s left"
    if name == "clock_behind_ms" and value.isdecimal():
        return f"the clock is {int(value) / 1000:.0f} s behind"
    if loading := _MODEL_LOADING.fullmatch(reason):
        return f"loading the model, {loading[1]} %"
    return _WORDS.get(reason) or name.replace("_", " ")


def wait_ready(
    children: Sequence[Child], deadline_s: float, show: Callable[[dict[str, str | None]], None]
) -> None:
    """Wait until all are ready; `show` gets each one's reason, None for ready, now and again.

    Raises `ChildError` when one ends or `deadline_s` seconds are over.
    """
    end = time.monotonic() + deadline_s
    while True:
        state: dict[str, str | None] = {}
        for child in children:
            child.check()
            state[child.name] = child.readiness()
        show(state)
        late = [name for name, reason in state.items() if reason is not None]
        if not late:
            return
        if time.monotonic() > end:
            child = next(c for c in children if c.name in late)
            raise ChildError(
                f"the {child.name} is not ready after {deadline_s:g} s ({state[child.name]}); "
                f"its log: {child.log}",
                child.last_lines(),
            )
        time.sleep(POLL_S)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
