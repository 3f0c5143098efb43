"""What holds memory, device by device: one report in one schema, with or without GPUs.

A *device* is a GPU, or, on a machine without one, a NUMA node of the host (`backend` says which).
Three accounts of each that do not add up to one another are kept apart: the allocator's (what torch
gave to tensors, and what it holds), the driver's (what is used at all), and the processes'. On a
CPU torch keeps no account, so the process's resident memory stands for it. Unknown is None, never
zero. Pure: facts in, report out; `watch.py` gathers them.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agent.memory.nvml import Link

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.engine.types import EngineStats
    from agent.memory.host import Host, NumaNode
    from agent.memory.nvml import Gpu, Gpus

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Allocator:
    """Torch's account: given to tensors, in use by streams, held, held in pieces, failures."""

    allocated_bytes: int | None
    active_bytes: int | None
    reserved_bytes: int | None
    inactive_split_bytes: int | None
    ooms: int | None
    alloc_retries: int | None


@dataclass(frozen=True, slots=True)
class Driver:
    """The device's account; `used_bytes` is everybody's."""

    total_bytes: int
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class User:
    """A process on a device; `ours`: this agent."""

    pid: int
    used_bytes: int | None
    ours: bool


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or NUMA node."""

    id: str
    kind: str
    name: str
    uuid: str | None
    numa_node: int | None
    cpus: str
    allocator: Allocator | None
    driver: Driver
    processes: tuple[User, ...]


@dataclass(frozen=True, slots=True)
class KvPool:
    """One engine's KV pool in blocks; `touched_blocks` were ever written: their pages exist."""

    name: str
    block_bytes: int
    block_tokens: int
    total_blocks: int
    held_blocks: int
    cached_blocks: int
    free_blocks: int
    touched_blocks: int

    @property
    def share(self) -> float:
        """Part that is held by requests, 0 to 1."""
        return self.held_blocks / self.total_blocks if self.total_blocks else 0.0


@dataclass(frozen=True, slots=True)
class Topology:
    """The report. `missing` says what could not be read and why."""

    backend: str
    at_unix_s: float
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    host: Host
    kv_pools: tuple[KvPool, ...]
    missing: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        value = {"schema": SCHEMA, **dataclasses.asdict(self)}
        value["host"]["limit_bytes"] = self.host.limit_bytes
        value["host"]["headroom_bytes"] = self.host.headroom_bytes
        return value

    def shares(self) -> dict[str, float]:
        """Return how full each pool is, 0 to 1, by the names the heat map shows."""
        found = {f"kv {pool.name}": pool.share for pool in self.kv_pools}
        for device in self.devices:
            total = device.driver.total_bytes or 1
            found[device.id] = device.driver.used_bytes / total
            if device.kind == "gpu" and device.allocator and device.allocator.reserved_bytes:
                found[f"{device.id} torch"] = device.allocator.reserved_bytes / total
        limit = self.host.limit_bytes or 1
        group = self.host.cgroup
        if group and group.limit_bytes:
            found["cgroup"] = group.working_bytes / limit
        found["process"] = self.host.process.rss_bytes / limit
        if self.host.stalled_share is not None:
            found["stalled"] = self.host.stalled_share
        return {name: min(1.0, max(0.0, share)) for name, share in found.items()}


def allocator_from(stats: Mapping[str, int]) -> Allocator | None:
    """Return the account in `torch.cuda.memory_stats()`; None for the empty one of a CPU build."""
    if not stats:
        return None
    return Allocator(
        stats.get("allocated_bytes.all.current"),
        stats.get("active_bytes.all.current"),
        stats.get("reserved_bytes.all.current"),
        stats.get("inactive_split_bytes.all.current"),
        stats.get("num_ooms"),
        stats.get("num_alloc_retries"),
    )


def kv_pool_from(name: str, stats: EngineStats) -> KvPool:
    """Return the engine's KV pool."""
    return KvPool(
        name,
        stats.kv_block_bytes,
        stats.kv_block_tokens,
        stats.kv_blocks_total,
        stats.kv_blocks_used,
        stats.kv_blocks_cached,
        stats.kv_blocks_total - stats.kv_blocks_used - stats.kv_blocks_cached,
        stats.kv_blocks_touched,
    )


def numa_bytes(numa_maps: str) -> dict[int, int]:
    """Return a process's pages by node from /proc/PID/numa_maps."""
    found: dict[int, int] = {}
    for line in numa_maps.splitlines():
        page = re.search(r"kernelpagesize_kB=(\d+)", line)
        size = (int(page[1]) if page else 4) << 10
        for node, pages in re.findall(r" N(\d+)=(\d+)", line):
            found[int(node)] = found.get(int(node), 0) + int(pages) * size
    return found


def assemble(
    *,
    at_unix_s: float,
    host: Host,
    gpus: Gpus | None,
    allocators: Mapping[str, Allocator],
    numa: Mapping[int, int],
    kv_pools: tuple[KvPool, ...],
    missing: tuple[str, ...],
) -> Topology:
    """Return the report; `allocators` by GPU uuid, `numa` this process's bytes by node."""
    if gpus is not None and gpus.gpus:
        devices = tuple(_gpu(gpu, allocators, host.process.pid) for gpu in gpus.gpus)
        return Topology("cuda", at_unix_s, devices, gpus.links, host, kv_pools, missing)
    nodes = tuple(_node(node, host, numa) for node in host.nodes) or (_whole(host),)
    return Topology("cpu", at_unix_s, nodes, _node_links(host), host, kv_pools, missing)


def _gpu(gpu: Gpu, allocators: Mapping[str, Allocator], own_pid: int) -> Device:
    return Device(
        id=f"gpu{gpu.index}",
        kind="gpu",
        name=gpu.name,
        uuid=gpu.uuid,
        numa_node=gpu.numa_node,
        cpus=gpu.cpus,
        allocator=allocators.get(gpu.uuid),
        driver=Driver(gpu.total_bytes, gpu.used_bytes, gpu.free_bytes),
        processes=tuple(
            User(process.pid, process.used_bytes, process.pid == own_pid)
            for process in sorted(gpu.processes, key=lambda p: -(p.used_bytes or 0))
        ),
    )


def _resident(host: Host, share_bytes: int | None) -> Allocator:
    process = host.process
    whole = share_bytes is None
    return Allocator(
        process.anonymous_bytes if whole else None,
        None,
        process.rss_bytes if whole else share_bytes,
        None,
        host.cgroup.oom_kills if host.cgroup else None,
        None,
    )


def _node(node: NumaNode, host: Host, numa: Mapping[int, int]) -> Device:
    alone = len(host.nodes) == 1
    own = None if alone else numa.get(node.index)
    used = host.process.rss_bytes if alone else own
    return Device(
        id=f"node{node.index}",
        kind="cpu",
        name=f"NUMA node {node.index}",
        uuid=None,
        numa_node=node.index,
        cpus=node.cpus,
        allocator=_resident(host, own) if alone or own is not None else None,
        driver=Driver(node.total_bytes, node.used_bytes, node.free_bytes),
        processes=(User(host.process.pid, used, ours=True),),
    )


def _whole(host: Host) -> Device:
    """Return the machine as one node, where the kernel shows none."""
    used = max(0, host.total_bytes - host.available_bytes)
    return Device(
        id="node0",
        kind="cpu",
        name="host",
        uuid=None,
        numa_node=None,
        cpus="",
        allocator=_resident(host, None),
        driver=Driver(host.total_bytes, used, host.available_bytes),
        processes=(User(host.process.pid, host.process.rss_bytes, ours=True),),
    )


def _node_links(host: Host) -> tuple[Link, ...]:
    return tuple(
        Link(f"node{a.index}", f"node{b.index}", "NUMA", f"distance {distance}", 0, "ok")
        for a in host.nodes
        for b, distance in zip(host.nodes, a.distances, strict=False)
        if a.index != b.index
    )
