"""A model file or folder, open for reading: its dimensions, its tokenizer, its tensors."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.engine import spec as specs
from agent.engine import tokenizer as tokenizers
from agent.engine.forms import form_of
from agent.engine.gguf_file import GgufFile
from agent.engine.sources import FolderSource, GgufSource, rope_factors
from agent.engine.types import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.engine.sources import TensorSource
    from agent.engine.spec import ModelSpec
    from agent.engine.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Opened:
    """`config` is the folder's `config.json`, empty for a GGUF file, which has `gguf` instead."""

    path: Path
    spec: ModelSpec
    tokenizer: TextTokenizer
    source: TensorSource
    config: dict[str, Any]
    gguf: GgufFile | None


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Open a GGUF file or a Hugging Face folder; raises `ModelFileError`."""
    if path.is_dir():
        yield _folder(path)
        return
    with GgufFile(path) as file:
        spec = specs.from_gguf(file, rope_factors(file))
        yield Opened(path, spec, tokenizers.from_gguf(file), GgufSource(file), {}, file)


def _folder(folder: Path) -> Opened:
    config = json_object(folder / "config.json", required=True)
    generation = json_object(folder / "generation_config.json", required=False)
    ends = _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
    spec = specs.from_config(config)
    tokenizer = tokenizers.from_folder(folder, frozenset(ends))
    if tokenizer.vocab_size > spec.vocab:
        raise ModelFileError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {spec.vocab}"
        )
    source = FolderSource(folder, form=form_of(config))
    return Opened(folder, spec, tokenizer, source, config, None)


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if type(v) is int and v >= 0}


def json_object(path: Path, *, required: bool) -> dict[str, Any]:
    """Return a JSON object of a model's folder; raises `ModelFileError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelFileError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelFileError(f"malformed {path.name}: {problem}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"malformed {path.name}: not an object")
    return value
