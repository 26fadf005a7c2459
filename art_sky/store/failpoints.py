"""Places where a test may kill the process: what `kill -9` leaves behind is a promise of the store.

`ART_SKY_FAILPOINT=after-manifest:2` makes the process SIGKILL itself when it passes `after-manifest` the second
time; `after-manifest@PATH` only while the file PATH exists, which is deleted first, so that the process that is
started in its place lives. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

VARIABLE = "ART_SKY_FAILPOINT"
_hits: dict[str, int] = {}
_lock = threading.Lock()


def failpoint(name: str) -> None:
    """Marks the moment right after the side effect that `name` tells of."""
    setting, at, arm = os.environ.get(VARIABLE, "").partition("@")
    wanted, _, count = setting.partition(":")
    if wanted != name:
        return
    with _lock:
        _hits[name] = _hits.get(name, 0) + 1
        if _hits[name] < int(count or 1):
            return
        if at:
            try:
                Path(arm).unlink()
            except FileNotFoundError:
                return
        os.kill(os.getpid(), signal.SIGKILL)
