"""What the SM4 channel costs end to end: one sidecar, asked in clear, under SM4 and under AES-256.

    python -m perf.channel [--rounds N] [--json FILE]

The sidecar runs on core 0; client and fake engine on core 1. Every request is a 4 KiB prompt, every
answer a stream. Method and traps: perf/README.md.
Exit codes: 0 every gate holds, 1 a gate is missed, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from perf import machine, output, peers, process, report
from perf.process import PeerError
from perf.rounds import midmean, standard_error
from proxy.keys.file import read
from proxy.sm4 import cipher
from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import MEDIA_TYPE, RequestPrelude
from proxy.sm4.keyring import Derived, Keyring
from proxy.sm4.sealer import EVENT_STREAM, RequestSealer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PEER_CORE, LOAD_CORE = 0, 1
PORT_BASE = 21100
PROMPT_BYTES = 4096
PLAIN, SM4, AES = "plaintext", "sm4", "aes-256"
PATH = "/v1/chat/completions"
END = b"\r\n0\r\n\r\n"
ANSWER_BYTES_MAX = 1 << 20
CLIENT_TIMEOUT_S = 30.0
# name: the engine's model, events in an answer, one round of how many is of this kind.
PACES = {
    "paced": ("m-n200-u41", 200, 1),  # 8.2 ms in clear
    "back to back": ("m-n200-g0", 200, 3),
    "10 ms gaps": ("m-n20-g10", 20, 30),
}
# What follows an answer (the record's group sync above all) belongs to it.
SETTLE_S = 0.012
GATED, PACED_MS = "paced", 199 * 0.041
DISTURBED = 1.1  # in clear, beyond the engine's own time
# SM4's promises in the paced test.
ADDED_MS = 0.4
LATENCY_TO_PLAIN, CPU_TO_PLAIN = 1.05, 1.25
# The goal, and what is refused: two equal costs differ by chance, by less than 0.01 as a rule.
TO_AES, TO_AES_MAX = 1.0, 1.02

WARM_UP = 10

Figures = dict[str, float]
Results = dict[str, dict[str, list[Figures]]]


class Sealing:
    """Makes requests of one suite, and opens an answer to see that it is whole."""

    def __init__(self, keys: Path) -> None:
        key = read(keys).envelope_keys[0]
        derived = Keyring([key]).get(key.kid)
        assert derived is not None
        self._derived: Derived = derived
        self._sealer: RequestSealer | None = None

    def request(self, host: str, model: str, body: bytes) -> bytes:
        """Return one request as it goes on the wire."""
        self._sealer = RequestSealer(
            self._derived,
            model=model,
            mac=False,
            nonce=os.urandom(12),
            now_ms=time.time_ns() // 1_000_000,
        )
        prelude = RequestPrelude("POST", PATH, "application/json", "")
        sealed = self._sealer.single(prelude, body)
        kind = f"{MEDIA_TYPE}\r\nX-Model-Id: {model}"
        return _request(host, kind, sealed)

    def events(self, answer: bytes) -> int:
        """Return the events in the answer to the last request made; raises EnvelopeError."""
        assert self._sealer is not None
        opener = AnswerOpener(self._sealer, EVENT_STREAM, None)
        whole = b"".join(opener.feed(answer)) + opener.finish()
        assert opener.prelude is not None
        return whole.count(b"data: ") if opener.prelude.status == 200 else 0


def _request(host: str, kind: str, body: bytes) -> bytes:
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Caller:
    """One contestant: a connection to a door; requests are made before they are timed."""

    def __init__(self, port: int, sealing: Sealing | None) -> None:
        self._sealing = sealing
        self._host = f"127.0.0.1:{port}"
        self._socket = socket.create_connection(("127.0.0.1", port), CLIENT_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(ANSWER_BYTES_MAX)
        self._view = memoryview(self._buffer)
        self._length = 0

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def request(self, model: str) -> bytes:
        """Return a request with a nonce of its own."""
        text = "a" * PROMPT_BYTES
        message = {"role": "user", "content": text}
        body = json.dumps({"model": model, "stream": True, "messages": [message]}).encode()
        if self._sealing is None:
            return _request(self._host, "application/json", body)
        return self._sealing.request(self._host, model, body)

    def ask(self, request: bytes) -> int:
        """Send a request, read its answer to the end; return the ns that took."""
        buffer, view, receive = self._buffer, self._view, self._socket.recv_into
        length = 0
        start = time.perf_counter_ns()
        self._socket.sendall(request)
        while True:
            got = receive(view[length:])
            if not got:
                raise PeerError("the sidecar closed the connection")
            length += got
            if buffer.endswith(END, 0, length):
                break
        spent = time.perf_counter_ns() - start
        self._length = length
        return spent

    def check(self, events: int) -> None:
        """Raise PeerError unless the last answer is a 200 with all events and [DONE]."""
        head, _, rest = bytes(self._buffer[: self._length]).partition(b"\r\n\r\n")
        body = _unchunked(rest)
        seen = body.count(b"data: ") if self._sealing is None else self._sealing.events(body)
        if not head.startswith(b"HTTP/1.1 200") or seen != events + 1:
            raise PeerError(f"an answer has {seen} events instead of {events + 1}")


def _unchunked(data: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size


def make_keys(folder: Path) -> dict[str, Path]:
    """Make keys of both suites for one receiver; return the client's files, and the sidecar's."""
    files = {}
    documents = []
    for suite, name in (("1", SM4), ("2", AES)):
        target = folder / f"keys-{name}"
        words = ["keys", "new", "--dir", str(target), "--suite", suite, "--force"]
        words += ["--audience", "local/default/bench"]
        script = "from proxy.cli import main; main()"
        command = [sys.executable, "-c", script, *words]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=peers.HERE.parent
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise PeerError(f"keys could not be made: {lines[-1] if lines else done.returncode}")
        files[name] = target / "client.json"
        documents.append(json.loads((target / "sidecar.json").read_text()))
    first, second = documents
    first["envelope_keys"] += second["envelope_keys"]
    both = folder / "sidecar.json"
    both.touch(0o600)
    both.write_text(json.dumps(first))
    return files | {"sidecar": both}


def configure(ports: peers.Ports, keys: Path, tier: str) -> list[str]:
    """Write the settings; return the command.

    Shipped defaults but for places and ports, and for the native pump, which streams in clear have
    and sealed ones have not: with it the ratios would be the pump's, not the channel's.
    """
    folder = ports.folder / "channel"
    engine = f'endpoints = ["http://127.0.0.1:{ports.backend}"]'
    config = folder / "tongguan.toml"
    config.write_text(
        f'[doors]\napp = "127.0.0.1:{ports.backend + 40}"\n'
        f'sealed = "127.0.0.1:{ports.sealed}"\nadmin = "127.0.0.1:{ports.admin}"\n'
        + "".join(f"[pools.{pool}]\n{engine}\n" for pool in ("dedicated", "shared", "best_effort"))
        + f'[keys]\nfile = "{keys}"\n[audit]\ndir = "{folder / "audit"}"\n'
        + f'[envelope]\nsm4_tier = "{tier}"\n[limits]\nlent_streams = 0\n',
        encoding="utf-8",
    )
    return [sys.executable, "-m", "proxy", "--config", str(config)]


@contextlib.contextmanager
def running(ports: peers.Ports, tier: str) -> Iterator[tuple[int, dict[str, Path]]]:
    """Run engine and sidecar; yield (the sidecar's pid, the clients' key files)."""
    folder = ports.folder / "channel"
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir()
    keys = make_keys(folder)
    command = configure(ports, keys["sidecar"], tier)
    engine_log, log = folder / "backend.log", folder / "sidecar.log"
    environment = {"PYTHONPATH": str(peers.HERE.parent)}
    engine = process.spawn([str(peers.WORK / "backend"), str(ports.backend)], LOAD_CORE, engine_log)
    try:
        process.wait_until(lambda: process.ask(ports.backend) == 200, engine, engine_log)
        sidecar = process.spawn(command, PEER_CORE, log, environment)
        try:
            process.wait_until(
                lambda: process.ask(ports.admin, path="/readyz", get=True) == 200, sidecar, log
            )
            yield sidecar.pid, keys
        finally:
            process.stop(sidecar)
    finally:
        process.stop(engine)


def one(caller: Caller, pace: str, pid: int) -> Figures:
    """Ask once; return the latency and the sidecar's CPU time, in ms."""
    model, events, _ = PACES[pace]
    request = caller.request(model)
    before = process.cpu_ns(pid)
    spent_ns = caller.ask(request)
    time.sleep(SETTLE_S)
    after = process.cpu_ns(pid)
    caller.check(events)
    return {
        "latency_ms": round(spent_ns / 1e6, 4),
        "cpu_ms": round((after[0] - before[0]) / 1e6, 4),
        "wait": round((after[1] - before[1]) / spent_ns, 4),
    }


def measure(callers: dict[str, Caller], pid: int, number: int) -> Results:
    """Return figures of interleaved rounds by pace and contestant."""
    results: Results = {pace: {name: [] for name in callers} for pace in PACES}
    for caller in callers.values():
        for _ in range(WARM_UP):  # caches, connections
            one(caller, GATED, pid)
    # Every order comes equally often: what a request leaves to the next one goes to all alike.
    orders = list(itertools.permutations(callers.items()))
    for done in range(number):
        for pace, (_, _, every) in PACES.items():
            if done % every == 0:
                # By the count of this pace's own rounds: else few orders would ever be its.
                order = orders[done // every % len(orders)]
                for name, caller in order:
                    results[pace][name].append(one(caller, pace, pid))
    return results


def compare(rounds: dict[str, list[Figures]]) -> dict[str, float]:
    """Return costs, and differences within rounds, of the quiet half of them.

    A ratio is 1 + difference / base, its `noise` one standard error.
    """
    order = range(len(rounds[PLAIN]))
    # What keeps engine, client or sidecar from their cores makes answers late, whoever asked.
    quiet = sorted(order, key=lambda i: sum(own[i]["latency_ms"] for own in rounds.values()))
    kept = quiet[: (len(quiet) + 1) // 2]
    found = {}
    for metric in ("latency_ms", "cpu_ms"):
        value = {name: [own[i][metric] for i in kept] for name, own in rounds.items()}
        for name, own in value.items():
            found[f"{name} {metric}"] = midmean(own)
        for name, base in ((SM4, PLAIN), (AES, PLAIN), (SM4, AES)):
            more = [a - b for a, b in zip(value[name], value[base], strict=True)]
            cost = found[f"{base} {metric}"]
            found[f"{name} - {base} {metric}"] = midmean(more)
            found[f"{name} / {base} {metric}"] = 1 + midmean(more) / cost
            error = standard_error(more)
            if error is not None:
                found[f"{name} / {base} {metric} noise"] = error / cost
    return found


def gates(found: dict[str, float]) -> list[report.Gate]:
    """Return SM4's promises over the paced test."""
    rows = (
        (f"{SM4} - {PLAIN} latency_ms", ADDED_MS, "ms", None),
        (f"{SM4} / {PLAIN} latency_ms", LATENCY_TO_PLAIN, "x", None),
        (f"{SM4} / {PLAIN} cpu_ms", CPU_TO_PLAIN, "x", None),
        (f"{SM4} / {AES} latency_ms", TO_AES_MAX, "x", TO_AES),
        (f"{SM4} / {AES} cpu_ms", TO_AES_MAX, "x", TO_AES),
    )
    return [
        report.Gate(name, found.get(name), limit, unit, goal=goal)
        for name, limit, unit, goal in rows
    ]


def show(outcome: dict[str, Any], found: list[report.Gate]) -> str:
    """Return the run as text."""
    facts = outcome["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in outcome["versions"].items())
    where = f"{facts['cpu']}, Python {facts['python']}, {versions}, commit {facts['commit']}"
    lines = [f"{where}, tier {outcome['tier']}"]
    columns = ["latency ms", "/ plain", "- plain", "CPU ms", "/ plain", "- plain"]
    for pace, row in outcome["paces"].items():
        body: list[list[float | str | None]] = []
        for name in (PLAIN, SM4, AES):
            cells: list[float | str | None] = [name]
            for metric in ("latency_ms", "cpu_ms"):
                cells.append(row[f"{name} {metric}"])
                cells += [row.get(f"{name} {sign} {PLAIN} {metric}") for sign in "/-"]
            body.append(cells)
        lines += ["", report.table([f"{pace} ({PACES[pace][1]} events)", *columns], body)]
    lines += ["", *report.gate_lines(found)]
    for metric in ("latency_ms", "cpu_ms"):
        name = f"{SM4} / {AES} {metric}"
        noise = outcome["paces"][GATED].get(f"{name} noise")
        if noise is not None:
            lines.append(f"       {name}: one standard error {noise:.4f}")
    late = outcome["paces"][GATED][f"{PLAIN} latency_ms"] / PACED_MS
    if late > DISTURBED:
        lines.append(f"disturbed: in clear it took {late:.2f} times what the engine needs")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Make the whole run."""
    if len(os.sched_getaffinity(0)) < 2:
        raise PeerError("two cores are needed: one for the sidecar, one for the load")
    if own := peers.own_variables_set():
        raise PeerError(f"unset {', '.join(own)}: shipped defaults are what is measured")
    facts = machine.facts()  # before this process keeps to one core
    peers.build_tools()
    ports = peers.Ports(arguments.port_base)
    with running(ports, arguments.tier) as (pid, keys):
        os.sched_setaffinity(0, {LOAD_CORE})
        callers = {
            PLAIN: Caller(ports.backend + 40, None),
            SM4: Caller(ports.sealed, Sealing(keys[SM4])),
            AES: Caller(ports.sealed, Sealing(keys[AES])),
        }
        try:
            results = measure(callers, pid, arguments.rounds)
        finally:
            for caller in callers.values():
                caller.close()
    paces = {pace: compare(rounds) for pace, rounds in results.items()}
    found = gates(paces[GATED])
    outcome = {
        "what": "perf.channel",
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "versions": {"cryptography": version("cryptography")},
        "tier": cipher.choose_tier(arguments.tier),
        "parameters": {"rounds": arguments.rounds, "prompt_bytes": PROMPT_BYTES, "paces": PACES},
        "paces": paces,
        "gates": [report.gate_row(gate) for gate in found],
    }
    output.put(arguments.json, outcome, show(outcome, found))
    return 0 if all(gate.ok for gate in found) else 1


def main() -> int:
    """Parse and run; what goes wrong is one line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.channel", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--rounds", type=int, default=1200, help="interleaved rounds (1200)")
    parser.add_argument("--tier", default=cipher.AUTO, help="SM4 tier of the sidecar (auto)")
    parser.add_argument("--port-base", type=int, default=PORT_BASE, help="first of 43 ports")
    output.add_json(parser)
    try:
        return run(parser.parse_args())
    except (PeerError, subprocess.CalledProcessError, OSError) as problem:
        sys.stderr.write(f"perf.channel: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
