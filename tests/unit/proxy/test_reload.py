"""What a reload may change, what it keeps, and what it swaps."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import proxy
from proxy.clock import ManualClock
from proxy.config import load
from proxy.context import Context
from proxy.reload import Loaded, changed, keep_fixed, newest

# What a new context makes from the settings; all else it has to take over from the one before.
MADE_ANEW = {
    "_tenants", "blocks_on_audit", "body_bytes_max", "body_idle_ns", "clock",
    "collect_bytes", "gateways", "head_limits", "keys", "loop", "machine", "own_tenant", "routes",
    "settings", "times", "wall_offset_ns",
}  # fmt: skip


@pytest.fixture
def context():
    loop = asyncio.new_event_loop()
    yield Context(load("", {}), ManualClock(), loop, "node")
    loop.close()


def assigned(method):
    """Return the attributes that a method of Context sets on itself, by its source."""
    tree = ast.parse(Path(proxy.__file__).with_name("context.py").read_text(encoding="utf-8"))
    (found,) = (
        node
        for kind in tree.body
        if isinstance(kind, ast.ClassDef) and kind.name == "Context"
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and node.name == method
    )
    return {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_every_attribute_of_a_context_is_made_anew_or_taken_over():
    everything = assigned("__init__")
    taken = assigned("_take_over")
    assert everything - taken == MADE_ANEW
    assert taken <= everything


def test_new_context_is_current_for_all_before_it(context):
    second = context.renewed(Loaded(load("", {}), None, {}))
    third = second.renewed(Loaded(load("", {}), None, {}))
    assert context.current is second.current is third.current
    assert context.current.context is third
    assert third.counters is context.counters
    assert third.connections is context.connections


def test_running_request_keeps_its_context_and_shares_its_place(context):
    lane = context.tenant("default").known[None]
    assert lane.route.state.admit(lane.tier.bound)
    text = "[pools.shared]\ninflight = 1\nendpoints = ['http://127.0.0.1:2']\n[limits]\nfields = 9"
    made = context.renewed(Loaded(load(text, {}), None, {"shared": b"Authorization: x\r\n"}))
    route = made.routes["shared"]
    assert (context.head_limits.fields, made.head_limits.fields) == (128, 9)
    assert lane.route.settings.inflight == 512
    assert not route.state.admit(made.tenant("default").known[None].tier.bound)
    lane.route.state.release()
    assert route.state.inflight == 0
    assert [endpoint.url for endpoint in route.state.endpoints] == ["http://127.0.0.1:2"]
    assert (lane.route.authorization, route.authorization) == (b"", b"Authorization: x\r\n")


def test_endpoint_that_stays_keeps_what_is_known_of_it(context):
    stays = context.routes["shared"].state.endpoints[0]
    stays.outstanding = 3
    text = f"[pools.shared]\nendpoints = ['http://127.0.0.1:2', '{stays.url}']"
    state = context.renewed(Loaded(load(text, {}), None, {})).routes["shared"].state
    assert state.endpoints[1] is stays
    assert state.pick(0) is state.endpoints[0]
    assert state.pick(0, frozenset({"http://127.0.0.1:2"})) is stays


def test_differences_are_named_down_to_the_tenant():
    one = load("[tenants.a]\nmax_class = 'P2'\n[limits]\nfields = 9", {})
    other = load("[tenants.a]\nmax_class = 'P0'\n[tenants.b]\nmax_class = 'P1'", {})
    assert changed(one, one) == []
    rows = [f"tenants.b.{name}" for name in ("burst", "max_class", "rate", "sla")]
    assert changed(one, other) == ["limits.fields", "tenants.a.max_class", *rows]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", []),
        ("[limits]\nfields = 9\n[doors]\nconnections = 3", []),
        ("[doors]\napp = '127.0.0.1:1'", ["doors.app"]),
        ("[keys]\nfile = '/a'\n[limits]\nfields = 9", ["keys.file"]),
        ("[audit]\ndir = '/a'\n[identity]\ntenant = 't'", ["audit.dir", "identity.tenant"]),
        ("[envelope]\nfence_s = 0", ["envelope.fence_s"]),
        ("[identity]\ngateways = ['127.0.0.1']", ["identity.gateways"]),
    ],
)
def test_what_needs_a_restart_is_kept_and_named(text, kept):
    start = load("", {})
    settings, names = keep_fixed(load(text, {}), start)
    assert names == kept
    for name in kept:
        section, _, field = name.partition(".")
        assert getattr(getattr(settings, section), field) == getattr(getattr(start, section), field)
    assert settings.limits == load(text, {}).limits
    assert settings.doors.connections == load(text, {}).doors.connections


def test_process_that_takes_anothers_place_has_the_newest_settings(tmp_path, caplog):
    file = tmp_path / "tongguan.toml"
    start = load("[limits]\nfields = 10", {})
    file.write_text("[limits]\nfields = 9\n[audit]\nheartbeat_s = 9")
    settings = newest(str(file), {}, start)
    assert (settings.limits.fields, settings.audit.heartbeat_s) == (9, 30)
    file.write_text("[limits]\nfields = 'x'")
    assert newest(str(file), {}, start) == start
    assert "limits.fields" in caplog.text
