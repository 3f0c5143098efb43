"""The parent of several workers: starts them, starts again what ends, passes signals on.

`Staff` decides who is started when, and what the exit code is; it has no clock and no process.
`supervise` is the shell: it waits for signals and does what `Staff` says. It opens no door and
holds no key. Workers start one after the other, each when the one before serves, so that each finds
the audit directory as the one before has left it.

    waiting -> started -> serving -> ended -> waiting, after a pause that doubles
                       -> ended before it ever served, with "bad settings" or "cannot use": all end
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.config import split_address
from proxy.workers import Board, Worker, shares_sealed

if TYPE_CHECKING:
    from proxy.config import Settings

PAUSE_FIRST_S = 0.2
PAUSE_MOST_S = 30.0
STEADY_S = 60.0  # a worker that lived so long begins with the first pause again
POLL_S = 0.05  # while one is starting
FATAL = (2, 3)  # bad settings; a port, key file or directory cannot be used
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    pid: int = 0
    served: bool = False  # ever
    serves: bool = False
    started_s: float = 0.0
    due_s: float = 0.0
    pause_s: float = PAUSE_FIRST_S


class Staff:
    """Who is started when. Times: monotonic seconds."""

    def __init__(self, count: int) -> None:
        self.places = [_Place() for _ in range(count)]
        self.ending = False
        self.code = 0

    def due(self, now_s: float) -> int | None:
        """Return the worker to start now; None while another one is starting, or none is due."""
        if self.ending or any(place.pid and not place.serves for place in self.places):
            return None
        for index, place in enumerate(self.places):
            if not place.pid and place.due_s <= now_s:
                return index
        return None

    def wait_s(self, now_s: float) -> float:
        """Return how long nothing is due, if nothing happens."""
        if any(place.pid and not place.serves for place in self.places):
            return POLL_S
        waits = [place.due_s - now_s for place in self.places if not place.pid]
        return max(0.0, min(waits, default=PAUSE_MOST_S))

    def started(self, index: int, pid: int, now_s: float) -> None:
        """Note a start."""
        place = self.places[index]
        place.pid, place.started_s, place.serves = pid, now_s, False

    def serving(self, index: int) -> None:
        """Note that a worker has opened its doors."""
        self.places[index].serves = self.places[index].served = True

    def ended(self, pid: int, code: int, now_s: float) -> int | None:
        """Note an end; `code` is negative for a signal. Return which one it was."""
        found = [index for index, place in enumerate(self.places) if place.pid == pid]
        if not found:
            return None
        index = found[0]
        place = self.places[index]
        place.pid, place.serves = 0, False
        if self.ending:
            if code not in (0, -signal.SIGTERM, -signal.SIGINT):
                self.code = self.code or 1
        elif code in FATAL and not place.served:
            self.ending, self.code = True, code
        else:
            if now_s - place.started_s >= STEADY_S:
                place.pause_s = PAUSE_FIRST_S
            place.due_s = now_s + place.pause_s
            place.pause_s = min(2 * place.pause_s, PAUSE_MOST_S)
        return index

    def running(self) -> list[int]:
        """Return the process ids that are there."""
        return [place.pid for place in self.places if place.pid]


def supervise(settings: Settings) -> int | Worker:
    """Run the workers. Returns the exit code, or in each worker which one it is."""
    shared = {"app": settings.doors.app}
    if shares_sealed(settings):
        shared["sealed"] = settings.doors.sealed
    for door, address in shared.items():
        if problem := _taken(address):
            log.critical("cannot start: doors.%s: %s", door, problem)
            return 3
    board, staff = Board(), Staff(settings.workers)
    directory = Path(tempfile.mkdtemp(prefix="tongguan-workers-"))  # mode 0700
    reader, writer = os.pipe()  # the workers' end of it closes when this process ends
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    while staff.running() or not staff.ending:
        now_s = time.monotonic()
        index = staff.due(now_s)
        if index is not None:
            again = staff.places[index].started_s > 0
            if again:
                board.count_restart(index)
            board.set_serves(index, serves=False)
            pid = os.fork()
            if not pid:
                os.close(writer)
                for number in SIGNALS:
                    ignored = number == signal.SIGHUP  # until it serves, as in `run.main`
                    signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                return Worker(index, settings.workers, directory, reader, board)
            staff.started(index, pid, now_s)
            log.info("worker %d started%s: pid=%d", index, " again" if again else "", pid)
        got = signal.sigtimedwait(SIGNALS, staff.wait_s(time.monotonic()))
        if got is not None:
            _pass_on(staff, got.si_signo)
        _reap(staff, board)
        for at, place in enumerate(staff.places):
            if place.pid and not place.serves and board.serves(at):
                staff.serving(at)
    shutil.rmtree(directory, ignore_errors=True)
    return staff.code


def _pass_on(staff: Staff, number: int) -> None:
    if number == signal.SIGCHLD:
        return
    ends = number in (signal.SIGTERM, signal.SIGINT)
    staff.ending |= ends
    for pid in staff.running():
        os.kill(pid, signal.SIGTERM if ends else number)


def _reap(staff: Staff, board: Board) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        was_ending = staff.ending
        code = os.waitstatus_to_exitcode(status)
        index = staff.ended(pid, code, time.monotonic())
        if index is None:
            continue
        board.set_serves(index, serves=False)
        if not was_ending:
            log.warning("worker %d ended: code=%d", index, code)
            if staff.ending:
                for other in staff.running():
                    os.kill(other, signal.SIGTERM)


def _taken(address: str) -> str:
    """Return why nobody can listen there: the workers' own sockets would share it silently."""
    if not address:
        return ""
    host, port = split_address(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
            probe.listen(1)
        except OSError as problem:
            return f"cannot listen on {address}: {problem.strerror}; is another one running?"
    return ""
