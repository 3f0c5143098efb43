"""From arrays to checked launches: one function for each kernel.

Each says what it takes, checks it, and decides grid, block and shared memory. Nothing runs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from kernels.launch import Launch, LaunchError, checked, view
from kernels.quant import GROUPS, row_words

if TYPE_CHECKING:
    from kernels.launch import Backend


GEMV_M_MAX: Final = 4
GEMM_M_MAX: Final = 64
_GEMM_ROWS: Final = 64
_GEMM_DEPTH: Final = 128
# Blocks for each multiprocessor that the split aims at; its bounds.
_GEMM_BLOCKS_EACH: Final = 4
_GEMM_STEPS_MIN: Final = 4
_GEMM_SHARES_MAX: Final = 16
_LAYER_THREADS: Final = 128


class FourBit(Protocol):
    """A packed matrix on any device: `quant.Packed`, or the same with a GPU's arrays."""

    @property
    def codes(self) -> Any: ...  # noqa: D102 - see quant.Packed
    @property
    def meta(self) -> Any: ...  # noqa: D102
    @property
    def k(self) -> int: ...  # noqa: D102
    @property
    def group(self) -> int: ...  # noqa: D102
    @property
    def minima(self) -> bool: ...  # noqa: D102


def _matrix(w: FourBit, device: str) -> tuple[int, int, int]:
    """Return rows and the addresses of codes and meta."""
    if w.group not in GROUPS:
        raise LaunchError(f"group {w.group}: one of {', '.join(map(str, GROUPS))}")
    codes = checked("codes", w.codes, "u32", (None, row_words(w.k)), device)
    rows = view(w.codes).shape[0]
    if w.k < 1 or rows < 1 or rows * row_words(w.k) >= 1 << 40:
        raise LaunchError(f"a matrix of {rows} x {w.k} weights")
    meta = checked("meta", w.meta, "u32", (-(-w.k // w.group), rows), device)
    return rows, codes, meta


def dequant(backend: Backend, w: FourBit, out: Any) -> Launch:
    """Plan `out` [rows, k] FP16 = the weights."""
    rows, codes, meta = _matrix(w, backend.device)
    target = checked("out", out, "f16", (rows, w.k), backend.device)
    words = -(-w.k // 8)
    return Launch(
        kernel="dequant_int4",
        grid=(rows, 1, 1),
        threads=min(256, -(-words // 32) * 32),
        shared_bytes=0,
        form="PPPiiiii",
        arguments=(
            codes, meta, target, rows, w.k, row_words(w.k), _log2(w.group),
            int(w.minima),
        ),
        device=backend.device,
        keeps=(w, out),
    )  # fmt: skip


def _product(
    backend: Backend, w: FourBit, x: Any, out: Any, *, paired: bool
) -> tuple[int, int, tuple[int, int, int, int]]:
    """Return m, outputs and the addresses of codes, meta, x and out."""
    rows, codes, meta = _matrix(w, backend.device)
    if paired and rows % 2:
        raise LaunchError(f"{rows} rows are no pairs of gate and up")
    outputs = rows // 2 if paired else rows
    source = checked("x", x, "f16", (None, w.k), backend.device)
    m = view(x).shape[0]
    target = checked("out", out, "f16", (m, outputs), backend.device)
    return m, outputs, (codes, meta, source, target)


def gemv(backend: Backend, w: FourBit, x: Any, out: Any, *, paired: bool = False) -> Launch:
    """Plan `out` [m, rows] = x [m, k] times the weights, m from 1 to 4.

    With `paired` the first half of the rows are gates, the second half ups, and `out` [m, rows / 2]
    is silu(gate) * up. Raises `LaunchError` also where x is too long for shared memory.
    """
    m, outputs, addresses = _product(backend, w, x, out, paired=paired)
    if not 1 <= m <= GEMV_M_MAX:
        raise LaunchError(f"x has {m} rows, this kernel takes 1 to {GEMV_M_MAX}")
    shared = gemv_shared_bytes(m, w.k, paired=paired)
    if shared > backend.shared_bytes_max:
        raise LaunchError(
            f"x needs {shared} bytes of shared memory, a block has {backend.shared_bytes_max}"
        )
    return Launch(
        kernel=f"gemv_gate_up_{m}" if paired else f"gemv_{m}",
        grid=(-(-outputs // 8), 1, 1),
        threads=256,
        shared_bytes=shared,
        form="PPPPiiiii",
        arguments=(*addresses, outputs, w.k, row_words(w.k), _log2(w.group), int(w.minima)),
        device=backend.device,
        keeps=(w, x, out),
    )


def gemv_shared_bytes(m: int, k: int, *, paired: bool) -> int:
    """Return what a block of the multiply-add kernel holds: x, and the sums of 8 warps."""
    return m * row_words(k) * 8 * 2 + m * (2 if paired else 1) * 8 * 8 * 4


def gemm_shares(backend: Backend, outputs: int, k: int, *, paired: bool) -> int:
    """Return how many blocks share a sum: enough blocks to fill the device, each of some depth."""
    blocks = -(-outputs * (2 if paired else 1) // _GEMM_ROWS)
    steps = -(-k // _GEMM_DEPTH)
    wanted = -(-_GEMM_BLOCKS_EACH * backend.multiprocessors // blocks)
    return max(1, min(wanted, steps // _GEMM_STEPS_MIN, _GEMM_SHARES_MAX))


def gemm_workspace(outputs: int, m: int, shares: int, *, paired: bool) -> tuple[int, int]:
    """Return how many FP32 and how many counters (uint32, all 0) a product needs beside it."""
    blocks = -(-outputs * (2 if paired else 1) // _GEMM_ROWS)
    return blocks * shares * _tiles(m) * 8 * _GEMM_ROWS, blocks


def gemm(
    backend: Backend,
    w: FourBit,
    x: Any,
    out: Any,
    *,
    partial: Any,
    counters: Any,
    shares: int,
    paired: bool = False,
) -> Launch:
    """Plan the same product by tensor cores, m from 1 to 64; k a multiple of 8.

    `partial` (FP32) and `counters` (uint32, zeros before the first use and after each) as
    `gemm_workspace` says; two products must not use them at once.
    """
    m, outputs, addresses = _product(backend, w, x, out, paired=paired)
    if not 1 <= m <= GEMM_M_MAX:
        raise LaunchError(f"x has {m} rows, this kernel takes 1 to {GEMM_M_MAX}")
    if w.k % 8:
        raise LaunchError(f"k = {w.k} is no multiple of 8: rows of x are not aligned")
    if not 1 <= shares <= _GEMM_SHARES_MAX:
        raise LaunchError(f"{shares} shares of a sum, 1 to {_GEMM_SHARES_MAX} are possible")
    floats, counts = gemm_workspace(outputs, m, shares, paired=paired)
    for name, array, wanted in (("partial", partial, floats), ("counters", counters, counts)):
        found = view(array).shape
        if len(found) != 1 or found[0] < wanted:
            raise LaunchError(f"{name} has shape {found}, at least {wanted} are needed")
    spare = checked("partial", partial, "f32", (None,), backend.device)
    counting = checked("counters", counters, "u32", (None,), backend.device)
    tiles = _tiles(m)
    stage = _GEMM_ROWS * 80 + tiles * 8 * 272 + 1024
    return Launch(
        kernel=f"gemm_{tiles * 8}",
        grid=(counts, shares, 1),
        threads=128,
        shared_bytes=4 * stage,
        form="PPPPPPiiiiiii",
        arguments=(
            *addresses, spare, counting, outputs, w.k, row_words(w.k), _log2(w.group),
            int(w.minima), m, int(paired),
        ),
        device=backend.device,
        keeps=(w, x, out, partial, counters),
    )  # fmt: skip


def _tiles(m: int) -> int:
    """Return how many tiles of 8 rows of x the smallest fitting kernel holds: 1, 2, 4 or 8."""
    return next(tiles for tiles in (1, 2, 4, 8) if m <= tiles * 8)


def _log2(group: int) -> int:
    return group.bit_length() - 1


def rms_norm(backend: Backend, x: Any, weight: Any, out: Any, *, eps: float) -> Launch:
    """Plan `out` [rows, hidden] = x over its root mean square, times weight [hidden]."""
    source = checked("x", x, "f16", (None, None), backend.device)
    rows, hidden = view(x).shape
    if not rows or not hidden:
        raise LaunchError(f"x has shape {(rows, hidden)}")
    gain = checked("weight", weight, "f16", (hidden,), backend.device)
    target = checked("out", out, "f16", (rows, hidden), backend.device)
    return Launch(
        kernel="rms_norm",
        grid=(rows, 1, 1),
        threads=_LAYER_THREADS,
        shared_bytes=16,
        form="PPPif",
        arguments=(source, gain, target, hidden, eps),
        device=backend.device,
        keeps=(x, weight, out),
    )


def rope(backend: Backend, x: Any, positions: Any, inverse: Any) -> Launch:
    """Plan turning x [rows, heads, dim] in place, by positions [rows], inverse [dim / 2]."""
    target = checked("x", x, "f16", (None, None, None), backend.device)
    rows, heads, dim = view(x).shape
    if not rows or not heads or not dim or dim % 2:
        raise LaunchError(f"x has shape {(rows, heads, dim)}; the last is even")
    where = checked("positions", positions, "i32", (rows,), backend.device)
    waves = checked("inverse", inverse, "f32", (dim // 2,), backend.device)
    return Launch(
        kernel="rope",
        grid=(rows, 1, 1),
        threads=_LAYER_THREADS,
        shared_bytes=0,
        form="PPPii",
        arguments=(target, where, waves, heads, dim),
        device=backend.device,
        keeps=(x, positions, inverse),
    )


def paged_attention(
    backend: Backend,
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    lengths: Any,
    out: Any,
) -> Launch:
    """Plan attention of one new token for each sequence: query, out [sequences, heads, dim].

    keys, values [blocks, block tokens, kv heads, dim]; table [sequences, width] and lengths
    [sequences], int32. Lengths are at least 1 and at most what a row of the table covers, and a
    table's blocks exist: they lie on the device, so that is the caller's word.
    """
    source = checked("query", query, "f16", (None, None, None), backend.device)
    sequences, heads, dim = view(query).shape
    stored = checked("keys", keys, "f16", (None, None, None, dim), backend.device)
    blocks, tokens, kv_heads, _ = view(keys).shape
    if dim % 32 or not 32 <= dim <= 256 or not sequences or kv_heads < 1 or heads % kv_heads:
        raise LaunchError(
            f"{heads} heads over {kv_heads} of {dim}: a multiple, of 32 to 256 by steps of 32"
        )
    also = checked("values", values, "f16", (blocks, tokens, kv_heads, dim), backend.device)
    pages = checked("table", table, "i32", (sequences, None), backend.device)
    counts = checked("lengths", lengths, "i32", (sequences,), backend.device)
    target = checked("out", out, "f16", (sequences, heads, dim), backend.device)
    return Launch(
        kernel="paged_attention",
        grid=(heads, sequences, 1),
        threads=_LAYER_THREADS,
        shared_bytes=4 * 4 * (dim + 2),
        form="PPPPPPiiiiif",
        arguments=(
            source, stored, also, pages, counts, target, heads, kv_heads, dim, tokens,
            view(table).shape[1], dim**-0.5,
        ),
        device=backend.device,
        keeps=(query, keys, values, table, lengths, out),
    )  # fmt: skip
