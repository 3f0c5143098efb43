"""A launch that has been checked, and who carries it out.

`kernels.plans` turns arrays into a `Launch`: shapes, types, devices, alignment and bounds are
checked there, once, and the launch can then be repeated at no cost but the call. A backend runs it:
`HostKernels` is the one for this CPU (tests).

Arrays are NumPy's on a host, on a GPU anything with `__cuda_array_interface__` (torch's tensors).
That interface carries no ownership: a `Launch` keeps its arrays alive, so keep the launch until the
stream has done it.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from kernels import build

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Bytes at which every array must start: the widest load of the kernels.
ALIGNMENT: Final = 16
# One element's type, by our name: what NumPy's type string may be.
TYPES: Final = {
    "u32": ("<u4", "<i4"),
    "i32": ("<i4",),
    "f16": ("<f2",),
    "f32": ("<f4",),
}
_CTYPES: Final[dict[str, Any]] = {"P": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}


class LaunchError(ValueError):
    """A launch that would read or write what it must not; nothing has been started."""


class KernelError(RuntimeError):
    """A kernel that ended with an error; the message is the backend's."""


@dataclass(frozen=True, slots=True)
class View:
    """An array as a kernel sees it. `typestr` as NumPy's, `device` "cpu" or "cuda:N"."""

    pointer: int
    shape: tuple[int, ...]
    typestr: str
    device: str
    contiguous: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with all it needs. `form` names each argument's type: P pointer, i int, f float."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    form: str
    arguments: tuple[int | float, ...]
    device: str
    keeps: tuple[object, ...]


class Backend(Protocol):
    """Carries launches out, in order."""

    device: str
    multiprocessors: int
    shared_bytes_max: int

    def run(self, launch: Launch) -> None:
        """Start a launch; raises `KernelError` where it is known to have failed."""
        ...


def view(array: Any) -> View:
    """Return how a kernel sees `array`; raises `LaunchError` if it is no array it could see."""
    if isinstance(array, np.ndarray):
        pointer, _ = array.__array_interface__["data"]
        whole = bool(array.flags.c_contiguous)
        return View(pointer, array.shape, array.dtype.str, "cpu", whole)
    facts = getattr(array, "__cuda_array_interface__", None)
    if facts is None:
        raise LaunchError(f"{type(array).__name__} is neither NumPy's nor on a CUDA device")
    size = int(facts["typestr"][2:])
    strides, shape = facts.get("strides"), tuple(facts["shape"])
    packed = tuple(size * math.prod(shape[at + 1 :]) for at in range(len(shape)))
    device = str(getattr(array, "device", "cuda:0"))
    whole = strides is None or tuple(strides) == packed
    return View(int(facts["data"][0]), shape, facts["typestr"], device, whole)


def checked(name: str, array: Any, kind: str, shape: Sequence[int | None], device: str) -> int:
    """Return the array's address if it is of this kind, shape (None: any) and device."""
    seen = view(array)
    if seen.typestr not in TYPES[kind]:
        raise LaunchError(f"{name} has type {seen.typestr}, expected {kind}")
    fits = len(seen.shape) == len(shape) and all(
        wanted is None or wanted == found for wanted, found in zip(shape, seen.shape, strict=True)
    )
    if not fits:
        wanted_shape = tuple("any" if length is None else length for length in shape)
        raise LaunchError(f"{name} has shape {seen.shape}, expected {wanted_shape}")
    if not seen.contiguous:
        raise LaunchError(f"{name} is not contiguous")
    if seen.device != device:
        raise LaunchError(f"{name} is on {seen.device}, the kernels are on {device}")
    if seen.pointer % ALIGNMENT:
        raise LaunchError(
            f"{name} starts at {seen.pointer % ALIGNMENT} bytes past a multiple of 16"
        )
    return seen.pointer


class HostKernels:
    """The kernels on this CPU, by g++ and `cuda/host_shim.h`: for tests, not for speed.

    `falling` runs the threads of a block in falling order (see the shim). One launch at a time for
    each shared object.
    """

    device = "cpu"
    multiprocessors = 4
    shared_bytes_max = 227 << 10

    def __init__(self, path: Path | None = None, *, falling: bool = False) -> None:
        self._library = ctypes.CDLL(str(build.host() if path is None else path))
        self._falling = falling
        self._lock = threading.Lock()

    def run(self, launch: Launch) -> None:
        """See `Backend`; returns when the kernel has ended."""
        door = getattr(self._library, f"{launch.kernel}_launch")
        door.restype = ctypes.c_char_p
        values = [
            _CTYPES[kind](value) for kind, value in zip(launch.form, launch.arguments, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
        )
        grid = (ctypes.c_uint * 3)(*launch.grid)
        with self._lock:
            problem = door(grid, launch.threads, launch.shared_bytes, int(self._falling), pointers)
        if problem is not None:
            raise KernelError(f"{launch.kernel}: {problem.decode()}")
