"""vLLM's HTTP interface, as far as the engine uses it, over a Unix socket.

Sampling goes through `/inference/v1/generate`: token ids in, events with token ids and logprobs out, no text. Pinned by
`vllm_install.TESTED_VERSION`; what answers otherwise is an error that says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from art_sky.errors import ArtSkyError, Busy, ChildDied, InvalidInput
from art_sky.inference.protocol import GenerateEnd, GenerateRequest, TokenDelta
from art_sky.inference.vllm_install import TESTED_VERSION
from art_sky.schemas import AdapterRef

NO_NUMBER = -9999.0  # what vLLM writes for a logprob that is NaN or minus infinity
_NAME = "/art-sky/name_adapter"  # of in_vllm/art_sky_adapters.py
_CONNECT_SECONDS = 5.0
_CONTROL_SECONDS = 120.0  # loading an adapter, falling asleep: they wait for the running step
_GAUGE = re.compile(r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^}]*\})? (\S+)$", re.M)


class VllmClient:
    """Talks to one vLLM process. ChildDied (retryable) is raised when it ends or its engine has; `where` names its
    log.
    """

    def __init__(self, socket: Path, where: str) -> None:
        self.dead = False  # as far as the last failure tells; the supervisor finds out
        self._where = where
        # The gateway has the deadlines between tokens; there is no limit on streams, as there is a queue in vLLM.
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=None)),
            base_url="http://vllm",
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def healthy(self, seconds: float) -> bool | None:
        """False: its engine is dead or nobody listens; None: no answer in time."""
        try:
            return (await self._http.get("/health", timeout=seconds)).status_code == 200
        except httpx.TimeoutException:
            return None
        except httpx.HTTPError:
            return False

    async def load(self, adapter: AdapterRef) -> None:
        """Raises InvalidInput for files that vLLM does not take."""
        body = {"lora_name": adapter.name, "lora_path": adapter.path}
        reply = await self._control("/v1/load_lora_adapter", body)
        if reply.status_code == 400 and "already been loaded" in _message(reply):
            return  # a name stands for one content
        if reply.status_code != 200:
            await self._raise_if_dead()
            raise InvalidInput(
                f"adapter {adapter.name} cannot be used: {_message(reply)}; fetch the adapter again, or use an "
                "earlier step"
            )

    async def name(self, adapter: AdapterRef) -> bool:
        """Makes a name known without loading its adapter, see `in_vllm/art_sky_adapters.py`; False where this vLLM
        does not do that. An adapter that vLLM would not load must not be named: its engine would end.
        """
        reply = await self._control(_NAME, {"lora_name": adapter.name, "lora_path": adapter.path})
        return reply.status_code == 200

    async def unload(self, name: str) -> None:
        """Of an adapter that is not there: nothing."""
        reply = await self._control("/v1/unload_lora_adapter", {"lora_name": name})
        if reply.status_code not in (200, 404):
            await self._raise_if_dead()
            raise ArtSkyError(f"vLLM does not unload {name}: {_message(reply)}; see {self._where}")

    async def sleep(self) -> None:
        """Frees the GPU: weights to main memory, KV cache gone. Running requests are kept, and computed anew later."""
        await self._switch("/sleep?level=1&mode=keep")

    async def wake_up(self) -> None:
        await self._switch("/wake_up")

    async def gauges(self) -> dict[str, float]:
        """num_requests_running, num_requests_waiting, and kv_cache_usage_perc (0 to 1)."""
        try:
            text = (await self._http.get("/metrics", timeout=_CONNECT_SECONDS)).text
        except httpx.HTTPError as e:
            raise self._died(e) from e
        return {name: float(value) for name, value in _GAUGE.findall(text)}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta | GenerateEnd, None]:
        """See `Engine.generate`. The adapter must be loaded. Closing the iterator ends the request in vLLM.

        Raises InvalidInput for what vLLM refuses and for logits that are not numbers, ArtSkyError for an answer that
        is not of its interface.
        """
        try:
            async with self._http.stream("POST", "/inference/v1/generate", json=_body(request)) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    await self._raise_refusal(request, reply.status_code, _message(reply))
                finish: str | None = None
                cached = 0
                async for line in reply.aiter_lines():
                    if not line:
                        continue
                    if line == "data: [DONE]":
                        break
                    event = self._event(line)
                    if "error" in event:
                        error = event["error"] if isinstance(event["error"], dict) else {}
                        await self._raise_refusal(request, error.get("code"), str(error.get("message") or event))
                    if event.get("usage"):
                        cached = self._cached(event)
                    for choice in event.get("choices") or []:
                        for delta in self._deltas(choice, request):
                            yield delta
                        finish = choice.get("finish_reason") or finish
                if finish is None:
                    raise self._died(None)
                try:
                    yield GenerateEnd.model_validate({"finish_reason": finish, "cached_tokens": cached})
                except ValidationError:
                    raise self._strange(f"finish_reason {finish!r}") from None
        except httpx.HTTPError as e:
            raise self._died(e) from e

    def _event(self, line: str) -> dict[str, Any]:
        try:
            event = json.loads(line.removeprefix("data: "))
        except ValueError:
            event = None
        if not line.startswith("data: ") or not isinstance(event, dict):
            raise self._strange(line)
        return event

    def _cached(self, event: dict[str, Any]) -> int:
        try:
            return int((event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (AttributeError, TypeError, ValueError):
            raise self._strange(json.dumps(event)) from None

    def _deltas(self, choice: Any, request: GenerateRequest) -> list[TokenDelta]:
        try:
            ids = list(choice.get("token_ids") or [])
            content = (choice.get("logprobs") or {}).get("content") or []
            if [c["token_id"] for c in content] != ids:
                raise ValueError("tokens and logprobs differ")
            made = [
                TokenDelta(
                    token_id=c["token_id"],
                    logprob=c["logprob"],
                    top=_top(c["top_logprobs"], request.top_logprobs) if request.top_logprobs else [],
                )
                for c in content
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as e:  # pydantic's errors are ValueErrors
            raise self._strange(f"{json.dumps(choice)[:300]} ({e})") from None
        if any(d.logprob <= NO_NUMBER for d in made):
            name = request.adapter.name
            raise InvalidInput(f"adapter {name} computes NaN or infinity for this prompt; use an earlier step")
        return made

    async def _control(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            return await self._http.post(path, json=body, timeout=_CONTROL_SECONDS)
        except httpx.HTTPError as e:
            raise self._died(e) from e

    async def _switch(self, path: str) -> None:
        reply = await self._control(path, {})
        if reply.status_code != 200:
            raise ArtSkyError(f"vLLM answered {path} with {reply.status_code} {_message(reply)}; see {self._where}")

    async def _raise_refusal(self, request: GenerateRequest, code: Any, message: str) -> None:
        await self._raise_if_dead()
        if code == 404:  # unloaded, or the process is another one than when it was loaded
            raise ChildDied(f"vLLM has lost adapter {request.adapter.name}; call again, it is loaded anew")
        if isinstance(code, int) and 400 <= code < 500:
            raise InvalidInput(f"vLLM refuses the request: {message}; change it")
        raise ArtSkyError(f"vLLM failed: {message}; see {self._where}, then try again")

    async def _raise_if_dead(self) -> None:
        if await self.healthy(_CONNECT_SECONDS) is False:
            raise self._died(None)

    def _died(self, cause: Exception | None) -> ChildDied | Busy:
        if isinstance(cause, httpx.TimeoutException):
            return Busy(f"vLLM gave no answer in time; call again, or send fewer at once; its log is {self._where}")
        self.dead = True
        why = f" ({type(cause).__name__})" if cause is not None else ""
        return ChildDied(
            f"vLLM ended while it worked on this{why}; it is being started again, call again; its log is {self._where}"
        )

    def _strange(self, what: str) -> ArtSkyError:
        return ArtSkyError(
            f"vLLM answered with {what[:300]!r}, which is not of the interface of vLLM {TESTED_VERSION}; install "
            "that version"
        )


def _body(request: GenerateRequest) -> dict[str, Any]:
    # One more candidate than asked for: vLLM lists the sampled token first and counts it.
    count = request.top_logprobs + 1 if request.top_logprobs else 0
    return {
        "model": request.adapter.name,
        "token_ids": request.prompt_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "seed": request.seed,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": True,  # only stop_token_ids end a sequence
            "logprobs": count,
        },
    }


def _top(candidates: list[dict[str, Any]], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest, likeliest first."""
    ranked = sorted(((int(c["token_id"]), float(c["logprob"])) for c in candidates), key=lambda c: -c[1])
    return [(token, logprob) for token, logprob in ranked[:count]]


def _message(reply: httpx.Response) -> str:
    try:
        error = reply.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return f"{reply.status_code} {reply.text[:300]!r}"
