"""Every setting of the node agent, declared and checked the way the sidecar's are.

They come from section `[agent]` of `tongguan.toml` and from variables `TONGGUAN_AGENT_<NAME>`.

Later wins: defaults, file, variables. All mistakes are reported at once; an unknown key or variable
is a mistake. Nothing here is a secret: the token is a file that a setting points to.

Pure: `load` is given the file's text and the environment; only `read` touches the disk.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from proxy.config import split_address
from proxy.settings import FILE_NAME, Section, SettingsError, build, own_variables, setting

VARIABLES = "TONGGUAN_AGENT_"
# A unix socket's path must fit into sockaddr_un (unix(7)); one byte is its terminator.
SOCKET_PATH_BYTES = 107
UPSTREAMS_MAX = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_URL = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+/?")


class Agent(Section):
    """Settings of one node agent."""

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "log level")
    listen: str = setting(
        "127.0.0.1:14100", "host:port of the OpenAI-compatible API; empty: socket only"
    )
    socket: str = setting(
        "", "path of a unix socket of the same API, for sidecars, at most 107 bytes; empty: none"
    )
    admin: str = setting("0.0.0.0:14190", "host:port of livez, readyz, metrics; empty: none")
    backlog: int = setting(1024, "listen backlog", ge=1, le=65535)
    connections: int = setting(
        1024, "connections to the API, all listeners; beyond it 503 connection_limit", ge=1
    )

    model: str = setting("", "GGUF file or Hugging Face folder; empty: the default model package")
    model_names: tuple[str, ...] = setting(
        (), "names the model is served under, the first shows; empty: the model's own"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "where the model runs; auto: a GPU if there is one"
    )
    dtype: Literal["auto", "int4", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "type of the weights; int4: four bits where the file has them, else FP16; "
        "auto: int4 on a CPU with AVX2, else float32, bfloat16 on a GPU",
    )
    threads: int = setting(0, "compute threads; 0: torch's choice", ge=0, le=1024)
    max_sequences: int = setting(16, "requests generated together", ge=1, le=1024)
    reserved_sequences: int = setting(
        2, "of max_sequences, those that only P0 may have; at least one is left", ge=0, le=1024
    )
    kv_tokens: int = setting(
        0, "tokens in the KV cache, all requests; it bounds one, too; 0: engine's choice", ge=0
    )
    queue: int = setting(256, "requests that wait for a place; beyond it 503 queue_full", ge=1)

    upstreams: tuple[str, ...] = setting(
        (), "other engines of this node to watch, name=http://host:port; they are not called upon"
    )
    upstream_poll_s: float = setting(2.0, "between two looks at them", ge=0.1, le=3600)

    memory_sample_s: float = setting(
        1.0, "between two samples of memory; 0: none, and no request is refused for it", ge=0, le=60
    )
    memory_window_s: float = setting(
        3600.0, "what the heat map shows, in at most 240 columns", ge=60, le=604800
    )
    memory_reserve_bytes: int = setting(
        64 << 20, "memory that requests must leave free; beyond it 503 out_of_memory", ge=0
    )

    default_class: Literal["P0", "P1", "P2"] = setting(
        "P1", "class of a request whose X-QoS-Class is not believed"
    )
    token_file: str = setting(
        "", "file of the sidecars' bearer token: with it X-QoS-Class is believed"
    )
    witness_dir: str = setting(
        "", "where heads of sidecars' audit logs are kept to cosign them; empty: no witness"
    )
    witness_token_file: str = setting(
        "",
        "file of the bearer token that sidecars of other nodes show to have checkpoints cosigned; "
        "it opens nothing else",
    )
    chains_dir: str = setting(
        "", "where chain seeds, their escrow and trace-id leases are kept; empty: none are given"
    )
    auditor_public: str = setting(
        "", "auditor's public key, 64 hex digits (X25519) or 128 (SM2); empty: no chain seeds"
    )
    machine: int = setting(
        -1, "machine number in the node's trace ids; -1: made of the node's name", ge=-1, le=99999
    )
    trusted_uids: tuple[str, ...] = setting(
        (), "uids believed over the unix socket, besides root and the agent's own"
    )

    body_bytes: int = setting(8 << 20, "a request body", ge=1024)
    bodies_bytes: int = setting(
        64 << 20,
        "request bodies together, until they are token ids; beyond it 503 queue_full",
        ge=1024,
    )
    pending_tokens: int = setting(
        16384, "tokens generated that a streaming client has not taken", ge=16
    )
    head_s: float = setting(10.0, "read a request head", ge=0.01)
    body_idle_s: float = setting(30.0, "a request body without progress", ge=0.01)
    client_stall_s: float = setting(60.0, "a streaming client that does not read", ge=0.01)
    keepalive_s: float = setting(75.0, "an idle connection", ge=1, le=86400)
    grace_s: float = setting(25.0, "time for running requests at shutdown", ge=0, le=3600)


class _Root(Section):
    agent: Agent = Agent()


def load(text: str, environ: Mapping[str, str]) -> Agent:
    """Return settings from a file's text and the environment.

    Raises `SettingsError` with every problem found.
    """
    problems: list[str] = []
    try:
        table = tomllib.loads(text)
    except ValueError as problem:  # a number of too many digits is no TOMLDecodeError
        raise SettingsError([f"{FILE_NAME}: {problem}"]) from None
    env = {n: v for n, v in own_variables(environ, ()).items() if n.startswith(VARIABLES)}
    section = {"agent": table["agent"]} if "agent" in table else {}
    root = build(_Root, section, env, "", problems)
    problems.extend(f"{name}: unknown variable" for name in sorted(env))
    problems.extend(_cross_check(root.agent))
    if problems:
        raise SettingsError(problems)
    return root.agent


def _cross_check(agent: Agent) -> list[str]:
    """Return what is wrong between settings that are each well formed."""
    problems = []
    for name in ("listen", "admin"):
        address = getattr(agent, name)
        if address:
            try:
                split_address(address)
            except ValueError as problem:
                problems.append(f"agent.{name}: {problem}")
    if not agent.listen and not agent.socket:
        problems.append("agent.listen: with an empty agent.socket there is nowhere to listen")
    if len(agent.socket.encode()) > SOCKET_PATH_BYTES:
        problems.append(f"agent.socket: a unix socket's path has at most {SOCKET_PATH_BYTES} bytes")
    problems.extend(
        f"agent.trusted_uids: expected numbers, got {uid!r}"
        for uid in agent.trusted_uids
        if not uid.isdecimal()
    )
    try:
        upstream_targets(agent.upstreams)
    except ValueError as problem:
        problems.append(f"agent.upstreams: {problem}")
    if agent.auditor_public and not auditor_key(agent.auditor_public):
        problems.append("agent.auditor_public: expected 64 hex digits (X25519) or 128 (SM2)")
    if agent.auditor_public and not agent.chains_dir:
        problems.append("agent.auditor_public: needs agent.chains_dir, where seeds' state is kept")
    problems.extend("agent.model_names: a name is empty" for n in agent.model_names if not n)
    return problems


def upstream_targets(upstreams: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (name, URL without a slash at its end) of each; raises ValueError."""
    found: dict[str, str] = {}
    if len(upstreams) > UPSTREAMS_MAX:
        raise ValueError(f"at most {UPSTREAMS_MAX}")
    for item in upstreams:
        name, equals, url = item.partition("=")
        if not equals or not _NAME.fullmatch(name) or not _URL.fullmatch(url):
            raise ValueError(f"expected name=http://host:port, got {item[:64]!r}")
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = url.rstrip("/")
    return tuple(found.items())


def auditor_key(text: str) -> bytes:
    """Return the auditor's public key of a setting, b"" where there is none."""
    try:
        return bytes.fromhex(text) if len(text) in (64, 128) else b""
    except ValueError:
        return b""


def read(path: str | None, environ: Mapping[str, str]) -> Agent:
    """Read settings from `path` (file or directory; None: defaults and environment only)."""
    if path is None:
        return load("", environ)
    file = Path(path)
    if file.is_dir():
        file /= FILE_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise SettingsError([f"{file}: {problem}"]) from None
    return load(text, environ)


class TokenError(Exception):
    """The token file cannot be used; the message shows none of it."""


def read_token(path: str, name: str = "agent.token_file") -> bytes:
    """Return the token in `path`; "" gives no token.

    The file may hold the bare token or a whole `Bearer …` value, so that one file can serve the
    sidecar's `authorization_file` too. `name` is the setting's. Raises `TokenError`.
    """
    if not path:
        return b""
    file = Path(path)
    try:
        mode = file.stat().st_mode
        token = file.read_bytes().strip()
    except OSError as problem:
        raise TokenError(f"{name}: {path}: {problem.strerror}") from None
    if mode & 0o007:
        raise TokenError(f"{name}: {path}: others may read it; chmod 600 it")
    token = token.removeprefix(b"Bearer ").strip()
    if len(token) < 16 or not token.isascii() or any(c <= 0x20 for c in token):
        raise TokenError(f"{name}: {path}: expected one token of 16 bytes or more")
    return token
