"""The fuzzers of the sidecar's readers, a moment of each; `make fuzz` runs longer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kernels import wire
from tests.fuzz import chains, envelope, sse
from tests.unit.kernels import wire_cases

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = random.SystemRandom().randrange(1 << 32)


def test_damaged_event_streams_come_apart_as_the_standard_says() -> None:
    rng = random.Random(SEED)
    for _ in range(2000):
        sse.check(rng)


@pytest.mark.parametrize("check", chains.CHECKS)
def test_lines_leaves_and_sums_are_those_of_the_twins(
    check: Callable[[random.Random], None],
) -> None:
    rng = random.Random(SEED)
    for _ in range(200):
        check(rng)


@pytest.mark.parametrize("check", envelope.CHECKS)
def test_damaged_envelopes_are_refused_however_they_arrive(
    check: Callable[[random.Random], None],
) -> None:
    rng = random.Random(SEED)
    for _ in range(700):
        check(rng)


@pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire: no extension built here")
def test_damaged_heads_chunks_and_bodies_are_read_alike_in_c_and_in_python() -> None:
    rng = random.Random(SEED)
    for name, pair in wire_cases.readers().items():
        taken = 0
        for _ in range(3000):
            data = wire_cases.damaged(rng, name)
            taken += wire_cases.agrees(pair, *wire_cases.arguments(rng, name, data))
        assert taken, f"{name} in C took nothing"
