"""What quantising cost, as data and as text: `quality.json` and `quality.txt` of a folder."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from agent.engine import reading
from agent.engine.precision import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.engine.precision import Plan


def report_of(
    before: float, after: float, scored: int, plan: Plan, errors: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the quality report, from the losses of the same tokens before and after."""
    source, result = reading.perplexity(before, scored), reading.perplexity(after, scored)
    return {
        "text": text_facts(reading.shipped("held_out"), own=False),
        "scored_tokens": scored,
        "window_tokens": reading.WINDOW,
        "source_perplexity": source,
        "perplexity": result,
        "ratio": result / source,
        "budget": plan.budget,
        "within_budget": result / source <= plan.budget,
        "output_errors": errors,
    }


def text_of(quality: dict[str, Any]) -> str:
    """Return a quality report for people."""
    verdict = "within it" if quality["within_budget"] else "BEYOND IT"
    lines = [
        f"Perplexity over {quality['scored_tokens']} held-out tokens: {quality['perplexity']:.3f}",
        f"Before: {quality['source_perplexity']:.3f}; ratio {quality['ratio']:.4f}",
        f"The plan allows a ratio of {quality['budget']:g}: {verdict}",
        "",
        "Relative output error of the products in four bits, by layer:",
    ]
    found: dict[int, dict[str, float]] = {}
    for row in quality["output_errors"]:
        found.setdefault(row["layer"], {})[row["operator"]] = row["output_error"]
    lines.append("layer" + "".join(f"{operator:>10}" for operator in OPERATORS))
    lines += [
        f"{layer:5}"
        + "".join(f"{row[op]:10.4f}" if op in row else f"{'fp16':>10}" for op in OPERATORS)
        for layer, row in sorted(found.items())
    ]
    return "\n".join(lines) + "\n"


def text_facts(texts: Sequence[str], *, own: bool) -> dict[str, Any]:
    """Return which text it was: shipped, or the user's own, whose name is left out."""
    digest_of = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return {"from": "a file" if own else "shipped", "sha256": digest_of}
