"""The engine's process: `python -m art_sky.inference.worker --fd N --base-model FOLDER --config JSON`.

One thread reads the channel (art_sky.worker), the main thread takes what arrived between two steps. All events of
a step leave in one frame.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from art_sky.config import DEFAULT_KV_CACHE_MIB, EngineConfig
from art_sky.errors import ArtSkyError, Cancelled, InvalidConfig, InvalidInput
from art_sky.inference.adapters import Adapters
from art_sky.inference.kv_cache import SHORTEST, KVCache
from art_sky.inference.model import Model
from art_sky.inference.protocol import GenerateRequest
from art_sky.inference.scheduler import Ended, Event, Scheduler, Sequence
from art_sky.schemas import AdapterRef
from art_sky.worker import Call, Channel, Message


def make_scheduler(base_model: Path, config: EngineConfig) -> Scheduler:
    """Loads the base model. Raises InvalidConfig or Unsupported, see `Model`, and InvalidConfig where not even the
    shortest slot fits into `kv_cache_mib`.
    """
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    model = Model(base_model, getattr(torch, config.dtype), config.context_length)
    kv_cache_mib = config.kv_cache_mib or DEFAULT_KV_CACHE_MIB
    cache = KVCache(model.kv_shape, kv_cache_mib << 20, model.context_length)
    if not cache.longest():
        needed = SHORTEST * model.kv_shape.token_bytes / 2**20
        raise InvalidConfig(
            f"kv_cache_mib {kv_cache_mib} is less than the {needed:.0f} MiB that {SHORTEST} tokens take; "
            "raise kv_cache_mib"
        )
    return Scheduler(
        model,
        cache,
        Adapters(model.groups, model.active, model.decoder_prefix, config.max_adapters),
        config.max_batch,
    )


class Worker:
    def __init__(self, channel: Channel, scheduler: Scheduler) -> None:
        self._channel = channel
        self._scheduler = scheduler
        self._calls: dict[Sequence, Call] = {}
        self._to_prepare = channel.aside["prepare"] = queue.Queue()

    def serve(self) -> None:
        """Until the parent goes."""
        threading.Thread(target=self._prepare_forever, name="prepare", daemon=True).start()
        while self._take():
            self._channel.beat += 1
            for sequence, call in list(self._calls.items()):
                if call.cancelled.is_set():
                    self._send(self._scheduler.cancel(sequence))
            if not self._scheduler.idle:
                self._send(self._scheduler.step())

    def _take(self) -> bool:
        """Handles the calls that wait; blocks for one when there is nothing to compute. False: the parent is gone."""
        block = self._scheduler.idle
        while True:
            try:
                call = self._channel.calls.get(block=block)
            except queue.Empty:
                return True
            if call is None:
                return False
            block = False
            try:
                self._handle(call)
            except (ArtSkyError, ValidationError) as e:
                call.error(e if isinstance(e, ArtSkyError) else InvalidInput(f"the engine was sent {e}; report this"))

    def _handle(self, call: Call) -> None:
        if call.method == "generate":
            if call.cancelled.is_set():
                raise Cancelled("the request was cancelled before it began; send it again if it is still wanted")
            self._calls[self._scheduler.add(GenerateRequest.model_validate(call.params))] = call
        elif call.method == "status":
            call.result(self._status())
        else:
            raise InvalidInput(f"the engine has no method {call.method!r}; use generate, prepare or status")

    def _prepare_forever(self) -> None:
        """Reads adapters beside the steps: none waits for the other."""
        while (call := self._to_prepare.get()) is not None:
            try:
                self._scheduler.adapters.read_ahead(AdapterRef.model_validate(call.params))
                call.result({})
            except Exception as e:
                call.error(e)

    def _status(self) -> Message:
        s, c = self._scheduler, self._scheduler.counters
        return {
            "running": len(s.running),
            "waiting": len(s.waiting),
            "adapters": s.adapters.names(),
            "kv_cache_used_mib": s.cache.used / 2**20,
            "tokens_sampled": c.tokens_sampled,
            "tokens_prefilled": c.tokens_prefilled,
            "tokens_reused": c.tokens_reused,
        }

    def _send(self, events: list[Event]) -> None:
        frame: list[Message] = []
        ended: list[Ended] = []
        for e in events:
            if isinstance(e, Ended):
                ended.append(e)
            else:
                d = e.drawn
                token: dict[str, Any] = {"token_id": d.token, "logprob": d.logprob, "top": d.top}
                frame.append({"id": self._calls[e.sequence].id, "event": token})
        if frame:
            self._channel.send(frame)
        for end in ended:
            call = self._calls.pop(end.sequence)
            if isinstance(end.reason, ArtSkyError):
                call.error(end.reason)
            else:
                call.result({"finish_reason": end.reason, "cached_tokens": end.sequence.cached_tokens or 0})


def main() -> None:
    channel = Channel.from_argv()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--base-model", type=Path, required=True)
    parser.add_argument("--config", type=EngineConfig.model_validate_json, required=True)
    options = parser.parse_args()
    scheduler = make_scheduler(options.base_model, options.config)
    # Before `ready`, which is answered by calls at once: a `prepare` that came first would be a method nobody knows.
    worker = Worker(channel, scheduler)
    channel.ready({"context_length": scheduler.model.context_length, "vocabulary": scheduler.model.vocabulary})
    worker.serve()


if __name__ == "__main__":
    main()
