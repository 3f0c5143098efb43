import dataclasses
import json

import orjson
import pytest

from agent.engine.load import load_engine
from agent.engine.types import Sampling
from agent.memory.nvml import NvmlError, PyNvml, cpu_list, decode
from agent.memory.topology import Allocator, allocator_from, kv_pool_from, numa_bytes
from agent.memory.watch import MemoryWatch
from agent.metrics import Metrics
from agent.node import Node
from tests.unit.agent.engine_kit import collect, random_prompt, write_gguf
from tests.unit.agent.memory_kit import GIB, Recorded, host, reading, report

TORCH = {
    "allocated_bytes.all.current": 5,
    "active_bytes.all.current": 6,
    "reserved_bytes.all.current": 8,
    "inactive_split_bytes.all.current": 2,
    "num_ooms": 1,
    "num_alloc_retries": 3,
}


def watch(nvml=None, of=host, node=None):
    def none():
        raise NvmlError("NVML: no driver")

    return MemoryWatch(
        node or Node(0), sample_s=1, window_s=240, nvml=Recorded(nvml) if nvml else none, host=of
    )


def test_eight_gpus_behind_switches():
    gpus = decode(reading("h100x8"))
    assert len(gpus.gpus) == 8
    assert [gpu.numa_node for gpu in gpus.gpus] == [0] * 4 + [1] * 4
    assert gpus.gpus[0].cpus == "0-47"
    assert gpus.gpus[7].cpus == "48-95"
    assert len(gpus.links) == 56
    near = next(link for link in gpus.links if (link.source, link.target) == ("gpu0", "gpu1"))
    far = next(link for link in gpus.links if (link.source, link.target) == ("gpu0", "gpu7"))
    assert (near.kind, near.nvlinks, near.path, near.p2p) == ("NVLINK", 18, "NODE", "ok")
    assert (far.kind, far.path) == ("NVLINK", "SYS")


def test_the_drivers_reserve_is_used_and_adds_up():
    gpu = decode(reading("h100x8")).gpus[0]
    assert gpu.used_bytes + gpu.free_bytes == gpu.total_bytes


def test_direct_nvlinks_are_counted_by_their_other_end():
    links = decode(reading("v100x2")).links
    assert [(link.kind, link.nvlinks) for link in links] == [("NVLINK", 1), ("NVLINK", 1)]


def test_pcie_alone_says_why_there_is_no_p2p():
    first, second = decode(reading("l4x2")).links
    assert (first.kind, first.path, first.p2p) == ("PCIE", "PHB", "chipset_not_supported")
    assert (second.path, second.p2p) == ("unknown", "unknown")


def test_a_node_of_minus_one_is_no_node():
    assert {gpu.numa_node for gpu in decode(reading("l4x2")).gpus} == {None}


@pytest.mark.parametrize(
    ("mask", "text"), [([], ""), ([0], ""), ([0b1011], "0-1,3"), ([1 << 63, 1], "63-64")]
)
def test_cpu_masks_are_lists(mask, text):
    assert cpu_list(mask) == text


def test_torch_and_driver_and_processes_are_three_accounts():
    gpus = decode(reading("h100x8"))
    uuid = gpus.gpus[0].uuid
    found = report(gpus=gpus, allocators={uuid: allocator_from(TORCH)})
    device = found.devices[0]
    assert (found.backend, device.kind) == ("cuda", "gpu")
    assert device.allocator == Allocator(5, 6, 8, 2, 1, 3)
    assert [(user.pid, user.ours) for user in device.processes] == [
        (4242, True), (1001, False), (999, False),
    ]  # fmt: skip
    assert device.processes[2].used_bytes is None
    assert found.devices[1].allocator is None
    assert {"gpu0", "gpu0 torch", "gpu1"} <= found.shares().keys()


def test_a_cpu_build_of_torch_keeps_no_account():
    assert allocator_from({}) is None


def test_a_cpu_has_the_same_schema():
    with_gpus = report(gpus=decode(reading("h100x8"))).plain()
    without = report().plain()
    assert without["backend"] == "cpu"
    assert without.keys() == with_gpus.keys()
    gpu, node = with_gpus["devices"][0], without["devices"][0]
    assert gpu.keys() == node.keys()
    assert gpu["driver"].keys() == node["driver"].keys()
    assert node["allocator"].keys() == dataclasses.asdict(Allocator(*[None] * 6)).keys()
    assert node["allocator"]["reserved_bytes"] == GIB


def test_two_nodes_share_a_process_by_its_pages():
    text = (
        "7f00 default anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4\n"
        "7f10 default file=/lib/x mapped=9 N1=2 kernelpagesize_kB=2048\n7f20 default\n"
    )
    pages = numa_bytes(text)
    assert pages == {0: 8 << 10, 1: (4 << 10) + (4 << 20)}
    found = report(host(nodes=2), numa=pages)
    assert [device.allocator.reserved_bytes for device in found.devices] == [pages[0], pages[1]]
    assert [(link.source, link.target, link.path) for link in found.links] == [
        ("node0", "node1", "distance 21"), ("node1", "node0", "distance 21"),
    ]  # fmt: skip


def test_a_kernel_without_nodes_is_one_node():
    found = report(host(nodes=0))
    assert [device.id for device in found.devices] == ["node0"]
    assert found.devices[0].driver.used_bytes == 8 * GIB


def test_shares_stay_shares():
    over = host(limit=GIB, used=2 * GIB)
    assert set(report(over).shares()) == {"node0", "cgroup", "process", "stalled"}
    assert all(0.0 <= share <= 1.0 for share in report(over).shares().values())


def test_the_watch_names_what_is_missing_and_goes_on():
    look = watch()
    look.look()
    look.look()
    assert look.latest.backend == "cpu"
    assert look.latest.missing == ("NVML: no driver",)
    assert look.heat.table()["pools"]


def test_a_gpu_that_falls_off_is_missing_until_it_is_back():
    answers = reading("l4x2"), NvmlError("NVML: GPU is lost"), reading("l4x2")
    look = watch()
    look._open_nvml = Recorded(*answers)
    backends = []
    for _ in answers:
        look.look()
        backends.append((look.latest.backend, look.latest.missing))
    lost = ("cpu", ("NVML: GPU is lost",))
    assert backends == [("cuda", ()), lost, ("cuda", ())]


def test_a_failure_is_counted_and_the_last_report_stays(caplog):
    look = watch(of=lambda: (_ for _ in ()).throw(FileNotFoundError("/proc/meminfo")))
    look.look()
    look.look()
    assert (look.failures, look.latest) == (2, None)
    assert len(caplog.records) == 1


def test_nvml_of_this_machine_is_read_or_says_what_is_missing():
    pytest.importorskip("pynvml", reason="capability: nvidia-ml-py")
    found, said = [], "NVML: "
    try:
        found = decode(PyNvml().read()).gpus
    except NvmlError as problem:
        said = str(problem)
    assert said.startswith("NVML: ")
    assert all(gpu.total_bytes > 0 for gpu in found)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("m") / "m.gguf")
    engine = load_engine(str(path), kv_tokens=1024)
    yield engine
    engine.close()


def test_a_real_engine_on_this_machine(engine):
    node = Node(0)
    node.loaded(engine, ())
    collect(engine, random_prompt(1, 40), Sampling(4, temperature=0.0))
    look = MemoryWatch(node, sample_s=1, window_s=240)
    look.look()
    found = orjson.loads(orjson.dumps(look.latest.plain()))
    (pool,) = found["kv_pools"]
    # 2 layers x 2 (K, V) x 16 tokens x 2 heads x 8 x 4 bytes
    assert (pool["total_blocks"], pool["block_bytes"]) == (64, 2 * 2 * 16 * 2 * 8 * 4)
    assert pool["held_blocks"] == 0
    assert pool["cached_blocks"] == 2
    assert pool["touched_blocks"] == 3
    assert found["host"]["process"]["rss_bytes"] > 10 << 20
    if found["backend"] == "cpu":
        own = [d["allocator"]["reserved_bytes"] for d in found["devices"] if d["allocator"]]
        assert sum(own) > 10 << 20
    assert json.dumps(found)


def test_promises_are_given_back(engine):
    collect(engine, random_prompt(2, 20), Sampling(4, temperature=0.0))
    assert engine.stats().kv_blocks_promised == 0
    assert kv_pool_from("m", engine.stats()).share == 0.0


def test_the_report_is_metrics_too(engine):
    node = Node(0)
    node.loaded(engine, ("m",))
    node.memory = watch(reading("h100x8"), node=node)
    metrics = Metrics(node)
    assert b"tongguan_agent_memory_device_bytes{" not in metrics.render()
    node.memory.look()
    value = metrics.registry.get_sample_value
    uuid = node.memory.latest.devices[0].uuid
    labels = {"device": "gpu0", "uuid": uuid, "account": "driver_total"}
    assert value("tongguan_agent_memory_device_bytes", labels) == 85520809984
    assert value("tongguan_agent_memory_p2p", {"src": "gpu0", "dst": "gpu1", "kind": "NVLINK"}) == 1
    assert value("tongguan_agent_memory_kv_pool_bytes", {"pool": "m", "state": "held"}) == 0
    assert value("tongguan_agent_memory_limit_bytes") == 4 * GIB
