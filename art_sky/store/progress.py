"""How far a transfer is, told to plain callbacks: who draws it is no matter of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]  # bytes done, of all; called from any thread, one at a time
Moved = Callable[[int], None]  # that many bytes more; from any thread


class Meter:
    """Adds up for `progress`. Every byte is counted `passes` times, for example when it is read and when written."""

    def __init__(self, total: int, progress: Progress | None, passes: int = 1) -> None:
        self.total = total
        self._counted, self._passes = 0, passes
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._counted += count
            if self._progress is not None:
                self._progress(self._counted // self._passes, self.total)
