"""Several processes behind the same doors: what a worker knows of itself, and of the others.

With `workers` above 1 the process that was started forks that many and looks after them
(`supervisor`). Each worker is a whole sidecar with loop, pools and audit chain of its own; the
kernel spreads the connections of the app door over them (SO_REUSEPORT). Worker 0 alone has the
admin door, and the sealed door too while its replay cache is in its memory; the others' admin doors
are unix sockets in a directory that only this user can enter, which worker 0 asks when it is asked.

Bounds: `WORKERS_MAX`; a sibling that does not answer in `ASK_S` counts as stuck.
"""

from __future__ import annotations

import mmap
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import orjson

from proxy.config import WORKERS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from proxy.config import Doors, Settings

ASK_S = 0.5
ANSWER_BYTES_MAX = 4 << 20


def shares_sealed(settings: Settings) -> bool:
    """Say whether every worker may have the sealed door: who remembers envelopes is no worker."""
    return settings.envelope.replay_store != "memory"


class Board:
    """A page that the supervisor and all workers see: restarts, and who serves."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, 16 * WORKERS_MAX)
        self._cells = memoryview(self._page).cast("Q")

    def restarts(self, index: int) -> int:
        """Return how often a worker was started again."""
        return int(self._cells[2 * index])

    def count_restart(self, index: int) -> None:
        """Count a restart; by the supervisor only."""
        self._cells[2 * index] += 1

    def serves(self, index: int) -> bool:
        """Say whether a worker has opened its doors since it was last started."""
        return bool(self._cells[2 * index + 1])

    def set_serves(self, index: int, *, serves: bool) -> None:
        """Note it: by the worker when it serves, by the supervisor before a start."""
        self._cells[2 * index + 1] = int(serves)


@dataclass(frozen=True, slots=True)
class Worker:
    """One of several: `directory` has their admin sockets; `parent` reads EOF when it is gone."""

    index: int
    count: int
    directory: Path
    parent: int
    board: Board = field(repr=False)

    @property
    def first(self) -> bool:
        """Say whether this one has the sealed door and answers for all."""
        return self.index == 0

    def doors(self, settings: Settings) -> Doors:
        """Return the doors that this one opens."""
        doors = settings.doors
        if self.first:
            return doors
        admin = f"unix:{self.socket_of(self.index)}" if doors.admin else ""
        sealed = doors.sealed if shares_sealed(settings) else ""
        return msgspec.structs.replace(doors, sealed=sealed, admin=admin)

    def shares(self, door: str, settings: Settings) -> bool:
        """Say whether others listen at the same address; else a second listener is refused."""
        return door == "app" or shares_sealed(settings)

    def serving(self) -> None:
        """Tell the supervisor that the doors are open."""
        self.board.set_serves(self.index, serves=True)

    def socket_of(self, index: int) -> Path:
        """Return the path of a worker's admin socket."""
        return self.directory / f"{index}.sock"

    def siblings(self) -> Siblings:
        """Return the others."""
        others = [index for index in range(self.count) if index != self.index]
        return Siblings(self, others)


class Siblings:
    """The other workers, asked one after the other; called on the admin thread."""

    def __init__(self, worker: Worker, others: list[int]) -> None:
        self._worker = worker
        self._others = others

    def stuck(self) -> list[str]:
        """Return who serves and is stuck; one that is being started again is not."""
        return self._problems(b"GET /livez")

    def unready(self) -> list[str]:
        """Return why one that serves should not; one that is being started again has no say."""
        return self._problems(b"GET /readyz")

    def _problems(self, request: bytes) -> list[str]:
        found = []
        for index in self._serving():
            try:
                status, body = self._ask(index, request)
            except TimeoutError:
                found.append(f"worker_{index}_silent")
            except OSError:
                continue  # it has just ended: the supervisor's business
            else:
                if status != 200:
                    found += (f"worker_{index}_{reason}" for reason in _reasons(body))
        return found

    def notes(self) -> list[str]:
        """Return who does not serve now."""
        serving = set(self._serving())
        return [f"worker_{index}_not_serving" for index in self._others if index not in serving]

    def tell(self, request: bytes, body: bytes) -> None:
        """Tell all others what an operator told this one."""
        for index in self._serving():
            try:
                self._ask(index, request, body)
            except OSError:
                continue

    def metrics(self, own: str) -> str:
        """Return the metrics of all workers as one, with `own`."""
        texts = [own]
        for index in self._serving():
            try:
                texts.append(self._ask(index, b"GET /metrics")[1].decode())
            except OSError:
                continue
        board, count = self._worker.board, self._worker.count
        rows = [
            "# HELP tongguan_proxy_worker_restarts_total Starts of workers that had ended.",
            "# TYPE tongguan_proxy_worker_restarts_total counter",
            *(
                f'tongguan_proxy_worker_restarts_total{{worker="{index}"}} {board.restarts(index)}'
                for index in range(count)
            ),
            "# HELP tongguan_proxy_workers_serving Workers whose numbers are in here.",
            "# TYPE tongguan_proxy_workers_serving gauge",
            f"tongguan_proxy_workers_serving {len(texts)}",
        ]
        return merge(texts) + "\n".join(rows) + "\n"

    def _serving(self) -> list[int]:
        return [index for index in self._others if self._worker.board.serves(index)]

    def _ask(self, index: int, request: bytes, body: bytes = b"") -> tuple[int, bytes]:
        """Return (status, body) of a sibling's admin door; raises OSError."""
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(ASK_S)
            door.connect(str(self._worker.socket_of(index)))
            head = b"%b HTTP/1.1\r\nHost: worker\r\nContent-Length: %d\r\n\r\n"
            door.sendall(head % (request, len(body)) + body)
            answer = b""
            while len(answer) < ANSWER_BYTES_MAX and (data := door.recv(1 << 16)):
                answer += data
        start, _, content = answer.partition(b"\r\n\r\n")
        parts = start.split(b" ", 2)
        if len(parts) < 2 or not parts[1].isdigit():
            raise OSError("no HTTP answer")
        return int(parts[1]), content


def _reasons(body: bytes) -> list[str]:
    try:
        return [str(reason) for reason in orjson.loads(body)["reasons"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ["unknown"]


# Gauges that are no sum over processes: for all a time, and what is the same for each.
_MOST = (
    "_seconds", "_info", "_live_kids", "_entries_limit", "_agent_limit", "_max_fds",
    "_keys_known", "_keys_expiring", "_keys_revoked", "_kid_live",
)  # fmt: skip
_LEAST = (
    "_available", "_last_success_timestamp_seconds", "_lease_seconds",
    "_expiry_timestamp_seconds",
)  # fmt: skip


def merge(texts: Iterable[str]) -> str:
    """Return Prometheus texts as one: sums, but for gauges that are a state or a time.

    The families keep the order in which they are first seen; each has its lines together.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    for text in texts:
        family = ""
        join: Callable[[float, float], float] = _sum
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                if family not in heads:
                    heads[family], samples[family] = [line], {}
            elif line.startswith("# TYPE "):
                join = _joining(family, gauge=line.endswith(" gauge"))
                if len(heads[family]) < 2:
                    heads[family].append(line)
            elif line:
                key, _, value = line.rpartition(" ")
                rows, number = samples[family], float(value)
                rows[key] = join(rows[key], number) if key in rows else number
    lines: list[str] = []
    for family, rows in samples.items():
        lines += heads[family]
        lines += (f"{key} {value}" for key, value in rows.items())
    return "\n".join(lines) + "\n"


def _sum(one: float, other: float) -> float:
    return one + other


def _joining(family: str, *, gauge: bool) -> Callable[[float, float], float]:
    if gauge and family.endswith(_LEAST):
        return min
    return max if gauge and family.endswith(_MOST) else _sum
