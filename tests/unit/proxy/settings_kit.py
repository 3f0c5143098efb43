"""Every setting by name, and what settings say of a mistake."""

from __future__ import annotations

import json
import typing

import pytest

from proxy.config import Settings, load
from proxy.settings import SettingsError, is_section, members


def problems(text="", environ=None):
    with pytest.raises(SettingsError) as caught:
        load(text, environ or {})
    return caught.value.problems


def leaves(kind=Settings, path=""):
    """Yield (dotted name, type, declaration) of every setting but the tables of tenants."""
    for name, hint, declared in members(kind):
        if is_section(hint):
            yield from leaves(hint, f"{path}{name}.")
        elif declared is not None:
            yield f"{path}{name}", hint, declared


LEAVES = list(leaves())
NAMES = [name for name, _, _ in LEAVES]


def lookup(settings, name):
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def variable(name):
    return "TONGGUAN_" + name.replace(".", "_").upper()


def toml(name, value):
    section, _, last = name.rpartition(".")
    return (f"[{section}]\n" if section else "") + f"{last} = {json.dumps(value)}\n"


def good_value(name, hint, declared, default):
    """Return a valid value that is not the default."""
    if hint is bool:
        return not default
    if hint in (int, float):
        value = default + 1
        if declared.le is None or value <= declared.le:
            return value
        return declared.ge if default > declared.ge else declared.le
    if typing.get_origin(hint) is typing.Literal:
        others = [v for v in typing.get_args(hint) if v != default]
        return others[0] if others else default
    if name.endswith(".seal.keys"):
        return ["client.json"]
    if typing.get_origin(hint) is tuple:
        endpoints = ["http://192.0.2.1:8000", "unix:/run/engine.sock"]
        return ["192.0.2.1", "2001:db8::/32"] if name == "identity.gateways" else endpoints
    if name == "envelope.replay_store_url":
        return "rediss://user@192.0.2.1:6379/1"
    if name == "keys.http_address":
        return "https://192.0.2.1:8200"
    if name == "tracing.endpoint":
        return "https://[2001:db8::1]:4318/v1/traces"
    if name == "audit.agent":
        return "unix:/run/agent.sock"
    if name == "qos.limits_url":
        return "http://192.0.2.1:9/limits"
    return "127.0.0.1:9" if name in {"doors.app", "doors.sealed", "doors.admin"} else "x"
