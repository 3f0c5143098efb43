"""NVIDIA's run-time compiler, by ctypes: a cubin for an architecture we did not ship one for.

The library comes with a toolkit or with the package `nvidia-cuda-nvrtc`; nothing else of a toolkit
is needed, since the kernels include no header but their own.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from pathlib import Path

from kernels import build
from kernels.build import BuildError


def libnvrtc() -> ctypes.CDLL:
    """Return the library; raises `BuildError` where there is none."""
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    if found := ctypes.util.find_library("nvrtc"):
        names.insert(0, found)
    wheels = [Path(place) / "nvidia" for place in sys.path if place]
    names += [str(p) for w in wheels for p in sorted(w.glob("**/libnvrtc.so.1[0-9]"))]
    for name in names:
        try:
            # It opens its own second half by name alone, which a package's folder does not answer.
            for half in sorted(Path(name).parent.glob("libnvrtc-builtins.so.1[0-9]*")):
                ctypes.CDLL(str(half), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BuildError("no libnvrtc: install nvidia-cuda-nvrtc, or ship a cubin for this GPU")


def compile_cubin(arch: str) -> bytes:
    """Return a cubin of all kernels for `arch` (sm_XX); raises `BuildError` with the log."""
    nvrtc = libnvrtc()
    files = build.sources()
    main = files.pop(build.MODULE)
    names = (ctypes.c_char_p * len(files))(*(name.encode() for name in files))
    texts = (ctypes.c_char_p * len(files))(*(text.encode() for text in files.values()))
    program = ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        if code := getattr(nvrtc, name)(*arguments):
            raise BuildError(f"{name}: error {code}\n{_log(nvrtc, program)}")

    call(
        "nvrtcCreateProgram", ctypes.byref(program), main.encode(), build.MODULE.encode(),
        len(files), texts, names,
    )  # fmt: skip
    try:
        options = [f"--gpu-architecture={arch}".encode(), b"-std=c++17", b"-default-device"]
        call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * 3)(*options))
        size = ctypes.c_size_t()
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if (
        program.value is None
        or nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        or not size.value
    ):
        return ""
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")[-4000:]
