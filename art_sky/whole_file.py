"""Small files that another process may read at any moment, or that must be whole after a crash."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """A reader sees the old file or the new one, also after power was cut. Raises OSError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(str(scratch), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        if scratch.exists():
            scratch.unlink()
