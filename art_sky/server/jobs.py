"""Train jobs: accepted once, trained one at a time, committed or told why not (rules R2, R3 and R7)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from pathlib import Path

from pydantic import TypeAdapter

from art_sky.config import AnyTrainConfig, SFTConfig, TrainConfig
from art_sky.errors import ArtSkyError, Busy, Cancelled, ChildDied, Conflict, NotFound, StoreError, TrainFailed
from art_sky.schemas import (
    JOB_TERMINAL,
    AttemptRecord,
    FileRef,
    Job,
    Manifest,
    TrainOutcome,
    TrainRequest,
    TrainRequestRecord,
    TrainResult,
    TrainTask,
)
from art_sky.server.activity import Activity
from art_sky.server.examples import as_examples
from art_sky.server.live_job import LiveJob
from art_sky.server.models import Registry, ServedModel, step_files, versions
from art_sky.server.render import ChatTemplate
from art_sky.server.vocabulary import Vocabulary
from art_sky.store.batches import decode_batch, encode_batch
from art_sky.store.failed import MAX_DEATHS
from art_sky.store.model_store import FINAL_OUTCOMES, Outcome
from art_sky.store.os_errors import full_disk
from art_sky.store.progress import Progress

log = logging.getLogger("art_sky.server")

_CONFIG: TypeAdapter[TrainConfig | SFTConfig] = TypeAdapter(AnyTrainConfig)

SILENT_SECONDS = 3600.0  # the longest one micro-batch, or the trainer's start, may take
KEPT_JOBS = 1000  # ended ones in memory; older ones are answered from the store


class Jobs:
    """The queue. Jobs of one model run in the order in which they came, since all do."""

    def __init__(self, registry: Registry, activity: Activity, state: Path) -> None:
        self._registry, self._activity = registry, activity
        self._work = state / "work"
        self._jobs: dict[str, LiveJob] = {}
        self._queue: asyncio.Queue[LiveJob] = asyncio.Queue()
        self._submitting = asyncio.Lock()
        self._closing = False
        self._runner: asyncio.Task[None] | None = None
        self._preparing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)  # left by a server that was killed
        self._runner = asyncio.create_task(self._run_forever(), name="train jobs")

    async def close(self) -> None:
        """Interrupts the running job; it is finished by the next server."""
        running = [*self._preparing, *([self._runner] if self._runner else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def all(self) -> list[Job]:
        return [job.view() for job in self._jobs.values()]

    def unfinished(self) -> list[LiveJob]:
        """Accepted, and neither committed nor failed nor cancelled."""
        return [job for job in self._jobs.values() if job.state not in JOB_TERMINAL]

    async def drain(self, seconds: float) -> None:
        """Takes no new request from here on, and waits at most `seconds` for those that were accepted."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for job in self.unfinished():
                    async for _ in job.events(0):
                        pass

    async def submit(self, model: ServedModel, request: TrainRequest) -> LiveJob:
        """The job of this request id: new, running, or ended before, whichever it is.

        Raises Conflict when the id was used with another body or for another model, NotFound without its batch.
        """
        async with self._submitting:
            live = self._jobs.get(request.request_id)
            if live is not None and live.model is not model:
                raise Conflict(f"train request {request.request_id} belongs to another model; use a new id")
            if self._closing and (live is None or live.again):
                raise Busy("this server is about to end and takes no new train request; send it again to the next one")
            record = await asyncio.to_thread(_begin, model, request)
            if live is not None and not live.again:
                return live
            job = await asyncio.to_thread(_restore, model, record)
            self._add(job)
            return job

    async def recover(self, model: ServedModel) -> None:
        """Queues what an earlier server accepted and did not end."""
        async with self._submitting:
            for record in await asyncio.to_thread(model.store.pending_requests):
                if record.request not in self._jobs:
                    log.info("train request %s of %s goes on", record.request, model.store.prefix)
                    self._add(await asyncio.to_thread(_restore, model, record))

    async def get(self, request_id: str) -> LiveJob:
        """Raises NotFound for an id that no registered model knows."""
        live = self._jobs.get(request_id)
        if live is not None:
            return live
        for model in self._registry.served():
            try:
                record = await asyncio.to_thread(model.store.request, request_id)
            except StoreError as e:
                if e.status != 404:
                    raise
                continue
            return await asyncio.to_thread(_restore, model, record)
        raise NotFound(f"no train request {request_id!r} is known here; register its model, then send it again")

    async def cancel(self, request_id: str) -> LiveJob:
        """Cancels a job that waits or trains; one that is being committed or has ended stays as it is."""
        job = await self.get(request_id)
        job.cancel.set()
        if job.state == "queued":
            attempt = await asyncio.to_thread(_begin_attempt, job)
            await asyncio.to_thread(_end, job, attempt, "cancelled", None)
            if job.state == "queued":
                _cancelled(job)
        return job

    def _add(self, job: LiveJob) -> None:
        self._jobs.pop(job.record.request, None)
        self._jobs[job.record.request] = job
        ended = [id for id, j in self._jobs.items() if j.state in JOB_TERMINAL]
        for id in ended[: max(len(ended) - KEPT_JOBS, 0)]:
            del self._jobs[id]
        if job.state == "queued":
            self._queue.put_nowait(job)

    async def _run_forever(self) -> None:
        while True:
            job = await self._queue.get()
            if job.state != "queued":
                continue  # cancelled meanwhile
            try:
                await self._run(job)
            except ArtSkyError as e:
                log.error("train request %s: %s", job.record.request, e.message)
                job.fail(e, again=isinstance(e, StoreError))
            except Exception as e:
                log.exception("train request %s", job.record.request)
                failed = ArtSkyError(f"the server failed ({type(e).__name__}: {e}); see its log, then try again")
                job.fail(full_disk(e) or failed, again=True)

    async def _run(self, job: LiveJob) -> None:
        """One attempt. Errors that end the job are raised."""
        model, request = job.model, job.record.request
        job.move("running")
        began = time.monotonic()
        if await asyncio.to_thread(model.writer.adopt, request) is not None:
            job.move("committing")
            await self._committed(job, None, began)
            return
        attempt = await asyncio.to_thread(_begin_attempt, job)
        job.attempts = attempt.attempt
        job.emit("progress", {"attempt": attempt.attempt})
        work = self._work / f"{request}-{attempt.attempt}"
        outcome: Outcome = "interrupted"
        message: str | None = None
        try:
            trained = await self._train(job, work)
            if job.cancel.is_set():
                raise Cancelled("the job was cancelled; nothing was committed")
            job.move("committing")
            await asyncio.to_thread(self._commit, job, trained, work / "out", self._stored_of(job))
            outcome = "committed"
            await self._committed(job, attempt, began)
        except Cancelled as e:
            outcome, message = "cancelled", e.message
            _cancelled(job)
        except (ChildDied, Busy) as e:
            outcome, message = "trainer_died", e.message
            await asyncio.to_thread(_end, job, attempt, outcome, message)
            self._again_or_fail(job, await asyncio.to_thread(_deaths, job), e)
        except StoreError as e:
            message = e.message  # the batch is not to blame: the request stays open
            raise
        except ArtSkyError as e:
            outcome, message = "failed", e.message
            raise
        finally:
            if outcome not in ("committed", "trainer_died"):
                await asyncio.to_thread(_end, job, attempt, outcome, message)
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    async def _train(self, job: LiveJob, work: Path) -> TrainOutcome:
        model, record = job.model, job.record
        parent = self._work / "parents" / model.store.prefix
        await asyncio.to_thread(model.store.fetch_files, model.head_manifest, parent)
        await asyncio.to_thread(_fetch_batch, model, record.batch, work / "batch")
        (work / "out").mkdir()
        config = _CONFIG.validate_python(record.config)
        reference = None
        if isinstance(config, SFTConfig):
            await asyncio.to_thread(_render, work / "batch", model.template, self._registry.vocabulary, config)
        elif config.kl_penalty_reference_step is not None:
            reference = work / "reference"
            _, manifest = model.steps[model.check_step(config.kl_penalty_reference_step)]
            await asyncio.to_thread(model.store.fetch_files, manifest, reference)
        task = TrainTask(
            request_id=record.request,
            base_model=model.record.base_model,
            parent_dir=str(parent),
            reference_dir=reference and str(reference),
            batch_path=str(work / "batch"),
            out_dir=str(work / "out"),
            config=config,
        )
        async with self._registry.engine.room_for_training():
            return await self._until_cancelled(job, task)

    async def _until_cancelled(self, job: LiveJob, task: TrainTask) -> TrainOutcome:
        training = asyncio.create_task(self._follow(job, task))
        cancelled = asyncio.create_task(job.cancel.wait())
        try:
            await asyncio.wait({training, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                raise Cancelled("the job was cancelled; nothing was committed")
            return training.result()
        finally:
            for waiting in (training, cancelled):
                waiting.cancel()
            await asyncio.gather(training, cancelled, return_exceptions=True)

    async def _follow(self, job: LiveJob, task: TrainTask) -> TrainOutcome:
        async with contextlib.aclosing(self._registry.trainer.train(task)) as events:
            while True:
                try:
                    async with asyncio.timeout(SILENT_SECONDS):
                        event = await anext(events)
                except TimeoutError:
                    what = f"the trainer made no progress in {SILENT_SECONDS:.0f} s"
                    raise Busy(f"{what}; see its log, then try again") from None
                except StopAsyncIteration:
                    raise TrainFailed("the trainer ended without an outcome; see its log, then try again") from None
                if isinstance(event, TrainOutcome):
                    return event
                self._activity.touch()
                job.emit("progress", event)

    def _stored_of(self, job: LiveJob) -> Progress:
        """Tells who follows the job, and who watches for idle time, how far its files are: some twenty times."""
        loop, began, told = asyncio.get_running_loop(), time.monotonic(), -1

        def tell(done: int, total: int) -> None:
            nonlocal told
            if (twentieth := done * 20 // max(total, 1)) == told:
                return
            told = twentieth
            data = {"stored_bytes": done, "of_bytes": total, "seconds": time.monotonic() - began}
            loop.call_soon_threadsafe(job.emit, "progress", data)
            loop.call_soon_threadsafe(self._activity.touch)

        return tell

    def _commit(self, job: LiveJob, trained: TrainOutcome, out: Path, progress: Progress) -> None:
        model, record = job.model, job.record
        files: dict[str, Path | FileRef] = {**(step_files(out) if trained.updates else model.head_manifest.files)}
        model.writer.commit(
            step=model.step + 1,
            request=record.request,
            files=files,
            updates=trained.updates,
            reason=trained.reason,
            batch=record.batch,
            config=record.config,
            metrics=trained.metrics,
            versions=versions(),
            progress=progress,
        )

    async def _committed(self, job: LiveJob, attempt: AttemptRecord | None, began: float) -> None:
        """HEAD is swapped: everything after this may fail without changing that."""
        model = job.model
        await asyncio.to_thread(model.reload)
        key, manifest = next((k, m) for k, m in reversed(model.steps) if m.request == job.record.request)
        try:
            if attempt is None:
                attempt = await asyncio.to_thread(_begin_attempt, job)
            job.attempts = attempt.attempt
            await asyncio.to_thread(model.store.end_attempt, attempt, "committed", None, key)
        except ArtSkyError as e:
            job.emit("warning", {"message": f"the outcome could not be written down: {e.message}"})
        job.commit(_result(key, manifest, time.monotonic() - began))
        self._activity.touch()
        preparing = asyncio.create_task(self._prepare(model), name=f"prepare {model.name}")
        self._preparing.add(preparing)
        preparing.add_done_callback(self._preparing.discard)

    async def _prepare(self, model: ServedModel) -> None:
        """Loads the new step before it is asked for. The next job does not wait: the engine may be starting."""
        try:
            async with self._registry.adapter(model, model.step) as adapter:
                await self._registry.engine.prepare(adapter)
        except ArtSkyError as e:
            log.warning("the engine could not load step %d yet: %s", model.step, e.message)

    def _again_or_fail(self, job: LiveJob, deaths: int, error: ArtSkyError) -> None:
        if deaths < MAX_DEATHS:
            job.emit("warning", {"message": f"attempt {job.attempts} ended: {error.message}; it is tried again"})
            job.move("queued")
            self._queue.put_nowait(job)
            return
        job.fail(
            TrainFailed(
                f"{deaths} attempts ended the trainer, the last with: {error.message}; make the batch smaller (fewer "
                "or shorter trajectories, a lower micro_batch_tokens) and train it under a new request id"
            )
        )


def _cancelled(job: LiveJob) -> None:
    job.error = Cancelled("the train call was cancelled; nothing was committed, train again under a new request id")
    job.move("cancelled")


def _begin(model: ServedModel, request: TrainRequest) -> TrainRequestRecord:
    try:
        batch = model.store.find_blob(request.batch)
    except StoreError as e:
        if e.status != 404:
            raise
        raise NotFound(f"the batch {request.batch} was not uploaded; PUT it to .../blobs/ first") from e
    return model.store.begin_request(
        TrainRequestRecord(
            request=request.request_id,
            batch=batch,
            config=request.config.model_dump(),
            head_step=model.step,
            head_manifest=model.head_key,
            created=time.time(),
        )
    )


def _restore(model: ServedModel, record: TrainRequestRecord) -> LiveJob:
    """The job of a stored request, as the store tells its end."""
    attempts = model.store.attempts(record.request)
    last = attempts[-1] if attempts else None
    for attempt in attempts:
        if attempt.outcome is None:  # its server was killed
            applied = any(m.request == record.request for _, m in model.steps)
            model.store.end_attempt(attempt, "committed" if applied else "interrupted")
    found = next(((k, m) for k, m in model.steps if m.request == record.request), None)
    job = LiveJob(model, record)
    job.attempts = len(attempts)
    if found is not None:
        seconds = (last.ended or last.begun) - last.begun if last else 0.0
        for state in ("running", "committing"):
            job.move(state)
        job.commit(_result(*found, seconds))
    elif last is not None and last.outcome == "cancelled":
        _cancelled(job)
    elif last is not None and last.outcome in FINAL_OUTCOMES:
        job.fail(TrainFailed(f"{last.message or 'it failed'}; train again under a new request id"))
    elif (deaths := _deaths(job)) >= MAX_DEATHS:
        job.fail(TrainFailed(f"{deaths} attempts ended the trainer; train a smaller batch under a new request id"))
    return job


def _result(key: str, manifest: Manifest, seconds: float) -> TrainResult:
    return TrainResult(
        request_id=manifest.request,
        step=manifest.step,
        manifest=key,
        updates=manifest.updates,
        reason=manifest.reason,
        metrics=manifest.metrics,
        seconds=seconds,
    )


def _begin_attempt(job: LiveJob) -> AttemptRecord:
    return job.model.store.begin_attempt(job.record.request, job.model.writer.generation)


def _end(job: LiveJob, attempt: AttemptRecord, outcome: Outcome, message: str | None) -> None:
    try:
        job.model.store.end_attempt(attempt, outcome, message)
    except ArtSkyError as e:  # the attempt stays open, as if the server had been killed
        log.error("attempt %d of %s: %s", attempt.attempt, attempt.request, e.message)


def _deaths(job: LiveJob) -> int:
    return sum(a.outcome == "trainer_died" for a in job.model.store.attempts(job.record.request))


def _render(batch: Path, template: ChatTemplate, vocabulary: Vocabulary, config: SFTConfig) -> None:
    examples = as_examples(decode_batch(batch.read_bytes()), template, vocabulary, config)
    batch.write_bytes(encode_batch(examples))


def _fetch_batch(model: ServedModel, batch: FileRef, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(model.store.read_blob(batch))
