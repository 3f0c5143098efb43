"""Hosts and reports for the tests of memory, by the same parsers that read real ones."""

import dataclasses
import json
import time
from pathlib import Path

from agent.memory.host import Cgroup, Host, NumaNode, Process
from agent.memory.nvml import NvmlError
from agent.memory.topology import assemble

GIB = 1 << 30
READINGS = Path(__file__).parents[2] / "vectors" / "nvml"


def host(*, limit=4 * GIB, used=1 * GIB, available=8 * GIB, nodes=1, **changes):
    made = Host(
        total_bytes=16 * GIB,
        available_bytes=available,
        nodes=tuple(
            NumaNode(
                i, f"{i}", 8 * GIB, 2 * GIB, 6 * GIB,
                tuple(10 if i == j else 21 for j in range(nodes)),
            )
            for i in range(nodes)
        ),
        cgroup=Cgroup(2, limit, used, used, used, 0) if limit else None,
        process=Process(4242, GIB, GIB, GIB // 2, GIB // 4, GIB // 4, 0),
        stalled_share=0.01,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def report(of=None, *, gpus=None, allocators=None, at=None, kv_pools=(), numa=None):
    return assemble(
        at_unix_s=time.time() if at is None else at,
        host=of or host(),
        gpus=gpus,
        allocators=allocators or {},
        numa=numa or {},
        kv_pools=kv_pools,
        missing=(),
    )


def reading(name):
    return json.loads((READINGS / f"{name}.json").read_text(encoding="utf-8"))


class Recorded:
    """An `Nvml` that plays readings, the last one for ever; an error is raised."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def __call__(self):
        return self

    def read(self):
        now = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if isinstance(now, NvmlError):
            raise now
        return now
