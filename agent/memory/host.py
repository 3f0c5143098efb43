"""The host's memory: cgroup (v1 and v2), NUMA nodes, this process, pressure; parsers, one reader.

The parsers are pure: they are given a file's text. `read_host` is the shell; it reads small files
of /proc and /sys only, and leaves out what is not there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# cgroup v1 writes "no limit" as the largest multiple of a page below 2^63.
NO_LIMIT_BYTES: Final = 1 << 60
NODES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The memory controller's figures; `limit_bytes` is the tightest of this group and its parents.

    `working_bytes` leaves out file pages that the kernel would drop first. `oom_kills` counts since
    the group was made. None: the kernel does not say.
    """

    version: int
    limit_bytes: int | None
    used_bytes: int
    working_bytes: int
    peak_bytes: int | None
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node's memory; `distances` to every node in order, 10 is its own.

    What the page cache holds and could give up counts as free.
    """

    index: int
    cpus: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    distances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Process:
    """Resident memory of a process, by kind."""

    pid: int
    rss_bytes: int
    rss_peak_bytes: int
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    swap_bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """All of it; `stalled_share` is the time of the last 10 s that some task waited for memory."""

    total_bytes: int
    available_bytes: int
    nodes: tuple[NumaNode, ...]
    cgroup: Cgroup | None
    process: Process
    stalled_share: float | None

    @property
    def limit_bytes(self) -> int:
        """What this process may have: the cgroup's limit, or the machine's memory."""
        limit = self.cgroup.limit_bytes if self.cgroup else None
        return min(limit or self.total_bytes, self.total_bytes)

    @property
    def headroom_bytes(self) -> int:
        """What could still be taken: the least of the limit's rest and the machine's available."""
        if self.cgroup and self.cgroup.limit_bytes:
            rest = max(0, self.cgroup.limit_bytes - self.cgroup.working_bytes)
            return min(rest, self.available_bytes)
        return self.available_bytes


def fields_kb(text: str) -> dict[str, int]:
    """Return `Name: N kB` lines as bytes; the forms of meminfo, of a node's and of status."""
    rows = re.findall(r"^(?:Node \d+ )?([A-Za-z()_]+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(value) << 10 for name, value in rows}


def parse_process(pid: int, status: str) -> Process:
    """Read /proc/PID/status."""
    row = fields_kb(status)
    return Process(
        pid,
        row.get("VmRSS", 0),
        row.get("VmHWM", 0),
        row.get("RssAnon", 0),
        row.get("RssFile", 0),
        row.get("RssShmem", 0),
        row.get("VmSwap", 0),
    )


def parse_node(index: int, meminfo: str, cpulist: str, distance: str) -> NumaNode:
    """Read a directory of /sys/devices/system/node."""
    row = fields_kb(meminfo)
    total = row.get("MemTotal", 0)
    # The page cache is given up when memory is wanted; shared memory is in it and is not.
    cache = max(0, row.get("FilePages", 0) - row.get("Shmem", 0)) + row.get("SReclaimable", 0)
    free = min(total, row.get("MemFree", 0) + cache)
    return NumaNode(
        index,
        cpulist.strip(),
        total,
        free,
        total - free,
        tuple(int(part) for part in distance.split()),
    )


def cgroup_paths(text: str) -> tuple[str | None, str | None]:
    """Return (v1 path of the memory controller, v2 path) from /proc/self/cgroup."""
    v1 = v2 = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            v1 = path
        elif number == "0" and not controllers:
            v2 = path
    return v1, v2


def parse_v2(files: Mapping[str, str], limits: Iterator[str] | tuple[str, ...] = ()) -> Cgroup:
    """Read a v2 group's files by name; `limits`: memory.max of its parents, too."""
    found = [_limit(text) for text in (files.get("memory.max", "max"), *limits)]
    used = int(files["memory.current"])
    events = dict(line.split() for line in files.get("memory.events", "").splitlines())
    kills = events.get("oom_kill")
    return Cgroup(
        2,
        min((limit for limit in found if limit is not None), default=None),
        used,
        max(0, used - _stat(files, "inactive_file")),
        int(files["memory.peak"]) if "memory.peak" in files else None,
        int(kills) if kills is not None else None,
    )


def parse_v1(files: Mapping[str, str], limits: Iterator[str] | tuple[str, ...] = ()) -> Cgroup:
    """Read a v1 group's files by name; `limits`: memory.limit_in_bytes of its parents, too."""
    found = [_limit(text) for text in (files.get("memory.limit_in_bytes", "max"), *limits)]
    # The hierarchical limit covers parents that this mount does not show.
    found.append(_limit(str(_stat(files, "hierarchical_memory_limit") or "max")))
    used = int(files["memory.usage_in_bytes"])
    control = dict(
        line.split() for line in files.get("memory.oom_control", "").splitlines() if " " in line
    )
    kills = control.get("oom_kill")
    peak = files.get("memory.max_usage_in_bytes")
    return Cgroup(
        1,
        min((limit for limit in found if limit is not None), default=None),
        used,
        max(0, used - _stat(files, "total_inactive_file")),
        int(peak) if peak is not None else None,
        int(kills) if kills is not None else None,
    )


def _limit(text: str) -> int | None:
    text = text.strip()
    if text == "max" or not text.isdigit() or int(text) >= NO_LIMIT_BYTES:
        return None
    return int(text)


def _stat(files: Mapping[str, str], name: str) -> int:
    row = re.search(rf"^{name} (\d+)$", files.get("memory.stat", ""), re.MULTILINE)
    return int(row[1]) if row else 0


def parse_stalled(text: str) -> float | None:
    """Return the share of the last 10 s from /proc/pressure/memory, 0 to 1."""
    row = re.search(r"^some avg10=(\d+\.\d+)", text, re.MULTILINE)
    return float(row[1]) / 100 if row else None


# --- the reader ----------------------------------------------------------------------------------

_V2_FILES: Final = ("memory.max", "memory.current", "memory.peak", "memory.events", "memory.stat")
_V1_FILES: Final = (
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes",
    "memory.oom_control", "memory.stat",
)  # fmt: skip
_PARENTS_MAX: Final = 32


def read_host(root: Path = Path("/")) -> Host:
    """Read everything under `root`; raises OSError where there is no /proc."""
    memory = fields_kb((root / "proc/meminfo").read_text(encoding="ascii"))
    status = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace")
    stalled = _text(root / "proc/pressure/memory")
    return Host(
        memory["MemTotal"],
        memory.get("MemAvailable", memory.get("MemFree", 0)),
        tuple(_nodes(root / "sys/devices/system/node")),
        _cgroup(root),
        parse_process(os.getpid(), status),
        parse_stalled(stalled) if stalled else None,
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _nodes(folder: Path) -> Iterator[NumaNode]:
    names = sorted(
        (int(path.name[4:]), path) for path in folder.glob("node[0-9]*") if path.name[4:].isdigit()
    )
    for index, path in names[:NODES_MAX]:
        meminfo = _text(path / "meminfo")
        if meminfo:
            cpus, distance = _text(path / "cpulist"), _text(path / "distance")
            yield parse_node(index, meminfo, cpus or "", distance or "")


def _cgroup(root: Path) -> Cgroup | None:
    v1, v2 = cgroup_paths(_text(root / "proc/self/cgroup") or "")
    mount = root / "sys/fs/cgroup"
    if v1 is not None:
        found = _group(mount / "memory", v1, _V1_FILES, "memory.limit_in_bytes")
        if found and "memory.usage_in_bytes" in found[0]:
            return parse_v1(*found)
    if v2 is not None:
        found = _group(mount, v2, _V2_FILES, "memory.max")
        if found and "memory.current" in found[0]:
            return parse_v2(*found)
    return None


def _group(
    mount: Path, path: str, names: tuple[str, ...], limit: str
) -> tuple[dict[str, str], tuple[str, ...]] | None:
    """Return a group's files and its parents' limits.

    In a container the path is often that of the host's tree while the mount shows only its own
    part: then the mount itself is the group.
    """
    inside = mount / path.lstrip("/")
    group = inside if inside.is_dir() else mount
    files = {name: text for name in names if (text := _text(group / name)) is not None}
    limits = []
    for parent in list(group.parents)[:_PARENTS_MAX]:
        if mount not in (parent, *parent.parents):
            break
        text = _text(parent / limit)
        if text is not None:
            limits.append(text)
    return (files, tuple(limits)) if files else None
