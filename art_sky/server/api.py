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

from art_sky.errors import InvalidInput
from art_sky.schemas import (
    Checkpoint,
    Exchange,
    FileRef,
    HistoryRow,
    Job,
    LogRequest,
    LogResult,
    Manifest,
    ModelStatus,
    RegisterRequest,
    RolloutAddress,
    RolloutExchanges,
    ServerStatus,
    Sha256,
    TrainRequest,
)
from art_sky.server.live_job import LiveJob
from art_sky.server.models import KnownModel
from art_sky.server.server import Server
from art_sky.server.wire_json import AsciiJSON, StrictRoute, dumps
from art_sky.store.model_store import ModelStore
from art_sky.store.retention import best_step, delete_checkpoints

MAX_BLOB = 4 << 30
REGISTER_SECONDS = 1800.0  # for which a registration, with a download and the start of an engine, counts as work
_CHUNK = 1 << 20
_MODEL = "/models/{project}/{name}"

MetricName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}/.{1,200}$")]


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
    async def shutdown(drain_seconds: Annotated[float, Query(ge=0, le=3600)] = 0.0) -> dict[str, Any]:
        """The server ends soon. With `drain_seconds` it takes no new train request and finishes the accepted ones
        first, as far as that time goes; what is left is finished by the next server."""
        server.drain(drain_seconds)
        return {"stopping": True}

    return router


def _model_routes(router: APIRouter, server: Server) -> None:
    registry = server.registry

    @router.post("/models")
    async def register(body: RegisterRequest) -> ModelStatus:
        """Registers a model, new or known, and goes on from its HEAD. The first one starts engine and trainer."""
        status = await server.register(body)
        server.activity.touch()
        return status

    @router.get("/models")
    async def models() -> list[ModelStatus]:
        return [registry.status(m) for m in registry.all()]

    @router.get(_MODEL)
    async def model(project: str, name: str) -> ModelStatus:
        return registry.status(registry.get(project, name))

    @router.get(_MODEL + "/blobs/{sha256}", response_model=None)
    async def get_blob(project: str, name: str, sha256: Sha256) -> Response:
        """The bytes behind a FileRef of a manifest; a damaged blob breaks the reply off."""
        store = registry.get(project, name).store
        ref = await asyncio.to_thread(store.find_blob, sha256)
        headers = {"content-length": str(ref.size)}
        return StreamingResponse(_blocks(store, ref), media_type="application/octet-stream", headers=headers)

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
        step = model.step if body.step is None else model.check_step(body.step)
        server.activity.touch()
        return await asyncio.to_thread(_log, model, step, body)

    @router.get(_MODEL + "/history")
    async def history(project: str, name: str) -> list[HistoryRow]:
        return await asyncio.to_thread(registry.get(project, name).store.history)

    @router.get(_MODEL + "/state", response_model=None)
    async def read_state(project: str, name: str) -> dict[str, Any] | None:
        """The user's own, null when none was ever written."""
        return await asyncio.to_thread(registry.get(project, name).store.read_state)

    @router.patch(_MODEL + "/state", response_model=None)
    async def merge_state(project: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sets the given top-level keys; answers with the whole."""
        return await asyncio.to_thread(registry.get(project, name).store.merge_state, body)

    @router.put(_MODEL + "/state", response_model=None)
    async def overwrite_state(project: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(registry.get(project, name).store.overwrite_state, body)


def _job_routes(router: APIRouter, server: Server) -> None:
    jobs = server.jobs

    @router.post(_MODEL + "/train", status_code=202)
    async def train(project: str, name: str, body: TrainRequest) -> Job:
        """Accepts a batch. The same request id again gives the same job, or its stored result."""
        return (await jobs.submit(server.registry.get_served(project, name), body)).view()

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

    @router.get(_MODEL + "/checkpoints/{step}")
    async def checkpoint(project: str, name: str, step: int) -> Manifest:
        """The manifest of a step; its files are fetched as blobs."""
        model = registry.get_served(project, name)
        return model.steps[model.check_step(step)][1]

    @router.delete(_MODEL + "/checkpoints")
    async def delete(project: str, name: str, best_metric: MetricName = "val/reward") -> list[int]:
        """Deletes the files of all steps but the newest, the best and those kept by name; returns their numbers."""
        model = registry.get_served(project, name)
        return await asyncio.to_thread(delete_checkpoints, model.writer, best_metric)


def _rollout_routes(router: APIRouter, server: Server) -> None:
    @router.get("/exchanges/{completion_id}")
    async def exchange(completion_id: str) -> Exchange:
        """What the gateway recorded of a completion, for a Choice that lost its tokens."""
        return await server.exchanges.find(completion_id)

    @router.post(_MODEL + "/rollouts", status_code=201)
    async def open_rollout(project: str, name: str, request: Request) -> RolloutAddress:
        """An address of its own: whatever calls it is recorded under this rollout."""
        server.registry.get_served(project, name)
        server.activity.touch()
        rollout, key = await asyncio.to_thread(server.rollouts.open, project, name)
        base = str(request.base_url).rstrip("/")
        return RolloutAddress(rollout=rollout.id, base_url=f"{base}/rollouts/{rollout.id}/v1", api_key=key)

    @router.get("/rollouts/{rollout}/exchanges")
    async def rollout_exchanges(rollout: str) -> RolloutExchanges:
        """Calls whose reply reached the agent, and whether those are all that this rollout ever had."""
        exchanges, kept = await server.gateway.exchanges_of(rollout)
        return RolloutExchanges(exchanges=exchanges, complete=kept and server.rollouts.opened_here(rollout))

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


def _log(model: KnownModel, step: int, body: LogRequest) -> LogResult:
    if body.batch is not None:
        trajectories = model.store.read_blob(model.store.find_blob(body.batch))
        model.store.write_trajectories(body.split, step, model.attempt, trajectories)
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


async def _blocks(store: ModelStore, ref: FileRef) -> AsyncIterator[bytes]:
    blocks = store.blob_blocks(ref)
    while block := await asyncio.to_thread(next, blocks, b""):
        yield block
