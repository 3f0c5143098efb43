"""perf.rounds and the channel's comparison: times to ratios and gates."""

from __future__ import annotations

import math

import pytest

from perf import channel, report, rounds


def test_a_ratio_is_that_of_the_same_round():
    # The machine slows down threefold: every contestant with it.
    times = {"base": [100.0, 300.0, 310.0], "own": [50.0, 150.0, 200.0]}
    rows = rounds.summary(times, "base")
    assert rows["own"].ratio == 0.5
    assert rows["own"].us == 0.15
    assert rows["base"].ratio == 1


def test_each_contestant_is_called_in_every_round():
    calls = {"a": 0, "b": 0}

    def call(name):
        calls[name] += 1
        sum(range(20_000))

    found = rounds.interleaved({n: lambda n=n: call(n) for n in calls}, "a", 3)
    assert set(found) == {"a", "b"}
    assert min(calls.values()) >= 3 * rounds.CALLS_MIN
    assert 0.2 < found["b"].ratio < 5


def test_the_calls_of_a_round_are_bounded():
    assert rounds.calls_a_round(lambda: sum(range(500_000))) >= rounds.CALLS_MIN
    assert rounds.calls_a_round(lambda: None) <= rounds.CALLS_MAX


def test_welch_sees_a_difference_and_only_that():
    first = [100.0 + i % 7 for i in range(1000)]
    assert abs(rounds.welch_t(first, list(first))) < 1e-9
    assert rounds.welch_t(first, [x + 1 for x in first]) < -4.5
    assert rounds.welch_t([x + 1 for x in first], first) > 4.5


def test_welch_ignores_the_slowest_tenth():
    first = [100.0 + i % 7 for i in range(1000)]
    assert abs(rounds.welch_t(first, first[:-50] + [1e9] * 50)) < 4.5


def test_welch_of_constant_samples_is_zero_or_infinite():
    assert rounds.welch_t([1.0] * 20, [1.0] * 20) == 0
    assert math.isinf(rounds.welch_t([1.0] * 20, [2.0] * 20))


def test_midmean_leaves_out_the_outer_fifths():
    assert rounds.midmean([5.0, -1e9, 1e9, 4.0, 6.0]) == 5.0
    assert rounds.midmean([7.0]) == 7.0


def test_standard_error_of_a_midmean_shrinks_with_the_values():
    values = [i * 7919 % 10007 / 100 for i in range(6400)]
    error = rounds.standard_error(values[:200])
    assert error is not None
    assert 0 < (rounds.standard_error(values) or 0) < error < 10
    assert rounds.standard_error(values[:39]) is None


def answers(latency, cpu):
    return [{"latency_ms": latency, "cpu_ms": cpu, "wait": 0.0}] * 2


def results(sm4_cpu=5.2, aes_cpu=5.5, sm4_latency=8.3):
    return {
        channel.PLAIN: [*answers(8.2, 5.0), {"latency_ms": 99.0, "cpu_ms": 99.0, "wait": 0.0}],
        channel.SM4: (answers(sm4_latency, sm4_cpu) * 2)[:3],
        channel.AES: (answers(8.4, aes_cpu) * 2)[:3],
    }


def test_a_disturbed_round_of_the_channel_does_not_count():
    found = channel.compare(results())
    assert found["sm4 / plaintext cpu_ms"] == pytest.approx(1.04)
    assert found["sm4 - plaintext latency_ms"] == pytest.approx(0.1)
    assert all(gate.ok for gate in channel.gates(found))


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"sm4_latency": 8.65}, "sm4 - plaintext latency_ms"),
        ({"sm4_latency": 8.65}, "sm4 / plaintext latency_ms"),
        ({"sm4_cpu": 6.3, "aes_cpu": 7.0}, "sm4 / plaintext cpu_ms"),
        ({"sm4_cpu": 5.62}, "sm4 / aes-256 cpu_ms"),
        ({"sm4_latency": 8.6}, "sm4 / aes-256 latency_ms"),
    ],
)
def test_each_promise_of_the_channel_can_be_missed(changes, missed):
    gates = channel.gates(channel.compare(results(**changes)))
    assert missed in {gate.name for gate in gates if not gate.ok}


def test_a_promise_that_was_not_measured_is_missed():
    assert not any(gate.ok for gate in channel.gates({}))


@pytest.mark.parametrize(("value", "ok"), [(3.9, False), (4.0, True), (None, False)])
def test_a_gate_may_ask_for_at_least(value, ok):
    gate = report.Gate("x", value, 4.0, "GB/s", at_least=True)
    assert gate.ok is ok
    assert report.gate_row(gate)["ok"] is ok
    assert ("MISSED" in report.gate_lines([gate])[0]) is not ok
