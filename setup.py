"""What pyproject.toml cannot say: the sidecar's data path is compiled, where that can be done.

`[tool.tongguan] compiled` names its modules; mypyc makes one extension of them, `proxy.path`. Their
sources stay beside it: they are what runs where no compiler or no mypyc was there, and what is
read. All or nothing: classes of one module inherit from another's.

`TONGGUAN_UP_COMPILE=no` leaves it out; `quick` compiles it without optimising, for a test.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

GROUP = "proxy.path"
# What is installed beside it must not matter: when the project is built in a fresh environment,
# nothing is there yet that it needs.
MYPY = (
    "--config-file=",
    "--no-site-packages",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--cache-dir=build/mypy",
)

# Its two thousand functions call each other and are nobody else's: no table of their names, nothing
# to look up at start; Python's own are called without a detour through one.
CODE = ("-fvisibility=hidden", "-fno-plt", "-fno-semantic-interposition")


def compiled() -> list[str]:
    """Return the paths of the modules to compile."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    return list(project["tool"]["tongguan"]["compiled"])


def path_extensions() -> list[Extension]:
    """Return the extensions of the data path, the one with the code first; none if mypyc cannot."""
    if os.environ.get("TONGGUAN_UP_COMPILE") == "no":
        return []
    try:
        from mypyc.build import mypycify  # noqa: PLC0415 - absent where it is not wanted
    except ImportError:
        sys.stderr.write("setup: no mypyc: the data path stays interpreted\n")
        return []
    try:
        level = "0" if os.environ.get("TONGGUAN_UP_COMPILE") == "quick" else "2"
        made = mypycify([*MYPY, *compiled()], opt_level=level, debug_level="0", group_name=GROUP)
    except SystemExit as problem:  # how it says that it refuses the source
        sys.stderr.write(f"setup: the data path stays interpreted: {problem}\n")
        return []
    for extension in made:
        extension.optional = True
        extension.extra_compile_args = [*extension.extra_compile_args, *CODE]
    return sorted(made, key=lambda extension: not extension.name.startswith(GROUP))


class BuildExtensions(build_ext):
    """Builds the data path whole or not at all; what it lacks is said, and is no failure."""

    path: frozenset[str] = frozenset()
    _failed = False

    def run(self) -> None:
        """Build all. What is built anew only in part looks as fresh as its source."""
        super().run()
        if self.inplace and not self._failed:
            for name in self.path:
                Path(self.get_ext_fullpath(name)).touch()

    def build_extension(self, ext: Extension) -> None:
        """Build one."""
        if ext.name not in self.path:
            super().build_extension(ext)
            return
        if self._failed:
            return
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as problem:
            self._failed = True
            self.warn(f"the data path stays interpreted: {problem}")
            for name in self.path:
                Path(self.get_ext_fullpath(name)).unlink(missing_ok=True)


PATH = path_extensions()
BuildExtensions.path = frozenset(extension.name for extension in PATH)
setup(ext_modules=PATH, cmdclass={"build_ext": BuildExtensions})
