"""A pytest plugin: tests meet another build of kernels.sm4, or none.

`-p tests.unit.kernels.sm4_stand_in` with SM4_STAND_IN naming the extension's file; empty: there is
none, as where no compiler was at install.
"""

from __future__ import annotations

import importlib.util
import os
import sys

MODULE = "kernels.sm4._sm4"
path = os.environ["SM4_STAND_IN"]
if path:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[MODULE])
else:
    sys.modules[MODULE] = None  # type: ignore[assignment]
