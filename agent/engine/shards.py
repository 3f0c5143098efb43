"""A folder's safetensors files, open: tensors by name, each checked before it is read.

Everything here is from outside: an index may name files of its own folder only, and a tensor is
read when its type and shape are what its reader expects. What nobody has read can be asked for: it
would mean other mathematics than ours.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

from agent.engine.types import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

FLOATS: Final = {"F32", "F16", "F64", "BF16", "F8_E4M3", "F8_E5M2"}
_INDEX: Final = "model.safetensors.index.json"


class Shards:
    """Tensors of a folder; `names` None: of the files its index names. `unused`: not read yet."""

    def __init__(self, folder: Path, names: Sequence[str] | None = None) -> None:
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for name in _named(folder) if names is None else names:
            path = folder / name
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as problem:
                raise ModelFileError(f"truncated or malformed {path.name}: {problem}") from None
            self._files[name] = file
            found: list[str] = file.keys()  # type: ignore[no-untyped-call]
            self._where.update(dict.fromkeys(found, name))
        # Buffers that old exports wrote although they follow from the configuration.
        self.unused = {n for n in self._where if not n.endswith("rotary_emb.inv_freq")}

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def form(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return type and shape; raises `ModelFileError` for one that is not there."""
        if name not in self._where:
            raise ModelFileError(f"the model has no tensor {name}")
        piece = self._files[self._where[name]].get_slice(name)
        return piece.get_dtype(), tuple(piece.get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, whatever it is."""
        self.unused.discard(name)
        found: torch.Tensor = self._files[self._where[name]].get_tensor(name)
        return found

    def part(self, name: str, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a part of a matrix in four bits; `kind` "" is a float, -1 any length."""
        found, size = self.form(name)
        fits = len(size) == len(shape) and all(
            want in {-1, got} for want, got in zip(shape, size, strict=True)
        )
        if not fits or not (found.startswith(kind) if kind else found in FLOATS):
            raise ModelFileError(f"tensor {name} is {found} {size}, expected {kind} {shape}")
        value = self.tensor(name)
        array: NDArray[Any] = (value if kind else value.float()).numpy()
        return array


def _named(folder: Path) -> list[str]:
    index = folder / _INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelFileError(f"malformed {_INDEX}") from None
    for name in names:
        # The index is from outside: it may name files of its own folder only.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ModelFileError(f"malformed {_INDEX}: it names a file outside its folder")
    return names
