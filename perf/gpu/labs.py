"""Where a measurement takes place: on a GPU, or dry, on this CPU through the host shim.

A lab makes arrays, runs launches and times them. The dry one is there so that everything else of
`perf.gpu` runs in the tests; its seconds mean nothing.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kernels import launch, quant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

REPLAYS = 20


class Lab(Protocol):
    """Arrays and time on one device."""

    backend: launch.Backend
    name: str
    l2_bytes: int
    facts: dict[str, Any]

    def empty(self, shape: Sequence[int], kind: str) -> Any: ...
    def halves(self, shape: Sequence[int]) -> Any: ...
    def matrix(self, k: int, outputs: int, group: int) -> quant.Packed: ...
    def fetch(self, array: Any) -> Any: ...
    def copy_bytes_per_s(self) -> float: ...
    def seconds(self, works: Sequence[Callable[[], None]]) -> float: ...
    def matmul(self, x: Any, w: Any, out: Any) -> Callable[[], None]: ...
    def launch_seconds(self, plan: launch.Launch) -> float: ...


class DryLab:
    """NumPy and the host build."""

    def __init__(self, path: Path | None = None) -> None:
        self.backend = launch.HostKernels(path)
        self.name, self.l2_bytes, self.facts = "host", 1 << 12, {"dry": True}
        self._rng = np.random.default_rng(0)

    def empty(self, shape: Sequence[int], kind: str) -> Any:
        size = int(np.prod(shape)) * np.dtype(launch.TYPES[kind][0]).itemsize
        raw = np.zeros(size + 16, np.uint8)
        start = -raw.ctypes.data % 16
        return raw[start : start + size].view(launch.TYPES[kind][0]).reshape(shape)

    def halves(self, shape: Sequence[int]) -> Any:
        out = self.empty(shape, "f16")
        out[...] = self._rng.normal(0, 1, shape)
        return out

    def matrix(self, k: int, outputs: int, group: int) -> quant.Packed:
        w = self._rng.normal(0, 0.02, (outputs, k)).astype(np.float32)
        made = quant.quantize(w, group, search=False)
        codes, meta = self.empty(made.codes.shape, "u32"), self.empty(made.meta.shape, "u32")
        codes[...], meta[...] = made.codes, made.meta
        return quant.Packed(codes, meta, k, group, minima=False)

    def fetch(self, array: Any) -> Any:
        return array

    def copy_bytes_per_s(self) -> float:
        return 1e9

    def seconds(self, works: Sequence[Callable[[], None]]) -> float:
        began = time.perf_counter()
        for work in works:
            work()
        return (time.perf_counter() - began) / len(works)

    def matmul(self, x: Any, w: Any, out: Any) -> Callable[[], None]:
        def work() -> None:
            out[...] = x.astype(np.float32) @ w.astype(np.float32).T

        return work

    def launch_seconds(self, plan: launch.Launch) -> float:
        return self.seconds([lambda: self.backend.run(plan)])


class GpuLab:
    """torch and PyCUDA on a device. All work is captured in graphs on the kernels' stream."""

    def __init__(self, folder: Path) -> None:
        import torch

        from kernels.device import CudaKernels

        self._torch = torch
        self.backend: Any = CudaKernels(folder)
        properties = torch.cuda.get_device_properties(0)
        self.name, self.l2_bytes = self.backend.name, int(properties.L2_cache_size)
        self.facts = {
            "name": self.name, "loaded": self.backend.loaded, "torch": torch.__version__,
            "cuda": torch.version.cuda, "l2_bytes": self.l2_bytes,
            "multiprocessors": self.backend.multiprocessors,
        }  # fmt: skip
        self._kinds = {
            "u32": torch.int32, "i32": torch.int32, "f16": torch.float16, "f32": torch.float32,
        }  # fmt: skip

    def empty(self, shape: Sequence[int], kind: str) -> Any:
        return self._torch.zeros(tuple(shape), dtype=self._kinds[kind], device="cuda:0")

    def halves(self, shape: Sequence[int]) -> Any:
        return self._torch.randn(tuple(shape), device="cuda:0").half()

    def matrix(self, k: int, outputs: int, group: int) -> quant.Packed:
        """Return random codes: every bit pattern is a matrix. Scales near 0.02."""
        torch = self._torch
        words, groups = quant.row_words(k), -(-k // group)
        codes = torch.randint(-(2**31), 2**31, (outputs, words), device="cuda:0")
        scale = (0.01 + 0.02 * torch.rand((groups, outputs), device="cuda:0")).half()
        zero = torch.randint(0, 16, (groups, outputs), device="cuda:0").half()
        low = scale.view(torch.int16).to(torch.int32) & 0xFFFF
        high = zero.view(torch.int16).to(torch.int32) << 16
        made: Any = (codes.to(torch.int32), low | high)
        return quant.Packed(*made, k, group, minima=False)

    def fetch(self, array: Any) -> Any:
        host = array.cpu().numpy()
        return host.view(np.uint32) if host.dtype == np.int32 else host

    def copy_bytes_per_s(self) -> float:
        source = self._torch.empty(1 << 29, dtype=self._torch.float16, device="cuda:0")
        target = self._torch.empty_like(source)
        spent = self.seconds([lambda: target.copy_(source)])
        return 2 * source.numel() * 2 / spent

    def seconds(self, works: Sequence[Callable[[], None]]) -> float:
        """Return the median over replays of a graph of all works, for one of them."""
        torch, stream = self._torch, self.backend.torch_stream
        with torch.cuda.stream(stream):
            for work in works:  # outside the graph first: loading and workspaces
                work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for work in works:
                    work()
            spent = []
            for _ in range(REPLAYS + 3):
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record(stream)
                graph.replay()
                last.record(stream)
                last.synchronize()
                spent.append(first.elapsed_time(last) / 1e3 / len(works))
        return statistics.median(spent[3:])

    def matmul(self, x: Any, w: Any, out: Any) -> Callable[[], None]:
        return lambda: self._torch.matmul(x, w.t(), out=out)

    def launch_seconds(self, plan: launch.Launch) -> float:
        """Return what a launch costs in Python: a thousand, not waited for."""
        with self.backend.stream():
            self.backend.run(plan)
            self.backend.torch_stream.synchronize()
            began = time.perf_counter()
            for _ in range(1_000):
                self.backend.run(plan)
            spent = time.perf_counter() - began
            self.backend.torch_stream.synchronize()
        return spent / 1_000
