"""Follows a train job to its end, through dropped connections and restarts of the server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from art_sky.client import routes
from art_sky.client.progress import Bar, progress_bar
from art_sky.client.transport import Transport
from art_sky.errors import ArtSkyError, Cancelled, NotFound, ServerUnreachable, TrainFailed, from_wire
from art_sky.schemas import JOB_TERMINAL, Job, JobEvent, TrainResult

log = logging.getLogger("art_sky")

RECONNECT_SECONDS = 300.0  # without any answer from the server; how long training may take has no limit here
CANCEL_SECONDS = 0.8  # Ctrl-C must come through within a second


class JobFollower:
    """`submit` posts the train request; it is idempotent (rule R3), so it also finds a job that the server forgot."""

    def __init__(
        self, http: Transport, request_id: str, submit: Callable[[], Awaitable[Job]], description: str
    ) -> None:
        self._http, self._id, self._submit = http, request_id, submit
        self._description = description
        self._path = routes.under(routes.JOBS, request_id)
        self._offset = 0  # of the next event
        self._heard = False  # whether the last stream brought anything

    async def result(self) -> TrainResult:
        """Raises the job's own error (TrainFailed and others), Cancelled, or ServerUnreachable."""
        job = await self._submit()
        backoff = self._http.backoff(RECONNECT_SECONDS)
        with progress_bar(self._description, None) as bar:
            while job.state not in JOB_TERMINAL:
                try:
                    await self._watch(bar)
                    job = Job.model_validate(await self._http.json("GET", self._path))
                    if job.state not in JOB_TERMINAL:
                        raise ServerUnreachable(f"the event stream of {self._id} ends early; call again")
                    break
                except ArtSkyError as e:
                    if not e.retryable and not isinstance(e, NotFound):
                        raise
                    if self._heard:
                        backoff.reset()
                    await backoff.wait(e)
                    if isinstance(e, NotFound):  # a restarted server that has not found its jobs again
                        job = await self._submit()
        return _outcome(job)

    async def cancel(self) -> None:
        """Best effort within a second: says so when the job may go on."""
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await self._http.json("POST", f"{self._path}/cancel")
        except NotFound:
            pass  # it never began
        except (ArtSkyError, TimeoutError) as e:
            log.warning("the train job %s could not be cancelled and may go on: %s", self._id, e)

    async def _watch(self, bar: Bar) -> None:
        """Reads events until the stream ends, each once."""
        self._heard = False
        async with self._http.lines(f"{self._path}/events", {"offset": str(self._offset)}) as lines:
            async for line in lines:
                self._heard = True
                if not line.strip():
                    continue  # a heartbeat
                event = JobEvent.model_validate(json.loads(line))
                self._offset = event.offset + 1
                self._show(event, bar)

    def _show(self, event: JobEvent, bar: Bar) -> None:
        data = event.data
        if event.kind == "warning":
            log.warning("train job %s: %s", self._id, data.get("message", data))
        elif event.kind == "progress" and isinstance(data.get("of"), int):
            bar.update(done=data.get("micro_batch"), total=data["of"], text="micro-batches")
        elif event.kind == "progress" and isinstance(data.get("of_bytes"), int):
            mib = [data.get(name, 0) / 2**20 for name in ("stored_bytes", "of_bytes")]
            rate = mib[0] / max(data.get("seconds", 0.0), 1e-3)
            bar.update(done=round(mib[0]), total=round(mib[1]), text=f"MiB into the store, {rate:.1f} MiB/s")
        elif event.kind == "state":
            bar.update(text=str(data.get("state", "")))


def _outcome(job: Job) -> TrainResult:
    if job.state == "committed" and job.result is not None:
        return job.result
    if job.error is not None:
        raise from_wire({"error": job.error})
    if job.state == "cancelled":
        raise Cancelled(f"the train job {job.request_id} was cancelled and committed nothing; train again if wanted")
    raise TrainFailed(f"the train job {job.request_id} ended as {job.state} without a result; see the server's log")
