"""Metrics of several processes as one; what workers are told of themselves."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.config import WORKERS_MAX, load
from proxy.settings import SettingsError
from proxy.workers import Board, Worker, merge

ONE = """\
# HELP tongguan_proxy_a_total A.
# TYPE tongguan_proxy_a_total counter
tongguan_proxy_a_total{x="1"} 3.0
# HELP tongguan_proxy_loop_lag_seconds Lag.
# TYPE tongguan_proxy_loop_lag_seconds gauge
tongguan_proxy_loop_lag_seconds 0.5
# HELP tongguan_proxy_audit_available Audit.
# TYPE tongguan_proxy_audit_available gauge
tongguan_proxy_audit_available 1.0
# HELP tongguan_proxy_sm4_info Tier.
# TYPE tongguan_proxy_sm4_info gauge
tongguan_proxy_sm4_info{tier="x y"} 1.0
"""
OTHER = """\
# HELP tongguan_proxy_a_total A.
# TYPE tongguan_proxy_a_total counter
tongguan_proxy_a_total{x="1"} 4.0
tongguan_proxy_a_total{x="2"} 1.0
# HELP tongguan_proxy_loop_lag_seconds Lag.
# TYPE tongguan_proxy_loop_lag_seconds gauge
tongguan_proxy_loop_lag_seconds 0.25
# HELP tongguan_proxy_audit_available Audit.
# TYPE tongguan_proxy_audit_available gauge
tongguan_proxy_audit_available 0.0
# HELP tongguan_proxy_sm4_info Tier.
# TYPE tongguan_proxy_sm4_info gauge
tongguan_proxy_sm4_info{tier="x y"} 1.0
# HELP tongguan_proxy_new New.
# TYPE tongguan_proxy_new gauge
tongguan_proxy_new 2.0
"""


def samples(text):
    rows = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, *sorted(sample.labels.values())
            assert key not in rows
            rows[key] = sample.value
    return rows


def test_counts_are_added_and_states_are_not():
    expected = {
        ("tongguan_proxy_a_total", "1"): 7.0,
        ("tongguan_proxy_a_total", "2"): 1.0,
        ("tongguan_proxy_loop_lag_seconds",): 0.5,
        ("tongguan_proxy_audit_available",): 0.0,
        ("tongguan_proxy_sm4_info", "x y"): 1.0,
        ("tongguan_proxy_new",): 2.0,
    }
    assert samples(merge([ONE, OTHER])) == expected
    assert samples(merge([OTHER, ONE])) == expected


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("gauge", "tongguan_proxy_pool_inflight", 5),
        ("gauge", "tongguan_proxy_endpoint_first_byte_seconds", 3),
        ("gauge", "process_start_time_seconds", 3),
        ("gauge", "tongguan_proxy_reload_last_success_timestamp_seconds", 2),
        ("gauge", "tongguan_proxy_audit_available", 2),
        ("gauge", "tongguan_proxy_replay_entries_limit", 3),
        ("counter", "process_cpu_seconds_total", 5),
        ("histogram", "tongguan_proxy_request_duration_seconds", 5),
    ],
)
def test_how_a_number_is_joined_follows_its_kind_and_name(kind, name, expected):
    sample = name + '_bucket{le="1.0",qos="P0"}' if kind == "histogram" else name
    texts = [f"# HELP {name} X.\n# TYPE {name} {kind}\n{sample} {n}\n" for n in (2, 3)]
    assert merge(texts).splitlines()[-1] == f"{sample} {float(expected)}"


def test_one_text_alone_stays_as_it_is():
    assert merge([ONE]) == ONE
    assert samples(merge([OTHER])) == samples(OTHER)


def test_only_the_first_worker_has_the_sealed_door_and_the_admin_address(tmp_path):
    settings = load("", {})
    first, other = (Worker(index, 2, tmp_path, 0, Board()) for index in (0, 1))
    assert first.doors(settings) == settings.doors
    assert other.doors(settings).app == settings.doors.app
    assert other.doors(settings).sealed == ""
    assert other.doors(settings).admin == f"unix:{tmp_path}/1.sock"
    assert other.doors(load("[doors]\nadmin = ''", {})).admin == ""


def test_all_workers_have_the_sealed_door_where_they_share_a_replay_store(tmp_path):
    settings = load("[envelope]\nreplay_store = 'redis'", {})
    other = Worker(1, 2, tmp_path, 0, Board())
    assert other.doors(settings).sealed == settings.doors.sealed


def test_board_counts_for_each_worker_apart():
    board = Board()
    board.count_restart(0)
    board.count_restart(WORKERS_MAX - 1)
    board.count_restart(0)
    board.set_serves(1, serves=True)
    assert [board.restarts(i) for i in (0, 1, WORKERS_MAX - 1)] == [2, 0, 1]
    assert [board.serves(i) for i in (0, 1, WORKERS_MAX - 1)] == [False, True, False]
    board.set_serves(1, serves=False)
    assert not board.serves(1)


@pytest.mark.parametrize("count", ["0", "65", "x"])
def test_number_of_workers_is_bounded(count):
    with pytest.raises(SettingsError, match="WORKERS"):
        load("", {"TONGGUAN_WORKERS": count})
