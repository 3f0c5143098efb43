"""The list of faults is such that `make mutants` can put each in and knows what has to fail."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests import mutants

ROOT = Path(__file__).resolve().parents[1]
FAULTS = mutants.mutants(mutants.LIST.read_text(encoding="utf-8"))
LEAST = 30
# The data path: what has to have faults in it.
PLACES = (
    "proxy/server.py", "proxy/relay.py", "proxy/upstream.py", "proxy/exchange.py",
    "proxy/replier.py", "proxy/reception.py", "proxy/retry.py", "proxy/http/", "proxy/qos/",
    "kernels/wire/",
)  # fmt: skip


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("mutant", FAULTS, ids=[mutant.fault for mutant in FAULTS])
def test_fault_has_one_place_and_a_test(mutant: mutants.Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    faulty = mutants.changed(text, mutant)  # the place is there, and once
    assert faulty != text
    if mutant.file.endswith(".py"):
        compile(faulty, mutant.file, "exec")
    file, function = mutant.test
    assert function in functions(file)


def test_faults_have_names_of_their_own_and_are_all_over_the_data_path() -> None:
    assert len(FAULTS) >= LEAST
    assert max(Counter(mutant.fault for mutant in FAULTS).values()) == 1
    for place in PLACES:
        assert any(mutant.file.startswith(place) for mutant in FAULTS), place


def test_a_place_that_is_not_there_or_there_twice_is_refused() -> None:
    mutant = mutants.Mutant("f", "proxy/a.py", "a = 1", "a = 2", "test_a.py::test_a[x]")
    assert mutant.test == ("tests/blackbox/test_a.py", "test_a")
    assert mutants.changed("a = 1\n", mutant) == "a = 2\n"
    for text in ("b = 1\n", "a = 1\na = 1\n"):
        with pytest.raises(mutants.MutantError):
            mutants.changed(text, mutant)


@pytest.mark.parametrize(
    ("code", "said", "word"),
    [
        (1, "1 failed in 2.00s", "caught"),
        (1, "1 failed, 3 passed in 2.00s", "caught"),
        (0, "1 passed in 2.00s", "SURVIVED"),
        (0, "2 passed, 1 skipped in 2.00s", "SURVIVED"),
        (0, "4 skipped in 0.40s", "SKIPPED"),
    ],
)
def test_a_test_that_was_skipped_has_caught_nothing(code: int, said: str, word: str) -> None:
    assert mutants.verdict(code, said) == word


def test_a_run_that_was_none_says_nothing() -> None:
    with pytest.raises(mutants.MutantError, match="pytest ended with 4"):
        mutants.verdict(4, "no tests ran")
