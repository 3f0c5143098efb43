"""Pick a token from logits: pure in (logits, sampling, seed, index).

The draw for the n-th generated token depends on the seed and n alone, never on a generator's state:
a preempted sequence, or one with other batch mates, draws the same numbers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from agent.engine.types import Sampling

# The likeliest tokens are tried first; a full sort of the vocabulary is 20 times dearer.
_NUCLEUS_FIRST = 512


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) with 53 random bits, a function of its arguments alone."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / float(1 << 53)


def pick(logits: torch.Tensor, sampling: Sampling, seed: int, index: int) -> int:
    """Return the token picked from one row of logits; raises ArithmeticError if there is none.

    `index` counts generated tokens from 0. Temperature 0 takes the first of the largest.
    """
    if sampling.temperature == 0.0:
        best = int(logits.argmax())
        if not torch.isfinite(logits[best]):
            raise ArithmeticError("the model gave no finite logits")
        return best
    # Float64 keeps the cumulative sum of a large vocabulary exact enough that a draw lands on the
    # same token whatever the batch was. The maximum goes first: a tiny temperature must not
    # overflow.
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / sampling.temperature
    weights = scaled.exp_()
    total = float(weights.sum())
    if not total >= 1.0 or total == float("inf"):  # the largest weight is 1; NaN fails too
        raise ArithmeticError("the model gave no finite logits")
    draw = uniform(seed, index)
    if sampling.top_p >= 1.0:
        return _invert(weights, draw * total)
    chosen, ids = _nucleus(weights, sampling.top_p * total)
    return int(ids[_invert(chosen, draw * float(chosen.sum()))])


def _nucleus(weights: torch.Tensor, mass: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fewest likeliest tokens whose weights reach `mass`, at least one."""
    size = weights.numel()
    for count in (min(_NUCLEUS_FIRST, size), size):
        top, ids = torch.topk(weights, count)
        sums = top.cumsum(0)
        if float(sums[-1]) >= mass or count == size:
            keep = int(torch.searchsorted(sums, torch.tensor(mass, dtype=sums.dtype))) + 1
            return top[:keep], ids[:keep]
    raise AssertionError("the last round always returns")


def _invert(weights: torch.Tensor, target: float) -> int:
    """Return the first index whose cumulative weight exceeds `target`."""
    sums = weights.cumsum(0)
    index = int(torch.searchsorted(sums, torch.tensor(target, dtype=sums.dtype), right=True))
    if index < weights.numel():
        return index
    # Rounding put the target at the very end: the last token that has any weight.
    return int(weights.nonzero()[-1])
