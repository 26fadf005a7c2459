"""vLLM as an engine: a server of its own in an environment of its own, with adapters loaded as they are asked for.

Prompts go in as token ids, tokens come out as ids with processed logprobs: log_softmax(logits / temperature),
temperature 1 where sampling is greedy. Under top_p, top_k or min_p vLLM gives those of the filtered distribution; such
tokens are not comparable (`GenerateRequest.comparable`) and are never used as old logprobs.

Each step's adapter has a name of its own, so a prefix that is cached under one step is never used for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

from art_sky.config import EngineConfig, TrainerConfig
from art_sky.errors import ArtSkyError, Busy, ChildDied, InvalidConfig, InvalidInput, PromptTooLong
from art_sky.inference.adapter_files import check_adapter
from art_sky.inference.gpus import Placement, visible
from art_sky.inference.memory_plan import ModelSize, free_memory, make_plan
from art_sky.inference.protocol import EngineStatus, GenerateEnd, GenerateRequest, TokenDelta
from art_sky.inference.vllm_client import VllmClient
from art_sky.inference.vllm_install import TESTED_VERSION, VllmInstall, find_vllm
from art_sky.inference.vllm_process import VllmProcess
from art_sky.schemas import AdapterRef
from art_sky.tasks import end_task

log = logging.getLogger("art_sky.server")

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM can be started with
_DEFAULT_RANK = 16
_TOP_LOGPROBS = 21  # one more than a request may ask for, see vllm_client
_WAKE_SECONDS = 120.0
# Tokens of one step on a CPU at least: LoRA's cost there grows with each, and by vLLM's default of 2048 all streams
# stood still for 2.2 s while 16 prompts of 40 tokens were computed (measured).
_CPU_STEP_TOKENS = 256


class VllmEngine:
    """Implements `Engine`. `config.context_length` must be given; `config.max_lora_rank` bounds every adapter."""

    def __init__(
        self,
        base_model_path: Path,
        config: EngineConfig,
        log_file: Path,
        placement: Placement | None = None,
        trainer: TrainerConfig | None = None,
        *,
        start_seconds: float = 900.0,
        stall_seconds: float = 300.0,
    ) -> None:
        """`stall_seconds`: a vLLM that gives no token for so long while requests wait is killed and started again.
        `trainer`: what the memory plan counts beside it."""
        if config.context_length is None:
            raise InvalidConfig("the vllm engine needs a context_length; give the model's")
        self._base, self._config, self._log_file = base_model_path, config, log_file
        self._context_length = config.context_length
        self._placement = placement or Placement()
        self._trainer = trainer
        self._start_seconds, self._stall_seconds = start_seconds, stall_seconds
        self._process: VllmProcess | None = None
        self._size: ModelSize | None = None
        self._kv_cache_mib = 0
        self._loaded: OrderedDict[str, None] = OrderedDict()  # adapters in vLLM, least recently used first
        self._loaded_in = 0  # the process's generation that they are in
        self._taken: set[str] = set()  # layouts of adapters that vLLM has loaded: it takes others of these
        self._users: Counter[str] = Counter()
        self._loading = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._last_event = time.monotonic()
        self._watch: asyncio.Task[None] | None = None
        self._sampled = self._prefilled = self._reused = 0

    @property
    def pid(self) -> int | None:
        """Of vLLM's process group, while it lives."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises InvalidConfig when there is no vLLM, or the model does not fit into memory."""
        if self._process is not None:
            return
        install = await asyncio.to_thread(find_vllm, self._config)
        if install.version.split("+")[0] != TESTED_VERSION:
            log.warning("vLLM is %s; art-sky is tested with %s", install.version, TESTED_VERSION)
        size = await asyncio.to_thread(ModelSize.of, self._base)
        shards = size.shards(len(self._placement.engine))
        placement = Placement(self._placement.engine[:shards], self._placement.trainer)
        rank = _max_rank(self._config)
        plan = make_plan(
            size,
            self._config,
            self._context_length,
            rank,
            placement,
            await asyncio.to_thread(free_memory),
            self._trainer,
        )
        log.info("memory plan: %s", plan)
        plan.check()
        self._size, self._placement, self._kv_cache_mib = size, placement, plan.kv_cache_mib

        def command(socket: Path) -> list[str]:
            return vllm_command(install, self._base, self._config, placement, plan.kv_cache_mib, socket)

        self._process = VllmProcess(
            command,
            vllm_environment(install, self._config, placement),
            self._log_file,
            start_seconds=self._start_seconds,
        )
        self._process.start()
        self._watch = asyncio.create_task(self._kill_stalled(), name="watch vLLM")

    async def close(self) -> None:
        await end_task(self._watch)
        self._watch = None
        if self._process is not None:
            await self._process.stop()

    async def prepare(self, adapter: AdapterRef) -> None:
        """Raises InvalidInput for an adapter that vLLM does not take; what is loaded stays."""
        async with self._use(adapter):
            pass

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta | GenerateEnd, None]:
        """See `Engine.generate`. Raises PromptTooLong, InvalidInput; ChildDied and Busy are retryable."""
        self._check(request)
        await self._awake.wait()
        try:
            async with self._use(request.adapter) as client, contextlib.aclosing(client.generate(request)) as events:
                self._last_event = time.monotonic()
                async for event in events:
                    self._last_event = time.monotonic()
                    if isinstance(event, TokenDelta):
                        self._sampled += 1
                    else:
                        self._reused += event.cached_tokens
                        self._prefilled += len(request.prompt_ids) - event.cached_tokens
                    yield event
        except ChildDied:
            self._loaded.pop(request.adapter.name, None)
            raise

    async def status(self) -> EngineStatus:
        """Numbers of vLLM's own while it answers in time, else those that are known here."""
        process = self._process
        found = EngineStatus(
            state=process.state if process is not None else "stopped",
            running=sum(self._users.values()),
            adapters=list(self._loaded),
            tokens_sampled=self._sampled,
            tokens_prefilled=self._prefilled,
            tokens_reused=self._reused,
            restarts=process.restarts if process is not None else 0,
        )
        client = process.client if process is not None else None
        if client is not None:
            with contextlib.suppress(ChildDied, Busy):  # its state tells
                gauges = await client.gauges()
                found.running = int(gauges.get("num_requests_running", found.running))
                found.waiting = int(gauges.get("num_requests_waiting", 0))
                found.kv_cache_used_mib = gauges.get("kv_cache_usage_perc", 0.0) * self._kv_cache_mib
        return found

    @contextlib.asynccontextmanager
    async def room_for_training(self) -> AsyncIterator[None]:
        """See `Engine.room_for_training`. Where a GPU is shared, vLLM sleeps, and a vLLM that dies stays down until
        the end.
        """
        if not self._placement.shared or self._process is None:
            yield
            return
        self._awake.clear()
        self._process.hold()
        try:
            async with self._loading:
                await self._fall_asleep(self._process)
            yield
        finally:
            self._process.release()
            try:
                await asyncio.shield(self._wake_up(self._process))
            finally:
                self._last_event = time.monotonic()
                self._awake.set()

    async def _fall_asleep(self, process: VllmProcess) -> None:
        if process.pid is None:
            return  # it is dead and stays so
        try:
            client = await process.ready()
            await client.sleep()
        except ArtSkyError as e:  # then its memory is freed by its end
            log.warning("vLLM is ended for the time of training: %s", e.message)
            process.kill()

    async def _wake_up(self, process: VllmProcess) -> None:
        if process.client is None:
            return  # it is being started, and starts awake
        try:
            async with asyncio.timeout(_WAKE_SECONDS):
                await process.client.wake_up()
        except (ArtSkyError, TimeoutError) as e:
            log.warning("vLLM does not wake up and is started again: %s", e)
            process.kill()

    @contextlib.asynccontextmanager
    async def _use(self, adapter: AdapterRef) -> AsyncIterator[VllmClient]:
        """The client of a vLLM that has the adapter, and keeps it until the context ends."""
        if self._process is None or self._size is None:
            raise Busy("the engine was not started; register the model, then call again")
        self._users[adapter.name] += 1  # from here on it is not unloaded
        try:
            client = await self._process.ready()
            while not self._is_loaded(adapter.name):
                await self._awake.wait()
                async with self._loading:
                    client = await self._process.ready()
                    if self._awake.is_set() and not self._is_loaded(adapter.name):
                        await self._give(client, adapter, self._size.shapes)
                        self._loaded[adapter.name] = None
                        await self._retire(client)
            if adapter.name in self._loaded:  # it may have died again meanwhile
                self._loaded.move_to_end(adapter.name)
            yield client
        finally:
            self._users[adapter.name] -= 1
            if not self._users[adapter.name]:
                del self._users[adapter.name]

    async def _give(self, client: VllmClient, adapter: AdapterRef, shapes: dict[str, tuple[int, ...]]) -> None:
        """Makes the adapter's name known to vLLM. Of the first one of a layout it is waited for that vLLM reads it,
        between two steps. Those of the next steps of training are read with their first request: no request waits for
        the end of a step that it is no part of.
        """
        layout = await asyncio.to_thread(check_adapter, adapter, shapes, _max_rank(self._config))
        if layout not in self._taken or not await client.name(adapter):
            await client.load(adapter)
            self._taken.add(layout)

    def _is_loaded(self, name: str) -> bool:
        assert self._process is not None
        if self._loaded_in != self._process.generation:
            self._loaded_in = self._process.generation
            self._loaded.clear()
        return name in self._loaded

    async def _retire(self, client: VllmClient) -> None:
        """Unloads what no request uses, beyond `max_adapters`, least recently used first."""
        for name in [n for n in self._loaded if not self._users[n]]:
            if len(self._loaded) <= self._config.max_adapters:
                return
            del self._loaded[name]
            await client.unload(name)

    def _check(self, request: GenerateRequest) -> None:
        """What would end vLLM's engine, or be cut silently, does not reach it."""
        prompt, context = len(request.prompt_ids), self._context_length
        if prompt + request.max_tokens > context:
            raise PromptTooLong(
                f"the prompt's {prompt} tokens and max_tokens {request.max_tokens} are more than the context length "
                f"{context}; shorten the prompt, or ask for fewer tokens"
            )
        vocabulary = self._size.vocabulary if self._size is not None else 0
        for token in request.prompt_ids:
            if self._size is not None and not 0 <= token < vocabulary:
                raise InvalidInput(
                    f"prompt token {token} is not in the vocabulary of {vocabulary}; use this model's tokenizer"
                )

    async def _kill_stalled(self) -> None:
        while True:
            await asyncio.sleep(self._stall_seconds / 8)
            assert self._process is not None
            idle = not sum(self._users.values()) or not self._awake.is_set() or self._process.state != "ready"
            if idle:
                self._last_event = time.monotonic()
            elif time.monotonic() - self._last_event > self._stall_seconds:
                log.warning("vLLM gave no token for %.0f s and is started again", self._stall_seconds)
                self._process.kill()


def vllm_command(
    install: VllmInstall, base: Path, config: EngineConfig, placement: Placement, kv_cache_mib: int, socket: Path
) -> list[str]:
    """Nothing secret stands here: a process list shows it."""
    return [
        *(install.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(base), "--served-model-name", "base", "--uds", str(socket)),
        "--tokens-only",
        *("--dtype", config.dtype, "--max-model-len", str(config.context_length)),
        *("--max-num-seqs", str(config.max_batch), "--kv-cache-memory-bytes", str(kv_cache_mib << 20)),
        *(_cpu_steps(config) if install.cpu_build else ()),
        *("--enable-lora", "--max-lora-rank", str(_max_rank(config))),
        *("--max-loras", str(config.max_adapters), "--max-cpu-loras", str(config.max_adapters)),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", str(_TOP_LOGPROBS)),
        *("--generation-config", "vllm"),  # no sampling defaults from the model's folder
        "--enable-prompt-tokens-details",
        *("--middleware", "art_sky_adapters.AdapterNames"),  # of in_vllm/
        "--disable-uvicorn-access-log",
        *(("--tensor-parallel-size", str(len(placement.engine))) if len(placement.engine) > 1 else ()),
        *(("--enable-sleep-mode",) if placement.shared else ()),
    ]


def _cpu_steps(config: EngineConfig) -> tuple[str, ...]:
    """Every prompt in one step: after a part of one vLLM turns back the request's random generator, which a CPU's
    cannot, so that a request with a seed would end vLLM ("CPU Generator does not use offset")."""
    tokens = max(_CPU_STEP_TOKENS, config.max_batch, config.context_length or 0)
    return ("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens))


def vllm_environment(install: VllmInstall, config: EngineConfig, placement: Placement) -> dict[str, str]:
    """What is set beside this process's own environment."""
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",  # the base model is a folder
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(Path(__file__).with_name("in_vllm")),
    }
    if placement.engine:
        env |= visible(placement.engine)
    if placement.shared:
        env["VLLM_SERVER_DEV_MODE"] = "1"  # /sleep and /wake_up are there only
    if install.cpu_build:
        env |= {
            # Compiling took 12 s at the first request and made nothing faster (measured).
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(config.threads or os.cpu_count() or 1),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same cores
            "OMP_WAIT_POLICY": "passive",
        }
    return env


def _max_rank(config: EngineConfig) -> int:
    wanted = config.max_lora_rank or _DEFAULT_RANK
    return next(rank for rank in _RANKS if rank >= wanted)
