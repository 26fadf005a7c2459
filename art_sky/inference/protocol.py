"""The `Engine` protocol: token ids in, sampled token ids and logprobs out.

Text, chat templates, stop strings, tools and n > 1 belong to the gateway, so that every engine behaves alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from pydantic import Field

from art_sky.schemas import AdapterRef, Wire


class GenerateRequest(Wire):
    """One sequence to sample.

    `seed` gives the request a random stream of its own, whatever else runs. `stop_token_ids` end the sequence
    and are part of what was sampled.
    """

    prompt_ids: list[int] = Field(min_length=1)
    adapter: AdapterRef
    max_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop_token_ids: list[int] = []
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def comparable(self) -> bool:
        """Whether the logprobs are those of the distribution that was sampled from (DESIGN §8)."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and self.min_p == 0


class TokenDelta(Wire):
    """One sampled token. logprob = log_softmax(logits / T)[token], T = 1 where temperature is 0."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class GenerateEnd(Wire):
    """The last event. `abort`: the request was cancelled."""

    finish_reason: Literal["stop", "length", "abort"]
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused


class EngineStatus(Wire):
    state: Literal["starting", "ready", "dead", "stopped"]
    running: int = 0
    waiting: int = 0
    adapters: list[str] = []
    kv_cache_used_mib: float = 0.0
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0
    restarts: int = 0


class Engine(Protocol):
    """What samples. Errors of `generate`: InvalidInput (a bad request), ChildDied (retryable), Busy."""

    async def start(self) -> None:
        """Begins to start the engine; requests made before it is ready wait for it, with a deadline."""
        ...

    async def close(self) -> None: ...

    async def prepare(self, adapter: AdapterRef) -> None:
        """Reads and checks an adapter, so that the first request need not. `generate` loads on demand."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta | GenerateEnd]:
        """Yields tokens as they are sampled, then one GenerateEnd. Closing the iterator cancels the request."""
        ...

    def room_for_training(self) -> AbstractAsyncContextManager[None]:
        """Held while the trainer computes. An engine that shares a GPU with it leaves the memory to it, and takes it
        back at the end, however training ended; requests wait so long.
        """
        ...

    async def status(self) -> EngineStatus: ...
