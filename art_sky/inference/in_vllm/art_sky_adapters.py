"""Runs inside vLLM's API server, as its `--middleware`: makes an adapter's name known without loading it.

vLLM's own route loads an adapter between two steps of its engine, and answers then. A step with many prompt tokens
takes seconds on a CPU; a request for the new adapter waits for the end of the running one before it can be sent at
all, and then for the end of the next one. Here the name is entered as that route does when it has loaded, and vLLM's
worker reads the files in the step that the first request joins, as it does for every adapter that left its cache.

An adapter that the worker does not take would end it there. So only those are named here whose configuration and
whose tensors' names, types and shapes are those of one that vLLM has loaded before (`art_sky/inference/vllm.py`).

vLLM's processes have this folder on their path, and nothing else of art-sky.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.lora.request import LoRARequest

PATH = "/art-sky/name_adapter"


class AdapterNames:
    """ASGI middleware that answers POST {"lora_name": ..., "lora_path": ...} at `PATH`; the rest is vLLM's."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).json()
        name, path = body["lora_name"], body["lora_path"]
        models = scope["app"].state.openai_serving_models
        if name not in models.lora_requests:
            models.lora_requests[name] = LoRARequest(name, models.lora_id_counter.inc(1), path)
        await JSONResponse({})(scope, receive, send)
