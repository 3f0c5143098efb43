"""What is loaded on a GPU, which kernel is taken, and the run-time compiler: all without a GPU."""

from __future__ import annotations

import hashlib
import importlib.util
import json

import pytest

from kernels import build, device, dispatch, nvrtc
from kernels.dispatch import UNMEASURED, Crossover
from kernels.launch import KernelError


def ship(folder, names, *, sources=None):
    """Write a folder as `kernels.build` does, with these files."""
    files = {}
    for name in names:
        (folder / name).write_bytes(name.encode())
        files[name] = {"sha256": hashlib.sha256(name.encode()).hexdigest(), "kernels": {}}
    manifest = {"sources": sources or build.digest(), "compiler": "", "files": files}
    (folder / build.MANIFEST).write_text(json.dumps(manifest))


def test_the_exact_cubin_then_ptx_then_the_run_time_compiler():
    files = dict.fromkeys(["sm_80.cubin", "sm_90.cubin", "compute_80.ptx"])
    assert device.choices((9, 0), files) == ["sm_90.cubin", "compute_80.ptx", "nvrtc"]
    assert device.choices((12, 0), files) == ["compute_80.ptx", "nvrtc"]
    assert device.choices((8, 6), files) == ["compute_80.ptx", "nvrtc"]
    # A cubin of another minor number may run, but is not the one that was measured.
    assert device.choices((7, 5), files) == ["nvrtc"]
    assert device.choices((9, 0), {}) == ["nvrtc"]


def test_a_shipped_file_is_loaded_only_if_it_is_the_one_that_was_built(tmp_path):
    ship(tmp_path, ["sm_90.cubin", "compute_80.ptx"])
    assert device.image(tmp_path, (9, 0)) == ("sm_90.cubin", b"sm_90.cubin")
    assert device.image(tmp_path, (10, 0)) == ("compute_80.ptx", b"compute_80.ptx")
    (tmp_path / "sm_90.cubin").write_bytes(b"another")
    with pytest.raises(KernelError, match="not the file that was built"):
        device.image(tmp_path, (9, 0))


def test_files_of_other_sources_are_not_taken(tmp_path):
    ship(tmp_path, ["sm_90.cubin"], sources="0" * 64)
    assert device.shipped(tmp_path) == {}
    (tmp_path / build.MANIFEST).write_text("{")
    assert device.shipped(tmp_path) == {}


def test_without_pycuda_it_is_said(tmp_path):
    if importlib.util.find_spec("pycuda"):
        pytest.skip("capability: an environment without pycuda")
    with pytest.raises(KernelError, match="pycuda"):
        device.CudaKernels(tmp_path)


def test_the_run_time_compiler_needs_no_header_but_ours():
    try:
        nvrtc.libnvrtc()
    except build.BuildError:
        pytest.skip("capability: libnvrtc (package nvidia-cuda-nvrtc)")
    assert nvrtc.compile_cubin("sm_80")[:4] == b"\x7fELF"
    with pytest.raises(build.BuildError, match="nvrtcCompileProgram"):
        nvrtc.compile_cubin("sm_1")


def test_a_route_is_one_that_can_take_the_shape():
    table = {"a": Crossover(gemv=1, gemm=64), "b": Crossover(gemv=0, gemm=16)}

    def route(name, m, k=4096, shared=1 << 20):
        return dispatch.route(table, name, m=m, k=k, shared_bytes_max=shared)

    assert [route("a", m) for m in (1, 2, 64, 65)] == ["gemv", "gemm", "gemm", "dequant"]
    assert [route("b", m) for m in (1, 17)] == ["gemm", "dequant"]
    assert [route("unmeasured", m) for m in (4, 5, 32, 33)] == ["gemv", "gemm", "gemm", "dequant"]
    assert route("a", 1, shared=1024) == "gemm"  # x does not fit
    assert route("a", 2, k=33) == "dequant"  # rows of x are not aligned
    assert UNMEASURED.gemm < 64


def test_a_crossover_ends_where_a_kernel_first_loses():
    seconds = {
        1: {"gemv": 1.0, "gemm": 2.0, "dequant": 9.0},
        2: {"gemv": 3.0, "gemm": 2.0, "dequant": 9.0},
        4: {"gemv": 1.0, "gemm": 2.0, "dequant": 9.0},  # noise: tensor cores have taken over
        64: {"gemm": 5.0, "dequant": 9.0},
        128: {"dequant": 9.0},
    }
    assert dispatch.crossover(seconds) == Crossover(gemv=1, gemm=64)
    assert dispatch.crossover({1: {"gemm": 1.0, "gemv": 2.0}}) == Crossover(gemv=0, gemm=1)
    assert dispatch.crossover({1: {"gemm": 3.0, "dequant": 2.0}}) == Crossover(gemv=0, gemm=0)


def test_the_table_that_is_shipped_reads_and_a_malformed_one_is_named(tmp_path):
    assert isinstance(dispatch.read(build.SOURCES / "crossover.json"), dict)
    path = tmp_path / "t.json"
    for text in ('{"devices": {"x": {"gemv": 9, "gemm": 1}}}', '{"devices": {"x": {}}}', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="crossover"):
            dispatch.read(path)
