"""Why memory ran out: ten causes told apart, with confidence, the figures, and one change to make.

Each cause has one judge: a function from `Evidence` to a verdict or nothing. A judge knows its own
cause alone and says how sure it is, 0 to 1; the surest wins, and the runners-up are kept, since two
causes often meet. Nothing is guessed: what no judge recognises is "unknown". Pure.

    does_not_fit          weights, KV and activations are more than the device
    fragmentation         enough is held by the allocator, but not in one piece
    other_process         another process has the memory
    outside_allocator     contexts, NCCL, graph pools: this process, but not torch's allocator
    kv_pool               the KV pool was sized against the wrong total
    leak                  the floor after collections rises with time
    spike                 one allocation far above what the profile run saw
    host_limit            the cgroup's or the machine's memory, not the GPU's
    accumulation          activations kept over the steps of a gradient accumulation
    all_reduce_buffers    static communication buffers are too large

The confidences of the rules are set by hand on the labelled cases of tests/scenarios/oom.toml; they
order causes, they are no probabilities. What a message says in so many words is a row of `said`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from agent.memory.said import ROWS, SMALLER_BUFFERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from agent.memory.evidence import Evidence

GIB: Final = 1 << 30
MIB: Final = 1 << 20
# A driver's context and a few workspaces: what a process holds outside torch at least.
CONTEXT_BYTES: Final = 700 * MIB
# Above this, and this share of the device, memory that is nobody's known is another process's.
FOREIGN_BYTES: Final = 3 * GIB // 2
FOREIGN_SHARE: Final = 0.08
# A leak: the floor rises this share of itself over the samples, and its rise is that steady.
LEAK_SHARE: Final = 0.05
LEAK_STEADY: Final = 0.8
LEAK_POINTS_MIN: Final = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause: `confidence` 0 to 1, why in one sentence, and one change to make."""

    cause: str
    confidence: float
    why: str
    change: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict, its figures in bytes (or tokens, as named), and the other candidates."""

    verdict: Verdict
    figures: dict[str, int]
    others: tuple[Verdict, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        verdict = self.verdict
        return {
            "cause": verdict.cause,
            "confidence": verdict.confidence,
            "why": verdict.why,
            "change": verdict.change,
            "figures": self.figures,
            "others": [
                {"cause": o.cause, "confidence": o.confidence, "why": o.why} for o in self.others
            ],
        }


def size(count: int | None) -> str:
    """Return a size for people."""
    if count is None:
        return "an unknown amount"
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} bytes"


UNKNOWN: Final = Verdict(
    "unknown",
    0.0,
    "no known message of memory running out, and no figures that point to a cause",
    "give the whole error text, from its first line on, or the figures (docs/memory.md)",
)


def explain(evidence: Evidence) -> Diagnosis:
    """Return the likeliest cause; `UNKNOWN` where none of the judges sees its own."""
    found = [verdict for judge in JUDGES if (verdict := judge(evidence)) is not None]
    found.sort(key=lambda verdict: -verdict.confidence)
    if not found:
        return Diagnosis(UNKNOWN, evidence.figures(), ())
    return Diagnosis(found[0], evidence.figures(), tuple(found[1:]))


def said(cause: str, e: Evidence, signs: AbstractSet[str] | None = None) -> Verdict | None:
    """Return what a message says of this cause in so many words; `signs`: others than `e`'s."""
    signs = e.signs if signs is None else signs
    for row in ROWS:
        if row.cause == cause and row.applies(signs):
            why = row.why.format(
                requested=size(e.requested_bytes),
                killed=f" (it had {size(e.killed_rss_bytes)})" if e.killed_rss_bytes else "",
                limit=f" of {size(e.limit_bytes)}" if e.limit_bytes else "",
            )
            return Verdict(cause, row.confidence, why, row.change)
    return None


def does_not_fit(e: Evidence) -> Verdict | None:
    """Judge: weights, KV and activations are more than the device."""
    cause = "does_not_fit"
    if "kv_too_short" in e.signs:
        room = e.tokens_room
        return Verdict(
            cause, 0.9,
            f"one request of {e.tokens_wanted or 'that many'} tokens needs more KV than is left "
            f"beside the weights ({size(e.kv_available_bytes)})"
            if e.kv_available_bytes is not None
            else f"one request of {e.tokens_wanted or 'that many'} tokens does not fit into the KV "
            f"pool ({room or 'fewer'} tokens)",
            f"set the longest context (max_model_len, --context-length) to {room} or less"
            if room else "shorten the longest context (max_model_len, --context-length)",
        )  # fmt: skip
    if (found := said(cause, e)) is not None:
        return found
    total = e.total_bytes
    fixed = [part for part in (e.weights_bytes, e.kv_pool_bytes) if part]
    if total and fixed and sum(fixed) > total:
        return Verdict(
            cause, 0.95,
            f"weights and KV pool are {size(sum(fixed))}, the device has {size(total)}",
            f"lower the KV pool to {size(max(0, total * 9 // 10 - (e.weights_bytes or 0)))}, or "
            "quantise the weights",
        )  # fmt: skip
    if not total or not e.allocated_bytes:
        return None
    share = e.allocated_bytes / total
    if share < 0.6:
        return None
    confidence = 0.9 if share > 1 else 0.75 if share >= 0.9 else 0.5
    if "load_weights" in e.signs and share >= 0.8:
        confidence = 0.85
    return Verdict(
        cause, confidence,
        f"{size(e.allocated_bytes)} of {size(total)} are in use by live tensors",
        "quantise the weights, use a smaller batch or context, or spread over more GPUs",
    )  # fmt: skip


def fragmentation(e: Evidence) -> Verdict | None:
    """Judge: enough is held by the allocator, but not in one piece."""
    held, wanted = e.unallocated_bytes, e.requested_bytes
    if held is None or wanted is None or held < 64 * MIB or "kv_no_blocks" in e.signs:
        return None
    block, total = e.largest_free_block_bytes, e.total_bytes or 0
    confidence = 0.0
    # A small piece that fails beside a small remainder says that all is in use, not torn.
    telling = wanted >= 64 * MIB or held >= total // 20
    if held >= wanted and telling:
        confidence = 0.9 if block is None else 0.95 if block < wanted else 0.0
    elif held >= (e.missing_bytes or wanted) and held >= wanted // 2 and telling:
        confidence = 0.8
    if not confidence:
        return None
    return Verdict(
        "fragmentation",
        confidence,
        f"{size(held)} are reserved and unused, and still no piece of {size(wanted)}"
        + (f" (largest {size(block)})" if block is not None else ""),
        "set PYTORCH_ALLOC_CONF=expandable_segments:True (older torch: PYTORCH_CUDA_ALLOC_CONF)",
    )


def other_process(e: Evidence) -> Verdict | None:
    """Judge: another process has the memory."""
    if "startup_free" in e.signs and e.total_bytes and e.free_bytes is not None:
        held = e.total_bytes - e.free_bytes
        if held < 0.15 * e.total_bytes:
            return None
        return Verdict(
            "other_process", 0.9,
            f"{size(held)} of {size(e.total_bytes)} were taken before this engine started",
            f"end the other process (nvidia-smi), or set gpu_memory_utilization to "
            f"{int(e.free_bytes / e.total_bytes * 100) / 100 - 0.02:.2f}",
        )  # fmt: skip
    foreign, total = e.foreign_bytes, e.total_bytes
    if not foreign or not total or foreign < (e.missing_bytes or 0):
        return None
    known = e.others_bytes or e.process_bytes is not None
    enough = max(FOREIGN_BYTES, int(FOREIGN_SHARE * total))
    if foreign < enough and foreign < (0.15 if known else 0.4) * total:
        return None
    confidence = 0.9 if foreign >= 0.3 * total else 0.8
    return Verdict(
        "other_process", confidence,
        f"{size(foreign)} of {size(total)} belong to other processes",
        "see who it is (nvidia-smi, GET /v1/node/topology) and end it or move this one to another "
        "GPU (CUDA_VISIBLE_DEVICES)",
    )  # fmt: skip


def outside_allocator(e: Evidence) -> Verdict | None:
    """Judge: contexts, NCCL and graph pools of this process."""
    cause, total = "outside_allocator", e.total_bytes or 0
    if (found := said(cause, e)) is not None:
        return found
    graphs, outside = e.private_pool_bytes or 0, e.outside_bytes
    if outside is None and e.foreign_bytes and e.foreign_bytes >= 0.25 * total:
        outside = e.foreign_bytes  # too little for another process's model: contexts
    held = (outside or 0) + (graphs if graphs >= 0.05 * total else 0)
    if total and held >= max(CONTEXT_BYTES, int(FOREIGN_SHARE * total), e.missing_bytes or 0):
        return Verdict(
            cause, 0.78,
            f"{size(held)} of this process are outside torch's allocator (context, NCCL, graphs)",
            "leave headroom: gpu_memory_utilization (or --mem-fraction-static) 0.05 lower; one "
            "process a GPU; enforce_eager where graphs are not needed",
        )  # fmt: skip
    if "bare_cuda_oom" in e.signs and "cuda_oom" not in e.signs:
        return Verdict(
            cause, 0.55, "the driver itself refused: the allocator had left it no memory",
            "leave headroom: lower gpu_memory_utilization (or --mem-fraction-static) by 0.05",
        )  # fmt: skip
    return None


def kv_pool(e: Evidence) -> Verdict | None:
    """Judge: the KV pool was sized against the wrong total."""
    cause = "kv_pool"
    if (found := said(cause, e)) is not None:
        return found
    if "startup_free" in e.signs and e.total_bytes and e.free_bytes is not None:
        short = (e.requested_bytes or e.free_bytes) - e.free_bytes
        return Verdict(
            cause, 0.8,
            f"the share asked for is of the whole device; {size(short)} more than is free",
            f"set gpu_memory_utilization to {int(e.free_bytes / e.total_bytes * 100) / 100:.2f}",
        )  # fmt: skip
    pool, total = e.kv_pool_bytes, e.total_bytes
    if pool and total and e.allocated_bytes and pool > 0.5 * total and e.requested_bytes:
        rest = total - pool - (e.weights_bytes or 0)
        if 0 <= rest < e.requested_bytes:
            return Verdict(
                cause, 0.85, f"the KV pool of {size(pool)} leaves {size(rest)} for activations",
                f"make the pool {size(e.requested_bytes)} smaller",
            )  # fmt: skip
    return None


def slope(points: tuple[tuple[float, int], ...]) -> tuple[float, float]:
    """Return bytes per second by least squares, and how steady it is (r squared, 0 to 1)."""
    count = len(points)
    mean_x = sum(at for at, _ in points) / count
    mean_y = sum(value for _, value in points) / count
    xx = sum((at - mean_x) ** 2 for at, _ in points)
    yy = sum((value - mean_y) ** 2 for _, value in points)
    xy = sum((at - mean_x) * (value - mean_y) for at, value in points)
    if not xx or not yy:
        return 0.0, 0.0
    return xy / xx, xy * xy / (xx * yy)


def leak(e: Evidence) -> Verdict | None:
    """Judge: the floor after collections rises with time."""
    if len(e.floor) < LEAK_POINTS_MIN:
        return None
    rate, steady = slope(e.floor)
    first, last = e.floor[0], e.floor[-1]
    rise = last[1] - first[1]
    if rate <= 0 or steady < LEAK_STEADY or rise < LEAK_SHARE * max(1, first[1]):
        return None
    left = e.free_bytes if e.free_bytes is not None else None
    hours = f"; {left / rate / 3600:.1f} h until the rest is gone" if left else ""
    return Verdict(
        "leak", min(0.95, 0.75 + 0.2 * steady),
        f"what stays after a collection rises by {size(int(rate * 3600))} an hour{hours}",
        "find who keeps it (torch.cuda.memory._record_memory_history, then two snapshots); until "
        "then restart before it is full",
    )  # fmt: skip


def spike(e: Evidence) -> Verdict | None:
    """Judge: one allocation far above what the profile run saw."""
    cause, wanted, total = "spike", e.requested_bytes, e.total_bytes
    change = (
        "bound one step: chunked prefill (max_num_batched_tokens, --chunked-prefill-size), a "
        "memory-efficient attention, or a smaller batch"
    )
    if (found := said(cause, e)) is not None:
        return found
    if e.peak_bytes and e.profile_peak_bytes and e.peak_bytes > 1.1 * e.profile_peak_bytes:
        over = e.peak_bytes - e.profile_peak_bytes
        return Verdict(cause, 0.9, f"the peak is {size(over)} above the profile run's", change)
    if "startup_free" in e.signs or not wanted or not total:
        return None
    if wanted >= total:
        why = f"one tensor of {size(wanted)} on a device of {size(total)}"
        return Verdict(cause, 0.95, why, change)
    if wanted >= 0.3 * total:
        why = f"one tensor of {size(wanted)}, {wanted / total:.0%} of the device"
        return Verdict(cause, 0.85, why, change)
    return None


def host_limit(e: Evidence) -> Verdict | None:
    """Judge: the cgroup's or the machine's memory."""
    cause = "host_limit"
    killed = {"cgroup_kill"} if (e.oom_kills or 0) > 0 else set()
    if (found := said(cause, e, e.signs | killed)) is not None:
        return found
    bound, used = e.limit_bytes, e.limit_used_bytes
    if bound and used and e.total_bytes is None:
        wanted = e.requested_bytes or 0
        if used + wanted > bound or used > 0.97 * bound:
            return Verdict(
                cause, 0.85, f"{size(used)} of the limit of {size(bound)} are in use",
                f"raise the limit by {size(max(used + wanted - bound, bound // 10))}",
            )  # fmt: skip
    return None


def accumulation(e: Evidence) -> Verdict | None:
    """Judge: activations kept over the steps of a gradient accumulation."""
    steps = e.micro_steps
    if len(steps) >= 3:
        rises = [after - before for before, after in pairwise(steps)]
        least = max(16 * MIB, steps[0] // 100)
        if min(rises) >= least:
            return Verdict(
                "accumulation", 0.92,
                f"each step of the accumulation leaves about {size(sum(rises) // len(rises))} more",
                "drop each step's graph: backward() before the next forward, and keep loss.item(), "
                "not loss",
            )  # fmt: skip
    return said("accumulation", e)


def all_reduce_buffers(e: Evidence) -> Verdict | None:
    """Judge: static communication buffers are too large."""
    cause = "all_reduce_buffers"
    buffers, total = e.comm_buffer_bytes, e.total_bytes
    if buffers and total and buffers >= max(0.05 * total, e.missing_bytes or 0):
        why = f"{size(buffers)} of {size(total)} are buffers for all-reduce and all-gather"
        return Verdict(cause, 0.91, why, SMALLER_BUFFERS)
    return said(cause, e)


JUDGES: Final[tuple[Callable[[Evidence], Verdict | None], ...]] = (
    host_limit, kv_pool, does_not_fit, other_process, outside_allocator, fragmentation, spike, leak,
    accumulation, all_reduce_buffers,
)  # fmt: skip
CAUSES: Final = tuple(judge.__name__ for judge in JUDGES)
