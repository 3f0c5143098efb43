"""Every setting of the sidecar: name, unit, default and bounds in one place.

Sources, later wins: defaults, `tongguan.toml` (a file, or a directory that holds it), variables
`TONGGUAN_<SECTION>_<NAME>`. Settings are frozen once loaded. All mistakes are collected and
reported at once; an unknown key or variable with our prefix is a mistake. Nothing here holds a
secret: secrets are files that settings point to.

Pure: `load` is given the file's text and the environment; only `read` touches the disk.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping  # noqa: TC003 - read at run time by get_type_hints
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from proxy import gateways
from proxy.settings import FILE_NAME, SettingsError, build, own_variables, setting, source

# Rooms with settings of their own; each checks its own names.
OTHER_ROOMS = ("AGENT_", "UP_", "CLIENT_")

WORKERS_MAX = 64
QosName = Literal["P0", "P1", "P2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Listening addresses, host:port; an empty one is closed."""

    app: str = setting("127.0.0.1:14080", "plaintext door for the pod's own application")
    sealed: str = setting("0.0.0.0:14081", "SM4 envelope door for callers outside the pod")
    admin: str = setting("0.0.0.0:14090", "livez, readyz, metrics, config, drain")
    backlog: int = setting(1024, "listen backlog", ge=1, le=65535)
    connections: int = setting(1024, "connections a door", ge=1)
    admin_token_file: str = setting("", "bearer token for the admin door's guarded paths")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One group of upstream endpoints."""

    endpoints: tuple[str, ...] = setting(
        ("http://127.0.0.1:14100",),
        "http://host:port, https://host:port or unix:/path, tried by least cost",
    )
    ca_file: str = setting("", "certificates that https endpoints are verified by; empty: system")
    host: str = setting("", "Host sent upstream instead of the client's")
    authorization_file: str = setting("", "file whose content becomes the Authorization header")
    repeatable: bool = setting(False, "a request may be sent again after it was fully written")
    token_ids: bool = setting(False, "the engine understands return_token_ids")
    inflight: int = setting(512, "requests in flight", ge=1)
    idle_connections: int = setting(64, "idle connections kept", ge=0)
    keepalive_s: float = setting(50.0, "idle time upstream; keep it below the peer's", ge=0)
    retry_percent: float = setting(10.0, "requests sent a second time; 0: none", ge=0, le=100)
    overflow: bool = setting(False, "what finds no place goes on: P0 to shared, P1 to best_effort")
    eject_errors: int = setting(5, "errors in a row that eject an endpoint; 0: never", ge=0)
    eject_slow_factor: float = setting(
        5.0, "first byte over the others' median that ejects an endpoint; 0: never", ge=0
    )
    eject_s: float = setting(10.0, "first ejection; each in a row is twice as long", ge=0.1)
    eject_max_s: float = setting(300.0, "longest ejection", ge=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The three pools a class is sent to."""

    there_are: ClassVar[str] = "; there are dedicated, shared and best_effort"

    dedicated: Pool = field(default_factory=Pool)
    shared: Pool = field(default_factory=Pool)
    best_effort: Pool = field(default_factory=Pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class P0:
    """Settings of class P0 alone."""

    inflight: int = setting(128, "P0 requests in flight; beyond it 503 queue_full", ge=1)
    preopen: int = setting(
        2, "idle connections kept to each dedicated endpoint, if P0 is granted", ge=0, le=64
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class P1:
    """Settings of class P1."""

    queue: int = setting(256, "requests that wait; beyond it 503 queue_full", ge=0, le=65536)
    deadline_s: float = setting(2.0, "from the head to a leased connection", ge=0.01, le=3600)
    weight: int = setting(16, "share of cost among those that wait", ge=1, le=1000)
    early_shed: float = setting(0.003, "share that may be refused early, over 60 s", ge=0, le=1)
    rate: float = setting(0.0, "requests a second; beyond it 429; 0: any", ge=0)
    burst: int = setting(0, "requests at once under rate; 0: a second's worth", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class P2:
    """Settings of class P2."""

    queue: int = setting(256, "requests that wait; beyond it 503 queue_full", ge=0, le=65536)
    deadline_s: float = setting(30.0, "from the head to a leased connection", ge=0.01, le=3600)
    weight: int = setting(1, "share of cost among those that wait", ge=1, le=1000)
    early_shed: float = setting(0.05, "share that may be refused early, over 60 s", ge=0, le=1)
    rate: float = setting(0.0, "requests a second; beyond it 429; 0: any", ge=0)
    burst: int = setting(0, "requests at once under rate; 0: a second's worth", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """The limit on requests in flight that follows the upstreams' answers."""

    enabled: bool = setting(True, "follow times to first byte; false: pools.*.inflight alone")
    initial: int = setting(32, "requests in flight at first", ge=1)
    least: int = setting(4, "it never falls below", ge=1)
    tolerance: float = setting(1.2, "times the time at rest: from there they wait", ge=1, le=10)
    headroom: float = setting(0.1, "share of the found limit that is left free", ge=0, le=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One classification rule; conditions that are empty or 0 hold always."""

    qos: str = setting("", "the class it gives: P0, P1 or P2; required")
    model: str = setting("", "model, or a pattern with * ? [...]")
    tenant: str = setting("", "tenant")
    sla: str = setting("", "the tenant's sla")
    prompt_bytes_min: int = setting(0, "prompt's length, at least", ge=0)
    prompt_bytes_max: int = setting(0, "prompt's length, at most; 0: any", ge=0)
    prompt_tokens_min: int = setting(0, "the same, estimated: 4 bytes each", ge=0)
    prompt_tokens_max: int = setting(0, "the same, at most; 0: any", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """Classes, and who waits how."""

    default_class: QosName = setting("P1", "class of a request that names none")
    on_unknown: Literal["default", "reject"] = setting(
        "default", "what an unknown X-QoS-Class does"
    )
    default_max_tokens: int = setting(512, "cost of an answer that names no max_tokens", ge=0)
    limits_url: str = setting(
        "http://127.0.0.1:14190/v1/limits", "where the agent says its limits; empty: not asked"
    )
    p0: P0 = field(default_factory=P0)
    p1: P1 = field(default_factory=P1)
    p2: P2 = field(default_factory=P2)
    adaptive: Adaptive = field(default_factory=Adaptive)
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What one tenant may ask for."""

    max_class: QosName = setting("P1", "highest class; P0 is granted by name")
    sla: str = setting("", "a name that qos.rules may ask for")
    rate: float = setting(0.0, "P1 and P2 requests a second; beyond it 429; 0: any", ge=0)
    burst: int = setting(0, "requests at once under rate; 0: a second's worth", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this sidecar is."""

    cluster: str = setting("local", "cluster name, in audit origins")
    namespace: str = setting("default", "pod namespace")
    pod: str = setting("", "pod name; empty: host name")
    pod_uid: str = setting("", "pod uid; empty: outside Kubernetes")
    node: str = setting("", "node name; empty: host name")
    tenant: str = setting("default", "tenant of the pod's own application")
    gateways: tuple[str, ...] = setting(
        (), "addresses or networks whose X-Tenant-Id is believed on the app door"
    )
    image: str = setting("unknown", "image digest, in the audit genesis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where keys come from."""

    provider: Literal["file"] = setting("file", "key provider")
    file: str = setting("", "key file; empty: 14081 is closed and audit has no keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Receiver side of the SM4 channel."""

    window_s: int = setting(60, "how old an envelope may be", ge=1, le=600)
    ahead_s: int = setting(5, "how far ahead its clock may be, at most window_s", ge=0, le=60)
    fence_s: int = setting(
        10,
        "start fence: nothing from before start + fence; 0: none",
        ge=0,
        le=120,
    )
    unverified_bytes: int = setting(64 << 20, "unverified sealed bodies together", ge=1 << 20)
    replay_entries: int = setting(1 << 20, "replay cache, all kids", ge=1)
    replay_entries_per_kid: int = setting(1 << 18, "replay cache, one kid", ge=1)
    signature_queue: int = setting(
        256, "signatures waiting to be verified; beyond it 503 envelope_busy", ge=1, le=65536
    )
    progress_s: float = setting(5.0, "a sealed body without progress is refused", ge=0.1)
    replay_store: Literal["memory", "redis"] = setting(
        "memory", "who remembers envelopes; redis for replicas that share one audience"
    )
    replay_store_url: str = setting(
        "redis://127.0.0.1:6379/0", "redis:// or rediss://host:port/db, or unix:///path"
    )
    replay_store_password_file: str = setting("", "file that holds the store's password")
    replay_store_timeout_s: float = setting(
        0.5, "a store that answers later is lost: sealed requests are refused", ge=0.01, le=10
    )
    state_dir: str = setting("", "volume for the first-start marker; empty: always fence")
    sm4_tier: str = setting("auto", "what does SM4's work: auto, a tier, or cryptography")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The audit chain."""

    enabled: bool = setting(True, "write an audit chain")
    dir: str = setting("", "directory of the chains; empty: no audit (shown in readyz)")
    token_ids: Literal["", "sealed", "commit", "plain", "off"] = setting(
        "", "token ids in records; empty: sealed, which needs the auditor's key"
    )
    on_failure: Literal["block", "degrade"] = setting("degrade", "when a record cannot be written")
    flush_ms: int = setting(5, "group interval", ge=1, le=1000)
    flush_records: int = setting(256, "group size", ge=1, le=4096)
    heartbeat_s: int = setting(30, "record after so long without one", ge=1)
    segment_bytes: int = setting(64 << 20, "segment size", ge=1 << 16, le=64 << 20)
    witness: str = setting(
        "", "who cosigns checkpoints: http://host:port or unix:/path of an agent; empty: nobody"
    )
    witness_authorization_file: str = setting(
        "", "file whose content becomes the Authorization header to the witness"
    )
    witness_late_s: int = setting(
        300, "a witness that decides nothing for so long is an alarm; with block, not ready", ge=1
    )
    alg: Literal["s256", "sm3"] = setting("s256", "chain MAC: HMAC-SHA256 or HMAC-SM3")
    prompt_hash_mode: Literal["keyed", "plain"] = setting(
        "keyed", "plain lets a dictionary open prompt hashes"
    )
    observed_bytes: int = setting(64 << 20, "bodies held for hashing, together", ge=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes in bytes, counts."""

    head_bytes: int = setting(64 << 10, "a head in all", ge=1024, le=1 << 20)
    field_bytes: int = setting(32 << 10, "one header field", ge=256, le=1 << 20)
    fields: int = setting(128, "header fields", ge=8, le=1024)
    body_bytes: int = setting(32 << 20, "a request body", ge=1024)
    collect_bytes: int = setting(1 << 20, "a body up to this is read whole, then sent", ge=0)
    discard_bytes: int = setting(64 << 20, "read and dropped after an early answer", ge=0)
    event_bytes: int = setting(1 << 20, "an SSE line the observer follows", ge=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Times in seconds."""

    connect_s: float = setting(2.0, "connect to an upstream", ge=0.01)
    head_s: float = setting(10.0, "read a request head", ge=0.01)
    body_idle_s: float = setting(30.0, "a request body without progress", ge=0.01)
    first_byte_s: float = setting(120.0, "last request byte to first body byte", ge=0.01)
    stream_idle_s: float = setting(60.0, "an upstream that has begun and is silent", ge=0.01)
    client_stall_s: float = setting(60.0, "a client that does not read", ge=0.01)
    request_total_s: float = setting(3600.0, "a request in all", ge=0.01)
    keepalive_s: float = setting(75.0, "an idle client connection", ge=0.01)
    tunnel_idle_s: float = setting(3600.0, "an upgraded connection without a byte", ge=0.01)
    discard_s: float = setting(2.0, "reading on after an early answer", ge=0)
    loop_stuck_s: float = setting(10.0, "livez fails when the data loop stood so long", ge=0.5)
    drain_s: float = setting(30.0, "grace for streams at shutdown", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of it."""

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "log level")
    workers: int = setting(
        1, "processes behind the app door; bounds are of each", ge=1, le=WORKERS_MAX
    )
    doors: Doors = field(default_factory=Doors)
    pools: Pools = field(default_factory=Pools)
    qos: Qos = field(default_factory=Qos)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    identity: Identity = field(default_factory=Identity)
    keys: Keys = field(default_factory=Keys)
    envelope: Envelope = field(default_factory=Envelope)
    audit: Audit = field(default_factory=Audit)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)


_HOST = re.compile(r"[0-9A-Za-z._:%~-]+")
# What is written into a header field as it is.
_FIELD_VALUE = re.compile(r"[!-~]{0,255}")


def load(text: str, environ: Mapping[str, str]) -> Settings:
    """Return settings from a file's text and the environment.

    Raises `SettingsError` with every problem found.
    """
    problems: list[str] = []
    try:
        table = tomllib.loads(text)
    except ValueError as problem:  # a number of too many digits is no TOMLDecodeError
        raise SettingsError([f"{FILE_NAME}: {problem}"]) from None
    table.pop("agent", None)  # the agent's room; it checks its own names
    env = own_variables(environ, OTHER_ROOMS)
    settings: Settings = build(Settings, table, env, "", problems)
    problems.extend(f"{name}: unknown variable" for name in sorted(env))
    problems.extend(cross_check(settings))
    if problems:
        raise SettingsError(problems)
    return settings


def cross_check(settings: Settings) -> list[str]:
    """Return what is wrong between settings that are each well formed."""
    problems, identity = [], settings.identity
    if not _FIELD_VALUE.fullmatch(identity.tenant):
        problems.append("identity.tenant: expected at most 255 printable characters, no space")
    problems += [f"identity.gateways: {what}" for what in gateways.mistakes(identity.gateways)]
    for name in ("app", "sealed", "admin"):
        address = getattr(settings.doors, name)
        if address:
            try:
                split_address(address)
            except ValueError as problem:
                problems.append(f"doors.{name}: {problem}")
    problems.extend(_store_problems(settings.envelope))
    for name in ("dedicated", "shared", "best_effort"):
        pool: Pool = getattr(settings.pools, name)
        if not _FIELD_VALUE.fullmatch(pool.host):
            problems.append(f"pools.{name}.host: expected printable characters, no space")
        if not pool.endpoints:
            problems.append(f"pools.{name}.endpoints: at least one endpoint")
        for endpoint in pool.endpoints:
            try:
                split_endpoint(endpoint)
            except ValueError as problem:
                problems.append(f"pools.{name}.endpoints: {problem}")
    problems.extend(_qos_problems(settings.qos))
    problems.extend(_audit_problems(settings.audit))
    return problems


def _qos_problems(qos: Qos) -> list[str]:
    problems = []
    for number, rule in enumerate(qos.rules, 1):
        where = f"qos.rules[{number}]"
        if rule.qos not in typing.get_args(QosName):
            problems.append(f"{where}.qos: expected one of 'P0', 'P1', 'P2', got {rule.qos!r}")
        for unit in ("bytes", "tokens"):
            least, most = getattr(rule, f"prompt_{unit}_min"), getattr(rule, f"prompt_{unit}_max")
            if 0 < most < least:
                problems.append(f"{where}.prompt_{unit}_max: less than prompt_{unit}_min")
    if qos.limits_url:
        try:
            split_url(qos.limits_url)
        except ValueError as problem:
            problems.append(f"qos.limits_url: {problem}")
    return problems


def _audit_problems(audit: Audit) -> list[str]:
    if audit.witness.startswith("https:"):
        return ["audit.witness: expected http:// or unix:/path, of an agent on this node"]
    if audit.witness:
        try:
            split_endpoint(audit.witness)
        except ValueError as problem:
            return [f"audit.witness: {problem}"]
    return []


def _store_problems(envelope: Envelope) -> list[str]:
    name, url = "envelope.replay_store_url", urlsplit(envelope.replay_store_url)
    if url.scheme not in {"redis", "rediss", "unix"} or not (url.hostname or url.path):
        return [f"{name}: expected redis://, rediss:// or unix://"]
    if url.password is not None or "password" in url.query:
        return [f"{name}: no password in here; use envelope.replay_store_password_file"]
    return []


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of `host:port`; raises ValueError with the reason."""
    host, _, port = address.rpartition(":")
    if host[:1] == "[" and host[-1:] == "]":
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"expected host:port, IPv6 as [address]:port, got {address!r}")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 65536
    if not _HOST.fullmatch(host) or number > 65535:
        raise ValueError(f"expected host:port, the port 1-65535, got {address!r}")
    return host, number


def split_endpoint(endpoint: str) -> tuple[str, int] | str:
    """Return (host, port) of an http or https URL, or a unix one's path; raises ValueError."""
    if endpoint.startswith("unix:"):
        path = endpoint.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError(f"expected unix:/path, got {endpoint!r}")
        return path
    scheme, found, rest = endpoint.partition("://")
    port = {"http": 80, "https": 443}.get(scheme)
    if not found or port is None:
        raise ValueError(f"expected http(s)://host:port or unix:/path, got {endpoint!r}")
    rest = rest.rstrip("/")
    if "/" in rest or not rest:
        raise ValueError(f"an endpoint has no path: {endpoint!r}")
    return split_address(rest if ":" in rest.rsplit("]", 1)[-1] else f"{rest}:{port}")


def split_url(url: str) -> tuple[tuple[str, int], str]:
    """Return ((host, port), path) of an http URL; raises ValueError with the reason."""
    scheme, found, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if not found or scheme != "http" or not host or not _FIELD_VALUE.fullmatch(path):
        raise ValueError(f"expected http://host:port/path, got {url!r}")
    address = split_endpoint(f"http://{host}")
    assert not isinstance(address, str)
    return address, slash + path or "/"


def read(path: str | None, environ: Mapping[str, str]) -> Settings:
    """Read settings from `path` (file or directory; None: defaults and environment only)."""
    return load(source(path)[1], environ)


def describe(settings: Settings) -> dict[str, Any]:
    """Return settings as plain data, for `/config` and `tongguan config check`."""
    return dataclasses.asdict(settings)
