"""One train job while a server has it: its state, and its events for all who follow it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from art_sky.errors import ArtSkyError
from art_sky.schemas import JOB_TERMINAL, JOB_TRANSITIONS, Job, JobEvent, JobState, TrainRequestRecord, TrainResult
from art_sky.server.models import ServedModel

HEARTBEAT_SECONDS = 10.0


class LiveJob:
    """A job with its events. All changes of state go through `move`."""

    def __init__(self, model: ServedModel, record: TrainRequestRecord, state: JobState = "queued") -> None:
        self.model, self.record = model, record
        self.state: JobState = state
        self.attempts = 0
        self.result: TrainResult | None = None
        self.error: ArtSkyError | None = None
        self.again = False  # failed for a reason outside the request: the same id may be sent again
        self.cancel = asyncio.Event()
        self._events: list[JobEvent] = []
        self._changed = asyncio.Event()
        self.emit("state", {"state": state})

    def move(self, state: JobState, **data: Any) -> None:
        if state not in JOB_TRANSITIONS[self.state]:
            raise AssertionError(f"a job cannot go from {self.state} to {state}")
        self.state = state
        self.emit("state", {"state": state, **data})

    def emit(self, kind: Literal["state", "progress", "warning"], data: dict[str, Any]) -> None:
        self._events.append(JobEvent(offset=len(self._events), time=time.time(), kind=kind, data=data))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fail(self, error: ArtSkyError, *, again: bool = False) -> None:
        self.error, self.again = error, again
        self.move("failed", error=error.to_wire()["error"])

    def commit(self, result: TrainResult) -> None:
        self.result = result
        self.move("committed", result=result.model_dump())

    def view(self) -> Job:
        return Job(
            request_id=self.record.request,
            project=self.model.project,
            name=self.model.name,
            state=self.state,
            created=self.record.created,
            attempts=self.attempts,
            result=self.result,
            error=self.error.to_wire()["error"] if self.error else None,
            events=len(self._events),
        )

    async def events(self, offset: int) -> AsyncIterator[JobEvent | None]:
        """Events from `offset` on until the job has ended; None is a heartbeat.

        A server that was restarted counts anew: an offset beyond its events gives all of them.
        """
        at = offset if offset <= len(self._events) else 0
        while True:
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self.state in JOB_TERMINAL:
                return
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                yield None
