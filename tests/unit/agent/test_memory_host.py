import os
import resource
from pathlib import Path

import pytest

from agent.memory.host import (
    cgroup_paths,
    parse_node,
    parse_process,
    parse_stalled,
    parse_v1,
    parse_v2,
    read_host,
)

V2 = {
    "memory.max": "8589934592\n",
    "memory.current": "3221225472\n",
    "memory.peak": "4294967296\n",
    "memory.events": "low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n",
    "memory.stat": "anon 2147483648\nfile 1073741824\ninactive_file 536870912\n",
}
V1 = {
    "memory.limit_in_bytes": "9223372036854771712\n",
    "memory.usage_in_bytes": "1000000\n",
    "memory.max_usage_in_bytes": "2000000\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory.stat": "cache 5\nhierarchical_memory_limit 4194304\ntotal_inactive_file 400000\n",
}


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root, cgroup="", **files):
    write(
        root,
        {
            "proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:    9000000 kB\n",
            "proc/self/status": "Name:\tx\nVmHWM:\t 400 kB\nVmRSS:\t 300 kB\nRssAnon:\t 200 kB\n",
            "proc/self/cgroup": cgroup,
        },
    )
    return root


def test_a_v2_group_is_read():
    group = parse_v2(V2)
    assert (group.version, group.limit_bytes, group.used_bytes) == (2, 8 << 30, 3 << 30)
    assert group.working_bytes == (3 << 30) - (512 << 20)
    assert (group.peak_bytes, group.oom_kills) == (4 << 30, 1)


def test_the_tightest_limit_of_the_parents_counts():
    assert parse_v2(V2, ("max\n", "1073741824\n", "max")).limit_bytes == 1 << 30
    assert parse_v2(V2 | {"memory.max": "max\n"}).limit_bytes is None


def test_a_v1_group_is_read_and_its_hierarchical_limit_counts():
    group = parse_v1(V1)
    assert (group.version, group.limit_bytes) == (1, 4 << 20)
    assert (group.working_bytes, group.peak_bytes, group.oom_kills) == (600_000, 2_000_000, 3)


def test_the_largest_number_is_no_limit():
    files = V1 | {"memory.stat": "hierarchical_memory_limit 9223372036854771712\n"}
    assert parse_v1(files).limit_bytes is None


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("0::/user.slice\n", (None, "/user.slice")),
        ("9:name=systemd:/\n4:memory:/a/b\n0::/\n", ("/a/b", "/")),
        ("4:cpu,memory:/x:y\n", ("/x:y", None)),
        ("", (None, None)),
    ],
)
def test_the_group_of_a_process_is_found(text, paths):
    assert cgroup_paths(text) == paths


def test_a_machine_with_v2(tmp_path):
    root = machine(tmp_path, "0::/pod/box\n")
    write(root / "sys/fs/cgroup/pod/box", V2 | {"memory.max": "max\n"})
    write(root / "sys/fs/cgroup/pod", {"memory.max": "2147483648\n"})
    host = read_host(root)
    assert host.cgroup.limit_bytes == host.limit_bytes == 2 << 30
    assert host.headroom_bytes == 0, "working set above the limit leaves nothing, not less"
    assert (host.process.rss_bytes, host.process.pid) == (300 << 10, os.getpid())


def test_a_container_that_sees_only_its_own_part(tmp_path):
    root = machine(tmp_path, "0::/kubepods/pod1/box\n")
    write(root / "sys/fs/cgroup", V2)
    assert read_host(root).cgroup.limit_bytes == 8 << 30


def test_v1_with_an_empty_v2_beside_it(tmp_path):
    root = machine(tmp_path, "4:memory:/gone\n0::/\n")
    write(root / "sys/fs/cgroup/memory", V1)
    host = read_host(root)
    assert (host.cgroup.version, host.limit_bytes) == (1, 4 << 20)


def test_no_group_at_all(tmp_path):
    host = read_host(machine(tmp_path))
    assert host.cgroup is None
    assert host.limit_bytes == host.total_bytes == 16_000_000 << 10
    assert host.headroom_bytes == 9_000_000 << 10
    assert (host.nodes, host.stalled_share) == ((), None)


def test_nodes_are_read_in_order_of_their_number(tmp_path):
    root = machine(tmp_path)
    for index in (10, 2):
        text = f"Node {index} MemTotal: 1000 kB\nNode {index} MemFree: 400 kB\n"
        folder = {"meminfo": text, "cpulist": "0-3\n", "distance": "10 21\n"}
        write(root / f"sys/devices/system/node/node{index}", folder)
    nodes = read_host(root).nodes
    assert [node.index for node in nodes] == [2, 10]
    assert (nodes[0].used_bytes, nodes[0].cpus, nodes[0].distances) == (600 << 10, "0-3", (10, 21))


def test_the_page_cache_of_a_node_is_free_but_for_shared_memory():
    rows = {"MemTotal": 100, "MemFree": 10, "FilePages": 50, "Shmem": 20, "SReclaimable": 5}
    text = "".join(f"Node 0 {name}: {size} kB\n" for name, size in rows.items())
    node = parse_node(0, text, "", "")
    assert (node.free_bytes, node.used_bytes) == (45 << 10, 55 << 10)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("some avg10=12.50 avg60=0.00 avg300=0.00 total=0\nfull avg10=9.00 total=1\n", 0.125),
        ("full avg10=9.00\n", None),
        ("", None),
    ],
)
def test_stalls_are_a_share(text, share):
    assert parse_stalled(text) == share


def test_a_status_without_memory_is_zero():
    assert parse_process(2, "Name:\tkthreadd\n").rss_bytes == 0


def test_this_machine_is_read():
    host = read_host()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert 1 << 20 < host.process.rss_bytes <= peak * 1.01
    assert 0 < host.available_bytes <= host.total_bytes
    assert 0 <= host.headroom_bytes <= host.limit_bytes <= host.total_bytes
    assert Path("/sys/devices/system/node/node0").is_dir() == bool(host.nodes)
