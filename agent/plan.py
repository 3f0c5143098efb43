"""What `tongguan up` is to run: state directory, settings, keys, ports; checked before a start.

What is not there is made, what is there is used again, and what is in the way is said in one line.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent import config as agent_config
from proxy import config as sidecar_config
from proxy.config import split_address
from proxy.keys.file import KeyFileError, read
from proxy.settings import FILE_NAME, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BASE_PORT = 14000
# Offsets of the five ports from the base: docs/agent.md, "tongguan up".
APP, SEALED, ADMIN, AGENT, AGENT_ADMIN = 80, 81, 90, 100, 190

EXIT_OK, EXIT_FAILED, EXIT_SETTINGS, EXIT_IO, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

VARIABLES = frozenset(
    {
        "TONGGUAN_UP_TORCH",
        "TONGGUAN_UP_COMPILE",
        "TONGGUAN_UP_BASE_PORT",
        "TONGGUAN_UP_STATE",
        "TONGGUAN_UP_READY_S",
    }
)
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

    def shell(self, *arguments: str) -> str:
        """Return a `tongguan` command as a line to paste into a shell in this directory."""
        return " ".join((installed("tongguan", "proxy.cli"), *(shlex.quote(a) for a in arguments)))

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `tongguan` command as a person would; raises `UpError` if it takes too long."""
        return _command(self.environ, arguments)


def _command(
    environ: Mapping[str, str], arguments: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - our own command
            (sys.executable, "-m", "proxy.cli", *arguments),
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UpError(f"`tongguan {' '.join(arguments[:2])}` takes too long") from None


def installed(name: str, module: str) -> str:
    """Return how a shell in this directory runs `name` of the running interpreter's environment."""
    python = Path(sys.executable)  # not resolved: a virtual environment's is a link
    program = python.with_name(name)
    if program.is_file():
        return shlex.quote(near(program))
    return f"{shlex.quote(near(python))} -m {module}"


def near(path: Path | str) -> str:
    """Return `path` from the working directory where it is below that, else as it is."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def check_question(question: str) -> None:
    """Refuse a question without a word in it; raises `UpError`."""
    if not question.strip():
        raise UpError(
            "the question is empty; leave out --ask (make up: ASK) for a default one",
            EXIT_SETTINGS,
        )


def check_variables(environ: Mapping[str, str]) -> None:
    """Refuse variables of `up` that are none; raises `UpError`."""
    unknown = sorted(n for n in environ if n.startswith("TONGGUAN_UP_") and n not in VARIABLES)
    if unknown:
        raise UpError(f"{', '.join(unknown)}: unknown variable", EXIT_SETTINGS)


def lock(state: Path) -> int:
    """Make the state directory and lock it; return the lock's descriptor."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / "logs").mkdir(exist_ok=True)
        handle = os.open(state / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise UpError(f"{problem.filename}: {problem.strerror}", EXIT_IO) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise UpError(
            f"{state} is in use by another `tongguan up` (pid {owner}); stop it, or choose "
            "another --state and --base-port",
            EXIT_IO,
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return handle


def make(state: Path, base_port: int | None, environ: Mapping[str, str]) -> Plan:
    """Read the settings, writing the file first where there is none."""
    state = state.resolve()
    file = state / FILE_NAME
    if not file.exists():
        auditor = _auditor_public(state, environ)
        _write_private(file, settings_text(state, base_port or BASE_PORT, auditor))
        say(f"wrote {file}")
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
        written = places(sidecar_config.read(str(file), {}), agent_config.read(str(file), {}))
    except SettingsError as problem:
        raise UpError("a setting is wrong", EXIT_SETTINGS, tuple(problem.problems)) from None
    _check_places(plan, written)
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


def places(sidecar: sidecar_config.Settings, agent: agent_config.Agent) -> dict[str, str]:
    """Return the settings that name where `up`'s children keep what they write and their keys."""
    return {
        "keys.file": sidecar.keys.file,
        "audit.dir": sidecar.audit.dir,
        "envelope.state_dir": sidecar.envelope.state_dir,
        "agent.socket": agent.socket,
        "agent.witness_dir": agent.witness_dir,
        "agent.chains_dir": agent.chains_dir,
    }


def _check_places(plan: Plan, written: Mapping[str, str]) -> None:
    """Refuse a file that names another state directory's files; raises `UpError`.

    A copied or moved directory brings its file along, and would go on writing into the first one.
    A variable may name any place: nobody copies those by accident.
    """
    used = places(plan.sidecar, plan.agent)
    outside = [
        name
        for name, value in written.items()
        if value and used[name] == value and not Path(value).resolve().is_relative_to(plan.state)
    ]
    if outside:
        variables = ", ".join(f"TONGGUAN_{name.replace('.', '_').upper()}" for name in outside)
        raise UpError(
            f"{plan.file} names files outside {plan.state}: was it copied or moved? Remove it and "
            f"run again: it is written anew for {plan.state}, {_keys_there(plan)}. Where the other "
            f"place is meant, say it with {variables}",
            EXIT_SETTINGS,
            tuple(f"{name} is {written[name]}" for name in outside),
        )


def _keys_there(plan: Plan) -> str:
    """Say what comes of `keys/` in the state directory when the settings are written anew."""
    keys = plan.state / "keys"
    if (keys / "sidecar.json").exists():
        return f"and the keys in {keys} are used again"
    return f"and keys are made in {keys}"


def _auditor_public(state: Path, environ: Mapping[str, str]) -> str:
    """Return the public key of the auditor, for whom chain seeds are sealed; "": of none.

    The keys of the state directory are made first where there are none. Raises `UpError`.
    """
    file = Path(environ.get("TONGGUAN_KEYS_FILE", "") or state / "keys" / "sidecar.json")
    auditor = file.parent / "auditor.json"
    if not file.exists() and file.parent == state / "keys":
        _make_keys(environ, file.parent)
    try:
        public = read(auditor).auditor_public
    except (OSError, KeyFileError):  # what is wrong is said where they are needed
        return ""
    return public.hex() if public else ""


def _make_keys(environ: Mapping[str, str], directory: Path) -> None:
    _tongguan(environ, "keys", "new", "--dir", str(directory), "--days", "365")
    say(f"made keys in {directory}")


def settings_text(state: Path, base_port: int, auditor_public: str = "") -> str:
    """Return the text of a fresh `tongguan.toml` for `state`.

    With the auditor's public key, seeds of chains and trace ids are the agent's to give.
    """
    quote = json.dumps  # a JSON string is a TOML basic string
    agent_socket = state / "agent.sock"
    fits = len(os.fsencode(agent_socket)) <= agent_config.SOCKET_PATH_BYTES
    endpoint = f"unix:{agent_socket}" if fits else f"http://127.0.0.1:{base_port + AGENT}"
    pools = "\n".join(
        f"[pools.{name}]\nendpoints = [{quote(endpoint)}]\ntoken_ids = true\n"
        for name in ("dedicated", "shared", "best_effort")
    )
    audit = agent = ""
    if fits and auditor_public:
        audit = f'agent = {quote(endpoint)}\nseeds = "agent"\n'
        agent = f"chains_dir = {quote(str(state / 'chains'))}\n"
        agent += f"auditor_public = {quote(auditor_public)}\n"
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
witness = {quote(endpoint if fits else "")}
{audit}
# On one's own machine P0 may be tried out.
[tenants.default]
max_class = "P0"

{pools}
[agent]
listen = "127.0.0.1:{base_port + AGENT}"
admin = "127.0.0.1:{base_port + AGENT_ADMIN}"
socket = {quote(str(agent_socket) if fits else "")}
witness_dir = {quote(str(state / "witness") if fits else "")}
{agent}"""


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


def check_keys(plan: Plan) -> None:
    """Make keys where there are none; say what to do about keys that no longer serve."""
    file = Path(plan.sidecar.keys.file)
    directory = file.parent
    if not file.exists():
        if directory != plan.state / "keys":
            variable = "TONGGUAN_KEYS_FILE"
            anew = f"unset {variable}" if variable in plan.environ else f"remove {plan.file}"
            raise UpError(
                f"keys.file names {file}, which is not there; {anew} and run again "
                f"({_keys_there(plan)}), or make keys there: "
                + plan.shell("keys", "new", "--dir", near(directory)),
                EXIT_IO,
            )
        _make_keys(plan.environ, directory)
    facts = json.loads(_tongguan(plan.environ, "keys", "show", "--json", str(plan.client_keys)))
    if not any(row["state"] == "live" for row in facts["envelope_keys"]):
        raise UpError(
            f"no key in {plan.client_keys} is valid now; move {plan.state} away and run again "
            "(its audit chains need its own auditor.json)",
            EXIT_IO,
        )


def check_ports(plan: Plan) -> None:
    """Refuse ports that are taken, all named in one line; raises `UpError`."""
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
        problem = listen_problem(host, port)
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


def listen_problem(host: str, port: int) -> int:
    """Return 0, or the errno that a server would get there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as problem:
            return problem.errno or errno.EINVAL
    return 0


def _tongguan(environ: Mapping[str, str], *arguments: str) -> str:
    """Run one of our own commands and return its output; raises `UpError` with its words."""
    command = _command(environ, arguments)
    if command.returncode != 0:
        raise UpError(
            f"`tongguan {' '.join(arguments)}` failed (code {command.returncode})",
            EXIT_IO,
            tuple(last_lines(command.stderr)),
        )
    return command.stdout


def say(text: str) -> None:
    """Tell a person how it goes; standard output is for results."""
    click.secho(text, err=True, dim=True)


def last_lines(text: str) -> list[str]:
    """Return the end of a command's output."""
    return text.strip().splitlines()[-12:]


def _write_private(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(text)
        partial.replace(file)
    except OSError as problem:
        raise UpError(f"{file}: {problem.strerror}", EXIT_IO) from None
