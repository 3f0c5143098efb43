"""perf.promises: which gates a run has, and what each compares."""

from __future__ import annotations

import pytest

from perf import promises, report

ROW = {
    "cpu_us_per_request": 10.0,
    "cpu_us_per_event": 10.0,
    "added_p50_us": 10.0,
    "failed": 0.0,
}
NAMES = ("relay", "haproxy", "envoy", "aiohttp", "tongguan", "tongguan-passthrough")
FOOT = {
    "rss_mb_started": 10.0,
    "rss_mb": 10.0,
    "cold_start_s": 0.1,
    "rss_growth_64_mb": 0.1,
    "rss_growth_stalled_mb": 0.1,
    "gone_ms": 1.0,
    "gone_silent_ms": 1.0,
}


def everybody(**changed):
    rows = {name: dict(ROW) for name in NAMES}
    rows["envoy"] |= {"cpu_us_per_request": 30.0, "cpu_us_per_event": 30.0, "added_p50_us": 30.0}
    rows["aiohttp"]["cpu_us_per_request"] = 100.0
    for name, figures in changed.items():
        rows[name.replace("_", "-")] |= figures
    return rows


def missed(rows, feet=None, apart=None):
    feet = feet or {"tongguan": dict(FOOT), "envoy": {**FOOT, "rss_mb_started": 60, "rss_mb": 60}}
    return [gate.name for gate in promises.whole(rows, feet, apart or {}) if not gate.ok]


def test_all_promises_can_hold():
    assert missed(everybody()) == []


@pytest.mark.parametrize(
    ("changed", "gates"),
    [
        ({"tongguan_passthrough": {"cpu_us_per_request": 26.0}}, 4),  # relay, envoy, haproxy, 4x
        ({"tongguan": {"cpu_us_per_request": 29.0}}, 1),
        ({"tongguan": {"added_p50_us": 30.1}}, 1),
        ({"tongguan": {"cpu_us_per_event": 13.6}}, 1),
        ({"tongguan": {"cpu_us_per_event": 24.0}}, 2),
        ({"tongguan_passthrough": {"failed": 1.0}}, 1),
        ({"tongguan": {"cpu_us_per_request": None}}, 1),
    ],
)
def test_each_figure_that_is_too_large_or_absent_misses_its_gates(changed, gates):
    assert len(missed(everybody(**changed))) == gates


@pytest.mark.parametrize("metric", FOOT)
def test_each_figure_of_a_footprint_is_judged(metric):
    feet = {
        "tongguan": {**FOOT, metric: 1e3},
        "envoy": {**FOOT, "rss_mb_started": 60, "rss_mb": 60},
    }
    assert len(missed(everybody(), feet)) == 1
    del feet["tongguan"][metric]
    assert len(missed(everybody(), feet)) == 1


def test_a_peer_that_was_not_there_has_no_gate():
    rows = everybody()
    del rows["envoy"], rows["haproxy"]
    names = [gate.name for gate in promises.whole(rows, {}, {})]
    assert not [name for name in names if "envoy" in name or "haproxy" in name]
    assert [name for name in names if "relay" in name]


def test_a_slow_peer_is_judged_by_its_own_run():
    apart = {
        "mitmdump": {"mitmdump": {**ROW, "cpu_us_per_request": 390.0}, "tongguan-passthrough": ROW}
    }
    assert missed(everybody(), apart=apart) == [
        "times less CPU/request, pass-through, than mitmdump"
    ]


def test_the_short_list_stays_as_it_is():
    rows = {name: dict(ROW) for name in ("direct", "relay", "envoy", "tongguan")}
    gates = promises.short(rows, {"tongguan": FOOT})
    assert [(gate.limit, gate.unit) for gate in gates] == [
        (1.2, "x"), (44.0, "MB"), (0.3, "s"), (0, ""),
    ]  # fmt: skip
    assert promises.short({"envoy": ROW}, {}) == []


def test_a_goal_is_shown_beside_its_gate():
    gate = report.Gate("g", 2.2, 2.3, "x", goal=2.0)
    assert report.gate_lines([gate]) == ["ok     g: 2.2 x (goal 2, at most 2.3 x)"]
    assert report.gate_row(gate)["goal"] == 2.0


def test_a_peer_measured_apart_is_placed_by_the_sidecar_beside_it():
    rows = everybody(tongguan_passthrough={"cpu_us_per_request": 15.0})
    apart = {
        "litellm": {
            "peers": {
                "litellm": {"cpu_us_per_request": 6000.0},
                "tongguan-passthrough": {"cpu_us_per_request": 20.0},
            }
        }
    }
    found = report.beside_envoy(rows, apart, "cpu_us_per_request")
    assert found["litellm"] == 150
    assert list(found)[-1] == "litellm"
    assert "litellm" not in report.beside_envoy(rows, {}, "cpu_us_per_request")
