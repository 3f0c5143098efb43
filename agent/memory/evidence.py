"""What is known about one failed allocation: figures and signs, out of a text or of statistics.

A text is what an operator has: a traceback, a log, a line of the kernel. `from_text` knows the
messages of torch (three generations and the CUDA async allocator), vLLM, SGLang, FlashInfer,
llama.cpp, NCCL, the Linux OOM killer, Docker, Kubernetes and Ray. Where a text has many messages
(one a rank, one a retry) the first one with figures counts: what follows an out-of-memory error is
usually its consequence. `from_stats` reads figures by this class's own names. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# A text is read from its first and its last part; the middle of a longer one is left out.
TEXT_BYTES_MAX: Final = 1 << 20
SERIES_MAX: Final = 10_000
LINE_MAX: Final = 8192


@dataclass(frozen=True, slots=True)
class Evidence:
    """Figures in bytes unless the name says otherwise; None is unknown.

    `process_bytes` is all of the failing process on the device, torch or not. `others_bytes` are
    other processes that were named. `signs` are the known phrases that were found. `floor` is
    (seconds, bytes allocated after a collection) over time, `micro_steps` the bytes active at the
    end of each step of a gradient accumulation.
    """

    source: str = ""
    signs: frozenset[str] = field(default_factory=frozenset)
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    private_pool_bytes: int | None = None
    process_bytes: int | None = None
    others_bytes: int | None = None
    largest_free_block_bytes: int | None = None
    weights_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_needed_bytes: int | None = None
    kv_available_bytes: int | None = None
    tokens_wanted: int | None = None
    tokens_room: int | None = None
    profile_peak_bytes: int | None = None
    peak_bytes: int | None = None
    comm_buffer_bytes: int | None = None
    killed_rss_bytes: int | None = None
    limit_bytes: int | None = None
    limit_used_bytes: int | None = None
    oom_kills: int | None = None
    floor: tuple[tuple[float, int], ...] = ()
    micro_steps: tuple[int, ...] = ()

    @property
    def unallocated_bytes(self) -> int | None:
        """What the allocator holds and has given to nobody."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """What the process holds on the device outside torch's allocator."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.process_bytes - self.reserved_bytes)

    @property
    def foreign_bytes(self) -> int | None:
        """What is used on the device and not by this process, as far as it can be told.

        Without the process's own figure, everything outside its allocator counts.
        """
        if self.others_bytes:
            return self.others_bytes
        own = self.process_bytes if self.process_bytes is not None else self.reserved_bytes
        if self.total_bytes is None or self.free_bytes is None or own is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - own)

    @property
    def missing_bytes(self) -> int | None:
        """How much more free memory would have been enough."""
        if self.requested_bytes is None:
            return None
        return max(0, self.requested_bytes - (self.free_bytes or 0))

    def figures(self) -> dict[str, int]:
        """Return every known figure by its name, derived ones included."""
        known = {
            item.name: value
            for item in dataclasses.fields(self)
            if isinstance(value := getattr(self, item.name), int)
        }
        for name in ("unallocated_bytes", "outside_bytes", "foreign_bytes", "missing_bytes"):
            value = getattr(self, name)
            if value is not None:
                known[name] = value
        return known


class EvidenceError(ValueError):
    """Statistics that cannot be read; the text names the field."""


_UNITS: Final = {
    "b": 1, "byte": 1, "bytes": 1, "kb": 1 << 10, "kib": 1 << 10, "mb": 1 << 20, "mib": 1 << 20,
    "gb": 1 << 30, "gib": 1 << 30, "tb": 1 << 40, "tib": 1 << 40,
}  # fmt: skip
# Some locales write 1900,00 MiB.
_SIZE: Final = r"(\d+(?:[.,]\d+)?) ?(bytes|byte|[KMGT]i?B|kB|B)\b"


def _bytes(number: str, unit: str) -> int:
    return int(float(number.replace(",", ".")) * _UNITS[unit.lower()])


# field: patterns of which the first that is found gives it; groups are number and unit.
_SIZES: Final[dict[str, tuple[str, ...]]] = {
    "requested_bytes": (
        rf"[Tt]ried to allocate {_SIZE}",
        rf"Requested +: {_SIZE}",
        rf"alloc_buffer: allocating {_SIZE}",
        rf"failed to allocate {_SIZE} of pinned",
        rf"Failed to CUDA (?:calloc|malloc) {_SIZE}",
    ),
    "total_bytes": (
        rf"total capac(?:i)?ty of {_SIZE}",
        rf"{_SIZE} total capacity",
        rf"Device limit +: {_SIZE}",
    ),
    "free_bytes": (
        rf"of which {_SIZE} is free",
        rf"{_SIZE} free;",
        rf"Free \(according to CUDA\): {_SIZE}",
    ),
    "allocated_bytes": (
        rf"{_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"Currently allocated +: {_SIZE}",
    ),
    "private_pool_bytes": (rf"{_SIZE} allocated in private pools",),
    "process_bytes": (rf"this process has {_SIZE} memory in use",),
    "kv_needed_bytes": (rf"\(?{_SIZE} KV cach\s?e is needed",),
    "kv_available_bytes": (rf"available KV cache memory \({_SIZE}\)",),
    "killed_rss_bytes": (rf"[Kk]illed process \d+ \(.*?anon-rss:{_SIZE}",),
    "limit_bytes": (rf"memory: usage \d+kB, limit {_SIZE}", rf"{_SIZE} allowed;"),
}
# Sizes without a unit are bytes.
_PLAIN: Final[dict[str, tuple[str, ...]]] = {
    "requested_bytes": (
        r"failed to allocate \w+ buffer of size (\d+)",
        r"Failed to allocate memory for \w+ with size (\d+)",
    ),
    "tokens_wanted": (r"max seq len \((\d+)\)",),
    "tokens_room": (
        r"stored in KV cache \((\d+)\)",
        r"estimated maximum model\s+length is (\d+)",
    ),
}
# sign: what its presence says is oom.py's business.
_SIGNS: Final[dict[str, str]] = {
    "cuda_oom": r"(?:CUDA|HIP|XPU) out of memory|OutOfMemoryError|would exceed allowed memory",
    "bare_cuda_oom": r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED",
    "kv_no_blocks": r"No available memory for the cache blocks",
    "kv_too_short": r"KV cach\s?e is needed, which is larger"
    r"|larger than the maximum number of tokens that can be stored in KV cache",
    "kv_static_fraction": r"Not enough memory\. Please try to increase --mem-fraction-static",
    "kv_exhausted": r"(?:Prefill|Decode) out of memory\. Try to lower your batch size",
    "sampler_warmup": r"out of memory occurred when warming up sampler",
    "startup_free": r"[Ff]ree memory on device.*is less than desired GPU memory utilization",
    "graph_capture": r"[Cc]apture cuda graph failed|capture_model|cuda_graph_runner.*capture",
    "workspace": r"in AlignedAllocator",
    "nccl": r"NCCL WARN Cuda failure.*out of memory|NCCL WARN Failed to CUDA|ncclUnhandledCudaError"
    r".*[Oo]ut of memory",
    "llama_alloc": r"cudaMalloc failed: out of memory",
    "llama_weights": r"error loading model|load_tensors",
    "llama_compute": r"failed to allocate compute (?:pp )?buffers|gallocr_reserve",
    "load_weights": r"\bin load_model\b|Load(?:ing)? (?:model )?weight",
    "retain_graph": r"retain_graph ?= ?True",
    "kept_outputs": r"\.(?:append|extend)\((?:loss|outputs?|logits|hidden)\b(?!.*(?:detach|item)\()"
    r"|(?:total|running|epoch)_?loss \+= loss(?!\.(?:detach|item))\b",
    "bucket_buffer": r"ipg_buffer|ipg_bucket_flat_buffer|param_and_grad_buffer|bucket_cap_mb"
    r"|int\(self\.(?:all)?(?:reduce|gather)_bucket",
    "all_reduce": r"custom_all_reduce|symm_mem|_all_reduce_out_place|register_graph_buffers"
    r"|pynccl.*all_?reduce",
    "cgroup_kill": r"Memory cgroup out of memory|CONSTRAINT_MEMCG|OOMKilled",
    "host_kill": r"[Oo]ut of memory: Kill(?:ed)? process|global_oom|invoked oom-killer",
    "exit_137": r"exit(?:ed)?(?: with)?(?: code)?[ :]*137\b|exitCode: 137",
    "ray_low_memory": r"killed due to the node running low on memory",
    "host_alloc": r"DefaultCPUAllocator|Cannot allocate memory|of pinned memory|std::bad_alloc"
    r"|numpy.*ArrayMemoryError|Unable to allocate .* for an array",
    "shm": r"insufficient shared memory|out of shared memory|No space left on device: '/dev/shm",
}
_OWN_SHARE: Final = 0.98  # a process that holds the allocator's memory is this process


def clip(text: str) -> str:
    """Return `text`, or its first and last halves where it is longer than `TEXT_BYTES_MAX`.

    Longer lines than `LINE_MAX` are broken, so that no pattern looks far.
    """
    if len(text) > TEXT_BYTES_MAX:
        half = TEXT_BYTES_MAX // 2
        text = f"{text[:half]}\n{text[-half:]}"
    return re.sub(rf"[^\n]{{{LINE_MAX}}}", r"\g<0>\n", text)


def from_text(text: str) -> Evidence:
    """Return what an error text says; no signs: it is no message of memory running out."""
    text = clip(text)
    values: dict[str, Any] = {}
    for name, patterns in _SIZES.items():
        found = next((m for p in patterns if (m := re.search(p, text))), None)
        if found:
            values[name] = _bytes(*found.groups()[-2:])
    for name, patterns in _PLAIN.items():
        found = next((m for p in patterns if (m := re.search(p, text))), None)
        if found and name not in values:
            values[name] = int(found[1])
    if found := re.search(r"tried to allocate (\d+) bytes", text):
        values["requested_bytes"] = int(found[1])
    _reserved(text, values)
    _processes(text, values)
    if found := re.search(rf"device.*?\((\d+(?:\.\d+)?)/{_SIZE}\) on\s+startup", text):
        values["free_bytes"] = _bytes(found[1], found[3])
        values["total_bytes"] = _bytes(found[2], found[3])
        wanted = re.search(rf"utilization \([\d.]+, {_SIZE}\)", text)
        if wanted:
            values["requested_bytes"] = _bytes(*wanted.groups())
    if found := re.search(r"memory: usage (\d+)kB, limit", text):
        values["limit_used_bytes"] = int(found[1]) << 10
    if values.get("limit_bytes") and "total_bytes" in values:
        # torch's per-process fraction: what it may use is the device, as far as it is concerned.
        values["total_bytes"] = values.pop("limit_bytes")
        values.pop("free_bytes", None)
    signs = frozenset(name for name, sign in _SIGNS.items() if re.search(sign, text))
    return Evidence(source="text", signs=signs, **values)


def _reserved(text: str, values: dict[str, Any]) -> None:
    """Read what the allocator holds: stated whole by old torch, as a remainder by new."""
    if found := re.search(rf"{_SIZE} (?:reserved in total by PyTorch|cached)", text):
        values["reserved_bytes"] = _bytes(found[1], found[2])
        if found[0].endswith("cached"):  # before 1.4 the figure leaves the allocated part out
            values["reserved_bytes"] += values.get("allocated_bytes", 0)
    elif "allocated_bytes" in values:
        found = re.search(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
        if found:
            values["reserved_bytes"] = values["allocated_bytes"] + _bytes(found[1], found[2])
        elif "Currently allocated" in text and {"total_bytes", "free_bytes"} <= values.keys():
            # The async allocator's pool is not in its message; the device is the process's own.
            values["reserved_bytes"] = values["total_bytes"] - values["free_bytes"]


def _processes(text: str, values: dict[str, Any]) -> None:
    """Tell this process from others among "Process N has X memory in use"."""
    first = text[: text.find("is allocated by PyTorch")] if "is allocated by" in text else text
    rows = [_bytes(m[1], m[2]) for m in re.finditer(rf"Process \d+ has {_SIZE} memory", first)]
    if not rows:
        return
    if "process_bytes" not in values:
        reserved = values.get("reserved_bytes", 0)
        own = next((size for size in sorted(rows) if size >= reserved * _OWN_SHARE), None)
        if own is not None:
            rows.remove(own)
            values["process_bytes"] = own
    values["others_bytes"] = sum(rows)


def from_stats(stats: Mapping[str, Any]) -> Evidence:
    """Return evidence from figures by field name; "text" adds what an error text says.

    Raises `EvidenceError`. A field nobody here knows is a mistake: it might have been the one.
    """
    kinds = {item.name for item in dataclasses.fields(Evidence)} - {"source", "signs"}
    values: dict[str, Any] = {}
    for name, value in stats.items():
        if name == "text":
            continue
        if name not in kinds:
            raise EvidenceError(
                f"{name}: no figure of that name; known: {', '.join(sorted(kinds))}"
            )
        values[name] = _series(name, value) if name in {"floor", "micro_steps"} else value
        if name not in {"floor", "micro_steps"} and (
            not isinstance(value, int) or isinstance(value, bool) or value < 0
        ):
            raise EvidenceError(f"{name}: expected a whole number of at least 0")
    base = Evidence(source="stats")
    if "text" in stats:
        if not isinstance(stats["text"], str):
            raise EvidenceError("text: expected a string")
        base = from_text(stats["text"])
    return dataclasses.replace(base, **values)


def _series(name: str, value: Any) -> tuple[Any, ...]:
    try:
        if len(value) > SERIES_MAX:
            raise EvidenceError(f"{name}: more than {SERIES_MAX} points")
        if name == "micro_steps":
            return tuple(int(item) for item in value)
        return tuple((float(at), int(size)) for at, size in value)
    except (TypeError, ValueError) as problem:
        if isinstance(problem, EvidenceError):
            raise
        raise EvidenceError(f"{name}: expected a list of numbers, or of pairs for floor") from None
