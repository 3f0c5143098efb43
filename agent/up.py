"""`tongguan up`: an agent and a sidecar on this machine, one question asked, the record verified.

Everything it makes lies in the state directory: keys, `tongguan.toml`, logs, the audit chains. What
is there is used again. It starts `python -m agent` and `python -m proxy`, asks one question over
the SM4 channel, shows the audit record that the answer left, and verifies the chains with the same
`tongguan audit` a person would use. The answer goes to standard output, then a blank line and one
fact a line; progress goes to standard error.

It needs neither torch nor the engine itself, only its children do.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from agent import config as agent_config
from agent.children import Child, ChildError, wait_ready
from proxy import config as sidecar_config
from proxy.config import FILE_NAME, SettingsError, split_address

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from proxy.ask import AskResult

QUESTION = "What is the capital of France?"
BASE_PORT = 14000
# Offsets of the five ports from the base: docs/agent.md, "tongguan up".
APP, SEALED, ADMIN, AGENT, AGENT_ADMIN = 80, 81, 90, 100, 190

EXIT_OK, EXIT_FAILED, EXIT_SETTINGS, EXIT_IO, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

VARIABLES = frozenset(
    {"TONGGUAN_UP_TORCH", "TONGGUAN_UP_BASE_PORT", "TONGGUAN_UP_STATE", "TONGGUAN_UP_READY_S"}
)
_RECORD_WAIT_S = 10.0
_RECORD_POLL_S = 0.2
_COMMAND_S = 120.0


class UpError(Exception):
    """`up` cannot go on; the message is one line and says how to, `lines` go below it."""

    def __init__(self, message: str, code: int = EXIT_FAILED, lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run: the two rooms' settings as their processes will read them."""

    state: Path
    file: Path
    sidecar: sidecar_config.Settings
    agent: agent_config.Agent
    environ: Mapping[str, str]

    @property
    def client_keys(self) -> Path:
        """Key file of a caller."""
        return Path(self.sidecar.keys.file).parent / "client.json"

    @property
    def auditor_keys(self) -> Path:
        """Key file of the auditor."""
        return Path(self.sidecar.keys.file).parent / "auditor.json"


def run(*, state: Path, base_port: int | None, question: str, oneshot: bool, ready_s: float) -> int:
    """Do it all; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        _check_variables(os.environ)
        lock = _prepare(state)
        try:
            plan = _plan(state, base_port, os.environ)
            _check_keys(plan)
            _check_ports(plan)
            return _run(plan, question, oneshot=oneshot, ready_s=ready_s)
        finally:
            os.close(lock)
    except UpError as problem:
        for line in problem.lines:
            click.secho(f"  {line}", err=True, dim=True)
        click.secho(f"tongguan up: {problem}", err=True, fg="red")
        return problem.code
    except KeyboardInterrupt:
        click.echo("\ntongguan up: interrupted", err=True)
        return EXIT_INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


# Before anything runs.


def _check_variables(environ: Mapping[str, str]) -> None:
    unknown = sorted(n for n in environ if n.startswith("TONGGUAN_UP_") and n not in VARIABLES)
    if unknown:
        raise UpError(f"{', '.join(unknown)}: unknown variable", EXIT_SETTINGS)


def _prepare(state: Path) -> int:
    """Make the state directory and lock it; return the lock's descriptor."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / "logs").mkdir(exist_ok=True)
        lock = os.open(state / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise UpError(f"{problem.filename}: {problem.strerror}", EXIT_IO) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(lock, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise UpError(
            f"{state} is in use by another `tongguan up` (pid {owner}); stop it, or choose "
            "another --state and --base-port",
            EXIT_IO,
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return lock


def _plan(state: Path, base_port: int | None, environ: Mapping[str, str]) -> Plan:
    """Read the settings, writing the file first where there is none."""
    state = state.resolve()
    file = state / FILE_NAME
    if not file.exists():
        _write_private(file, settings_text(state, base_port or BASE_PORT))
        _say(f"wrote {file}")
    environ = dict(environ)
    try:
        if base_port is not None:
            before = sidecar_config.read(str(file), environ)
            environ |= port_variables(base_port, before)
        plan = Plan(
            state=state,
            file=file,
            sidecar=sidecar_config.read(str(file), environ),
            agent=agent_config.read(str(file), environ),
            environ=environ,
        )
    except SettingsError as problem:
        raise UpError("a setting is wrong", EXIT_SETTINGS, tuple(problem.problems)) from None
    needed = {
        "doors.app": plan.sidecar.doors.app,
        "doors.sealed": plan.sidecar.doors.sealed,
        "doors.admin": plan.sidecar.doors.admin,
        "agent.admin": plan.agent.admin,
        "keys.file": plan.sidecar.keys.file,
        "audit.dir": plan.sidecar.audit.dir,
    }
    empty = [name for name, value in needed.items() if not value]
    if empty:
        raise UpError(f"{file}: `up` needs {', '.join(empty)}", EXIT_SETTINGS)
    return plan


def settings_text(state: Path, base_port: int) -> str:
    """Return the text of a fresh `tongguan.toml` for `state`."""
    quote = json.dumps  # a JSON string is a TOML basic string
    agent_socket = state / "agent.sock"
    fits = len(os.fsencode(agent_socket)) <= agent_config.SOCKET_PATH_BYTES
    endpoint = f"unix:{agent_socket}" if fits else f"http://127.0.0.1:{base_port + AGENT}"
    pools = "\n".join(
        f"[pools.{name}]\nendpoints = [{quote(endpoint)}]\ntoken_ids = true\n"
        for name in ("dedicated", "shared", "best_effort")
    )
    return f"""\
# Written by `tongguan up`, read by the sidecar and by the agent. Yours to edit: it is not
# overwritten. `tongguan config check --config {FILE_NAME} --show` lists every setting.

[doors]
app = "127.0.0.1:{base_port + APP}"
sealed = "127.0.0.1:{base_port + SEALED}"
admin = "127.0.0.1:{base_port + ADMIN}"

[keys]
file = {quote(str(state / "keys" / "sidecar.json"))}

[envelope]
state_dir = {quote(str(state))}

[audit]
dir = {quote(str(state / "audit"))}

# On one's own machine P0 may be tried out.
[tenants.default]
max_class = "P0"

{pools}
[agent]
listen = "127.0.0.1:{base_port + AGENT}"
admin = "127.0.0.1:{base_port + AGENT_ADMIN}"
socket = {quote(str(agent_socket) if fits else "")}
"""


def port_variables(base_port: int, settings: sidecar_config.Settings) -> dict[str, str]:
    """Return the variables that move all five ports of existing settings to `base_port`."""
    variables = {
        "TONGGUAN_DOORS_APP": f"127.0.0.1:{base_port + APP}",
        "TONGGUAN_DOORS_SEALED": f"127.0.0.1:{base_port + SEALED}",
        "TONGGUAN_DOORS_ADMIN": f"127.0.0.1:{base_port + ADMIN}",
        "TONGGUAN_AGENT_LISTEN": f"127.0.0.1:{base_port + AGENT}",
        "TONGGUAN_AGENT_ADMIN": f"127.0.0.1:{base_port + AGENT_ADMIN}",
    }
    for name in ("dedicated", "shared", "best_effort"):
        endpoints = getattr(settings.pools, name).endpoints
        if len(endpoints) == 1 and endpoints[0].startswith("http://127.0.0.1:"):
            variables[f"TONGGUAN_POOLS_{name.upper()}_ENDPOINTS"] = (
                f"http://127.0.0.1:{base_port + AGENT}"
            )
    return variables


def _check_keys(plan: Plan) -> None:
    """Make keys where there are none; say what to do about keys that no longer serve."""
    file = Path(plan.sidecar.keys.file)
    directory = file.parent
    if not file.exists():
        if directory != plan.state / "keys":
            raise UpError(
                f"keys.file names {file}, which is not there; remove {plan.file} to have it and "
                "keys made anew, or: tongguan keys new --dir DIR",
                EXIT_IO,
            )
        _tongguan(plan, "keys", "new", "--dir", str(directory), "--days", "365")
        _say(f"made keys in {directory}")
    facts = json.loads(_tongguan(plan, "keys", "show", "--json", str(plan.client_keys)))
    if not any(row["state"] == "live" for row in facts["envelope_keys"]):
        raise UpError(
            f"no key in {plan.client_keys} is valid now; move {plan.state} away and run again "
            "(its audit chains need its own auditor.json)",
            EXIT_IO,
        )


def _check_ports(plan: Plan) -> None:
    doors = plan.sidecar.doors
    taken = []
    for name, address in (
        ("app door", doors.app),
        ("SM4 door", doors.sealed),
        ("sidecar admin", doors.admin),
        ("agent", plan.agent.listen),
        ("agent admin", plan.agent.admin),
    ):
        if not address:
            continue
        host, port = split_address(address)
        problem = _listen_problem(host, port)
        if problem == errno.EADDRINUSE:
            taken.append(f"{port} ({name})")
        elif problem:
            raise UpError(f"{name}: cannot use {address}: {os.strerror(problem)}", EXIT_IO)
    if taken:
        first = taken[0].partition(" ")[0]
        word = "port" if len(taken) == 1 else "ports"
        raise UpError(
            f"{word} {', '.join(taken)} taken; who has it: ss -ltnp 'sport = :{first}'; other "
            "ports: --base-port 15000 (make up: TONGGUAN_UP_BASE_PORT=15000)",
            EXIT_IO,
        )


def _listen_problem(host: str, port: int) -> int:
    """Return 0, or the errno that a server would get there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as problem:
            return problem.errno or errno.EINVAL
    return 0


# With both running.


def _run(plan: Plan, question: str, *, oneshot: bool, ready_s: float) -> int:
    agent, sidecar = _children(plan)
    code = EXIT_OK
    try:
        started = time.monotonic()
        agent.start()
        sidecar.start()
        progress = _Progress()
        try:
            wait_ready((agent, sidecar), ready_s, progress.show)
        finally:
            progress.clear()
        _say(f"agent and sidecar are ready after {time.monotonic() - started:.1f} s")
        _ask_and_verify(plan, question)
        if not oneshot:
            _say_how(plan)
            try:
                _serve((agent, sidecar))
            except KeyboardInterrupt:
                click.echo("", err=True)
    except ChildError as problem:
        raise UpError(str(problem), EXIT_FAILED, problem.lines) from None
    finally:
        # The sidecar first: it drains into an agent that still answers.
        _say("stopping")
        sidecar_code = sidecar.stop()
        agent_code = agent.stop()
    for child, ended in ((sidecar, sidecar_code), (agent, agent_code)):
        if ended != 0:
            raise UpError(
                f"the {child.name} did not end cleanly (code {ended}); its log: {child.log}"
            )
    _say(f"stopped cleanly; with the final record: {_verify(plan, live=False)}")
    return code


def _children(plan: Plan) -> tuple[Child, Child]:
    logs = plan.state / "logs"
    sidecar, agent = plan.sidecar, plan.agent
    return (
        Child(
            "agent",
            (sys.executable, "-m", "agent", "--config", str(plan.file)),
            split_address(agent.admin),
            logs / "agent.log",
            agent.grace_s + 10,
            plan.environ,
        ),
        Child(
            "sidecar",
            (sys.executable, "-m", "proxy", "--config", str(plan.file)),
            split_address(sidecar.doors.admin),
            logs / "sidecar.log",
            sidecar.timeouts.drain_s + 10,
            plan.environ,
        ),
    )


def _ask_and_verify(plan: Plan, question: str) -> None:
    """Ask over the SM4 channel, print the answer and its facts; raises `UpError`."""
    from proxy.ask import AskError, ask  # noqa: PLC0415 - httpx takes a moment

    _say(f"asking over the SM4 channel: {question}")
    host, port = split_address(plan.sidecar.doors.sealed)
    terminal = sys.stdout.isatty()
    try:
        result = ask(
            question,
            base_url=f"http://{host}:{port}",
            keys_file=plan.client_keys,
            on_text=lambda text: click.echo(printable(text) if terminal else text, nl=False),
        )
    except AskError as problem:
        click.echo()
        raise UpError(f"no answer: {problem}") from None
    record = _record(plan, result.trace_id)
    click.echo("\n")
    for line in facts(result, record):
        click.echo(line)
    outcome = record.get("outcome", "unknown")
    if outcome != "ok":
        raise UpError(f"the audit record of {result.trace_id} says outcome {outcome}")
    click.echo(_verify(plan, live=True))


def printable(text: str) -> str:
    """Return `text` without what a terminal would obey: control characters but line ends and tabs.

    A model's output is nobody's to trust; elsewhere than on a terminal it is passed as it is.
    """
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf"))


def facts(result: AskResult, record: Mapping[str, Any]) -> list[str]:
    """Return one line a fact about an answer and the record it left."""
    rate = f"{result.tokens_per_s:.1f}" if result.tokens_per_s else "-"
    lines = [
        f"trace_id {result.trace_id}",
        f"model {result.model}",
        f"qos {result.qos_class}",
        f"pool {result.pool}",
        f"ttft {result.ttft_ms:.0f} ms",
        f"tokens {result.tokens}",
        f"tokens/s {rate}",
    ]
    lines += [
        f"{name} {record[name]}"
        for name in ("seq", "prompt_hash", "output_hash", "ids_commit", "outcome")
        if name in record
    ]
    return lines


def _record(plan: Plan, trace_id: str) -> dict[str, Any]:
    """Return the audit record of a request, once it is on the disk; raises `UpError`."""
    if not trace_id:
        raise UpError("the answer names no trace id (X-Trace-Id)")
    end = time.monotonic() + _RECORD_WAIT_S
    while True:
        command = _command(
            plan,
            "audit",
            "show",
            plan.sidecar.audit.dir,
            "--trace-id",
            trace_id,
            "--auditor-key",
            str(plan.auditor_keys),
            "--json",
        )
        if command.returncode == 0:
            return dict(json.loads(command.stdout)["record"])
        # 1: not on the disk yet; anything else will not get better.
        if command.returncode != 1 or time.monotonic() > end:
            raise UpError(
                f"no audit record for {trace_id}", EXIT_FAILED, tuple(_lines(command.stderr))
            )
        time.sleep(_RECORD_POLL_S)


def _verify(plan: Plan, *, live: bool) -> str:
    """Verify every chain of the state directory; return the verdict's line, raise `UpError`."""
    arguments = ["audit", "verify", plan.sidecar.audit.dir, "--keys", str(plan.auditor_keys)]
    command = _command(plan, *arguments, *(["--live"] if live else []))
    if command.returncode != 0:
        raise UpError(
            f"the audit chains do not verify (code {command.returncode}); again: tongguan "
            + " ".join(arguments),
            EXIT_FAILED,
            tuple(_lines(command.stdout) + _lines(command.stderr)),
        )
    return command.stdout.partition("\n")[0].strip()


def _serve(children: tuple[Child, ...]) -> None:
    """Watch the children until Ctrl-C."""
    while True:
        for child in children:
            child.check()
        time.sleep(0.5)


# Speaking.


def _command(plan: Plan, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - our own command
            (sys.executable, "-m", "proxy.cli", *arguments),
            env=dict(plan.environ),
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UpError(f"`tongguan {' '.join(arguments[:2])}` takes too long") from None


def _tongguan(plan: Plan, *arguments: str) -> str:
    """Run one of our own commands and return its output; raises `UpError` with its words."""
    command = _command(plan, *arguments)
    if command.returncode != 0:
        raise UpError(
            f"`tongguan {' '.join(arguments)}` failed (code {command.returncode})",
            EXIT_IO,
            tuple(_lines(command.stderr)),
        )
    return command.stdout


def _lines(text: str) -> list[str]:
    return text.strip().splitlines()[-12:]


def _write_private(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(text)
        partial.replace(file)
    except OSError as problem:
        raise UpError(f"{file}: {problem.strerror}", EXIT_IO) from None


def _say(text: str) -> None:
    click.secho(text, err=True, dim=True)


class _Progress:
    """One moving line on a terminal; elsewhere nothing but the end."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def show(self, state: dict[str, str | None]) -> None:
        if self._terminal:
            parts = [f"{name}: {reason or 'ready'}" for name, reason in state.items()]
            click.echo(f"\r\x1b[K{'   '.join(parts)[:100]}", err=True, nl=False)

    def clear(self) -> None:
        if self._terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


def _say_how(plan: Plan) -> None:
    doors = plan.sidecar.doors
    click.echo(how_to_call(doors.app, doors.sealed, doors.admin, plan))


def how_to_call(app: str, sealed: str, admin: str, plan: Plan) -> str:
    """Return what to type next."""
    return f"""
Serving until Ctrl-C. In another terminal:

  curl http://{app}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Who are you?"}}]}}'

  # Python, plain: what an application beside the sidecar does
  from openai import OpenAI
  client = OpenAI(base_url="http://{app}/v1", api_key="unused")

  # Python, sealed with SM4: what a caller from elsewhere does
  import httpx
  from proxy.client import Sm4Transport
  channel = httpx.Client(transport=Sm4Transport("{plan.client_keys}"))
  client = OpenAI(base_url="http://{sealed}/v1", api_key="unused", http_client=channel)

  tongguan audit verify {plan.sidecar.audit.dir} --keys {plan.auditor_keys} --live
  curl http://{admin}/metrics
"""
