"""From a model to the same model with four-bit weights, layer by layer.

One pass reads the source in float32, a layer at a time, and sends two texts through it as it goes:
the calibration text, whose rows say what goes into each product (`kernels.calibrated`), and the
held-out text, on which nothing is chosen: its perplexity is the source's, and its first window
shows each product's error. Then the finished folder is read as the engine reads it, and the
held-out text once more. Memory: the vocabulary's matrix, one layer, and both texts' rows.

After a kill the same command goes on: finished layers are kept, only the reading is done again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from agent.engine import compact, quality, reading
from agent.engine.model_folder import Unfinished, digest, room, vacant
from agent.engine.opened import Opened, opened
from agent.engine.precision import OPERATORS, Plan, default, operator_bytes
from agent.engine.sources import NAMES, FolderSource
from agent.engine.types import ModelFileError
from agent.engine.weights import LayerWeights, Loader, Weights, load_weights
from kernels import calibrated, exporters, importers, quant

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from agent.engine.spec import ModelSpec

# Windows of calibration: beyond some thousand tokens the choice of codes hardly changes.
CALIBRATION_WINDOWS: Final = 12
# Windows of the held-out texts: with the default model's tokenizer 9,198 scored tokens.
WINDOWS: Final = 18
ROLES: Final = {
    "qkv": ("q", "k", "v"), "out": ("o",), "gate_up": ("gate", "up"), "down": ("down",),
}  # fmt: skip
_EMBEDDING: Final = "model-embedding.safetensors"
_LAYER: Final = "model-layer-{:04}.safetensors"
# Shares of the time: the pass over the source, and reading the result.
_PASS: Final = 0.7


@dataclass(frozen=True, slots=True)
class Options:
    """How to convert.

    `plan` None: the default one at `group`. `plain`: codes by the weights' own squared error, no
    calibration text. `text`: a calibration text of the user's, None: the shipped ones. `windows`:
    at most so many of the held-out texts are read; 0: no report.
    """

    group: int = 128
    plan: Plan | None = None
    plain: bool = False
    text: str | None = None
    windows: int = WINDOWS


@dataclass(frozen=True, slots=True)
class _Step:
    """What one layer's conversion needs: the open model, its plan, and how codes are chosen."""

    model: Opened
    plan: Plan
    plain: bool

    def stored(self, operator: str, layer: int) -> quant.Packed | None:
        """Return a matrix that the source holds in four bits of the plan's group: kept as it is."""
        parts = []
        for role in ROLES[operator]:
            packed = self.model.source.packed(role, layer)
            if packed is None and self.plan.group == 32 and self.model.gguf is not None:
                raw = self.model.source.four_bits(role, layer)
                packed = None if raw is None else importers.gguf(raw, "Q4_1")
            if packed is None or packed.group != self.plan.group:
                return None
            if self.model.spec.permuted and role in {"q", "k"}:
                packed = _in_halves(packed, self.model.spec.head_dim)
            parts.append(packed)
        return quant.joined(parts)


def convert(
    path: Path, out: Path, options: Options, report: Callable[[str, float], None]
) -> dict[str, Any]:
    """Write the folder `out` and return its manifest; `report` gets a phase and the share done.

    Raises `ModelFileError` for the source, `FolderError` for `out`, OSError for a full disk, and
    ValueError for a plan that is not this model's.
    """
    report("opening", 0.0)
    vacant(out)  # again when it is made; hashing a large source takes minutes
    with opened(path) as model:
        spec = model.spec
        plan = options.plan or default(spec.layers, options.group)
        if plan.layers != spec.layers:
            raise ValueError(f"the plan has {plan.layers} layers, the model {spec.layers}")
        texts = reading.shipped("calibration") if options.text is None else [options.text]
        room(out, _size(spec, plan))
        facts: dict[str, Any] = {
            "version": 1,
            "source": {"name": path.name, "sha256": digest(path)},
            "plan": plan.plain(),
            "codes": "plain" if options.plain else "calibrated",
            "calibration": None
            if options.plain
            else quality.text_facts(texts, own=options.text is not None),
        }
        held = []
        if options.windows:
            held = reading.windows(
                model.tokenizer, reading.shipped("held_out"), limit=options.windows
            )
        calibration = []
        if not options.plain:
            calibration = reading.windows(model.tokenizer, texts, limit=CALIBRATION_WINDOWS)
        with Unfinished(out, facts) as folder:
            step = _Step(model, plan, options.plain)
            loss, errors = _pass(step, folder, calibration, held, report)
            tied = model.source.shape("head", 0) is None
            config = {"tie_word_embeddings": tied, "quantization_config": _config(plan)}
            folder.describe(model, config)
            shards = [_EMBEDDING, *(_LAYER.format(index) for index in range(spec.layers))]
            if held:
                after = _read_back(spec, folder, shards, held, report)
                try:
                    measured = quality.report_of(loss, after, reading.scored(held), plan, errors)
                except ValueError as problem:
                    raise ModelFileError(f"the perplexity cannot be told: {problem}") from None
                folder.write("quality.json", (json.dumps(measured, indent=1) + "\n").encode())
                folder.write("quality.txt", quality.text_of(measured).encode())
                facts["quality"] = {k: v for k, v in measured.items() if k != "output_errors"}
            manifest = folder.finish(shards, facts)
    report("done", 1.0)
    return manifest


def _pass(
    step: _Step,
    folder: Unfinished,
    calibration: list[list[int]],
    held: list[list[int]],
    report: Callable[[str, float], None],
) -> tuple[float, list[dict[str, Any]]]:
    """Write all shards; return the source's loss on the held-out text, and products' errors."""
    model, spec = step.model, step.model.spec
    loader = Loader(spec, model.source, torch.float32, torch.device("cpu"), None)
    embed = loader.embedding()
    final_norm = loader.read(("final_norm", spec.hidden), cols=None)
    tied = model.source.shape("head", 0) is None
    head = embed if tied else loader.weight(("head", spec.vocab), cols=spec.hidden)
    assert isinstance(head, torch.Tensor), "no small forms were asked for"
    if not folder.has(_EMBEDDING):
        named = {_name("embed", 0): _halves(embed), _name("final_norm", 0): final_norm.numpy()}
        if not tied:
            named[_name("head", 0)] = _halves(head)
        folder.shard(_EMBEDDING, named)
    f32 = torch.float32
    reader = reading.Reader(spec, Weights(embed, (), final_norm, head, tied, f32, f32))
    rows = [reader.start(tokens) for tokens in calibration]
    held_rows = [reader.start(tokens) for tokens in held]
    errors: list[dict[str, Any]] = []
    for index in range(spec.layers):
        report("layers", _PASS * index / spec.layers)
        layer = loader.layer(index)
        name = _LAYER.format(index)
        moments: dict[str, calibrated.Moments] = {}
        if calibration and not folder.has(name):
            moments = {op: calibrated.Moments(getattr(layer, op).shape[1]) for op in OPERATORS}
        seen = _Seen(moments)
        rows = [reader.layer(x, layer, seen.moments) for x in rows]
        if not folder.has(name):
            folder.shard(name, _shard(step, index, layer, moments))
        for place, x in enumerate(held_rows):
            held_rows[place] = reader.layer(x, layer, seen.keep if place == 0 else None)
        errors += _errors(folder, name, index, step.plan, layer, seen.inputs)
    unused = model.source.leftovers()
    if unused:
        raise ModelFileError(f"tensor {min(unused)} has no place in a {spec.architecture} model")
    loss = sum(reader.loss(x, tokens) for x, tokens in zip(held_rows, held, strict=True))
    return loss, errors


class _Seen:
    """Takes what goes into a layer's products."""

    def __init__(self, moments: dict[str, calibrated.Moments]) -> None:
        self._moments = moments
        self.inputs: dict[str, torch.Tensor] = {}

    def moments(self, operator: str, x: torch.Tensor) -> None:
        """Add rows to an operator's moments, where they are wanted."""
        if operator in self._moments:
            self._moments[operator].add(x.numpy())

    def keep(self, operator: str, x: torch.Tensor) -> None:
        """Keep rows."""
        self.inputs[operator] = x


def _shard(
    step: _Step, index: int, layer: LayerWeights, moments: dict[str, calibrated.Moments]
) -> dict[str, NDArray[Any]]:
    """Return one layer's tensors by name."""
    spec = step.model.spec
    named: dict[str, NDArray[Any]] = {
        _name("attn_norm", index): layer.attn_norm.numpy(),
        _name("ffn_norm", index): layer.ffn_norm.numpy(),
    }
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    counts = {
        "qkv": (queries, keys, keys), "out": (spec.hidden,),
        "gate_up": (spec.ffn, spec.ffn), "down": (spec.hidden,),
    }  # fmt: skip
    if layer.qkv_bias is not None:
        ends = np.cumsum(counts["qkv"])[:-1]
        for role, part in zip("qkv", np.split(layer.qkv_bias.numpy(), ends), strict=True):
            named[_name(f"{role}_bias", index)] = np.ascontiguousarray(part)
    for operator in OPERATORS:
        weight = getattr(layer, operator)
        packed = None
        if step.plan.precision(operator, index) == "int4":
            packed = step.stored(operator, index)
            if packed is None:
                packed = _quantise(weight.numpy(), step.plan.group, moments.get(operator))
        first = 0
        for role, count in zip(ROLES[operator], counts[operator], strict=True):
            rows, name = slice(first, first + count), _name(role, index)
            if packed is None:
                named[name] = _halves(weight[rows])
            else:
                parts = exporters.tensors(_rows(packed, rows))
                named |= {f"{name}_{part}": value for part, value in parts.items()}
            first += count
    return named


def _quantise(
    w: NDArray[np.float32], group: int, moments: calibrated.Moments | None
) -> quant.Packed:
    try:
        if moments is None:
            return quant.quantize(w, group)
        return calibrated.quantize(w, group, moments)
    except quant.QuantError as problem:
        raise ModelFileError(f"a matrix cannot be held in four bits: {problem}") from None


def _rows(packed: quant.Packed, rows: slice) -> quant.Packed:
    meta = np.ascontiguousarray(packed.meta[:, rows])
    return replace(packed, codes=packed.codes[rows], meta=meta)


def _in_halves(packed: quant.Packed, head_dim: int) -> quant.Packed:
    """Return rows that lie in interleaved pairs (GGUF's llama) in halves, head by head."""
    order = np.arange(packed.rows).reshape(-1, head_dim // 2, 2).transpose(0, 2, 1).ravel()
    meta = np.ascontiguousarray(packed.meta[:, order])
    return replace(packed, codes=packed.codes[order], meta=meta)


def _errors(
    folder: Unfinished,
    name: str,
    index: int,
    plan: Plan,
    layer: LayerWeights,
    inputs: dict[str, torch.Tensor],
) -> list[dict[str, Any]]:
    """Return |change| / |output| of each four-bit product, from what is on disk."""
    found, source = [], FolderSource(folder.folder, [name])
    for operator in OPERATORS if inputs else ():
        if plan.precision(operator, index) == "fp16":
            continue
        stored = [source.packed(role, index) for role in ROLES[operator]]
        written = torch.cat([torch.from_numpy(quant.dequantize(p)) for p in stored if p])
        weight, x = getattr(layer, operator), inputs[operator]
        lost = reading.relative_error(x @ (written - weight).T, x @ weight.T)
        found.append({"operator": operator, "layer": index, "output_error": lost})
    return found


def _name(role: str, layer: int) -> str:
    return NAMES[role][1].format(layer)


def _halves(weight: torch.Tensor) -> NDArray[Any]:
    """Return FP16, or what it was where FP16 cannot hold it; raises `ModelFileError`."""
    halves = weight.half()
    if not halves.isfinite().all():
        if not weight.isfinite().all():
            raise ModelFileError("the weights hold an infinity or no number")
        halves = weight
    array: NDArray[Any] = halves.contiguous().numpy()
    return array


def _read_back(
    spec: ModelSpec,
    folder: Unfinished,
    shards: list[str],
    held: list[list[int]],
    report: Callable[[str, float], None],
) -> float:
    """Return the loss of what was written, read as the engine reads it."""
    source = FolderSource(folder.folder, shards)
    spec = replace(spec, permuted=False)  # GGUF's order of Q and K ends with its file
    cpu, small = torch.device("cpu"), compact.AVAILABLE
    weights = load_weights(spec, source, torch.float32, cpu, lambda _share: None, small=small)
    reader, loss = reading.Reader(spec, weights), 0.0
    for place, tokens in enumerate(held):
        report("reading back", _PASS + (1.0 - _PASS) * place / len(held))
        loss += reader.read(tokens)
    return loss


def _size(spec: ModelSpec, plan: Plan) -> int:
    """Return about how many bytes the folder takes; a little more than it will."""
    total = 2 * 2 * spec.vocab * spec.hidden
    for index in range(spec.layers):
        for operator, (rows, cols) in shapes(spec).items():
            total += operator_bytes(rows, cols, plan.precision(operator, index), plan.group)
    return total + (16 << 20)


def shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return rows and columns of a layer's products."""
    queries = spec.heads * spec.head_dim
    return {
        "qkv": (queries + 2 * spec.kv_heads * spec.head_dim, spec.hidden),
        "out": (spec.hidden, queries),
        "gate_up": (2 * spec.ffn, spec.hidden),
        "down": (spec.hidden, spec.ffn),
    }


def _config(plan: Plan) -> dict[str, Any]:
    """Return the `quantization_config` by which others know the form."""
    ignored = ["lm_head"]
    for operator in OPERATORS:
        for index in range(plan.layers):
            if plan.precision(operator, index) == "fp16":
                names = (_name(role, index) for role in ROLES[operator])
                ignored += [name.removesuffix(".weight") for name in names]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": False,
                    "strategy": "group",
                    "group_size": plan.group,
                },
            }
        },
        "ignore": ignored,
    }
