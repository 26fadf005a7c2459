"""`/v1/...` and `/rollouts/{id}/v1/...`: the OpenAI dialect over HTTP, whole replies and streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from art_sky.errors import ArtSkyError
from art_sky.server.connection import Handover
from art_sky.server.gateway import Gateway, Plan, Progress
from art_sky.server.openai_fields import ChatRequest
from art_sky.server.rollouts import Rollout
from art_sky.server.server import Server
from art_sky.server.tools import Part
from art_sky.server.wire_json import AsciiJSON, StrictRoute, dumps

log = logging.getLogger("art_sky.server")

T = TypeVar("T")
_CLIENT_LEFT = 499
_DONE = b"data: [DONE]\n\n"
_RETRIES = "x-stainless-retry-count"  # OpenAI's clients say with it that they ask again


def chat_router(server: Server) -> APIRouter:
    router = APIRouter(route_class=StrictRoute, default_response_class=AsciiJSON, tags=["OpenAI dialect"])

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completion(body: ChatRequest, request: Request) -> Response:
        """OpenAI's chat completions; choices carry their tokens, and `model` of the reply says which step it was."""
        return await _complete(server.gateway, body, request, None)

    @router.post("/rollouts/{rollout}/v1/chat/completions", response_model=None)
    async def rollout_chat_completion(rollout: str, body: ChatRequest, request: Request) -> Response:
        """The same, recorded under a rollout."""
        found = server.rollouts.get(rollout)
        server.activity.touch()
        return await _complete(server.gateway, body, request, found)

    @router.get("/v1/models", response_model=None)
    async def list_models() -> dict[str, Any]:
        """The models, and the steps that the engine has loaded."""
        return {"object": "list", "data": await _models(server)}

    @router.get("/rollouts/{rollout}/v1/models", response_model=None)
    async def rollout_models(rollout: str) -> dict[str, Any]:
        server.rollouts.get(rollout)
        return {"object": "list", "data": await _models(server)}

    @router.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> dict[str, Any]:
        model, _ = await server.registry.resolve(name)
        return _model(name, model.record.created, model.project)

    return router


async def _models(server: Server) -> list[dict[str, Any]]:
    registry = server.registry
    loaded = (await registry.engine.status()).adapters if registry.base_model is not None else []
    listed = []
    for model in registry.served():
        name, prefix = registry.inference_name(model), f"{model.project}/{model.name}@"
        steps = [f"{name}@{a.removeprefix(prefix)}" for a in loaded if a.startswith(prefix)]
        listed += [_model(id, model.record.created, model.project) for id in (name, *steps)]
    return listed


def _model(id: str, created: float, project: str) -> dict[str, Any]:
    return {"id": id, "object": "model", "created": int(created), "owned_by": project}


async def _complete(gateway: Gateway, body: ChatRequest, request: Request, rollout: Rollout | None) -> Response:
    if rollout is not None and request.headers.get(_RETRIES, "0") != "0":
        await gateway.begun_again(rollout, body)
    async with contextlib.AsyncExitStack() as stack:
        plan = await stack.enter_async_context(gateway.plan(body, rollout))
        headers = {}
        if plan.warnings:
            text = "; ".join(plan.warnings)
            log.warning("%s: %s", plan.completion_id, text)
            headers["x-art-sky-warning"] = ascii(text)[1:-1][:2000]
        events = gateway.run(plan)
        await stack.enter_async_context(contextlib.aclosing(events))
        if not body.stream:
            if await _while_connected(request, _drain(events)) is None:
                return Response(status_code=_CLIENT_LEFT)
            return _Whole(gateway, plan, headers)
        # The first event before the status line, so that what fails at once is a plain error reply.
        first = await _while_connected(request, anext(events, None))
        if first is None:
            return Response(status_code=_CLIENT_LEFT)
        keep = stack.pop_all()
        return _Stream(gateway, plan, _chain(first, events), keep, headers)


class _Whole(AsciiJSON):
    """Part of its rollout when all of it was handed over."""

    def __init__(self, gateway: Gateway, plan: Plan, headers: dict[str, str]) -> None:
        super().__init__(
            {**_head(plan, "chat.completion"), "choices": plan.choices(), "usage": plan.usage()}, 200, headers
        )
        self._gateway, self._plan = gateway, plan

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        handover = Handover(scope, send)
        await super().__call__(scope, receive, handover.send)
        await self._gateway.delivered(self._plan, handover)


class _Stream(StreamingResponse):
    """Likewise. Ends the sampling also when the client left before the first byte."""

    def __init__(
        self,
        gateway: Gateway,
        plan: Plan,
        events: AsyncIterator[Progress],
        keep: contextlib.AsyncExitStack,
        headers: dict[str, str],
    ) -> None:
        headers = {**headers, "cache-control": "no-cache"}
        super().__init__(self._body(gateway, plan, events), media_type="text/event-stream", headers=headers)
        self._keep = keep
        self._handover: Handover

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._handover = Handover(scope, send)
        async with self._keep:
            await super().__call__(scope, receive, self._handover.send)

    async def _body(self, gateway: Gateway, plan: Plan, events: AsyncIterator[Progress]) -> AsyncIterator[bytes]:
        ended = False
        async for event in _sse(plan, events):
            ended = event == _DONE
            yield event
        if ended:  # asked for more, so that the last of it was sent
            await gateway.delivered(plan, self._handover)


async def _drain(events: AsyncIterator[Progress]) -> bool:
    async for _ in events:
        pass
    return True


async def _while_connected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None when the client left; the work is cancelled then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return None if leaving.done() else working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _sse(plan: Plan, events: AsyncIterator[Progress]) -> AsyncIterator[bytes]:
    """Server-sent events; the last is _DONE, unless it failed."""
    head = _head(plan, "chat.completion.chunk")
    if plan.usage_wanted:
        head["usage"] = None
    begun: set[int] = set()
    shown = [0] * len(plan.replies)  # tokens whose logprobs are out
    calls = [0] * len(plan.replies)
    try:
        async for event in events:
            i = event.index
            if i is None:
                yield b": waiting\n\n"
                continue
            for delta in _deltas(event.parts, calls, i):
                if i not in begun:
                    begun.add(i)
                    delta = {"role": "assistant", **delta}
                reply = plan.replies[i]
                logprobs = reply.logprobs(shown[i], plan.top)
                shown[i] = len(reply.token_ids)
                yield _event({**head, "choices": [_chunk(i, delta, logprobs)]})
    except ArtSkyError as e:
        yield _event(e.to_wire())
        return
    except Exception as e:
        log.exception("stream %s", plan.completion_id)
        message = f"the server failed ({type(e).__name__}); see its log, then try again"
        yield _event(ArtSkyError(message).to_wire())
        return
    for i, reply in enumerate(plan.replies):
        delta = {} if i in begun else {"role": "assistant", "content": ""}
        last = _chunk(i, delta, reply.logprobs(shown[i], plan.top), reply.finish_reason)
        yield _event({**head, "choices": [{**last, **reply.capture(plan.prompt_ids, plan.sampling(i))}]})
    if plan.usage_wanted:
        yield _event({**head, "choices": [], "usage": plan.usage()})
    yield _DONE


async def _chain(first: Progress, events: AsyncIterator[Progress]) -> AsyncIterator[Progress]:
    yield first
    async for event in events:
        yield event


def _deltas(parts: list[Part], calls: list[int], i: int) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "tool_call":
            call = {"index": calls[i], "id": part.text, "type": "function", "function": part.call}
            calls[i] += 1
            deltas.append({"tool_calls": [call]})
        elif deltas and part.kind in deltas[-1]:
            deltas[-1][part.kind] += part.text
        else:
            deltas.append({part.kind: part.text})
    return deltas


def _head(plan: Plan, kind: str) -> dict[str, Any]:
    return {
        "id": plan.completion_id,
        "object": kind,
        "created": int(plan.created),
        "model": plan.model_name,
        "system_fingerprint": None,
    }


def _chunk(i: int, delta: dict[str, Any], logprobs: Any, finish: str | None = None) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {dumps(value)}\n\n".encode()
