"""A server without engine, trainer or store: the routes that the client calls, in memory, with faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

import art_sky
from art_sky.errors import ArtSkyError, Conflict, NotFound, TrainFailed, Unauthorized
from art_sky.schemas import Job, JobEvent, TrainResult
from art_sky.store.batches import decode_batch
from art_sky.trajectories import plain

TOKEN = "secret-token"


class AsciiJSON(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class FakeServer:
    """`events` of the next job, `fail_job`, `break_stream_after` and `forget_jobs` script a train call."""

    def __init__(self) -> None:
        self.base_url = ""
        self.models: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, int] = {}
        self.blobs: dict[str, bytes] = {}
        self.jobs: dict[str, Job] = {}
        self.rows: dict[tuple[str, int, str], dict[str, Any]] = {}
        self.logged: list[dict[str, Any]] = []
        self.states: dict[str, dict[str, Any]] = {}
        self.exchanges: dict[str, dict[str, Any]] = {}
        self.open_rollouts: dict[str, str] = {}
        self.replaced = False  # the machine on which rollouts were opened
        self.calls: list[tuple[str, str]] = []
        self.events: list[dict[str, Any]] = [{"micro_batch": i, "of": 4} for i in range(5)]
        self.offsets: list[int] = []
        self.watched = asyncio.Event()  # somebody reads events
        self.break_stream_after: list[int] = []  # one stream after another: events before it breaks
        self.fail_job: ArtSkyError | None = None
        self.hold_job: asyncio.Event | None = None
        self.errors: list[ArtSkyError | HTTPException] = []  # of the next calls
        self.files: dict[str, bytes] = {}
        self.drop_fields = False
        self.app = FastAPI()
        self._routes()

    def batch(self, sha256: str) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = plain(decode_batch(self.blobs[sha256]))
        return groups

    def restart(self) -> None:
        """Forgets what a server keeps in memory."""
        self.models.clear()
        self.jobs.clear()

    def finish(self, id: str, model: str) -> None:
        job = self.jobs[id]
        if job.state != "running":
            return
        if self.fail_job is not None:
            self.jobs[id] = job.model_copy(update={"state": "failed", "error": self.fail_job.to_wire()["error"]})
            return
        self.steps[model] += 1
        step = self.steps[model]
        result = TrainResult(
            request_id=id, step=step, manifest=f"manifests/{step}", updates=1, metrics={"loss": 0.5}, seconds=0.1
        )
        self.jobs[id] = job.model_copy(update={"state": "committed", "result": result})

    def choices(self, id: str, name: str, n: int, prompt: list[int]) -> list[dict[str, Any]]:
        return [
            {
                "index": i,
                "finish_reason": "stop",
                "logprobs": None,
                "message": {"role": "assistant", "content": f"maybe {i}", "reasoning_content": "hm"},
                "prompt_token_ids": prompt,
                "token_ids": [7, 8, i],
                "token_logprobs": [-0.1, -0.2, -0.3],
                "sampling": {"completion_id": id, "model": name, "temperature": 1.0, "comparable": True},
            }
            for i in range(n)
        ]

    def _routes(self) -> None:
        app, base = self.app, "/api/v1/models/{project}/{name}"

        @app.middleware("http")
        async def guard(request: Request, call: Any) -> Response:
            self.calls.append((request.method, request.url.path))
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if given != TOKEN and given not in self.open_rollouts:
                return _reply(Unauthorized("wrong token; send the right one"))
            if self.errors:
                error = self.errors.pop(0)
                return _reply(error) if isinstance(error, ArtSkyError) else Response(status_code=error.status_code)
            response: Response = await call(request)
            return response

        @app.exception_handler(ArtSkyError)
        async def known(_: Request, error: ArtSkyError) -> Response:
            return _reply(error)

        def status(key: str) -> dict[str, Any]:
            if key not in self.models:
                raise NotFound(f"{key} is not registered here; register it")
            body, step = self.models[key], self.steps[key]
            keep = {k: body[k] for k in ("project", "name", "base_model", "lora")}
            return {
                **keep,
                "inference_name": body["name"],
                "step": step,
                "manifest": f"manifests/{step}",
                "server_version": art_sky.__version__,
                "context_length": 512,
            }

        @app.post("/api/v1/models")
        async def register(request: Request) -> Any:
            body = await request.json()
            key = f"{body['project']}/{body['name']}"
            known = self.models.get(key)
            if known is not None and known["base_model"] != body["base_model"]:
                raise Conflict(f"{key} has base model {known['base_model']}; use another name")
            self.models[key] = body
            self.steps.setdefault(key, 0)
            return status(key)

        @app.get(base)
        async def model(project: str, name: str) -> Any:
            return status(f"{project}/{name}")

        @app.put(base + "/blobs/{sha256}")
        async def blob(project: str, name: str, sha256: str, request: Request) -> Any:
            status(f"{project}/{name}")
            data = await request.body()
            assert hashlib.sha256(data).hexdigest() == sha256
            self.blobs[sha256] = data
            return {"sha256": sha256, "size": len(data)}

        @app.post(base + "/train", status_code=202)
        async def train(project: str, name: str, request: Request) -> Any:
            status(f"{project}/{name}")
            body = await request.json()
            id = body["request_id"]
            if id not in self.jobs:
                assert body["batch"] in self.blobs
                events = len(self.events)
                self.jobs[id] = Job(
                    request_id=id, project=project, name=name, state="running", created=0.0, events=events
                )
                self.logged.append({"train": body})
            return self.jobs[id].model_dump()

        @app.get("/api/v1/jobs/{id}")
        async def job(id: str) -> Any:
            if id not in self.jobs:
                raise NotFound(f"no job {id}; send it again")
            return self.jobs[id].model_dump()

        @app.get("/api/v1/jobs/{id}/events")
        async def events(id: str, offset: int = 0) -> Response:
            if id not in self.jobs:
                raise NotFound(f"no job {id}; send it again")
            self.offsets.append(offset)
            self.watched.set()
            stop = self.break_stream_after.pop(0) if self.break_stream_after else None
            found = self.jobs[id]

            async def lines() -> AsyncIterator[bytes]:
                for at in range(offset, len(self.events)):
                    if at - offset == stop:
                        raise RuntimeError("the connection breaks")
                    event = JobEvent(offset=at, time=0.0, kind="progress", data=self.events[at])
                    yield json.dumps(event.model_dump()).encode() + b"\n\n"
                    await asyncio.sleep(0)
                if self.hold_job is not None:
                    yield b"\n"
                    await self.hold_job.wait()
                self.finish(id, f"{found.project}/{found.name}")

            return StreamingResponse(lines(), media_type="application/x-ndjson")

        @app.post("/api/v1/jobs/{id}/cancel")
        async def cancel(id: str) -> Any:
            if id not in self.jobs:
                raise NotFound(f"no job {id}")
            self.jobs[id] = self.jobs[id].model_copy(update={"state": "cancelled"})
            return self.jobs[id].model_dump()

        @app.post(base + "/log")
        async def log(project: str, name: str, request: Request) -> Any:
            status(f"{project}/{name}")
            body = await request.json()
            step = self.steps[f"{project}/{name}"] if body["step"] is None else body["step"]
            self.rows.setdefault((f"{project}/{name}", step, body["split"]), {}).update(body["metrics"])
            self.logged.append({"log": body})
            return {"attempt": 1, "step": step, "split": body["split"]}

        @app.get(base + "/history")
        async def history(project: str, name: str) -> Any:
            return [
                {"attempt": 1, "step": s, "split": split, "time": 0.0, "metrics": m}
                for (key, s, split), m in self.rows.items()
                if key == f"{project}/{name}"
            ]

        @app.get(base + "/checkpoints")
        async def checkpoints(project: str, name: str) -> Any:
            one = {"created": 0.0, "updates": 1, "reason": None, "metrics": {}, "size": 10}
            steps = range(self.steps[f"{project}/{name}"] + 1)
            return [{"step": s, "manifest": f"manifests/{s}", **one} for s in steps]

        @app.delete(base + "/checkpoints")
        async def delete(project: str, name: str, best_metric: str) -> Any:
            self.logged.append({"delete": best_metric})
            return [1, 2]

        @app.get(base + "/checkpoints/{step}")
        async def manifest(project: str, name: str, step: int) -> Any:
            files = {n: {"sha256": hashlib.sha256(d).hexdigest(), "size": len(d)} for n, d in self.files.items()}
            self.blobs |= {hashlib.sha256(d).hexdigest(): d for d in self.files.values()}
            one = {"parent": None, "request": "r", "generation": 1, "created": 0.0, "updates": 1}
            return {"step": step, "files": files, **one}

        @app.get(base + "/blobs/{sha256}")
        async def get_blob(project: str, name: str, sha256: str) -> Response:
            return Response(self.blobs[sha256])

        @app.get(base + "/state")
        async def read_state(project: str, name: str) -> Any:
            return self.states.get(f"{project}/{name}")

        @app.patch(base + "/state")
        async def merge_state(project: str, name: str, request: Request) -> Response:
            self.states.setdefault(f"{project}/{name}", {}).update(await request.json())
            return AsciiJSON(self.states[f"{project}/{name}"])

        @app.put(base + "/state")
        async def overwrite_state(project: str, name: str, request: Request) -> Response:
            self.states[f"{project}/{name}"] = await request.json()
            return AsciiJSON(self.states[f"{project}/{name}"])

        @app.get("/api/v1/exchanges/{id}")
        async def exchange(id: str) -> Any:
            if id not in self.exchanges:
                raise NotFound(f"no exchange {id} is on record here; keep the Choice as it came")
            return AsciiJSON(self.exchanges[id])

        @app.post(base + "/rollouts", status_code=201)
        async def open_rollout(project: str, name: str) -> Any:
            id = f"r-{len(self.open_rollouts)}"
            self.open_rollouts[f"rk-{id}"] = id
            return {"rollout": id, "base_url": f"{self.base_url}/rollouts/{id}/v1", "api_key": f"rk-{id}"}

        @app.get("/api/v1/rollouts/{id}/exchanges")
        async def rollout_exchanges(id: str) -> Any:
            found = [e for e in self.exchanges.values() if e["rollout"] == id]
            return {"exchanges": found, "complete": not self.replaced}

        @app.delete("/api/v1/rollouts/{id}", status_code=204)
        async def close_rollout(id: str) -> Response:
            self.open_rollouts.pop(f"rk-{id}", None)
            return Response(status_code=204)

        @app.post("/v1/chat/completions")
        @app.post("/rollouts/{rollout}/v1/chat/completions")
        async def chat(request: Request, rollout: str | None = None) -> Any:
            body = await request.json()
            id = f"chatcmpl-{len(self.exchanges)}"
            name = body["model"] if "@" in body["model"] else body["model"] + "@0"
            choices = self.choices(id, name, body.get("n") or 1, list(range(len(body["messages"]))))
            self.exchanges[id] = {
                "completion_id": id,
                "created": float(len(self.exchanges)),
                "project": "p",
                "model": name,
                "rollout": rollout,
                "messages": body["messages"],
                "tools": body.get("tools"),
                "choices": choices,
            }
            if self.drop_fields:
                choices = [{k: v for k, v in c.items() if not k.endswith(("ids", "logprobs", "ling"))} for c in choices]
            return {
                "id": id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": name,
                "choices": choices,
            }


def _reply(error: ArtSkyError) -> Response:
    return AsciiJSON(error.to_wire(), error.status)


@contextlib.asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[FakeServer]:
    """Serves it on a loopback port in this event loop."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    http = uvicorn.Server(uvicorn.Config(server.app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    http.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]  # pytest has the signals
    task = asyncio.create_task(http.serve(sockets=[listening]))
    while not http.started:  # uvicorn has no event for it
        await asyncio.sleep(0.005)
    try:
        yield server
    finally:
        if server.hold_job is not None:
            server.hold_job.set()
        http.should_exit = True
        await task


__all__ = ["TOKEN", "FakeServer", "TrainFailed", "running"]
