import dataclasses
import time

import pytest

from agent.engine.types import EngineStats
from agent.memory.admission import PREDICTED_TOKENS, STALE_S, predicted_tokens, shortage
from agent.memory.nvml import decode
from agent.memory.topology import Allocator
from tests.unit.agent.memory_kit import GIB, host, reading, report

MIB = 1 << 20
NOW_S = 1_000_000.0


def stats(**changes):
    base = EngineStats(
        running=0, waiting=0, waiting_limit=8, sequences_limit=4, kv_blocks_total=1000,
        kv_blocks_used=0, kv_blocks_cached=0, prompt_tokens_total=0, generation_tokens_total=0,
        prefix_tokens_queried_total=0, prefix_tokens_hit_total=0, preemptions_total=0,
        steps_total=0, step_seconds_total=0.0, finished_total={}, kv_block_bytes=MIB,
        kv_block_tokens=16, kv_blocks_touched=0, kv_blocks_promised=0,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def ask(engine, tokens, left_mib, reserve_mib=64, **changes):
    """Ask for tokens with so many MiB between the working set and the limit."""
    of = host(limit=4 * GIB, used=4 * GIB - left_mib * MIB, **changes)
    return shortage(
        engine, report(of, at=NOW_S), tokens=tokens, reserve_bytes=reserve_mib * MIB,
        now_unix_s=NOW_S,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "most", "expected"),
    [(10, 5, 15), (10, 10_000, 10 + PREDICTED_TOKENS), (0, PREDICTED_TOKENS, PREDICTED_TOKENS)],
)
def test_an_answer_counts_up_to_the_usual_length(prompt, most, expected):
    assert predicted_tokens(prompt, most) == expected


def test_what_fits_is_let_in_and_one_block_more_is_not():
    assert ask(stats(), 160, 74) is None
    short = ask(stats(), 161, 74)
    assert (short.needed_bytes, short.left_bytes) == (11 * MIB, 10 * MIB)
    assert str(short) == (
        "this request and those before it may need 11 MiB more, and 10 MiB are left "
        "(the container's limit)"
    )


def test_promises_to_others_count_once():
    promised = stats(kv_blocks_promised=20, kv_blocks_used=4, kv_blocks_touched=4)
    assert ask(promised, 160, 64 + 26) is None
    assert ask(promised, 160, 64 + 25).needed_bytes == 26 * MIB


def test_blocks_whose_pages_exist_cost_nothing():
    assert ask(stats(kv_blocks_touched=100), 1600, 0) is None


def test_cached_blocks_are_not_to_be_had_while_others_are_free():
    assert ask(stats(kv_blocks_touched=10, kv_blocks_cached=10), 160, 64 + 9) is not None


def test_no_request_needs_more_than_the_pool():
    full = stats(kv_blocks_total=100, kv_blocks_promised=500, kv_blocks_touched=90)
    assert ask(full, 16_000, 64 + 10) is None


def test_without_a_limit_the_machine_counts():
    short = ask(stats(), 1600, 0, cgroup=None, available=100 * MIB)
    assert "the machine's memory" in str(short)
    assert short.left_bytes == 36 * MIB


@pytest.mark.parametrize("age_s", [STALE_S + 1, -60.0])
def test_a_stale_report_refuses_nobody(age_s):
    found = report(host(limit=GIB, used=GIB), at=NOW_S - age_s)
    assert shortage(stats(), found, tokens=999, reserve_bytes=0, now_unix_s=NOW_S) is None


@pytest.mark.parametrize(("free", "held", "refused"), [(100, 0, False), (10, 80, False),
                                                       (10, 20, True)])  # fmt: skip
def test_a_gpus_reserve_may_lie_in_the_allocator(free, held, refused):
    gpus = decode(reading("l4x2"))
    gpus = dataclasses.replace(
        gpus, gpus=(dataclasses.replace(gpus.gpus[0], free_bytes=free * MIB),)
    )
    account = Allocator(GIB, GIB, GIB + held * MIB, 0, 0, 0)
    found = report(gpus=gpus, allocators={gpus.gpus[0].uuid: account}, at=NOW_S)
    short = shortage(stats(), found, tokens=16, reserve_bytes=64 * MIB, now_unix_s=NOW_S)
    assert (short is not None) is refused


class Fixed:
    """A memory watch whose report is given."""

    def __init__(self, latest):
        self.latest = latest
        self.failures = 0


def test_the_api_answers_503_with_the_reason(start, engine):
    served = start()
    engine.stats = stats
    served.node.memory = Fixed(report(host(limit=GIB, used=GIB), at=time.time()))
    body = {"prompt": "Hi", "max_tokens": 4}
    answer = served.client.post("/v1/completions", json=body)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "out_of_memory"
    assert "the container's limit" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    hits = {"setting": "memory_reserve_bytes"}
    assert served.metrics.registry.get_sample_value("tongguan_agent_limit_hits_total", hits) == 1
    assert engine.generations.empty()
    served.node.memory = Fixed(report(host(), at=time.time()))
    assert served.client.post("/v1/completions", json=body).status_code == 200
