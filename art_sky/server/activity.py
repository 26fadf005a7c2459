"""When the server last did work. Work is progress, not existence: a token served, bytes of an upload, a training
micro-batch, a rollout's call."""

from __future__ import annotations

import time
from collections.abc import Callable


class Activity:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def touch(self) -> None:
        self._last = self._clock()

    def idle_seconds(self) -> float:
        return self._clock() - self._last
