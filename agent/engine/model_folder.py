"""Writes a model as a folder that the engine loads: shards, config, tokenizer, manifest.

A folder is made beside its place, under a name that ends in `.unfinished`, and gets its own name
when all of it is on disk. Each file in it is written whole or not at all (a temporary name, fsync,
rename), so that whoever begins again after a crash at any byte finds nothing that is half there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING, Any, Final, Self

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agent.engine.types import EngineError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from agent.engine.opened import Opened
    from agent.engine.spec import ModelSpec

MANIFEST: Final = "quantization.json"
_BEGUN: Final = ".begun.json"
_INDEX: Final = "model.safetensors.index.json"
_CLASSES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# What a folder may have beside its tensors that the engine reads.
_KEPT: Final = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
    "special_tokens_map.json", "LICENSE", "README.md",
)  # fmt: skip


class FolderError(EngineError):
    """The folder cannot be written as asked; the message says why and what to do."""


class Unfinished:
    """A folder in the making at `out`; use `with`. `identity`: what it is made of, and how.

    A folder that an earlier run began for the same `identity` is gone on with. Raises `FolderError`
    where `out` exists, was begun otherwise, or is being made by another process.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out = out
        self.folder = out.parent / f"{out.name}.unfinished"
        self._identity = json.loads(json.dumps(identity))
        self._lock = -1

    def __enter__(self) -> Self:
        vacant(self.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FolderError(f"another process is writing {self.folder}") from None
        begun = self.folder / _BEGUN
        if not begun.exists():
            self.write(_BEGUN, json.dumps(self._identity).encode())
        elif _read(begun) != self._identity:
            os.close(self._lock)
            raise FolderError(
                f"{self.folder} was begun from another model or with other options; "
                "repeat that command, or remove the folder"
            )
        for stale in self.folder.glob("*.tmp"):
            stale.unlink()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        with self._place(name) as path:
            path.write_bytes(content)

    def shard(self, name: str, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Write a safetensors file, whole or not at all."""
        with self._place(name) as path:
            try:
                save_file(dict(tensors), path, metadata={"format": "pt"})
            except SafetensorError as problem:  # what the library makes of a full disk
                raise FolderError(
                    f"cannot write {self.folder / name}: {problem}; repeat the command to go on"
                ) from None

    @contextlib.contextmanager
    def _place(self, name: str) -> Any:
        path = self.folder / f"{name}.tmp"
        yield path
        with path.open("rb") as file:
            if name != _BEGUN:  # the safetensors library lets nobody but its user read
                begun = (self.folder / _BEGUN).stat().st_mode
                os.fchmod(file.fileno(), stat.S_IMODE(begun))
            os.fsync(file.fileno())
        path.replace(self.folder / name)
        os.fsync(self._lock)

    def has(self, name: str) -> bool:
        """Say whether a whole shard of that name is there already."""
        path = self.folder / name
        if not path.exists():
            return False
        try:
            with safe_open(path, framework="np"):
                return True
        except (OSError, SafetensorError):  # not ours: a rename shows whole files only
            path.unlink()
            return False

    def describe(self, model: Opened, config: Mapping[str, Any]) -> None:
        """Write what the engine reads beside the tensors; `config` is added to the model's own."""
        if model.gguf is None:
            for name in _KEPT:
                source = model.path / name
                if source.is_file():
                    self.write(name, source.read_bytes())
            own = {k: v for k, v in model.config.items() if k not in {"torch_dtype", "dtype"}}
        else:
            own = _config(model.spec)
            self._tokenizer(model)
        whole = own | {"dtype": "float16"} | dict(config)
        self.write("config.json", (json.dumps(whole, indent=1) + "\n").encode())

    def _tokenizer(self, model: Opened) -> None:
        file = model.gguf
        assert file is not None, "a folder's files are copied"
        tokens = file.get("tokenizer.ggml.tokens", list)
        config: dict[str, Any] = {}
        for name in ("bos", "eos"):
            index = file.get(f"tokenizer.ggml.{name}_token_id", int, -1)
            if 0 <= index < len(tokens):
                config[f"{name}_token"] = tokens[index]
        template = file.get("tokenizer.chat_template", str, "")
        if template:
            config["chat_template"] = template
        self.write("tokenizer.json", model.tokenizer.to_json().encode())
        self.write("tokenizer_config.json", (json.dumps(config, indent=1) + "\n").encode())
        ends = {"eos_token_id": sorted(model.tokenizer.ends)}
        self.write("generation_config.json", (json.dumps(ends) + "\n").encode())

    def finish(self, shards: list[str], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write index and manifest (`facts` and every file's hash) and give the folder its name."""
        where: dict[str, str] = {}
        for shard in shards:
            with safe_open(self.folder / shard, framework="np") as file:
                names: list[str] = file.keys()
                where.update(dict.fromkeys(names, shard))
        total = sum((self.folder / shard).stat().st_size for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        self.write(_INDEX, (json.dumps(index, indent=1) + "\n").encode())
        manifest = dict(facts) | {"files": listed(self.folder)}
        self.write(MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        if os.path.lexists(self.out):
            raise FolderError(f"{self.out} was made meanwhile; {self.folder} is complete")
        self.folder.rename(self.out)
        # Last: without it, who begins again could not tell what the shards there are made of.
        (self.out / _BEGUN).unlink()
        parent = os.open(self.out.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        return manifest


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of a folder's files, manifest and hidden ones apart."""
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(".")
    }


def digest(path: Path) -> str:
    """Return a file's SHA-256; of a folder, that of its files' names and hashes."""
    if path.is_dir():
        return hashlib.sha256(json.dumps(listed(path)).encode()).hexdigest()
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise ModelFileError(f"cannot read {path}: {problem.strerror}") from None


def changed(folder: Path) -> list[str]:
    """Return what differs from the folder's manifest, one line each; raises `ModelFileError`."""
    files = _read(folder / MANIFEST).get("files")
    if not isinstance(files, dict) or not all(isinstance(facts, dict) for facts in files.values()):
        raise ModelFileError(f"{folder / MANIFEST} is no manifest of a quantised model")
    found = listed(folder)
    lines = [f"{name}: missing" for name in sorted(files) if name not in found]
    lines += [f"{name}: not in the manifest" for name in sorted(found) if name not in files]
    lines += [
        f"{name}: its content is another"
        for name in sorted(files)
        if name in found and found[name]["sha256"] != files[name].get("sha256")
    ]
    return lines


def vacant(out: Path) -> None:
    """Refuse, with `FolderError`, a place where something is, or that has no name."""
    if not out.name:
        raise FolderError(f"{out} is no name for a new folder")
    if os.path.lexists(out):  # also a link that leads nowhere
        raise FolderError(f"{out} exists; name another folder, or remove it")


def room(out: Path, wanted: int) -> None:
    """Refuse, with `FolderError`, a file system that has less than `wanted` bytes free."""
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < wanted:
        raise FolderError(f"{place} has {free >> 20} MiB free, {wanted >> 20} MiB are needed")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _config(spec: ModelSpec) -> dict[str, Any]:
    """Return the `config.json` of a model that came without; raises `ModelFileError`."""
    rope: dict[str, Any] = {"rope_theta": spec.rope_theta, "rope_type": "default"}
    if spec.rope_factors is not None:
        if len(set(spec.rope_factors)) != 1:
            raise ModelFileError(
                "this file's rotary factors have no place in a config.json; "
                "use the model's Hugging Face folder"
            )
        rope |= {"rope_type": "linear", "factor": spec.rope_factors[0]}
    return {
        "architectures": [_CLASSES[spec.architecture]],
        "model_type": spec.architecture,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": rope,
        "vocab_size": spec.vocab,
    }
