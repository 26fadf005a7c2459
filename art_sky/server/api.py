"""`/api/v1/...`: models, train jobs, checkpoints, history, state, rollouts and the server itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import StringConstraints

from art_sky.errors import InvalidInput, NotFound
from art_sky.schemas import (
    Checkpoint,
    Exchange,
    FileRef,
    HistoryRow,
    Job,
    LogRequest,
    LogResult,
    ModelStatus,
    RegisterRequest,
    RolloutAddress,
    ServerStatus,
    Sha256,
    TrainRequest,
    Wire,
)
from art_sky.server.jobs import LiveJob
from art_sky.server.models import ServedModel
from art_sky.server.server import Server
from art_sky.server.wire_json import AsciiJSON, StrictRoute, dumps
from art_sky.store.model_store import ModelStore
from art_sky.store.retention import best_step, delete_checkpoints

MAX_BLOB = 4 << 30
_CHUNK = 1 << 20
_MODEL = "/models/{project}/{name}"

MetricName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}/.{1,200}$")]


class DeleteRequest(Wire):
    best_metric: MetricName = "val/reward"


class DeleteResult(Wire):
    deleted: list[int]


def api_router(server: Server) -> APIRouter:
    router = APIRouter(prefix="/api/v1", route_class=StrictRoute, default_response_class=AsciiJSON)
    _model_routes(router, server)
    _job_routes(router, server)
    _checkpoint_routes(router, server)
    _rollout_routes(router, server)

    @router.get("/status")
    async def status() -> ServerStatus:
        return await server.status()

    @router.post("/shutdown", status_code=202)
    async def shutdown() -> dict[str, Any]:
        """The server ends soon; what it accepted and did not end is finished by the next one."""
        asyncio.get_running_loop().call_soon(server.stop)
        return {"stopping": True}

    return router


def _model_routes(router: APIRouter, server: Server) -> None:
    registry = server.registry

    @router.post("/models")
    async def register(body: RegisterRequest) -> ModelStatus:
        """Registers a model, new or known, and goes on from its HEAD. The first one starts engine and trainer."""
        return await server.register(body)

    @router.get("/models")
    async def models() -> list[ModelStatus]:
        return [registry.status(m) for m in registry.all()]

    @router.get(_MODEL)
    async def model(project: str, name: str) -> ModelStatus:
        return registry.status(registry.get(project, name))

    @router.put(_MODEL + "/blobs/{sha256}")
    async def put_blob(project: str, name: str, sha256: Sha256, request: Request) -> FileRef:
        """Stores bytes under their hash, which is checked."""
        model = registry.get(project, name)
        scratch = server.state / "uploads" / uuid.uuid4().hex
        try:
            found = await _receive(server, request, scratch)
            if found != sha256:
                raise InvalidInput(f"the bytes have the hash {found}, not {sha256}; send them again")
            return await asyncio.to_thread(model.store.put_blob, scratch)
        finally:
            await asyncio.to_thread(scratch.unlink, missing_ok=True)

    @router.post(_MODEL + "/log")
    async def log(project: str, name: str, body: LogRequest) -> LogResult:
        """Fills the row (attempt, step, split) of the history, and keeps trajectories that were uploaded."""
        model = registry.get(project, name)
        step = model.step if body.step is None else body.step
        if not 0 <= step <= model.step:
            raise NotFound(f"{project}/{name} has no step {step}; log to 0 to {model.step}")
        server.activity.touch()
        return await asyncio.to_thread(_log, model, step, body)

    @router.get(_MODEL + "/history")
    async def history(project: str, name: str) -> list[HistoryRow]:
        return await asyncio.to_thread(registry.get(project, name).store.history)

    @router.get(_MODEL + "/state", response_model=None)
    async def read_state(project: str, name: str) -> dict[str, Any]:
        """`{"state": ...}`: the user's own, null when none was ever written."""
        return {"state": await asyncio.to_thread(registry.get(project, name).store.read_state)}

    @router.patch(_MODEL + "/state", response_model=None)
    async def merge_state(project: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sets the given top-level keys."""
        return {"state": await asyncio.to_thread(registry.get(project, name).store.merge_state, body)}

    @router.put(_MODEL + "/state", response_model=None)
    async def overwrite_state(project: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"state": await asyncio.to_thread(registry.get(project, name).store.overwrite_state, body)}


def _job_routes(router: APIRouter, server: Server) -> None:
    jobs = server.jobs

    @router.post(_MODEL + "/train", status_code=202)
    async def train(project: str, name: str, body: TrainRequest) -> Job:
        """Accepts a batch. The same request id again gives the same job, or its stored result."""
        return (await jobs.submit(server.registry.get(project, name), body)).view()

    @router.get("/jobs/{request_id}")
    async def job(request_id: str) -> Job:
        return (await jobs.get(request_id)).view()

    @router.get("/jobs/{request_id}/events", response_model=None)
    async def events(request_id: str, offset: Annotated[int, Query(ge=0)] = 0) -> Response:
        """JobEvents, one JSON line each, until the job has ended; empty lines show that the server is there."""
        return StreamingResponse(_lines(await jobs.get(request_id), offset), media_type="application/x-ndjson")

    @router.post("/jobs/{request_id}/cancel")
    async def cancel(request_id: str) -> Job:
        return (await jobs.cancel(request_id)).view()


def _checkpoint_routes(router: APIRouter, server: Server) -> None:
    registry = server.registry

    @router.get(_MODEL + "/checkpoints")
    async def checkpoints(project: str, name: str, best_metric: MetricName = "val/reward") -> list[Checkpoint]:
        return await asyncio.to_thread(_checkpoints, registry.get(project, name).store, best_metric)

    @router.get(_MODEL + "/checkpoints/{step}/files/{path:path}", response_model=None)
    async def checkpoint_file(project: str, name: str, step: int, path: str) -> Response:
        """A file of a step, checked before it is sent; `x-art-sky-sha256` lets the receiver check it too."""
        model = registry.get(project, name)
        if not 0 <= step <= model.step:
            raise NotFound(f"{project}/{name} has no step {step}; its steps are 0 to {model.step}")
        ref = model.steps[step][1].files.get(path)
        if ref is None:
            known = ", ".join(model.steps[step][1].files)
            raise NotFound(f"step {step} has no file {ascii(path)[:100]}; it has {known}")
        await asyncio.to_thread(model.store.verify_blob, ref)
        headers = {"content-length": str(ref.size), "x-art-sky-sha256": ref.sha256}
        body = _read_blob(model.store, ref)
        return StreamingResponse(body, media_type="application/octet-stream", headers=headers)

    @router.post(_MODEL + "/checkpoints/delete")
    async def delete(project: str, name: str, body: DeleteRequest) -> DeleteResult:
        """Deletes the files of all steps but the newest, the best and those kept by name."""
        model = registry.get(project, name)
        return DeleteResult(deleted=await asyncio.to_thread(delete_checkpoints, model.writer, body.best_metric))


def _rollout_routes(router: APIRouter, server: Server) -> None:
    @router.get("/exchanges/{completion_id}")
    async def exchange(completion_id: str) -> Exchange:
        """What the gateway recorded of a completion, for a Choice that lost its tokens."""
        return await server.exchanges.find(completion_id)

    @router.post(_MODEL + "/rollouts", status_code=201)
    async def open_rollout(project: str, name: str, request: Request) -> RolloutAddress:
        """An address of its own: whatever calls it is recorded under this rollout."""
        server.registry.get(project, name)
        server.activity.touch()
        rollout, key = await asyncio.to_thread(server.rollouts.open, project, name)
        base = str(request.base_url).rstrip("/")
        return RolloutAddress(rollout=rollout.id, base_url=f"{base}/rollouts/{rollout.id}/v1", api_key=key)

    @router.get("/rollouts/{rollout}/exchanges")
    async def rollout_exchanges(rollout: str) -> list[Exchange]:
        return await server.exchanges.of_rollout(rollout)

    @router.delete("/rollouts/{rollout}", status_code=204)
    async def close_rollout(rollout: str) -> Response:
        """Its key opens nothing any more; what it recorded stays readable."""
        await asyncio.to_thread(server.rollouts.close_rollout, rollout)
        return Response(status_code=204)


async def _receive(server: Server, request: Request, scratch: Path) -> str:
    """Writes the body to `scratch`; returns its hash."""
    await asyncio.to_thread(scratch.parent.mkdir, parents=True, exist_ok=True)
    digest, size, pending = hashlib.sha256(), 0, bytearray()

    def flush(data: bytes) -> None:
        digest.update(data)
        out.write(data)

    with await asyncio.to_thread(scratch.open, "wb") as out:
        async for chunk in request.stream():
            server.activity.touch()
            size += len(chunk)
            if size > MAX_BLOB:
                raise HTTPException(413, f"the blob is over {MAX_BLOB >> 30} GiB; send fewer groups at once")
            pending += chunk
            if len(pending) >= _CHUNK:
                await asyncio.to_thread(flush, bytes(pending))
                pending.clear()
        await asyncio.to_thread(flush, bytes(pending))
    return digest.hexdigest()


def _log(model: ServedModel, step: int, body: LogRequest) -> LogResult:
    if body.batch is not None:
        store = model.store
        ref = FileRef(sha256=body.batch, size=store.store.info(store.blob_key(body.batch)).size)
        store.write_trajectories(body.split, step, model.attempt, store.read_blob(ref))
    model.store.log_row(model.attempt, step, body.split, body.metrics)
    return LogResult(attempt=model.attempt, step=step, split=body.split)


def _checkpoints(store: ModelStore, best_metric: str) -> list[Checkpoint]:
    steps = store.steps()
    best: int | None = None
    with contextlib.suppress(InvalidInput):  # nothing was logged under that name yet
        best = best_step(store.history(), [s.manifest.step for s in steps if not s.deleted], best_metric)
    return [
        Checkpoint(
            step=s.manifest.step,
            manifest=s.key,
            created=s.manifest.created,
            updates=s.manifest.updates,
            reason=s.manifest.reason,
            metrics=s.manifest.metrics,
            size=s.size,
            deleted=s.deleted,
            best=s.manifest.step == best,
        )
        for s in steps
    ]


async def _lines(job: LiveJob, offset: int) -> AsyncIterator[bytes]:
    async for event in job.events(offset):
        yield (dumps(event.model_dump()) if event else "").encode() + b"\n"


async def _read_blob(store: ModelStore, ref: FileRef) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(store.store.open, store.blob_key(ref.sha256)) as source:
        while block := await asyncio.to_thread(source.read, _CHUNK):
            yield block
