"""perf.soak: what it concludes from what it saw."""

from __future__ import annotations

import os
import random
import socket

import pytest

from perf import soak


def line(mb_per_s: float, noise: float = 0.0):
    rng = random.Random(3)
    return [(t / 2, 40 + mb_per_s * t / 2 + rng.uniform(-noise, noise)) for t in range(1200)]


@pytest.mark.parametrize("mb_per_s", [0.0, 0.01, -0.02])
def test_growth_is_that_of_the_whole_time(mb_per_s):
    assert soak.growth_mb(line(mb_per_s)) == pytest.approx(mb_per_s * 600, abs=0.1)


def test_growth_is_found_in_noise_and_noise_is_none():
    assert abs(soak.growth_mb(line(0.0, noise=4.0))) < 1
    assert soak.growth_mb(line(0.01, noise=4.0)) > 5


def test_a_few_high_samples_are_no_growth():
    samples = [(t, mb + 30 * (t > 590)) for t, mb in line(0.0)]
    assert soak.growth_mb(samples) < 0.1


@pytest.mark.parametrize("samples", [[], [(0.0, 1.0)]])
def test_too_few_samples_are_no_growth(samples):
    assert soak.growth_mb(samples) == 0


def test_what_is_held_for_a_while_is_no_growth():
    samples = [(t, mb + 8 * (int(t) % 20 < 14)) for t, mb in line(0.0)]
    assert soak.growth_mb(samples) < 0.1


@pytest.mark.parametrize(
    ("load", "json"), [(0.6, 300), (0.5, 360), (0.01, 450), (0.0, 450), (1.2, 150), (9.0, 150)]
)
def test_the_next_rates_follow_the_load_in_bounded_steps(load, json):
    assert soak.next_rates(dict(soak.FIRST), load, 0.05)["json"] == pytest.approx(json)


def test_where_much_is_shed_the_rates_go_down_whatever_the_load():
    assert soak.next_rates(dict(soak.FIRST), 0.1, 0.2)["json"] == pytest.approx(210)


def test_rates_have_a_top():
    assert soak.next_rates(dict(soak.TOP), 0.1, 0.0) == soak.TOP


def test_sockets_towards_a_port_are_counted():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert soak.upstream_sockets(os.getpid(), port) == 0
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            assert soak.upstream_sockets(os.getpid(), port) == 1
