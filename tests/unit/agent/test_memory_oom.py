import itertools
import json
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.memory import oom, said
from agent.memory.cli import memory
from agent.memory.evidence import _SIGNS, TEXT_BYTES_MAX, EvidenceError, from_stats, from_text

MIB = 1 << 20
SCENARIOS = Path(__file__).parents[2] / "scenarios" / "oom.toml"
CASES = tomllib.loads(SCENARIOS.read_text(encoding="utf-8"))["case"]


def evidence_of(case):
    return from_stats(case["stats"]) if "stats" in case else from_text(case["text"])


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_labelled_case_is_explained(case):
    diagnosis = oom.explain(evidence_of(case))
    verdict = diagnosis.verdict
    assert verdict.cause == case["cause"], diagnosis.plain()
    for name, expected in case.get("figures", {}).items():
        assert diagnosis.figures[name] == pytest.approx(expected * MIB, rel=1e-3), name
    if verdict.cause != "unknown":
        assert 0.5 <= verdict.confidence <= 0.95
        assert len(verdict.change) > 20


def test_every_cause_has_cases_and_real_texts():
    causes = Counter(case["cause"] for case in CASES)
    assert set(causes) == {*oom.CAUSES, "unknown"}
    assert len(CASES) >= 24
    assert min(causes[cause] for cause in oom.CAUSES) >= 2
    real = [case for case in CASES if "#" in case["from"] and not case["from"].startswith("made")]
    assert len(real) >= 24


def test_rows_name_signs_and_causes_that_there_are():
    for row in said.ROWS:
        assert row.cause in oom.CAUSES
        assert frozenset().union(*row.signs, row.without) <= set(_SIGNS)
        assert row.why.format(requested="1 GiB", killed="", limit="")
        assert from_text("nothing of note").signs.isdisjoint(frozenset().union(*row.signs))


def test_no_verdict_rests_on_the_tail_of_a_long_log():
    case = next(c for c in CASES if c["cause"] == "kv_pool")
    long = "INFO 1\n" * (TEXT_BYTES_MAX // 4)
    assert oom.explain(from_text(long + case["text"])).verdict.cause == "kv_pool"


def test_a_hostile_line_costs_no_more_than_its_length():
    began = time.process_time()
    assert from_text("Killed process 1 (" * 40_000).signs <= {"host_kill"}
    assert time.process_time() - began < 10


def test_the_first_message_with_figures_counts():
    first, second = (c["text"] for c in CASES if c["name"].startswith(("many small", "one tensor")))
    assert oom.explain(from_text(first + second)).figures["requested_bytes"] == 1740.8 * MIB // 1


def test_several_processes_are_told_apart():
    text = (
        "CUDA out of memory. Tried to allocate 1.71 GiB. GPU 0 has a total capacity of 22.30 GiB "
        "of which 1.52 GiB is free. Process 29153 has 248.00 MiB memory in use. Process 162529 has "
        "248.00 MiB memory in use. Process 162519 has 20.28 GiB memory in use. Of the allocated "
        "memory 19.55 GiB is allocated by PyTorch, and 244.94 MiB is reserved by PyTorch but "
        "unallocated."
    )
    evidence = from_text(text)
    assert evidence.others_bytes == 496 * MIB
    assert evidence.process_bytes == int(20.28 * (1 << 30))


def test_a_fraction_of_the_device_is_the_device():
    text = (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total "
        "capacity of 255.98 GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated "
        "memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB allocated in private pools "
        "(e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated."
    )
    diagnosis = oom.explain(from_text(text))
    assert diagnosis.verdict.cause == "does_not_fit"
    assert diagnosis.figures["total_bytes"] == int(1.05 * (1 << 30))


@pytest.mark.parametrize(
    ("floor", "found"),
    [
        ([(t, (8 << 30) + t * 500_000) for t in range(0, 6000, 600)], True),
        ([(t, 8 << 30) for t in range(0, 6000, 600)], False),
        ([(t, (8 << 30) - t * 500_000) for t in range(0, 6000, 600)], False),
        # Up and down around the same level: no leak, however full it is.
        ([(t, (8 << 30) + (t % 1200) * 900_000) for t in range(0, 6000, 600)], False),
        ([(0, 8 << 30), (600, 9 << 30)], False),
    ],
)
def test_a_leak_is_a_steady_rise_of_the_floor(floor, found):
    verdict = oom.leak(from_stats({"floor": floor}))
    assert (verdict is not None) is found


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_an_accumulation_that_releases_is_none(missing):
    steps = [16 << 30, 17 << 30, 18 << 30, 19 << 30]
    steps[missing + 1] = steps[missing]
    assert oom.accumulation(from_stats({"micro_steps": steps})) is None


def test_no_figures_never_break_a_judge():
    """Each judge on every pair of figures, none, zero or large: it may say nothing, never raise."""
    names = [name for name in from_stats({}).__dataclass_fields__ if name.endswith("_bytes")]
    for pair in itertools.combinations(names, 2):
        for values in itertools.product((0, 1 << 20, 1 << 36), repeat=2):
            diagnosis = oom.explain(from_stats(dict(zip(pair, values, strict=True))))
            assert 0.0 <= diagnosis.verdict.confidence <= 0.95


@pytest.mark.parametrize(
    ("stats", "name"),
    [
        ({"colour": 1}, "colour"),
        ({"total_bytes": "many"}, "total_bytes"),
        ({"total_bytes": -1}, "total_bytes"),
        ({"total_bytes": True}, "total_bytes"),
        ({"floor": [1, 2]}, "floor"),
        ({"floor": [[0, 1]] * 10_001}, "floor"),
        ({"micro_steps": 3}, "micro_steps"),
        ({"text": 3}, "text"),
    ],
)
def test_figures_that_cannot_be_read_are_named(stats, name):
    with pytest.raises(EvidenceError, match=f"^{name}"):
        from_stats(stats)


@pytest.fixture
def run():
    def invoke(text, *arguments):
        return CliRunner().invoke(memory, ["explain", *arguments], input=text)

    return invoke


def test_a_pasted_text_is_explained(run):
    text = next(c["text"] for c in CASES if c["from"] == "vllm-project/vllm#783")
    result = run(text, "-")
    assert result.exit_code == 0
    assert "cause       other_process" in result.output
    assert "foreign_bytes 16.08 GiB" in result.output


def test_json_has_the_whole_diagnosis(run, tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"limit_bytes": 100, "limit_used_bytes": 99}))
    result = run(None, str(path), "--json")
    value = json.loads(result.output)
    assert (value["cause"], value["figures"]["limit_bytes"]) == ("host_limit", 100)
    assert set(value) == {"cause", "confidence", "why", "change", "figures", "others"}


@pytest.mark.parametrize(
    ("text", "code"), [("all is well", 1), ("", 1), ("{", 2), ('{"colour": 1}', 2), ("{}", 1)]
)
def test_what_is_not_understood_has_its_own_exit_code(run, text, code):
    assert run(text).exit_code == code
