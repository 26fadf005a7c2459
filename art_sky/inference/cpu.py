"""The engine for CPUs, as the server sees it: a child process that is started again whenever it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from art_sky.config import EngineConfig
from art_sky.errors import Busy, ChildDied
from art_sky.inference.protocol import EngineStatus, GenerateEnd, GenerateRequest, TokenDelta
from art_sky.schemas import AdapterRef
from art_sky.server.child import Child
from art_sky.tasks import end_task

_STATUS_SECONDS = 5.0


class CpuEngine:
    """Implements `Engine`. Adapters are files, and every request names its own, so a new child needs no telling."""

    def __init__(
        self,
        base_model_path: Path,
        config: EngineConfig,
        log_file: Path,
        *,
        start_seconds: float = 180.0,
        stall_seconds: float = 120.0,
    ) -> None:
        """`stall_seconds`: a child whose main thread makes no step for so long while requests wait is killed."""
        self._child = Child(
            "engine",
            "art_sky.inference.worker",
            ["--base-model", str(base_model_path), "--config", config.model_dump_json()],
            log_file,
            # Threads that wait sleep. Spinning ones fight with the server and the trainer for the cores: on two cores
            # with other work, a step of 16 sequences took 1-2 s instead of 65 ms.
            env={"OMP_WAIT_POLICY": "passive"},
            start_seconds=start_seconds,
        )
        self._stall_seconds = stall_seconds
        self._active = 0
        self._watch: asyncio.Task[None] | None = None
        self._last = EngineStatus(state="stopped")

    @property
    def pid(self) -> int | None:
        """Of the child, while it lives."""
        return self._child.pid

    async def start(self) -> None:
        self._child.start()
        if self._watch is None:
            self._watch = asyncio.create_task(self._kill_stalled(), name="watch engine")

    async def close(self) -> None:
        await end_task(self._watch)
        self._watch = None
        await self._child.stop()

    async def context_length(self) -> int:
        """Tokens of prompt and answer together. Waits for the child; raises Busy."""
        await self._child.wait_ready()
        return int(self._child.info["context_length"])

    async def prepare(self, adapter: AdapterRef) -> None:
        await self._child.result("prepare", adapter.model_dump())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta | GenerateEnd]:
        """See `Engine.generate`. Raises PromptTooLong, InvalidInput, ChildDied (retryable), Busy (retryable)."""
        self._active += 1
        messages = self._child.call("generate", request.model_dump())
        try:
            async for message in messages:
                if "event" in message:
                    yield TokenDelta(**message["event"])
                else:
                    yield GenerateEnd(**message["result"])
        finally:
            self._active -= 1
            await messages.aclose()  # closing it cancels the call

    def room_for_training(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Nothing to do: on a CPU both fit, and sampling goes on while the trainer computes."""
        return contextlib.nullcontext()

    async def status(self) -> EngineStatus:
        """Never waits long: while the child is deep in a step, its last numbers with the present state."""
        if self._child.state == "ready":
            # A child that dies now is seen in its state.
            with contextlib.suppress(TimeoutError, ChildDied, Busy):
                numbers = await asyncio.wait_for(self._child.result("status", {}), _STATUS_SECONDS)
                self._last = EngineStatus(state="ready", **numbers)
        return self._last.model_copy(update={"state": self._child.state, "restarts": self._child.restarts})

    async def _kill_stalled(self) -> None:
        """The child's channel thread answers pings even when its main thread is stuck; its beat tells."""
        loop = asyncio.get_running_loop()
        seen, since = (self._child.pid, self._child.beat), loop.time()
        while True:
            await asyncio.sleep(self._stall_seconds / 8)
            now = (self._child.pid, self._child.beat)
            if now != seen or not self._active or self._child.state != "ready":
                seen, since = now, loop.time()
            elif loop.time() - since > self._stall_seconds:
                self._child.kill()
