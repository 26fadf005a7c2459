"""When the server last did work. Work is progress, not existence: a token served, bytes of an upload, a training
micro-batch, a rollout's call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_TOUCH_SECONDS = 5.0


class Activity:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def touch(self) -> None:
        self._last = self._clock()

    def idle_seconds(self) -> float:
        return self._clock() - self._last

    @asynccontextmanager
    async def during(self, seconds: float) -> AsyncIterator[None]:
        """What happens within is work, for at most `seconds`: for what takes minutes and shows no progress of its own,
        as the download of a model."""
        end = self._clock() + seconds

        async def touching() -> None:
            while self._clock() < end:
                self.touch()
                await asyncio.sleep(_TOUCH_SECONDS)

        task = asyncio.create_task(touching(), name="counts as work")
        try:
            yield
        finally:
            task.cancel()
