"""Pools that let another one serve what they cannot."""

import json
import threading

import pytest

from tests.blackbox.harness import (
    OK,
    Sidecar,
    new_keys,
    post,
    until,
)
from tests.blackbox.node import free_base
from tests.blackbox.pooled import (
    CHAT,
    P0,
    UNAVAILABLE,
    Pooled,
    asked,
    holding,
    pools,
    state,
    two_pools,
)

# --- overflow


def test_without_overflow_p0_beyond_its_places_is_refused(tmp_path, two):
    release = threading.Event()
    two[0].answering(holding(release))
    toml = two_pools(two, tmp_path, overflow=False)
    with Pooled(tmp_path / "s", toml, QOS_P0_INFLIGHT=1) as sidecar, sidecar.client() as client:
        client.send(post(CHAT, P0))
        two[0].last()
        assert sidecar.ask(post(CHAT, P0)).error() == "queue_full"
        release.set()
        assert client.answer().get("X-QoS-Pool") == b"dedicated"
    assert asked(two) == [1, 0]


def test_p0_without_a_place_goes_to_the_shared_pool_as_one_of_its_own(tmp_path, two):
    release = threading.Event()
    two[0].answering(holding(release))
    keys = new_keys(tmp_path / "keys")
    toml = two_pools(two, tmp_path, overflow=True)
    with (
        Pooled(tmp_path / "s", toml, keys=keys, QOS_P0_INFLIGHT=1) as sidecar,
        sidecar.client() as client,
    ):
        client.send(post(CHAT, P0))
        two[0].last()
        answer = sidecar.ask(post(CHAT, P0))
        assert answer.status == 200
        assert (answer.get("X-QoS-Class"), answer.get("X-QoS-Pool")) == (b"P0", b"shared")
        seen = two[1].last()
        assert seen.get("Host") == b"shared.test"
        assert seen.all("Authorization") == [b"Bearer shared"]
        assert seen.get("X-QoS-Class") == b"P0"
        record = sidecar.record(answer.trace_id)
        assert (record["qos"], record["pool"]) == ("P0", "shared")
        assert sidecar.metric("tongguan_proxy_pool_overflows_total", pool="dedicated") == 1
        release.set()
        assert client.answer().get("X-QoS-Pool") == b"dedicated"
        assert sidecar.metric("tongguan_proxy_pool_inflight") == 0


@pytest.mark.parametrize("size", [len(CHAT), 3 << 20], ids=["whole", "streamed"])
def test_p0_whose_pool_cannot_be_reached_goes_to_the_shared_one(tmp_path, two, size):
    closed = f"http://127.0.0.1:{free_base()}"
    toml = two_pools(two, tmp_path, overflow=True, endpoints=json.dumps([closed]))
    body = CHAT + b" " * (size - len(CHAT))
    more = {"POOLS_DEDICATED_EJECT_ERRORS": 2, "QOS_P0_PREOPEN": 0}
    with Pooled(tmp_path / "s", toml, **more) as sidecar:
        for _ in range(5):
            answer = sidecar.ask(post(body, P0))
            assert (answer.status, answer.get("X-QoS-Pool")) == (200, b"shared")
        # Once it is suspect it is not asked for each request any more.
        assert sidecar.metric("tongguan_proxy_pool_connect_failures_total") == 2
        assert sidecar.metric("tongguan_proxy_pool_inflight") == 0
    assert [seen.payload == body for seen in two[1].seen] == [True] * 5
    assert {seen.get("Host") for seen in two[1].seen} == {b"shared.test"}
    assert {seen.get("Authorization") for seen in two[1].seen} == {b"Bearer shared"}


def test_a_pool_that_let_another_one_serve_comes_back_by_itself(tmp_path, two):
    two[0].answering(UNAVAILABLE)
    toml = two_pools(two, tmp_path, overflow=True, eject_errors=2, eject_s=0.3)
    with Pooled(tmp_path / "s", toml) as sidecar:
        assert [sidecar.ask(post(CHAT, P0)).status for _ in range(3)] == [503, 503, 200]
        assert asked(two) == [2, 1]
        two[0].answering(OK)
        until(
            lambda: sidecar.ask(post(CHAT, P0)).get("X-QoS-Pool") == b"dedicated",
            "the dedicated pool",
        )
        assert state(sidecar, two[0], "dedicated") == "healthy"


def test_overflow_goes_one_step(tmp_path, two):
    """P0 that finds no place in the dedicated pool nor in the shared one is refused."""
    release = threading.Event()
    for upstream in two:
        upstream.answering(holding(release))
    toml = two_pools(two, tmp_path, overflow=True, inflight=1)
    more = {"POOLS_SHARED_INFLIGHT": 1, "POOLS_SHARED_OVERFLOW": "true"}
    with (
        Pooled(tmp_path / "s", toml, **more) as sidecar,
        sidecar.client() as one,
        sidecar.client() as other,
    ):
        one.send(post(CHAT, P0))
        two[0].last()
        other.send(post(CHAT, P0))
        two[1].last()
        assert sidecar.ask(post(CHAT, P0)).error() == "queue_full"
        release.set()
        assert [client.answer().status for client in (one, other)] == [200, 200]


def test_the_last_pool_has_no_overflow_to_set(tmp_path, two):
    toml = pools(best_effort={"overflow": "true"})
    sidecar = Sidecar(tmp_path / "s", two[0].url, toml=toml, POOLS_BEST_EFFORT_OVERFLOW="true")
    assert sidecar.spawn().ended() == 2
    first, second = sidecar.log.splitlines()
    assert "pools.best_effort.overflow: unknown" in first
    assert "TONGGUAN_POOLS_BEST_EFFORT_OVERFLOW: unknown" in second


def test_the_shared_pool_lets_best_effort_serve(tmp_path, two):
    closed = f"http://127.0.0.1:{free_base()}"
    toml = pools(
        shared={"endpoints": json.dumps([closed]), "overflow": "true"},
        best_effort={"endpoints": json.dumps([two[1].url])},
    )
    with Pooled(tmp_path / "s", toml) as sidecar:
        answer = sidecar.ask(post(CHAT))
        assert (answer.get("X-QoS-Class"), answer.get("X-QoS-Pool")) == (b"P1", b"best_effort")


def test_ids_that_only_the_first_pool_understands_are_not_asked_of_the_other(tmp_path, two):
    closed = f"http://127.0.0.1:{free_base()}"
    keys = new_keys(tmp_path / "keys")
    toml = two_pools(two, tmp_path, overflow=True, endpoints=json.dumps([closed]), token_ids="true")
    with Pooled(tmp_path / "s", toml, keys=keys) as sidecar:
        assert sidecar.ask(post(CHAT, P0)).status == 200
    seen = two[1].last()
    assert seen.payload == CHAT
    assert seen.get("Content-Length") == b"%d" % len(CHAT)
