"""Causes that a message names in so many words: which signs, how sure, why, what to change.

Data for `oom`, whose judges look here first and at the figures then. Signs are those of
`evidence`. Of a cause's rows the first that applies counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

CUDA: Final = frozenset(("cuda_oom", "bare_cuda_oom"))
SMALLER_BUFFERS: Final = (
    "make them smaller: reduce_bucket_size and allgather_bucket_size 5e7 (DeepSpeed), "
    "bucket_cap_mb 25 (DDP), or disable_custom_all_reduce (vLLM)"
)


class Row(NamedTuple):
    """`signs`: of each group one has to be there; `without`: none of these.

    `why` is a sentence with figures by name: {requested}, {killed} and {limit}.
    """

    cause: str
    signs: tuple[frozenset[str], ...]
    confidence: float
    why: str
    change: str
    without: frozenset[str] = frozenset()

    def applies(self, signs: AbstractSet[str]) -> bool:
        """Say whether these signs are the row's."""
        return all(group & signs for group in self.signs) and not self.without & signs


def _of(*names: str) -> frozenset[str]:
    return frozenset(names)


ROWS: Final = (
    Row(
        "does_not_fit", (_of("llama_alloc"), _of("llama_compute")), 0.85,
        "the compute buffer of {requested} does not fit beside the weights",
        "lower the batch (-ub 256) or the context (-c), or offload fewer layers (-ngl)",
    ),
    Row(
        "does_not_fit", (_of("llama_alloc"), _of("llama_weights")), 0.9,
        "the weights' buffer of {requested} does not fit",
        "offload fewer layers (-ngl), split over more GPUs, or take a smaller quantisation",
    ),
    Row(
        "outside_allocator", (_of("nccl"),), 0.9,
        "NCCL asked the driver for {requested} and torch had left nothing",
        "leave headroom: gpu_memory_utilization (or --mem-fraction-static) 0.05 lower; or fewer"
        " channels (NCCL_MAX_NCHANNELS=8)",
    ),
    Row(
        "outside_allocator", (_of("graph_capture"),), 0.85,
        "the private pools of CUDA graphs did not fit beside the KV pool",
        "capture fewer batch sizes (--cuda-graph-max-bs, cudagraph_capture_sizes) or lower the "
        "static fraction by 0.05",
    ),
    Row(
        "kv_pool", (_of("sampler_warmup"),), 0.87,
        "the KV pool took what the sampler needs for as many requests as allowed",
        "lower max_num_seqs to 256, or gpu_memory_utilization by 0.05",
    ),
    Row(
        "kv_pool", (_of("kv_no_blocks"),), 0.85,
        "the profile run left nothing for KV within gpu_memory_utilization",
        "raise gpu_memory_utilization (a share of the whole device, not of what is free), or "
        "shorten max_model_len, which the profile run fills",
    ),
    Row(
        "kv_pool", (_of("kv_static_fraction"),), 0.85,
        "--mem-fraction-static leaves no KV pool beside the weights",
        "raise --mem-fraction-static by 0.05; where that runs out later, lower "
        "--chunked-prefill-size",
    ),
    Row(
        "kv_pool", (_of("kv_exhausted"),), 0.8,
        "the KV pool is full while requests still grow",
        "lower --max-running-requests, or raise --schedule-conservativeness",
    ),
    Row(
        "spike", (_of("workspace"),), 0.85,
        "a batch needs {requested} in a workspace of fixed size",
        "enlarge the workspace (SGLANG_FLASHINFER_WORKSPACE_SIZE), or bound the batch",
    ),
    Row(
        "host_limit", (_of("cgroup_kill"),), 0.95,
        "the kernel killed the process at its cgroup's limit{limit}{killed}",
        "raise the container's memory limit above the weights plus what the loader holds, or "
        "load with mmap / safetensors",
    ),
    Row(
        "host_limit", (_of("host_kill"),), 0.93,
        "the machine ran out of memory and killed the process{killed}",
        "use a machine with more memory, load one shard at a time, or add swap for the load",
    ),
    Row(
        "host_limit", (_of("shm"),), 0.9,
        "shared memory is full: a container has 64 MiB of it unless told otherwise",
        "give it more (--shm-size=8g; in Kubernetes an emptyDir of medium Memory on /dev/shm)",
    ),
    Row(
        "host_limit", (_of("host_alloc"),), 0.88,
        "the host refused {requested}, not the GPU",
        "raise the memory (or locked memory: ulimit -l) limit of the process, or lower the "
        "CPU offload and swap space settings",
    ),
    Row(
        "host_limit", (_of("exit_137", "ray_low_memory"),), 0.75,
        "the process was killed from outside (SIGKILL), as the OOM killer does",
        "see dmesg or the pod's last state; raise the container's memory limit",
        without=_of("cuda_oom"),
    ),
    Row(
        "accumulation", (_of("retain_graph", "kept_outputs"), CUDA), 0.91,
        "the code keeps the graph of earlier steps alive",
        "call backward() without retain_graph, and add loss.item() or loss.detach(), not loss",
    ),
    Row(
        "all_reduce_buffers", (_of("bucket_buffer"), CUDA), 0.91,
        "{requested} were asked for as a bucket of gradients", SMALLER_BUFFERS,
    ),
    Row(
        "all_reduce_buffers", (_of("all_reduce"), CUDA), 0.82,
        "{requested} were asked for inside an all-reduce", SMALLER_BUFFERS,
    ),
)  # fmt: skip
