"""Metrics: every counter has its place, every name its form, no label is a client's."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import proxy
from proxy import retry
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from proxy.config import Settings, load
from proxy.context import Context
from proxy.metrics import BOUNDS_S, DOORS, LIMITS, OUTCOMES, Counters, Histogram, built
from proxy.qos.admission import REASONS as SHED_REASONS
from proxy.qos.pools import STATE_NAMES
from proxy.scrape import Collector
from proxy.sm4.cipher import tier
from proxy.sm4.envelope import REASONS
from tests.unit.proxy.audit_chains import config, request, run
from tests.unit.proxy.sm4_kit import NOW_MS, make_receiver

CLASSES = ("P0", "P1", "P2")
POOLS = ("dedicated", "shared", "best_effort")
OTHER_LIMITS = ("doors.connections", "audit.observed_bytes", "limits.event_bytes",
                "limits.lent_streams", "timeouts.connect_s")  # fmt: skip
MS = 1_000_000


# --- limits: names as they are counted


def counted():
    """Return each name that the sources count a hit of."""
    names = set()
    for path in Path(proxy.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.AugAssign) or not isinstance(node.target, ast.Subscript):
                continue
            table = node.target.value
            if getattr(table, "attr", getattr(table, "id", "")) in {"limit_hits", "hits"}:
                found = [
                    leaf.value
                    for leaf in ast.walk(node.target.slice)
                    if isinstance(leaf, ast.Constant)
                ]
                assert found, (path, node.lineno)
                names.update(found)
    return names


def test_every_limit_that_is_counted_has_a_row_and_every_row_is_counted():
    assert counted() == set(LIMITS)
    assert Counters().limit_hits == dict.fromkeys(LIMITS, 0)


@pytest.mark.parametrize("name", [*LIMITS, *OTHER_LIMITS])
def test_a_limit_is_named_by_its_setting(name):
    section, _, last = name.partition(".")
    assert last in getattr(Settings(), section).__struct_fields__


# --- histograms


def test_bounds_rise_and_hold_the_promised_ones_exactly():
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
    assert {0.2, 0.22, 0.5, 0.8} <= set(BOUNDS_S)


@pytest.mark.parametrize("bound_s", BOUNDS_S)
def test_a_bound_is_inclusive_to_the_nanosecond(bound_s):
    bound_ns = round(bound_s * 1e9)
    histogram = Histogram()
    histogram.add(bound_ns)
    histogram.add(bound_ns + 1)
    counts = dict(histogram.buckets())
    index = BOUNDS_S.index(bound_s)
    assert counts[str(bound_s)] == 1
    above = str(BOUNDS_S[index + 1]) if index + 1 < len(BOUNDS_S) else "+Inf"
    assert counts[above] == 2


def test_buckets_accumulate_and_the_sum_is_exact():
    histogram = Histogram()
    values = [0, 1, 7 * MS, 210 * MS, 220 * MS, 221 * MS, 900_000 * MS]
    for value in values:
        histogram.add(value)
    rows = histogram.buckets()
    counts = [count for _, count in rows]
    assert counts == sorted(counts)
    assert rows[-1] == ("+Inf", len(values))
    assert dict(rows)["0.22"] - dict(rows)["0.2"] == 2
    assert histogram.sum_ns == sum(values)


def test_an_empty_histogram_has_every_bucket():
    assert [name for name, _ in Histogram().buckets()] == [*map(str, BOUNDS_S), "+Inf"]
    assert {count for _, count in Histogram().buckets()} == {0}


# --- what a scrape gives


def scrape(context):
    registry = CollectorRegistry()
    registry.register(Collector(context))
    return generate_latest(registry).decode()


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text, name, **labels):
    (found,) = [
        sample.value
        for family in families(text).values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return found


def context_on(loop, text=""):
    return Context(load(text, {}), ManualClock(NOW_MS), loop, "node")


@pytest.fixture
def context():
    loop = asyncio.new_event_loop()
    yield context_on(loop)
    loop.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Return a scrape of a context in which everything has happened."""

    async def scene():
        loop = asyncio.get_running_loop()
        context = context_on(loop)
        counters = context.counters
        for qos in CLASSES:
            counters.started[qos] += 2
            counters.duration[qos].add(210 * MS)
            counters.first_byte[qos].add(90 * MS)
            for outcome in OUTCOMES:
                counters.outcomes[qos, outcome] += 1
        for name in LIMITS:
            counters.limit_hits[name] += 3
        counters.connections_refused = 4
        context.observing.held_bytes_max = 10
        assert not context.observing.hold(11)
        context.tenant("tenant-from-a-client")
        context.refused_head("app", "code-from-a-client")
        for reason in REASONS:
            context.envelope_failed("192.0.2.77", reason)
        context.receiver = make_receiver()
        directory = tmp_path_factory.mktemp("audit")
        context.audit = AuditWriter.start(config(directory), context.clock, loop)
        seq = context.audit.append_request(request(1, tenant="tenant-from-a-client"))
        await context.audit.durable(seq)
        text = scrape(context)
        await context.audit.close()
        return text

    return run(scene)


def test_a_scrape_is_read_by_prometheus_own_parser(full):
    assert families(full)["tongguan_proxy_requests_started"].type == "counter"
    assert value(full, "tongguan_proxy_requests_started_total", qos="P1") == 2
    assert value(full, "tongguan_proxy_requests_total", qos="P2", outcome="truncated") == 1
    assert value(full, "tongguan_proxy_refused_heads_total", door="app") == 1
    assert value(full, "tongguan_proxy_audit_records_total") == 2
    assert value(full, "tongguan_proxy_audit_available") == 1
    assert value(full, "tongguan_proxy_live_kids") == 1
    assert value(full, "tongguan_proxy_sm4_info", tier=tier()) == 1
    assert value(full, "tongguan_proxy_path_info", built=built()) == 1


def test_every_limit_shows_also_those_counted_elsewhere(full):
    for name in LIMITS:
        assert value(full, "tongguan_proxy_limit_hits_total", limit=name) == 3
    assert value(full, "tongguan_proxy_limit_hits_total", limit="doors.connections") == 4
    assert value(full, "tongguan_proxy_limit_hits_total", limit="audit.observed_bytes") == 1


@pytest.mark.parametrize(("noun", "seconds"), [("duration", 0.21), ("first_byte", 0.09)])
def test_a_histograms_count_and_sum_agree_with_its_buckets(full, noun, seconds):
    name = f"tongguan_proxy_request_{noun}_seconds"
    for qos in CLASSES:
        assert value(full, f"{name}_count", qos=qos) == 1
        assert value(full, f"{name}_sum", qos=qos) == pytest.approx(seconds)
        assert value(full, f"{name}_bucket", qos=qos, le="+Inf") == 1
        assert value(full, f"{name}_bucket", qos=qos, le="0.05") == 0
        assert value(full, f"{name}_bucket", qos=qos, le="0.22") == 1


def test_names_have_our_form_and_counters_end_in_total(full):
    for family in families(full).values():
        assert re.fullmatch(r"tongguan_proxy_[a-z0-9]+(_[a-z0-9]+)*", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|ns|milliseconds|kb|mb)(_|$)", family.name)
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert names <= {f"{family.name}_total"}, names
        elif family.type == "gauge":
            assert not family.name.endswith("_total")
        assert family.type != "unknown"


def test_label_values_come_from_closed_lists_and_never_from_a_client(full):
    allowed = {
        "qos": set(CLASSES),
        "outcome": {*OUTCOMES, "taken", "stale", "absent", "malformed"},
        "door": set(DOORS),
        "pool": set(POOLS),
        "limit": {*LIMITS, *OTHER_LIMITS},
        "reason": {*REASONS, *SHED_REASONS, *retry.REASONS, *retry.COUNTED, "errors", "slow"},
        "endpoint": {url for name in POOLS for url in getattr(Settings().pools, name).endpoints},
        "state": set(STATE_NAMES.values()),
        "scope": {"class", "tenant"},
        "pools": {"dedicated+shared+best_effort"},
        "tier": {tier()},
        "built": {built()},
        "wire": {"c", "pure"},
        "result": {"ok", "failed", "passed"},
        "le": {*map(str, BOUNDS_S), "+Inf"},
    }
    for family in families(full).values():
        for sample in family.samples:
            for name, text in sample.labels.items():
                assert text in allowed[name], (sample.name, name, text)
    for text in ("from-a-client", "192.0.2.77"):
        assert text not in full


def test_no_name_comes_twice(full):
    names = re.findall(r"^# TYPE (\S+) ", full, re.MULTILINE)
    assert len(names) == len(set(names))


def test_a_fresh_sidecar_has_all_its_series_at_zero(context):
    text = scrape(context)
    for qos in CLASSES:
        assert value(text, "tongguan_proxy_requests_started_total", qos=qos) == 0
        for outcome in OUTCOMES:
            assert value(text, "tongguan_proxy_requests_total", qos=qos, outcome=outcome) == 0
    for pool in POOLS:
        assert value(text, "tongguan_proxy_pool_inflight", pool=pool) == 0
        assert value(text, "tongguan_proxy_pool_inflight_limit", pool=pool) == 512
    for name in LIMITS:
        assert value(text, "tongguan_proxy_limit_hits_total", limit=name) == 0
    # No audit, no sealed door: nothing is made up for them.
    assert value(text, "tongguan_proxy_audit_available") == 0
    assert "tongguan_proxy_audit_records" not in text
    assert "tongguan_proxy_replay_entries" not in text


def test_places_in_flight_and_refusals_show_by_pool(context):
    state = context.routes["shared"].state
    assert state.admit(1)
    assert not state.admit(1)
    text = scrape(context)
    assert value(text, "tongguan_proxy_pool_inflight", pool="shared") == 1
    assert value(text, "tongguan_proxy_pool_refused_total", pool="shared") == 1
    assert value(text, "tongguan_proxy_pool_inflight", pool="dedicated") == 0
