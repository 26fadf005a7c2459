"""How long the newest step takes to be ready while 16 streams run (issue: under 50 ms at the median, none dropped).

    python benchmarks/adapter_swap.py [--swaps 20] [--streams 16] [--model smollm2-135m] [--threads 2]

Streams of 24 tokens follow each other, each with the newest adapter at its begin. Once as many as run have ended,
the next adapter (rank 8, all linear layers, new files under a new name) is prepared: `ours` is the wall time of
`prepare` on the CPU engine in milliseconds, from the call in the server's process to its return. The peer is vLLM's
CPU build behind the same protocol, where $ART_SKY_VLLM_PYTHON names it. `dropped` counts streams that failed or gave
fewer tokens than asked for, `gap_ms` is the longest time that a stream waited for its next token. `first_token_ms` is
the median wait of a stream for its first token: `new` of those that were the first on their adapter, `known` of the
others; what a swap costs a request is the difference.

Where the time went with vLLM 0.32's CPU build and one thread, when its own route loaded every adapter (one busy core,
medians of 6 swaps): check of the files 13 ms, HTTP 2 ms, waiting for the end of vLLM's running step 165 ms, reading the
files 12 ms, placing the tensors 4 ms. A step of 16 streams took 140 ms, of which 34 were LoRA's; one that also had 16
prompts of 40 tokens, 2.2 s, since vLLM's LoRA on CPUs copies the matrices for each token. So nothing in front of vLLM
can come below half a step's time while `prepare` waits for its end. It no longer does (docs/vllm.md): vLLM reads and
places in the step that the first request joins, and `prepare` is check (now 2 ms) and HTTP. At a load of 8 on two cores
a swap then took 50 ms at the median, 17 of them the check and 9 HTTP, and the rest waiting for a turn in this process,
which reads the 16 streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from art_sky import base_models
from art_sky.config import EngineConfig
from art_sky.errors import ArtSkyError
from art_sky.inference.cpu import CpuEngine
from art_sky.inference.memory_plan import ModelSize
from art_sky.inference.protocol import Engine, GenerateRequest, TokenDelta
from art_sky.inference.vllm import VllmEngine
from art_sky.inference.vllm_install import TESTED_VERSION, VARIABLE
from art_sky.schemas import AdapterRef

TOKENS = 24


class Run:
    """One engine under load."""

    def __init__(self, engine: Engine, adapters: list[AdapterRef], streams: int, vocabulary: int) -> None:
        self._engine, self._adapters, self._streams = engine, adapters, streams
        self._vocabulary = vocabulary
        self._newest = adapters[0]
        self._draw = random.Random(20261)
        self._ended = self._dropped = 0
        self._gap = 0.0
        self._asked_for: set[str] = set()
        self._first: dict[str, list[float]] = {"new": [], "known": []}
        self._over = False

    async def measure(self) -> dict[str, Any]:
        await self._engine.start()
        await self._engine.prepare(self._newest)
        running = [asyncio.create_task(self._stream()) for _ in range(self._streams)]
        took = []
        for adapter in self._adapters[1:]:
            await self._round()
            began = time.perf_counter()
            await self._engine.prepare(adapter)
            took.append((time.perf_counter() - began) * 1000)
            self._newest = adapter
        await self._round()
        self._over = True
        await asyncio.gather(*running)
        return {
            "median_ms": round(statistics.median(took), 1),
            "max_ms": round(max(took), 1),
            "gap_ms": round(self._gap * 1000, 1),
            "first_token_ms": {kind: round(statistics.median(waits) * 1000, 1) for kind, waits in self._first.items()},
            "streams_ended": self._ended,
            "dropped": self._dropped,
        }

    async def _round(self) -> None:
        """Until as many streams have ended as run at once."""
        until = self._ended + self._dropped + self._streams
        while self._ended + self._dropped < until:  # noqa: ASYNC110  # polled, so that streams do nothing beside
            await asyncio.sleep(0.005)

    async def _stream(self) -> None:
        while not self._over:
            prompt = [self._draw.randrange(self._vocabulary) for _ in range(40)]
            request = GenerateRequest(prompt_ids=prompt, adapter=self._newest, max_tokens=TOKENS)
            kind = "known" if self._newest.name in self._asked_for else "new"
            self._asked_for.add(self._newest.name)
            tokens, last, began = 0, None, time.perf_counter()
            try:
                async for event in self._engine.generate(request):
                    if isinstance(event, TokenDelta):
                        tokens += 1
                        now = time.perf_counter()
                        if last is None:
                            self._first[kind].append(now - began)
                        else:
                            self._gap = max(self._gap, now - last)
                        last = now
            except ArtSkyError as e:
                print(e, file=sys.stderr)
            self._ended += tokens == TOKENS
            self._dropped += tokens != TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    base = base_models.resolve(options.model)
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(base, Path(folder), options.swaps + 1)
        # Streams may be two steps old when they end.
        common = {"threads": options.threads, "max_adapters": 8, "context_length": 512, "kv_cache_mib": 512}
        log = Path(folder) / "engine.log"
        load = (adapters, options.streams, ModelSize.of(base).vocabulary)
        ours = run(CpuEngine(base, EngineConfig(**common), log), *load)
        peers = {}
        if os.environ.get(VARIABLE):
            engine = VllmEngine(base, EngineConfig(kind="vllm", max_lora_rank=8, **common), log)
            peers[f"vLLM {TESTED_VERSION}, CPU build"] = run(engine, *load)
    ratio = {"wall": round(min(p["median_ms"] for p in peers.values()) / ours["median_ms"], 2)} if peers else {}
    notes = f"{options.swaps} swaps, {options.streams} streams of {TOKENS} tokens, {options.threads} threads, bfloat16"
    if not peers:
        notes += f"; no vLLM: ${VARIABLE} is not set"
    line = {
        "bench": "adapter_swap",
        "case": Path(options.model).name,
        "ours": ours,
        "peers": peers,
        "ratio": ratio,
        "notes": notes,
    }
    print(json.dumps(line), flush=True)


def run(engine: Engine, adapters: list[AdapterRef], streams: int, vocabulary: int) -> dict[str, Any]:
    async def measured() -> dict[str, Any]:
        try:
            return await Run(engine, adapters, streams, vocabulary).measure()
        finally:
            await engine.close()

    return asyncio.run(measured())


def make_adapters(base: Path, folder: Path, count: int) -> list[AdapterRef]:
    torch.manual_seed(20261)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    peft = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    peft.save_pretrained(folder / "0")
    for i in range(1, count):
        shutil.copytree(folder / "0", folder / str(i))
    return [AdapterRef(name=f"bench@{i}", path=str(folder / str(i))) for i in range(count)]


if __name__ == "__main__":
    main()
