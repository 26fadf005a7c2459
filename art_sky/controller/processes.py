"""Processes that outlive the command which started them: who they are, and how they end.

A process id alone names nobody: ids are used again. An *identity* adds the moment at which the process began.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.05


def identity(pid: int) -> str | None:
    """What stays the same while this process lives and no other process will ever have; None if it is dead.

    A zombie counts as dead: it holds neither memory nor a port.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        return _identity_by_ps(pid)
    except ProcessLookupError:  # it ended between open and read
        return None
    # The command's name is in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    state, started_ticks = fields[0], fields[19]
    if state in "ZX":
        return None
    # Ticks count from the boot, so that a clock that is set does not change them; two boots may repeat them.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{started_ticks}"


def is_alive(pid: int | None, who: str | None) -> bool:
    """Whether `pid` still is the process that had the identity `who`."""
    return pid is not None and who is not None and identity(pid) == who


def wait_end(pid: int, who: str | None, seconds: float) -> bool:
    """Waits until the process has ended; False when it still lives after `seconds`."""
    deadline = time.monotonic() + seconds
    while is_alive(pid, who):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def end_group(pid: int, who: str | None, term_seconds: float) -> bool:
    """Ends a session leader with everything it started: SIGTERM, then SIGKILL. True when it is dead."""
    for number, seconds in ((signal.SIGTERM, term_seconds), (signal.SIGKILL, 5.0)):
        if not is_alive(pid, who):
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        if wait_end(pid, who, seconds):
            # What ignored SIGTERM and lost its leader is still in the group; the id stays taken until it ends.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            return True
    return False


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back for the few lines between the birth of a process and the note of its id.

    Not by a signal mask: the new process would inherit it. In other threads than the main one Python runs no
    signal handler, so that there is nothing to hold.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in seen:
            signal.raise_signal(held)


def _identity_by_ps(pid: int) -> str | None:
    """For systems without /proc."""
    out = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = out.stdout.strip().partition(" ")
    return started.strip() if started and not state.startswith("Z") else None
