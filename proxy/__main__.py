"""`python -m proxy`: run one sidecar. Readies the interpreter before anything else is loaded."""

from __future__ import annotations

import gc
import signal
import sys

if __name__ == "__main__":
    # It asks for a reload. Until there is something to reload it must not end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Hardly anything that a start makes is garbage; once it serves, `lifecycle` turns this on.
    gc.disable()
    # But for the twin in Python that `datetime` throws away (before 3.12): while little is there.
    import datetime as dt  # noqa: F401

    gc.collect()
    from proxy import lean  # noqa: F401 - before what loads msgspec
    from proxy.run import main

    sys.exit(main())
