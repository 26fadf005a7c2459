"""Tasks that run in the background of an event loop."""

from __future__ import annotations

import asyncio
import contextlib


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancels it and waits until it has cleaned up; None is no task."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
