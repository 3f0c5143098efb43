"""Lanes: what each header value of a tenant leads to, made once."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from proxy.clock import ManualClock
from proxy.config import load
from proxy.context import Context
from proxy.lanes import tenant_lanes
from proxy.qos.classes import CLASSES, UnknownClassError

VALUES = [None, *(c.encode() for c in CLASSES), *(c.lower().encode() for c in CLASSES)]


@pytest.fixture
def context():
    loop = asyncio.new_event_loop()
    text = """
    [pools.dedicated]
    inflight = 40
    host = "fast.test"
    [pools.shared]
    inflight = 50
    [pools.best_effort]
    inflight = 60
    """
    yield Context(load(text, {"TONGGUAN_QOS_P0_INFLIGHT": "30"}), ManualClock(), loop, "node")
    loop.close()


def tenant(context, max_class="P0", default="P1", on_unknown="default"):
    qos = load(f"[qos]\ndefault_class = '{default}'\non_unknown = '{on_unknown}'\n", {}).qos
    counters = context.counters
    made = tenant_lanes(
        "team-a",
        max_class=max_class,
        prompt_key=b"k" * 32,
        qos=qos,
        routes=context.routes,
        tiers=context.gates.tiers,
        histograms={c: (counters.duration[c], counters.first_byte[c]) for c in CLASSES},
    )
    return made, qos


@pytest.mark.parametrize(
    ("value", "default", "cap"), list(itertools.product(VALUES, CLASSES, CLASSES))
)
def test_a_plain_value_is_one_look_up_and_names_what_was_asked_where_it_was_capped(
    context, value, default, cap
):
    made, qos = tenant(context, cap, default)
    lane = made.known[value]
    asked = value.decode().upper() if value else default
    effective = max(asked, cap)
    assert lane.qos == effective
    assert lane.asked == (asked if asked != effective else "")
    assert lane.route is context.routes[lane.route.name]
    assert lane.duration is context.counters.duration[effective]
    assert lane.first_byte is context.counters.first_byte[effective]
    assert made.lane(value, repeated=False, qos=qos) is lane


def test_a_cap_of_p2_tells_p0_from_p1_in_the_record(context):
    made, _ = tenant(context, "P2")
    assert [made.known[v].asked for v in (b"P0", b"P1", b"P2", None)] == ["P0", "P1", "", "P1"]


def test_upper_and_lower_case_share_a_lane(context):
    made, _ = tenant(context)
    for qos_class in CLASSES:
        assert made.known[qos_class.encode()] is made.known[qos_class.lower().encode()]


@pytest.mark.parametrize("value", [b"P3", b"P0, P1", b"", b"x" * 9000])
@pytest.mark.parametrize("cap", CLASSES)
def test_what_is_not_plain_goes_the_way_of_nothing(context, value, cap):
    made, qos = tenant(context, cap)
    assert made.lane(value, repeated=False, qos=qos) is made.known[None]


@pytest.mark.parametrize("value", VALUES[1:])
def test_a_repeated_field_is_not_believed(context, value):
    made, qos = tenant(context)
    assert made.lane(value, repeated=True, qos=qos) is made.known[None]


def test_unknown_values_make_no_new_lanes(context):
    made, qos = tenant(context)
    for number in range(100):
        made.lane(b"x%d" % number, repeated=False, qos=qos)
    assert set(made.known) == set(VALUES)


@pytest.mark.parametrize(("value", "repeated"), [(b"P3", False), (b"P0", True), (b"P0,P0", False)])
def test_policy_may_refuse_what_is_not_plain(context, value, repeated):
    made, qos = tenant(context, on_unknown="reject")
    with pytest.raises(UnknownClassError):
        made.lane(value, repeated=repeated, qos=qos)
    assert made.lane(None, repeated=False, qos=qos) is made.known[None]


def test_a_class_that_waits_for_the_disk_waits_in_whatever_pool_serves_it():
    loop = asyncio.new_event_loop()
    text = '[audit]\ndir = "/a"\nsync = {p0 = "request"}\n[pools.dedicated]\noverflow = true\n'
    text += '[tenants.a]\nmax_class = "P0"\n[pools.shared]\noverflow = true\n'
    known = Context(load(text, {}), ManualClock(), loop, "node").tenant("a").known
    for qos, waits in ((b"P0", True), (b"P1", False)):
        assert (known[qos].opens, known[qos].overflow.opens) == (waits, waits)
    loop.close()


def test_the_bound_is_the_pools_and_for_p0_the_smaller_of_two():
    loop = asyncio.new_event_loop()

    def bounds(p0, dedicated):
        text = f"""
        [tenants.vip]
        max_class = "P0"
        [qos.p0]
        inflight = {p0}
        [qos.adaptive]
        enabled = false
        [pools.dedicated]
        inflight = {dedicated}
        [pools.shared]
        inflight = 50
        [pools.best_effort]
        inflight = 60
        """
        known = Context(load(text, {}), ManualClock(), loop, "node").tenant("vip").known
        return [known[value].tier.bound for value in (b"P0", b"P1", b"P2", None)]

    assert bounds(30, 40) == [30, 50, 60, 50]
    assert bounds(50, 40) == [40, 50, 60, 50]
    loop.close()


def rows(*rules, default="P1", tenants=""):
    text = f"[qos]\ndefault_class = '{default}'\n{tenants}\n"
    return text + "".join(f"[[qos.rules]]\n{rule}\n" for rule in rules)


def classes(context, text, tenant="team-a"):
    made = Context(load(text, {}), ManualClock(), context.loop, "node").tenant(tenant)
    return made, made.known.get(None)


def test_a_rule_on_the_tenant_alone_is_part_of_the_look_up(context):
    _, lane = classes(context, rows("qos = 'P2'\ntenant = 'team-a'", "qos = 'P1'\nmodel = 'm'"))
    assert lane.qos == "P2"


def test_a_rule_on_the_sla_holds_for_tenants_that_have_it(context):
    text = rows("qos = 'P2'\nsla = 'bronze'", tenants="[tenants.b]\nsla = 'bronze'")
    assert classes(context, text, "b")[1].qos == "P2"
    assert classes(context, text, "team-a")[1].qos == "P1"


def test_a_rule_on_the_body_leaves_absence_undecided_and_names_decided(context):
    made, lane = classes(context, rows("qos = 'P2'\nmodel = 'slow-*'"))
    assert lane is None
    assert made.default.qos == "P1"
    assert made.known[b"P2"].qos == "P2"
    assert made.lane(b"nonsense", repeated=False, qos=context.settings.qos) is None


def test_rules_of_other_tenants_ask_for_no_body(context):
    _, lane = classes(context, rows("qos = 'P2'\nmodel = 'x'\ntenant = 'other'"))
    assert lane.qos == "P1"


def test_a_rule_raises_nobody_above_the_cap(context):
    _, lane = classes(context, rows("qos = 'P0'\ntenant = 'team-a'"))
    assert (lane.qos, lane.asked) == ("P1", "P0")


def test_the_fields_upstream_and_back_name_the_effective_class(context):
    context.routes["best_effort"].authorization = b"Authorization: Bearer x\r\n"
    made, _ = tenant(context, "P2")
    lane = made.known[b"P0"]
    assert lane.request_fields == (
        b"X-QoS-Class: P2\r\nX-Tenant-Id: team-a\r\nAuthorization: Bearer x\r\n"
    )
    assert lane.answer_fields == b"X-QoS-Class: P2\r\nX-QoS-Pool: best_effort\r\nX-Trace-Id: "
    made, _ = tenant(context)
    assert made.known[b"P0"].host == b"fast.test"
    assert made.known[b"P1"].host == b""
    assert b"Authorization" not in made.known[b"P0"].request_fields


def test_secrets_do_not_show(context):
    context.routes["shared"].authorization = b"Authorization: Bearer hidden\r\n"
    made, _ = tenant(context)
    assert "kkkk" not in repr(made)
    assert "hidden" not in repr(context.routes["shared"])


def test_a_tenant_is_made_once_and_p0_only_by_name(context):
    assert context.tenant("a") is context.tenant("a")
    assert context.tenant("a").max_class == "P1"
    assert context.tenant("a").known[b"P0"].qos == "P1"
