"""Live, ready, and what an operator should know."""

from __future__ import annotations

import asyncio
import errno

import pytest

from proxy.audit import disk
from proxy.audit import writer as writer_module
from proxy.audit.writer import AuditUnavailableError, AuditWriter
from proxy.clock import ManualClock
from proxy.config import load
from proxy.context import Context
from proxy.health import CLOCK_BEHIND_MS, Health
from tests.unit.proxy.audit_chains import config, request, run
from tests.unit.proxy.sm4_kit import NOW_MS, make_key, make_receiver
from tests.unit.proxy.test_audit_checkpoints import SIGNER, Obliging

STUCK_MS = 10_000  # timeouts.loop_stuck_s


class Clock(ManualClock):
    """A manual clock that knows how far the wall clock lies behind it."""

    __slots__ = ("behind",)

    def __init__(self):
        super().__init__(NOW_MS, mono_ns=1)
        self.behind = 0

    def behind_ms(self):
        return self.behind


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


def health_of(loop, text=""):
    clock = Clock()
    context = Context(load(text, {}), clock, loop, "node")
    return Health(context, clock), context, clock


@pytest.fixture
def parts(loop):
    health, context, clock = health_of(loop)
    health.started = True
    return health, context, clock


# --- live


def test_a_loop_that_turns_is_live(parts):
    health, _, clock = parts
    clock.advance_ms(STUCK_MS)
    assert health.dead() == []


def test_a_loop_that_is_stuck_is_dead_and_says_for_how_long(parts):
    health, _, clock = parts
    clock.advance_ms(STUCK_MS + 2_500)
    assert health.dead() == ["loop_stuck_s=12"]
    assert health.lag_ms() == STUCK_MS + 2_400
    assert health.unready() == ["loop_stuck_s=12"]
    health.last_tick_ns = clock.mono_ns()
    assert (health.dead(), health.unready(), health.lag_ms()) == ([], [], 0)


def test_a_loop_that_turns_in_time_has_no_lag(parts):
    health, _, clock = parts
    clock.advance_ms(100)
    assert health.lag_ms() == 0


def test_a_listener_that_has_closed_is_named_but_not_in_a_drain(parts, loop):
    health, context, _ = parts

    async def served():
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        health.listeners["app"] = server
        assert health.unready() == []
        server.close()
        assert health.unready() == ["door_closed=app"]

    loop.run_until_complete(served())
    context.draining = True
    assert health.unready() == ["draining"]


def test_a_slow_start_is_not_dead(loop):
    health, _, clock = health_of(loop)
    clock.advance_ms(600_000)
    assert health.dead() == []


# --- ready


def test_a_started_sidecar_is_ready(parts):
    assert parts[0].unready() == []


def test_before_the_doors_are_open_it_is_starting(loop):
    assert health_of(loop)[0].unready() == ["starting"]


def test_a_draining_one_is_not_ready(parts):
    health, context, _ = parts
    context.draining = True
    assert health.unready() == ["draining"]
    assert health.dead() == []


def test_the_start_fence_counts_down_and_includes_its_last_millisecond(parts):
    health, context, clock = parts
    context.receiver = make_receiver()
    health.fence_until_ms = NOW_MS + 10_000
    assert health.unready() == ["start_fence_ms=10000"]
    clock.advance_ms(9_999)
    health.last_tick_ns = clock.mono_ns()
    assert health.unready() == ["start_fence_ms=1"]
    clock.advance_ms(1)
    assert health.unready() == ["start_fence_ms=0"]
    clock.advance_ms(1)
    assert health.unready() == []


def test_without_a_fence_or_a_sealed_door_there_is_nothing_to_wait_for(parts):
    health, context, _ = parts
    health.fence_until_ms = NOW_MS + 10_000
    assert health.unready() == []  # the sealed door is closed
    context.receiver = make_receiver()
    health.fence_until_ms = -1
    assert health.unready() == []


def test_a_wall_clock_far_behind_makes_it_unready(parts):
    health, _, clock = parts
    clock.behind = CLOCK_BEHIND_MS
    assert health.unready() == []
    clock.behind = CLOCK_BEHIND_MS + 1
    assert health.unready() == ["clock_behind_ms=5001"]


def test_without_a_key_in_time_the_sealed_door_is_of_no_use(parts):
    health, context, clock = parts
    context.receiver = make_receiver(make_key(not_after_ms=NOW_MS + 60_000))
    health.fence_until_ms = -1
    assert health.unready() == []
    clock.advance_ms(3_600_000)
    health.last_tick_ns = clock.mono_ns()
    assert health.unready() == ["no_live_kid"]


def test_all_reasons_are_given_at_once(loop):
    health, context, clock = health_of(loop)
    context.draining = True
    context.receiver = make_receiver(make_key(not_after_ms=NOW_MS - 3_000_000))
    health.fence_until_ms = NOW_MS + 5
    clock.behind = 6_000
    assert health.unready() == [
        "starting",
        "draining",
        "start_fence_ms=5",
        "clock_behind_ms=6000",
        "no_live_kid",
    ]


# --- notes


def test_a_bare_sidecar_says_what_is_off(parts):
    assert parts[0].notes() == ["audit_off", "sealed_door_closed"]


def test_plain_prompt_hashes_are_told(loop):
    health, context, _ = health_of(loop, "[audit]\nprompt_hash_mode = 'plain'\n")
    context.receiver = make_receiver()
    (note,) = [n for n in health.notes() if n != "audit_off"]
    assert note.startswith("prompt_hashes_plain")


@pytest.mark.parametrize(("policy", "reasons"), [("degrade", []), ("block", ["audit_unavailable"])])
def test_a_chain_that_cannot_be_written_blocks_or_is_noted(tmp_path, monkeypatch, policy, reasons):
    async def scene():
        loop = asyncio.get_running_loop()
        health, context, clock = health_of(loop, f"[audit]\non_failure = '{policy}'\n")
        health.started = True
        context.receiver = make_receiver()
        health.fence_until_ms = -1
        writer = context.audit = AuditWriter.start(config(tmp_path), clock, loop)
        assert (health.unready(), health.notes()) == ([], [])

        def full(*_):
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "pwrite", full)
            patch.setattr(writer_module, "RETRY_S", 0.01)
            seq = writer.append_request(request(1))
            with pytest.raises(AuditUnavailableError):
                await writer.durable(seq)
            found = health.unready(), health.notes()
        await writer.close()
        return found

    assert run(scene) == (reasons, ["audit_degraded"])


@pytest.mark.parametrize("trouble", ["witness_refused", "witness_unreachable"])
@pytest.mark.parametrize("policy", ["degrade", "block"])
def test_trouble_with_the_witness_is_noted_or_blocks(tmp_path, policy, trouble):
    class Witness(Obliging):
        def __init__(self):
            super().__init__()
            self.trouble = ""

    async def scene():
        loop = asyncio.get_running_loop()
        health, context, clock = health_of(loop, f"[audit]\non_failure = '{policy}'\n")
        health.started = True
        context.receiver = make_receiver()
        health.fence_until_ms = -1
        witness, other = Witness(), Witness()
        other.name = "unix:/run/agent.sock"
        values = config(tmp_path, signers=(SIGNER,), witnesses=(witness, other))
        context.audit = AuditWriter.start(values, clock, loop)
        assert (health.unready(), health.notes()) == ([], [])
        witness.trouble = trouble
        one = health.unready(), health.notes()
        other.trouble = "witness_unreachable"
        both = health.unready(), health.notes()
        await context.audit.close()
        return one, both

    told = f"{trouble}: {Obliging.name}"
    other = "witness_unreachable: unix:/run/agent.sock"
    one, both = run(scene)
    stops = policy == "block" and trouble == "witness_refused"
    assert one == (([told], []) if stops else ([], [told]))
    assert both == (([told, other], []) if policy == "block" else ([], [told, other]))
