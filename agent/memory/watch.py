"""The thread that looks at memory once in a while: the newest report, and the heat map of all.

Each look reads a few files of /proc and /sys, NVML and torch where there are any, and the engine's
counters; it never waits for the engine. Readers take `latest`, a finished report, from any thread.
What cannot be read is named in the report (`missing`) and looked for again, but for a driver that
is not there at all.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.memory.host import read_host
from agent.memory.nvml import NvmlError, PyNvml, decode
from agent.memory.pressure import HeatMap
from agent.memory.topology import (
    Allocator,
    KvPool,
    Topology,
    allocator_from,
    assemble,
    kv_pool_from,
    numa_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.memory.host import Host
    from agent.memory.nvml import Gpus, Nvml
    from agent.node import Node

log = logging.getLogger("tongguan.agent.memory")
COLUMNS: Final = 240
_JOIN_S: Final = 5.0
# The pages of a process by node cost a walk over its page tables: not at every look.
_NUMA_EVERY: Final = 30


class MemoryWatch:
    """Looks every `sample_s`; the heat map covers `window_s`."""

    def __init__(
        self,
        node: Node,
        *,
        sample_s: float,
        window_s: float,
        nvml: Callable[[], Nvml] = PyNvml,
        host: Callable[[], Host] = read_host,
    ) -> None:
        self.latest: Topology | None = None
        self.failures = 0
        # Two samples a column at least, so that a late one leaves no hole.
        bucket_s = max(2 * sample_s, window_s / COLUMNS)
        self.heat = HeatMap(columns=math.ceil(window_s / bucket_s), bucket_s=bucket_s)
        self._node = node
        self._sample_s = sample_s
        self._open_nvml = nvml
        self._nvml: Nvml | None = None
        self._no_nvml = ""
        self._read_host = host
        self._numa: dict[int, int] = {}
        self._looks = 0
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; at most a few seconds."""
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            self.look()
            if self._stop.wait(self._sample_s):
                return

    def look(self) -> None:
        """Take one sample now; a failure is counted, and the first one logged."""
        with self._turn:
            try:
                self.latest = self._sample()
            except (OSError, ValueError, KeyError) as problem:
                self.failures += 1
                if self.failures == 1:
                    log.warning("memory cannot be read: %s: %s", type(problem).__name__, problem)
                return
            others = self._node.upstreams.shares() if self._node.upstreams else {}
            self.heat.observe(self.latest.at_unix_s, self.latest.shares() | others)

    def _sample(self) -> Topology:
        host = self._read_host()
        missing: list[str] = []
        gpus = self._gpus(missing)
        if len(host.nodes) > 1 and self._looks % _NUMA_EVERY == 0:
            with contextlib.suppress(OSError):
                text = Path("/proc/self/numa_maps").read_text(encoding="utf-8", errors="replace")
                self._numa = numa_bytes(text)
        self._looks += 1
        return assemble(
            at_unix_s=round(time.time(), 3),
            host=host,
            gpus=gpus,
            allocators=_torch_allocators() if gpus is not None else {},
            numa=self._numa,
            kv_pools=self._kv_pools(),
            missing=tuple(missing),
        )

    def _gpus(self, missing: list[str]) -> Gpus | None:
        if self._no_nvml:
            missing.append(self._no_nvml)
            return None
        try:
            self._nvml = self._nvml or self._open_nvml()
        except NvmlError as problem:
            self._no_nvml = str(problem)
            missing.append(self._no_nvml)
            return None
        try:
            return decode(self._nvml.read())
        except NvmlError as problem:
            missing.append(str(problem))
            return None

    def _kv_pools(self) -> tuple[KvPool, ...]:
        engine = self._node.engine
        return (kv_pool_from(self._node.names[0], engine.stats()),) if engine else ()


def _torch_allocators() -> dict[str, Allocator]:
    """Return torch's accounts by GPU uuid; none where torch has not touched a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        account = allocator_from(torch.cuda.memory_stats(index))
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if account is not None and uuid is not None:
            found[f"GPU-{uuid}"] = account
    return found
