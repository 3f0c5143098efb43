"""The kernels under sanitizers, and by the real compiler for each architecture."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels import build

HERE = Path(__file__).resolve().parent
# Registers a kernel may use: with 256 threads a block two blocks fit a multiprocessor at 128.
REGISTERS_MAX = 128
KERNELS = {
    "dequant_int4",
    "rms_norm",
    "rope",
    "paged_attention",
    *(f"gemv_{m}" for m in range(1, 5)),
    *(f"gemv_gate_up_{m}" for m in range(1, 5)),
    *(f"gemm_{m}" for m in (8, 16, 32, 64)),
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("capability: g++")
    path = tmp_path_factory.mktemp("driver") / "driver"
    words = [flag for flag in build.HOST_FLAGS if flag not in {"-shared", "-fPIC"}]
    source = HERE / "cuda_driver.cpp"
    done = subprocess.run(
        ["g++", *words, "-O0", *build.SANITIZERS, f"-I{build.SOURCES}", "-o", path, source],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if "cannot find" in done.stderr and "asan" in done.stderr:
        pytest.skip("capability: the sanitizers' libraries")
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def run(driver, *words):
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # abandoned fibers' stacks
    return subprocess.run(
        [driver, *words], check=False, capture_output=True, text=True, env=environment
    )


@pytest.mark.slow
def test_sanitizers_find_nothing(driver):
    done = run(driver)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "file"),
    [
        ("dequant_int4", "dequant.cu"), ("rms_norm", "layer.cu"), ("rope", "layer.cu"),
        ("paged_attention", "layer.cu"),
    ],
)  # fmt: skip
def test_sanitizers_report_an_output_that_is_64_bytes_short(driver, kernel, file):
    done = run(driver, kernel)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert f"in {kernel}" in done.stderr
    assert file in done.stderr


@pytest.mark.slow
def test_every_architecture_compiles_without_spills(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("capability: nvcc")
    _, words = build.nvcc("sm_90", tmp_path)
    used = build.resources(words)
    assert set(used) == KERNELS
    for kernel, numbers in used.items():
        assert numbers["spill_bytes"] == 0, kernel
        assert 0 < numbers["registers"] <= REGISTERS_MAX, kernel


def test_the_kept_report_is_of_these_kernels_and_without_spills():
    kept = json.loads((build.SOURCES.parents[1] / "perf/results/kernels.json").read_text())
    for arch in build.ARCHES:
        used = kept["files"][f"{arch}.cubin"]["kernels"]
        assert set(used) == KERNELS
        assert {numbers["spill_bytes"] for numbers in used.values()} == {0}


def test_report_of_ptxas_is_read():
    words = (
        "ptxas info    : Compiling entry function 'a' for 'sm_90'\n"
        "    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 33 registers, used 1 barriers\n"
    )
    assert build.resources(words) == {"a": {"spill_bytes": 12, "registers": 33}}
