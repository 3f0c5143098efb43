"""GPUs as the driver sees them: one reading through NVML, and its decoding into facts.

`Nvml` is the seam. `PyNvml` is the real one: nvidia-ml-py is imported when it is first asked for,
and a machine without a driver says so in `NvmlError`. A reading is plain numbers as NVML gives them
(tests/vectors/nvml has some); `decode` makes names and facts of them and is pure. What a driver or
a container does not tell (a process's memory, say) is None, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

GPUS_MAX: Final = 64
LINKS_MAX: Final = 18
# nvmlGpuTopologyLevel_t, in nvidia-smi's words.
PATHS: Final = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvmlGpuP2PStatus_t.
P2P: Final = {
    0: "ok", 1: "chipset_not_supported", 2: "gpu_not_supported", 3: "topology_not_supported",
    4: "disabled", 5: "not_supported", 6: "unknown",
}  # fmt: skip


class NvmlError(Exception):
    """There is no NVML to ask; the text says what is missing."""


class Nvml(Protocol):
    """Reads the driver. A reading is JSON's types only (see `PyNvml.read`)."""

    def read(self) -> dict[str, Any]:
        """Return one reading; raises `NvmlError`."""
        ...


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU; None: the driver does not say how much."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's driver figures; `numa_node` is None where the host has only one or does not say."""

    index: int
    name: str
    uuid: str
    bus_id: str
    numa_node: int | None
    cpus: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...]
    nvlinks_active: int
    pcie_generation: int | None
    pcie_width: int | None


@dataclass(frozen=True, slots=True)
class Link:
    """Between two devices: `kind` NVLINK or PCIE, `path` in nvidia-smi's words, `p2p` ok or why.

    `nvlinks` counts links; through switches it is all of the device's, as nvidia-smi shows it.
    """

    source: str
    target: str
    kind: str
    path: str
    nvlinks: int
    p2p: str


@dataclass(frozen=True, slots=True)
class Gpus:
    """A decoded reading."""

    driver: str
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]


def decode(reading: dict[str, Any]) -> Gpus:
    """Return the facts of a reading."""
    rows = reading["gpus"][:GPUS_MAX]
    gpus = tuple(_gpu(row) for row in rows)
    known = {gpu.index for gpu in gpus}
    links = tuple(
        _link(rows, pair)
        for pair in reading["pairs"]
        if pair["a"] in known and pair["b"] in known and pair["a"] != pair["b"]
    )
    return Gpus(str(reading["driver"]), gpus, links)


def _gpu(row: dict[str, Any]) -> Gpu:
    memory, node, pcie = row["memory"], row.get("numa_node"), row.get("pcie") or {}
    return Gpu(
        index=row["index"],
        name=row["name"],
        uuid=row["uuid"],
        bus_id=row["bus_id"].lower(),
        # The kernel says -1 where there is nothing to choose.
        numa_node=node if node is not None and node >= 0 else None,
        cpus=cpu_list(row.get("cpu_mask") or []),
        total_bytes=memory["total"],
        # v2 of the call counts the driver's own reserve apart; a tensor can have neither.
        used_bytes=memory["used"] + memory.get("reserved", 0),
        free_bytes=memory["free"],
        processes=tuple(GpuProcess(pid, used) for pid, used in row["processes"]),
        nvlinks_active=len(row.get("nvlinks") or []),
        pcie_generation=pcie.get("generation"),
        pcie_width=pcie.get("width"),
    )


def _link(rows: list[dict[str, Any]], pair: dict[str, Any]) -> Link:
    by_index = {row["index"]: row for row in rows}
    remotes = [str(bus).lower() for bus in by_index[pair["a"]].get("nvlinks") or []]
    direct = remotes.count(by_index[pair["b"]]["bus_id"].lower())
    by_nvlink = pair.get("nvlink") == 0
    count = direct or (len(remotes) if by_nvlink else 0)
    read, write = pair.get("read", 6), pair.get("write", 6)
    status = read if read != 0 else write
    return Link(
        source=f"gpu{pair['a']}",
        target=f"gpu{pair['b']}",
        kind="NVLINK" if count and (by_nvlink or direct) else "PCIE",
        path=PATHS.get(-1 if pair.get("ancestor") is None else pair["ancestor"], "unknown"),
        nvlinks=count,
        p2p=P2P.get(status, "unknown"),
    )


def cpu_list(mask: list[int]) -> str:
    """Return 64-bit words of a CPU mask as a list like 0-3,8."""
    cpus = [w * 64 + bit for w, word in enumerate(mask) for bit in range(64) if word >> bit & 1]
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class PyNvml:
    """NVML through nvidia-ml-py. Not thread safe: one thread reads."""

    def __init__(self) -> None:
        """Start NVML; raises `NvmlError`."""
        try:
            import pynvml  # noqa: PLC0415 - only where a GPU is looked for
        except ImportError:
            raise NvmlError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
        self._n: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as problem:
            raise NvmlError(f"NVML: {problem}") from None
        self._fixed: dict[int, dict[str, Any]] = {}
        self._pairs: list[dict[str, Any]] | None = None

    def read(self) -> dict[str, Any]:
        """Return driver, gpus and pairs. What cannot change is asked once."""
        n = self._n
        try:
            count = min(n.nvmlDeviceGetCount(), GPUS_MAX)
            handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            if self._pairs is None:
                self._fixed = {i: self._describe(i, h) for i, h in enumerate(handles)}
                self._pairs = [
                    self._pair(a, handles[a], b, handles[b])
                    for a in range(count)
                    for b in range(count)
                    if a != b
                ]
            gpus = [
                self._fixed[i] | {"memory": self._memory(h), "processes": self._processes(h)}
                for i, h in enumerate(handles)
            ]
            return {"driver": _str(n.nvmlSystemGetDriverVersion()), "gpus": gpus,
                    "pairs": self._pairs}  # fmt: skip
        except n.NVMLError as problem:
            raise NvmlError(f"NVML: {problem}") from None

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call gives, None where this GPU or driver has no answer."""
        try:
            return call(*arguments)
        except self._n.NVMLError:
            return None

    def _describe(self, index: int, handle: Any) -> dict[str, Any]:
        n = self._n
        pci = n.nvmlDeviceGetPciInfo(handle)
        bus_id = _str(pci.busId).lower()
        words = self._ask(n.nvmlDeviceGetCpuAffinity, handle, 16)
        return {
            "index": index,
            "name": _str(n.nvmlDeviceGetName(handle)),
            "uuid": _str(n.nvmlDeviceGetUUID(handle)),
            "bus_id": bus_id,
            "numa_node": _numa_node(bus_id),
            "cpu_mask": [int(word) for word in words] if words else [],
            "nvlinks": [
                _str(remote.busId).lower()
                for link in range(LINKS_MAX)
                if self._ask(n.nvmlDeviceGetNvLinkState, handle, link) == 1
                and (remote := self._ask(n.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))
            ],
            "pcie": {
                "generation": self._ask(n.nvmlDeviceGetMaxPcieLinkGeneration, handle),
                "width": self._ask(n.nvmlDeviceGetMaxPcieLinkWidth, handle),
            },
        }

    def _memory(self, handle: Any) -> dict[str, int]:
        n = self._n
        version = getattr(n, "nvmlMemory_v2", None)
        info = self._ask(n.nvmlDeviceGetMemoryInfo, handle, version) if version else None
        if info is None:
            info = n.nvmlDeviceGetMemoryInfo(handle)
        return {
            "total": int(info.total),
            "used": int(info.used),
            "free": int(info.free),
            "reserved": int(getattr(info, "reserved", 0)),
        }

    def _processes(self, handle: Any) -> list[list[int | None]]:
        rows = self._ask(self._n.nvmlDeviceGetComputeRunningProcesses, handle) or []
        return [
            [int(row.pid), None if row.usedGpuMemory is None else int(row.usedGpuMemory)]
            for row in rows
        ]

    def _pair(self, a: int, first: Any, b: int, second: Any) -> dict[str, Any]:
        n = self._n
        status = {
            name: self._ask(n.nvmlDeviceGetP2PStatus, first, second, getattr(n, constant, -1))
            for name, constant in (
                ("read", "NVML_P2P_CAPS_INDEX_READ"),
                ("write", "NVML_P2P_CAPS_INDEX_WRITE"),
                ("nvlink", "NVML_P2P_CAPS_INDEX_NVLINK"),
            )
        }
        ancestor = self._ask(n.nvmlDeviceGetTopologyCommonAncestor, first, second)
        known = {name: int(value) for name, value in status.items() if value is not None}
        return {"a": a, "b": b, "ancestor": None if ancestor is None else int(ancestor), **known}


def _str(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _numa_node(bus_id: str) -> int | None:
    """Read the kernel's node of a PCI device; NVML's domain has eight digits, the kernel's four."""
    try:
        text = Path("/sys/bus/pci/devices", bus_id[-12:], "numa_node").read_text(encoding="ascii")
    except OSError:
        return None
    return int(text)
