"""The kernels on a GPU, through PyCUDA, beside torch.

PyCUDA is imported when a `CudaKernels` is made and not before. Both it and torch use the device's
primary context, so one's memory is the other's. PyCUDA cannot launch on a stream it did not make:
so the stream is PyCUDA's, and torch is put on it (`stream()`); on torch's default stream the
launches go to the default stream as well. On any other stream the order would be lost, and a launch
is refused.

What is loaded: the cubin for exactly this architecture, else the PTX that the driver compiles, else
what NVRTC makes. No compiler is needed for the first two.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
from typing import TYPE_CHECKING, Any, Final

from kernels import build, nvrtc
from kernels.launch import KernelError, Launch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

_PTX: Final = f"{build.PTX_ARCH}.ptx"


def choices(capability: tuple[int, int], files: Mapping[str, Any]) -> list[str]:
    """Return what to try for a device, best first: names of shipped files, then "nvrtc"."""
    major, minor = capability
    oldest = int(build.PTX_ARCH.removeprefix("compute_"))
    found = [name for name in (f"sm_{major}{minor}.cubin",) if name in files]
    if _PTX in files and major * 10 + minor >= oldest:
        found.append(_PTX)
    return [*found, "nvrtc"]


def shipped(folder: Path) -> dict[str, Any]:
    """Return the files of a folder that `kernels.build` wrote, if it is of these sources."""
    try:
        manifest = json.loads((folder / build.MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if manifest.get("sources") != build.digest():
        return {}
    files: dict[str, Any] = manifest["files"]
    return files


def image(folder: Path, capability: tuple[int, int]) -> tuple[str, bytes]:
    """Return which module is loaded for a device, and its bytes.

    Raises `KernelError` for a shipped file that is not the one that was built, `build.BuildError`
    where nothing is shipped and nothing can be compiled.
    """
    files = shipped(folder)
    name = choices(capability, files)[0]
    if name == "nvrtc":
        return name, nvrtc.compile_cubin(f"sm_{capability[0]}{capability[1]}")
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
        raise KernelError(f"{name} is not the file that was built: build the kernels again")
    return name, content


class CudaKernels:
    """The kernels on one CUDA device. Use from the thread that made it."""

    def __init__(self, folder: Path, index: int = 0) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._driver: Any = importlib.import_module("pycuda.driver")
        except ImportError as problem:
            raise KernelError(f"the GPU's kernels need torch and pycuda: {problem}") from None
        self._torch.cuda.init()
        self._torch.cuda.set_device(index)
        self._driver.init()
        device = self._driver.Device(index)
        # Pushed for PyCUDA's own stack of contexts; popped at exit, or it complains.
        self._context = device.retain_primary_context()
        self._context.push()
        atexit.register(self._context.pop)
        limits = self._driver.device_attribute
        self.device = f"cuda:{index}"
        self.name = str(device.name())
        self.multiprocessors = int(device.get_attribute(limits.MULTIPROCESSOR_COUNT))
        self.shared_bytes_max = int(device.get_attribute(limits.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))
        self.loaded, content = image(folder, device.compute_capability())
        self._module = self._driver.module_from_buffer(content)
        self._functions: dict[str, Any] = {}
        self._own = self._driver.Stream()
        self._stream = self._torch.cuda.ExternalStream(self._own.handle, device=self.device)

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which torch works on the stream of these kernels."""
        context: AbstractContextManager[Any] = self._torch.cuda.stream(self._stream)
        return context

    @property
    def torch_stream(self) -> Any:
        """The stream as torch's, to capture a graph on."""
        return self._stream

    def run(self, launch: Launch) -> None:
        """Start a launch on torch's current stream; see `launch.Backend`."""
        if launch.device != self.device:
            raise KernelError(f"planned for {launch.device}, this is {self.device}")
        current = self._torch.cuda.current_stream().cuda_stream
        if current not in {0, self._own.handle}:
            raise KernelError("torch is on a stream of its own: use `with kernels.stream():`")
        function = self._functions.get(launch.kernel) or self._prepared(launch)
        function.prepared_async_call(
            launch.grid, (launch.threads, 1, 1), self._own if current else None,
            *launch.arguments, shared_size=launch.shared_bytes,
        )  # fmt: skip

    def _prepared(self, launch: Launch) -> Any:
        function = self._module.get_function(launch.kernel)
        function.prepare(launch.form)
        attribute = self._driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        function.set_attribute(attribute, self.shared_bytes_max)
        self._functions[launch.kernel] = function
        return function
