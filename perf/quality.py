"""Measure what four bits cost in perplexity: `python -m perf.quality [--json FILE]`.

The default model reads the held-out texts (agent/texts/NOTICE), a novel and a manual, in float32,
as the engine holds it by default, as `tongguan model quantize` writes it at its own group of 32, at
group 128, and at 128 with codes chosen by the weights alone. Gates are for both texts together.
Perplexity does not depend on the machine's load. Some 5 minutes on two
cores. Exit codes: 0 every gate holds, 1 one is missed, 2 no model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.engine.threads import shorten_spin
from perf import machine, output

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS_MIN = 8_192
# figure: (least, most).
GATES: dict[str, tuple[float, float]] = {
    "default_ratio": (0.998, 1.002),
    "own_group_ratio": (0.998, 1.002),
    "group_128_ratio": (0.0, 1.15),
    "scored_tokens": (TOKENS_MIN, float("inf")),
}


def missed(figures: dict[str, float]) -> list[str]:
    """Return one line for each gate that does not hold; a figure that is no number holds none."""
    return [
        f"{name}: {figures[name]:.4f}, {least:g} to {most:g} expected"
        for name, (least, most) in GATES.items()
        if not least <= figures[name] <= most
    ]


def losses_of(path: Path, texts: Sequence[list[list[int]]], *, small: bool) -> list[float]:
    """Return a model's summed loss on each text, given as windows of tokens."""
    import torch

    from agent.engine import reading
    from agent.engine.load import read_model

    spec, _, weights = read_model(
        path, torch.float32, torch.device("cpu"), lambda _share: None, small=small
    )
    reader = reading.Reader(spec, weights)
    return [sum(reader.read(part) for part in parts) for parts in texts]


def measure(
    model: Path, work: Path, windows: int | None = None
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the figures, and the output errors of the products at group 128.

    `windows`: read so many at most, None: all.
    """
    from agent.engine import compact, reading
    from agent.engine.convert import Options, convert
    from agent.engine.opened import opened

    small = compact.AVAILABLE
    with opened(model) as found:
        held = reading.windows(found.tokenizer, reading.shipped("held_out"), limit=windows)
    # In turn one window of each kind.
    kinds = [held[at :: len(reading.KINDS)] for at in range(len(reading.KINDS))]

    def say(phase: str) -> None:
        print(phase, file=sys.stderr, flush=True)

    def converted(name: str, options: Options) -> Path:
        say(f"quantising: {name}")
        convert(model, work / name, options, lambda _phase, _share: None)
        return work / name

    def read(name: str, path: Path, *, small: bool = small) -> dict[str, float]:
        say(f"reading: {name}")
        losses = losses_of(path, kinds, small=small)
        counts = [reading.scored(parts) for parts in kinds]
        each = dict(zip(reading.KINDS, map(reading.perplexity, losses, counts), strict=True))
        return each | {"all": reading.perplexity(sum(losses), sum(counts))}

    # At the file's own group its codes are kept, so there is nothing to calibrate.
    own = converted("own", Options(group=32, plain=True, windows=0))
    wide = converted("wide", Options(group=128, windows=1))
    plain = converted("plain", Options(group=128, plain=True, windows=0))
    base = read("float32", model, small=False)
    default = read("default", model)
    group_32, group_128 = read("own", own), read("wide", wide)
    weights_only = read("plain", plain)
    ratios = {
        "default_ratio": default,
        "own_group_ratio": group_32,
        "group_128_ratio": group_128,
        "group_128_by_weights_alone_ratio": weights_only,
    }
    quality = json.loads((wide / "quality.json").read_text(encoding="utf-8"))
    errors: list[dict[str, Any]] = quality["output_errors"]
    figures = {"scored_tokens": float(reading.scored(held))}
    figures |= {f"float32_perplexity_{kind}": value for kind, value in base.items()}
    for name, found_ones in ratios.items():
        figures[name] = found_ones["all"] / base["all"]
        figures |= {f"{name}_{kind}": found_ones[kind] / base[kind] for kind in reading.KINDS}
    return figures, errors


def _bounds(name: str) -> str:
    gate = GATES.get(name)
    return f"   {gate[0]:g} to {gate[1]:g}" if gate else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="perf.quality", description=__doc__)
    output.add_json(parser)
    parser.add_argument(
        "--model", type=Path, help="GGUF file or folder; default: the default model"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    options = parser.parse_args()
    shorten_spin(os.environ)
    import torch

    from agent.engine.load import default_model
    from agent.engine.types import ModelFileError

    if options.threads:
        torch.set_num_threads(options.threads)
    facts = machine.facts()  # the commit that is measured, not one that was made meanwhile
    try:
        model = options.model or default_model()
        with tempfile.TemporaryDirectory() as work:
            figures, errors = measure(model, Path(work))
    except ModelFileError as problem:
        print(f"perf.quality: {problem}", file=sys.stderr)
        return 2
    figures = {name: round(value, 5) for name, value in figures.items()}
    lines = missed(figures)
    result: dict[str, Any] = {
        "machine": facts | {"torch": importlib.metadata.version("torch")},
        "model": model.name,
        "figures": figures,
        "output_errors": errors,
        "missed": lines,
    }
    table = [f"{name:42} {value:12.4f}{_bounds(name)}" for name, value in figures.items()]
    output.put(options.json, result, "\n".join(table))
    for line in lines:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
