"""Read a GGUF file without trusting it.

Decides where each metadata value and each tensor lies, and refuses what does not fit: every length
is checked against what is left of the file before anything is read or allocated. It never converts
a tensor; it hands out byte ranges. Format: GGUF v2 and v3, little endian
(github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from agent.engine.types import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
# Far above any model made so far; a count above it is a damaged file, not a large one.
_KEYS_MAX: Final = 65_536
_TENSORS_MAX: Final = 1_048_576
_NAME_BYTES_MAX: Final = 4_096
_ALIGNMENT_MAX: Final = 1 << 20
_ARRAY: Final = 9
_STRING: Final = 8
_BOOL: Final = 7
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies; `shape` is rows first (GGUF stores it the other way round)."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise ModelFileError(
                f"truncated GGUF: {what} needs {count} bytes at byte {self.at}, "
                f"file has {self.size}"
            )

    def number(self, form: struct.Struct, what: str) -> Any:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number(_U64, what)
        if limit is not None and length > limit:
            raise ModelFileError(f"malformed GGUF: {what} has {length} bytes, at most {limit}")
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"malformed GGUF: {what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        form = _SCALARS.get(kind)
        if form is None:
            raise ModelFileError(f"malformed GGUF: {what} has unknown type {kind}")
        value = self.number(form, what)
        return bool(value) if kind == _BOOL else value

    def _array(self, what: str) -> list[Any]:
        kind = self.number(_U32, what)
        length = self.number(_U64, what)
        if kind == _STRING:
            self.need(length * 8, what)  # each has at least its length field
            return [self.text(what) for _ in range(length)]
        form = _SCALARS.get(kind)
        if form is None:  # arrays of arrays are legal but no model of ours has one
            raise ModelFileError(f"malformed GGUF: {what} is an array of type {kind}")
        self.need(length * form.size, what)
        values = struct.unpack_from(f"<{length}{form.format[1:]}", self.data, self.at)
        self.at += length * form.size
        return [bool(v) for v in values] if kind == _BOOL else list(values)


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name. Close it, or use `with`.

    Raises `ModelFileError` for anything that is not a whole, well-formed file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelFileError(f"truncated GGUF: {path.name} is empty") from None
        except OSError as problem:
            raise ModelFileError(f"cannot read {path}: {problem.strerror}") from None
        try:
            self.metadata, self.tensors = _parse(self._map)
        except ModelFileError:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the mapping back; idempotent."""
        self._map.close()

    def read(self, start: int, count: int) -> bytes:
        """Return `count` stored bytes from byte `start`, which lie within a tensor."""
        return self._map[start : start + count]

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return a metadata value of `kind`; raises where it is absent and has no default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFileError(f"GGUF has no {key}")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelFileError(f"malformed GGUF: {key} is not of type {kind.__name__}")
        return value


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor = _Cursor(data)
    cursor.need(4, "the magic")
    if data[:4] != _MAGIC:
        raise ModelFileError("not a GGUF file: the magic is wrong")
    cursor.at = 4
    version = cursor.number(_U32, "the version")
    if version not in _VERSIONS:
        raise ModelFileError(f"GGUF version {version} is not supported (2 and 3 are)")
    tensor_count = cursor.number(_U64, "the tensor count")
    key_count = cursor.number(_U64, "the key count")
    if tensor_count > _TENSORS_MAX or key_count > _KEYS_MAX:
        raise ModelFileError(
            f"malformed GGUF: {tensor_count} tensors and {key_count} keys are claimed"
        )
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        key = cursor.text(f"key {index}", _NAME_BYTES_MAX)
        if key in metadata:
            raise ModelFileError(f"malformed GGUF: key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.number(_U32, key), key)
    heads = [_tensor_head(cursor, index) for index in range(tensor_count)]
    return metadata, _place(heads, _data_start(cursor, metadata), cursor.size)


def _data_start(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 0 < alignment <= _ALIGNMENT_MAX
        or alignment & (alignment - 1)
    ):
        raise ModelFileError("malformed GGUF: general.alignment is not a power of two")
    return -(-cursor.at // alignment) * alignment


def _tensor_head(
    cursor: _Cursor, index: int
) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.text(f"the name of tensor {index}", _NAME_BYTES_MAX)
    dimensions = cursor.number(_U32, f"tensor {name}")
    if not 1 <= dimensions <= 4:
        raise ModelFileError(f"malformed GGUF: tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.number(_U64, f"tensor {name}") for _ in range(dimensions))[::-1]
    number = cursor.number(_U32, f"tensor {name}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelFileError(f"tensor {name} has unknown quantisation {number}") from None
    return name, kind, shape, cursor.number(_U64, f"tensor {name}")


def _place(
    heads: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], start: int, size: int
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in heads:
        if name in tensors:
            raise ModelFileError(f"malformed GGUF: tensor {name} appears twice")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise ModelFileError(
                f"malformed GGUF: tensor {name} has shape {shape}, {kind.name} blocks hold {block}"
            )
        elements = 1
        for length in shape:
            elements *= length
        nbytes = elements // block * block_bytes
        if start + offset + nbytes > size:
            raise ModelFileError(
                f"truncated GGUF: tensor {name} needs {nbytes} bytes at byte {start + offset}, "
                f"file has {size}"
            )
        tensors[name] = TensorInfo(name, kind, shape, start + offset, nbytes)
    return tensors
