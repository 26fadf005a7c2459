"""A program beside the server, which brings something into the store and must never hold up the watchdog."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

START_SECONDS = 60.0  # from one start to the next
LAST_SECONDS = 60.0  # for its last word


class SideProgram:
    """It runs until its stdin closes, then does its work once more and ends, with 0 if that went well."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._started = -math.inf
        self._closed: float | None = None

    def tend(self, now: float, start: Callable[[str], subprocess.Popen[bytes]]) -> None:
        """Starts it, and again when it ended by itself; `start(module)` makes a child with a pipe as stdin."""
        if (self._child is None or self._child.poll() is not None) and now - self._started >= START_SECONDS:
            self._started = now
            self._child = start(self.module)

    def over(self, now: float) -> bool:
        """Asks it to end and whether it has, to be called until it has. Overdue it is killed."""
        if self._child is None or self._child.stdin is None:
            return True
        if self._closed is None:
            self._closed = now
            self._child.stdin.close()
        if self._child.poll() is None:
            if now - self._closed < LAST_SECONDS:
                return False
            kill_group(self._child)
        return True

    @property
    def succeeded(self) -> bool:
        """Whether it was over in time, with all its work done."""
        return self._child is not None and self._child.returncode == 0


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Also what is left of the group when the child itself has ended."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
