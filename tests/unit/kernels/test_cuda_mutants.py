"""Faults put into the kernels on purpose: the checks of the other files must see each of them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from kernels import build, launch, plans, reference
from tests.unit.kernels import cuda_kit as kit


def dequant_is_right(backend):
    for minima in (False, True):
        packed = kit.matrix(np.random.default_rng(1), 9, 333, 32, minima=minima)
        if not kit.same_bits(kit.run_dequant(packed, backend=backend), reference.dequant(packed)):
            return False
    return True


def product_is_right(run, backend):
    packed = kit.matrix(np.random.default_rng(2), 70, 1000, 64)
    x = kit.half_rows(np.random.default_rng(3), 4, 1000)
    got = run(packed, x, backend=backend)
    return kit.close(got, reference.linear(packed, x), reference.scale_of(packed, x))


def gemv_is_right(backend):
    return product_is_right(kit.run_gemv, backend)


def gemm_is_right(backend):
    def twice(packed, x, backend):
        return kit.run_gemm(packed, x, backend=backend, shares=3, times=2)

    return product_is_right(kit.run_gemm, backend) and product_is_right(twice, backend)


def layer_is_right(backend):
    rng = np.random.default_rng(4)
    x, weight = kit.half_rows(rng, 2, 300), kit.half_rows(rng, 1, 300)[0]
    out = kit.Guarded((2, 300), np.float16)
    args = [kit.guarded(a).array for a in (x, weight)]
    backend.run(plans.rms_norm(backend, *args, out.array, eps=1e-5))
    norm = np.abs(out.check() - reference.rms_norm(x, weight, 1e-5)).max()
    query = rng.normal(0, 2, (1, 4, 64)).astype(np.float16)
    keys, values = (rng.normal(0, 2, (3, 8, 2, 64)).astype(np.float16) for _ in range(2))
    table, lengths = np.array([[2, 0, 1]], np.int32), np.array([21], np.int32)
    got = kit.Guarded((1, 4, 64), np.float16)
    args = [kit.guarded(a).array for a in (query, keys, values, table, lengths)]
    backend.run(plans.paged_attention(backend, *args, got.array))
    exact = reference.paged_attention(query, keys, values, table, lengths)
    return norm < 1e-2 and np.abs(got.check() - exact).max() < 1e-2


def rope_is_right(backend):
    start = np.random.default_rng(5).normal(0, 1, (3, 5, 64)).astype(np.float16)
    x, positions = kit.guarded(start), np.array([0, 3, 11], np.int32)
    inverse = (100.0 ** -(np.arange(32) / 32)).astype(np.float32)
    args = [kit.guarded(a).array for a in (positions, inverse)]
    backend.run(plans.rope(backend, x.array, *args))
    return np.abs(x.check() - reference.rope(start, positions, inverse)).max() < 1e-2


# name: the kernel's file, the file changed, what is there, what is put in its place, the check.
MUTANTS = {
    "nibbles exchanged": (
        "dequant", "int4.h", "word >> 4 * j &", "word >> 4 * (3 - j) &", dequant_is_right,
    ),
    "the zero point one too high": (
        "dequant", "int4.h", "#define INT4_MAGIC 0x64006400u",
        "#define INT4_MAGIC (0x64006400u)\n#define h2_add(a, b) h2_add(h2_add(a, b), 0x3c003c00u)",
        dequant_is_right,
    ),
    "zero points taken for minima": (
        "dequant", "int4.h", "minima ? offset : 0x80008000u", "offset", dequant_is_right,
    ),
    "the next group's scale": (
        "dequant", "dequant.cu", "(u32)word * 8 >>", "(u32)(word + 1) * 8 >>", dequant_is_right,
    ),
    "a tail of seven": ("dequant", "dequant.cu", "i < 8 &&", "i < 7 &&", dequant_is_right),
    "no barrier after x is fetched": (
        "gemv", "gemv.cu", "    __syncthreads();\n}", "}", gemv_is_right,
    ),
    "no barrier before warps are added up": (
        "gemv", "gemv.cu", "    __syncthreads();\n    int m", "    int m", gemv_is_right,
    ),
    "a lane of a row left out": (
        "gemv", "gemv.cu", "sum += lane_xor(sum, 2);", "", gemv_is_right,
    ),
    "x not padded": ("gemv", "gemv.cu", "at < k ? x[", "true ? x[", gemv_is_right),
    "no barrier in the pipeline": (
        "gemm", "gemm.cu", "__syncthreads();  // this stage", "// this stage", gemm_is_right,
    ),
    "no wait in the pipeline": (
        "gemm", "gemm.cu", "copy_wait<GEMM_STAGES - 2>();", "", gemm_is_right,
    ),
    "a wait one stage short": (
        "gemm", "gemm.cu", "copy_wait<GEMM_STAGES - 2>", "copy_wait<GEMM_STAGES - 1>",
        gemm_is_right,
    ),
    "a stage fewer than it says": (
        "gemm", "gemm.cu", "(next - first) % GEMM_STAGES", "(next - first) % (GEMM_STAGES - 1)",
        gemm_is_right,
    ),
    "fragments exchanged": (
        "gemm", "gemm.cu", "{weights[0][0], weights[1][0], weights[0][1], weights[1][1]}",
        "{weights[0][0], weights[0][1], weights[1][0], weights[1][1]}", gemm_is_right,
    ),
    "a counter not given back": (
        "gemm", "gemm.cu", "a.counters[blockIdx.x] = 0;", ";", gemm_is_right,
    ),
    "a share left out": (
        "gemm", "gemm.cu", "for (int share = 0;", "for (int share = 1;", gemm_is_right,
    ),
    "no barrier in the norm": (
        "layer", "layer.cu", "__syncthreads();\n    float total = 0;", "float total = 0;",
        layer_is_right,
    ),
    "no barrier before heads are joined": (
        "layer", "layer.cu", "__syncthreads();\n    float most", "float most", layer_is_right,
    ),
    "a sum that is not corrected": (
        "layer", "layer.cu", "sum = sum * old + now;", "sum = sum + now;", layer_is_right,
    ),
    "the block before": (
        "layer", "layer.cu", "blocks[token / block_tokens]", "blocks[(token - 1) / block_tokens]",
        layer_is_right,
    ),
    "a token too many": (
        "layer", "layer.cu", "token < lengths[sequence]", "token <= lengths[sequence]",
        layer_is_right,
    ),
    "keys of another head": (
        "layer", "layer.cu", "head / (heads / kv_heads)", "head % kv_heads", layer_is_right,
    ),
    "a norm's tail left out": (
        "layer", "layer.cu", "i < hidden; i += LAYER_THREADS) {",
        "i < hidden - 44; i += LAYER_THREADS) {", layer_is_right,
    ),
    "a sine's sign": (
        "layer", "layer.cu", "a * cosine - b * sine", "a * cosine + b * sine", rope_is_right,
    ),
    "the angle of another pair": (
        "layer", "layer.cu", "inverse[i % half]", "inverse[i / half]", rope_is_right,
    ),
    "a barrier that half of a warp passes by": (
        "gemv", "gemv.cu", "    __syncthreads();\n    int m",
        "    if (lane < 16) __syncthreads();\n    int m", gemv_is_right,
    ),
}  # fmt: skip


def built(folder, kernel):
    """Build one kernel's file out of `folder`."""
    (folder / build.MODULE).write_text(f'#include "{kernel}.cu"\n')
    return build.host(folder, flags=("-O0", "-g0", "-w"), source=folder)


def seen(check, path):
    """Return whether the check, or the shim itself, finds a fault."""
    try:
        right = all(check(launch.HostKernels(path, falling=falling)) for falling in (False, True))
    except (launch.KernelError, AssertionError):
        return True
    return not right


@pytest.fixture
def copy(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("capability: g++")
    folder = tmp_path / "cuda"
    shutil.copytree(build.SOURCES, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(copy, name):
    kernel, file, there, instead, check = MUTANTS[name]
    source = (copy / file).read_text()
    assert source.count(there) == 1, "the line to change is there once"
    (copy / file).write_text(source.replace(there, instead))
    assert seen(check, built(copy, kernel))


@pytest.mark.parametrize(
    ("kernel", "check"),
    [
        ("dequant", dequant_is_right),
        ("gemv", gemv_is_right),
        ("gemm", gemm_is_right),
        ("layer", layer_is_right),
        ("layer", rope_is_right),
    ],
)
def test_without_a_fault_nothing_is_seen(copy, kernel, check):
    assert not seen(check, built(copy, kernel))
