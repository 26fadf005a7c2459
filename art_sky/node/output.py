"""What the node's programs say, kept in a file besides."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# What ends the watchdog in order must not end the one that writes its last lines.
_TEE = 'trap "" HUP INT TERM; exec tee -a "$0"'
_END_SECONDS = 10.0


@contextlib.contextmanager
def also_in(file: Path) -> Iterator[None]:
    """Within, stdout and stderr of this process and of its children go to its stdout, and to the end of `file`.

    By `tee`, a process of its own: children hand it their output also while this process is hung or killed, and a
    full disk loses the file and not the output. Raises OSError.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tee = subprocess.Popen(["sh", "-c", _TEE, str(file)], stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    before = [(n, os.dup(n)) for n in (1, 2)]
    for n, _ in before:
        os.dup2(tee.stdin.fileno(), n)
    tee.stdin.close()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for n, kept in before:
            os.dup2(kept, n)
            os.close(kept)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child that outlives this goes on through it
            tee.wait(_END_SECONDS)
