"""perf.report: rounds to figures, gates and a table."""

from __future__ import annotations

import pytest

from perf import machine, report


def one(cpu_us: float, *, wait: float = 0.0, total: float = 100, **more: float):
    figures = {
        "total": total,
        "wait": wait,
        "peer_wait": wait,
        "cpu_us": cpu_us,
        "rps": 1e6 / cpu_us,
    }
    figures |= {"p50_us": 100.0, "p99_us": 200.0, "errors": 0, "not_200": 0}
    return figures | more


def test_only_the_least_disturbed_half_counts():
    rounds = [one(10, wait=0.01), one(90, wait=0.9), one(80, wait=0.8), one(12, wait=0.02)]
    assert report.median(rounds, "cpu_us") == 11


def test_half_of_an_odd_number_is_rounded_up():
    rounds = [one(1, wait=0.1), one(2, wait=0.2), one(9, wait=0.3)]
    assert len(report.quiet_half(rounds)) == 2


def test_a_round_that_served_nothing_does_not_count():
    assert report.median([one(1, total=0), one(7, wait=0.5)], "cpu_us") == 7
    assert report.median([one(1, total=0)], "cpu_us") is None
    assert report.median([], "cpu_us") is None


def test_failures_of_every_round_are_added_up():
    rounds = {"p": {"closed": [one(1, errors=2), one(1, wait=9, not_200=3)], "open": [one(1)]}}
    assert report.summary(rounds)["p"]["failed"] == 5


@pytest.mark.parametrize(("value", "base"), [(None, 1.0), (1.0, None), (1.0, 0.0)])
def test_a_ratio_without_both_sides_is_none(value, base):
    assert report.ratio(value, base) is None


def test_ratios_stand_beside_relay_and_envoy_but_not_beside_oneself():
    rounds = {
        name: {"closed": [one(cpu)]} for name, cpu in (("relay", 10), ("envoy", 30), ("x", 15))
    }
    found = report.ratios(report.summary(rounds))
    assert found["x"]["cpu_us_per_request / relay"] == 1.5
    assert found["x"]["cpu_us_per_request / envoy"] == 0.5
    assert "cpu_us_per_request / envoy" not in found["envoy"]


def test_added_latency_is_over_direct():
    rounds = {
        name: {"open": [one(1, p50_us=p50)]}
        for name, p50 in (("direct", 100.0), ("envoy", 300.0), ("x", 200.0))
    }
    assert report.ratios(report.summary(rounds))["x"]["added p50 at 500 rps / envoy"] == 0.5


@pytest.mark.parametrize(
    ("value", "ok"), [(1.2, True), (1.19, True), (1.2001, False), (None, False)]
)
def test_gate_holds_up_to_its_limit_and_fails_without_a_value(value, ok):
    assert report.Gate("g", value, 1.2, "x").ok is ok


def test_table_shows_nothing_measured_as_a_dash():
    assert report.table(["peer", "us"], [["a", None], ["bcd", 12345.6]]).splitlines() == [
        "peer     us",
        "a         -",
        "bcd   12346",
    ]


def test_cpu_model_of_a_processor_that_names_none():
    assert machine.cpu_model("flags: x\n") == "unknown"
    assert machine.cpu_model("processor: 0\nmodel name\t: Fast 9000\n") == "Fast 9000"


def test_machine_names_no_host_user_or_path():
    assert set(machine.facts()) == {"cpu", "cores", "memory_gib", "kernel", "python", "commit"}
