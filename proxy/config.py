"""Every setting of the sidecar: name, unit, default and bounds.

Sources, later wins: defaults, `tongguan.toml` (a file, or a directory that holds it), variables
`TONGGUAN_<SECTION>_<NAME>`. Settings are frozen once loaded. All mistakes are collected and
reported at once; an unknown key or variable with our prefix is a mistake. Nothing here holds a
secret: secrets are files that settings point to.

The sections stand in `config_doors`, `config_pools`, `config_qos`, `config_keys`, `config_audit`,
`config_tls` and `config_tracing`, each with the checks between its own settings; whoever uses
settings imports them from here. Pure: `load` is given the file's text and the environment; only
`read` touches the disk.
"""

import tomllib
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from proxy import gateways
from proxy.config_address import FIELD_VALUE, split_address, split_endpoint, split_url
from proxy.config_audit import Audit, audit_problems
from proxy.config_doors import Doors, doors_problems
from proxy.config_keys import Envelope, Keys, envelope_problems, keys_problems
from proxy.config_pools import Pool, Pools, Seal, UpperPool, pools_problems
from proxy.config_qos import Qos, Rule, Tenant, qos_problems
from proxy.config_tls import Tls
from proxy.config_tracing import Tracing, tracing_problems
from proxy.settings import FILE_NAME, Section, SettingsError, build, own_variables, setting, source

__all__ = [
    "WORKERS_MAX",
    "Audit",
    "Doors",
    "Envelope",
    "Identity",
    "Keys",
    "Limits",
    "Pool",
    "Pools",
    "Qos",
    "Rule",
    "Seal",
    "Settings",
    "Tenant",
    "Timeouts",
    "Tls",
    "Tracing",
    "UpperPool",
    "describe",
    "load",
    "read",
    "split_address",
    "split_endpoint",
    "split_url",
]

# Rooms with settings of their own; each checks its own names.
OTHER_ROOMS = ("AGENT_", "UP_", "CLIENT_")

WORKERS_MAX = 64


class Identity(Section):
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


class Limits(Section):
    """Sizes in bytes, counts."""

    head_bytes: int = setting(64 << 10, "a head in all", ge=1024, le=1 << 20)
    field_bytes: int = setting(32 << 10, "one header field", ge=256, le=1 << 20)
    fields: int = setting(128, "header fields", ge=8, le=1024)
    body_bytes: int = setting(32 << 20, "a request body", ge=1024)
    collect_bytes: int = setting(1 << 20, "a body up to this is read whole, then sent", ge=0)
    sealing_bytes: int = setting(
        64 << 20, "bodies above collect_bytes held until they are sealed, together", ge=0
    )
    discard_bytes: int = setting(64 << 20, "read and dropped after an early answer", ge=0)
    event_bytes: int = setting(1 << 20, "an SSE line the observer follows", ge=1024)
    lent_streams: int = setting(
        4096, "event streams in clear that the native pump passes on; 0: none", ge=0, le=1 << 16
    )


class Timeouts(Section):
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


class Settings(Section):
    """All of it."""

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "log level")
    workers: int = setting(
        1, "processes behind the app door; bounds are of each", ge=1, le=WORKERS_MAX
    )
    doors: Doors = Doors()
    tls: Tls = Tls()
    pools: Pools = Pools()
    qos: Qos = Qos()
    tenants: Mapping[str, Tenant] = msgspec.field(default_factory=dict)
    identity: Identity = Identity()
    keys: Keys = Keys()
    envelope: Envelope = Envelope()
    audit: Audit = Audit()
    tracing: Tracing = Tracing()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()


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
    settings = build(Settings, table, env, "", problems)
    problems.extend(f"{name}: unknown variable" for name in sorted(env))
    problems.extend(cross_check(settings))
    if problems:
        raise SettingsError(problems)
    return settings


def cross_check(settings: Settings) -> list[str]:
    """Return what is wrong between settings that are each well formed."""
    problems, identity = [], settings.identity
    if not FIELD_VALUE.fullmatch(identity.tenant):
        problems.append("identity.tenant: expected at most 255 printable characters, no space")
    problems += [f"identity.gateways: {what}" for what in gateways.mistakes(identity.gateways)]
    problems.extend(doors_problems(settings.doors))
    problems.extend(keys_problems(settings.keys))
    problems.extend(envelope_problems(settings.envelope))
    problems.extend(pools_problems(settings.pools))
    problems.extend(qos_problems(settings.qos))
    problems.extend(audit_problems(settings.audit))
    problems.extend(tracing_problems(settings.tracing))
    return problems


def read(path: str | None, environ: Mapping[str, str]) -> Settings:
    """Read settings from `path` (file or directory; None: defaults and environment only)."""
    return load(source(path)[1], environ)


def describe(settings: Settings) -> dict[str, Any]:
    """Return settings as plain data, for `/config` and `tongguan config check`."""
    return cast("dict[str, Any]", msgspec.to_builtins(settings))
