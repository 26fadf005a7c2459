"""Continuous batching: which tokens of which requests go into the next forward.

A step computes one token of every decoding sequence and, beside them, up to PREFILL_TOKENS tokens of prompts, so
that a request joins at the next step and long prompts do not hold up those that run.

States of a sequence: waiting -> running -> ended; running -> waiting when a longer-running one needs its memory
(it is computed again later, and its tokens so far stay as they were sampled).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from art_sky.errors import ArtSkyError, Busy, InvalidInput, PromptTooLong
from art_sky.inference.adapters import Adapter, Adapters
from art_sky.inference.attention import Plan, plan_chunk, plan_rows
from art_sky.inference.kv_cache import KVCache, Slot, common_prefix
from art_sky.inference.model import Model
from art_sky.inference.protocol import GenerateRequest
from art_sky.inference.sampler import Draw, Drawn, sample, uniform
from art_sky.schemas import AdapterRef

PREFILL_TOKENS = 256  # enough to run the matrix products at full speed; a few decode steps' worth of time
WORTH_WAITING = 16  # tokens: a prompt waits for another that is being computed when it can copy this many more
ROOM = 32  # tokens a sequence may sample before it has to move to a longer slot


@dataclass(eq=False)
class Sequence:
    """One request on its way. `tokens[:computed]` have keys and values in `slot`."""

    request: GenerateRequest
    seed: int
    since: float
    tokens: list[int]
    computed: int = 0
    cached_tokens: int | None = None  # None until it has run
    adapter: Adapter | None = None
    slot: Slot | None = None

    @property
    def pending(self) -> int:
        """Tokens without keys and values; 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def sampled(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)


@dataclass(frozen=True)
class Sampled:
    sequence: Sequence
    drawn: Drawn


@dataclass(frozen=True)
class Ended:
    sequence: Sequence
    reason: Literal["stop", "length", "abort"] | ArtSkyError


Event = Sampled | Ended


@dataclass
class Counters:
    steps: int = 0
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0
    preempted: int = 0


@dataclass
class Scheduler:
    """Drive it with `add`, `cancel` and `step` from one thread."""

    model: Model
    cache: KVCache
    adapters: Adapters
    max_batch: int
    wait_seconds: float = 600.0  # a request that could not begin by then ends with Busy
    clock: Callable[[], float] = time.monotonic
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)  # oldest first
    counters: Counters = field(default_factory=Counters)

    def add(self, request: GenerateRequest) -> Sequence:
        """Queues a request. Raises PromptTooLong or InvalidInput when it can never be served."""
        self._check(request)
        seed = request.seed if request.seed is not None else int.from_bytes(os.urandom(8), "big")
        sequence = Sequence(request, seed, self.clock(), list(request.prompt_ids))
        self.waiting.append(sequence)
        return sequence

    @torch.inference_mode()
    def cancel(self, sequence: Sequence) -> list[Event]:
        """Ends a sequence now; what it has computed stays reusable. Nothing happens to one that has ended."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._leave(sequence)
        else:
            return []
        return [Ended(sequence, "abort")]

    @torch.inference_mode()
    def load(self, ref: AdapterRef) -> Adapter:
        """Makes an adapter resident; see Adapters.load for the errors."""
        adapter, gone = self.adapters.load(ref, {s.request.adapter.name for s in self.running})
        for name in gone:
            self.cache.forget(name)
        return adapter

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One forward. Every running request whose prompt is done gets one token."""
        events = self._admit()
        work = self._share()
        if not work:
            return events
        self.counters.steps += 1
        work.sort(key=_batch_order)
        plan = Plan(self.model.context_length)
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        wants: list[Sequence] = []
        runs: list[tuple[Adapter, int]] = []
        for s, count in work:
            assert s.slot is not None and s.adapter is not None
            if count > 1:
                plan.chunks.append(plan_chunk(s.slot, len(tokens), s.computed, count, self.model.group))
            tokens += s.tokens[s.computed : s.computed + count]
            positions += range(s.computed, s.computed + count)
            runs.append((s.adapter, count))
            if s.computed + count == len(s.tokens):
                wanted.append(len(tokens) - 1)
                wants.append(s)
        _plan_rows(plan, [s for s, count in work if count == 1])
        self.adapters.activate(runs)
        logits = self.model.forward(tokens, positions, wanted, plan)
        for s, count in work:
            assert s.slot is not None
            if count > 1 or not s.sampled:
                self.counters.tokens_prefilled += count
            s.computed += count
            s.slot.used = s.computed
        if wants:
            for s, drawn in zip(wants, sample(logits, [_draw(s) for s in wants]), strict=True):
                events += self._fail(s) if drawn is None else self._append(s, drawn)
        return events

    # --- who runs ---------------------------------------------------------------------------------------

    def _admit(self) -> list[Event]:
        """Moves waiting sequences into the batch, in order; one that cannot have a place holds up those behind."""
        events: list[Event] = []
        late = self.clock() - self.wait_seconds
        for s in list(self.waiting):
            if s.since < late and s.cached_tokens is None:
                self.waiting.remove(s)
                message = f"the request waited {self.wait_seconds:.0f} s behind {len(self.running)} running ones; "
                events.append(Ended(s, Busy(message + "call again, or send fewer at once")))
                continue
            if len(self.running) == self.max_batch:
                break
            try:
                adapter = self.load(s.request.adapter)
            except Busy:
                break  # until a running request ends and frees a place for the adapter
            except ArtSkyError as e:
                self.waiting.remove(s)
                events.append(Ended(s, e))
                continue
            source, length, later = self._prefix(s)
            if later - length >= WORTH_WAITING:
                continue
            remaining = s.request.max_tokens - s.sampled
            slot = self.cache.allocate(len(s.tokens) + min(remaining, ROOM))
            if slot is None:
                break
            self.waiting.remove(s)
            self.running.append(s)
            s.adapter, s.slot, s.computed, slot.used = adapter, slot, length, length
            if source is not None:
                slot.rows(length).copy_(source)
            self.counters.tokens_reused += length
            if s.cached_tokens is None:
                s.cached_tokens = length
        return events

    def _prefix(self, s: Sequence) -> tuple[torch.Tensor | None, int, int]:
        """Rows to copy for the longest known prefix, its length, and the length that can be copied once the
        running prompts are computed. At least one token is left to compute.
        """
        limit = len(s.tokens) - 1
        kept, length = self.cache.find(s.request.adapter.name, s.tokens)
        length = min(length, limit)
        source = kept.data[:, :, :, :length] if kept is not None else None
        later = length
        for other in self.running:
            if other.request.adapter.name != s.request.adapter.name:
                continue
            common = min(common_prefix(other.tokens, s.tokens), limit)
            later = max(later, common)
            if other.slot is not None and min(common, other.computed) > length:
                length = min(common, other.computed)
                source = other.slot.rows(length)
        return source, length, later

    # --- what the next forward computes -------------------------------------------------------------------

    def _share(self) -> list[tuple[Sequence, int]]:
        """How many tokens each running sequence gets in this step, all with room in their slots."""
        prompts = [s for s in self.running if s.pending > 1]
        counts = {s: 1 for s in self.running if s.pending == 1}
        left = PREFILL_TOKENS
        if prompts:  # the oldest gets half, so that it is not starved; the shortest are soonest done
            counts[prompts[0]] = min(prompts[0].pending, left // 2)
            left -= counts[prompts[0]]
        for s in sorted(prompts, key=lambda s: s.pending):
            take = min(s.pending - counts.get(s, 0), left)
            if take:
                counts[s] = counts.get(s, 0) + take
                left -= take
        for s in list(self.running):
            while s.slot is not None and not self.cache.grow(s.slot, s.computed + counts.get(s, 0)):
                self._preempt(self.running[-1])
        return [(s, counts[s]) for s in self.running if s in counts]

    def _preempt(self, s: Sequence) -> None:
        assert s.slot is not None
        self.cache.free(s.slot)
        self.running.remove(s)
        self.waiting.insert(0, s)
        s.slot, s.computed = None, 0
        self.counters.preempted += 1

    # --- what comes of it ---------------------------------------------------------------------------------

    def _append(self, s: Sequence, drawn: Drawn) -> list[Event]:
        s.tokens.append(drawn.token)
        self.counters.tokens_sampled += 1
        events: list[Event] = [Sampled(s, drawn)]
        if drawn.token in s.request.stop_token_ids:
            events.append(Ended(s, "stop"))
        elif s.sampled == s.request.max_tokens:
            events.append(Ended(s, "length"))
        else:
            return events
        self._leave(s)
        return events

    def _fail(self, s: Sequence) -> list[Event]:
        """For logits that are not numbers: an adapter with weights that overflow."""
        name = s.request.adapter.name
        self._leave(s, keep=False)
        self.cache.forget(name)
        self.cache.scrub()
        return [Ended(s, InvalidInput(f"adapter {name} computes NaN or infinity for this prompt; use an earlier step"))]

    def _leave(self, s: Sequence, *, keep: bool = True) -> None:
        assert s.slot is not None
        if keep:
            self.cache.keep(s.request.adapter.name, s.tokens[: s.computed], s.slot)
        self.cache.free(s.slot)
        self.running.remove(s)
        s.slot = None

    def _check(self, request: GenerateRequest) -> None:
        prompt, context = len(request.prompt_ids), self.model.context_length
        if prompt >= context:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens and the context length is {context}; "
                f"shorten it to at most {context - 1}"
            )
        if prompt + request.max_tokens > context:
            raise PromptTooLong(
                f"the prompt's {prompt} tokens and max_tokens {request.max_tokens} are more than the context length "
                f"{context}; ask for at most {context - prompt} tokens"
            )
        if prompt + request.max_tokens > self.cache.longest():
            raise InvalidInput(
                f"the request may grow to {prompt + request.max_tokens} tokens and the KV cache holds at most "
                f"{self.cache.longest()} for one request; ask for fewer tokens, or raise kv_cache_mib"
            )
        for token in request.prompt_ids:
            if not 0 <= token < self.model.vocabulary:
                raise InvalidInput(
                    f"prompt token {token} is not in the vocabulary of {self.model.vocabulary}; "
                    "use this model's tokenizer"
                )


def _draw(s: Sequence) -> Draw:
    r = s.request
    return Draw(r.temperature, uniform(s.seed, s.sampled), r.top_p, r.top_k, r.min_p, r.top_logprobs)


def _batch_order(item: tuple[Sequence, int]) -> tuple[bool, int, int]:
    """Single tokens first, slab by slab, in the order of their slots."""
    s, count = item
    assert s.slot is not None
    return count > 1, id(s.slot.slab), s.slot.index


def _plan_rows(plan: Plan, singles: list[Sequence]) -> None:
    first = 0
    for _, members in itertools.groupby(singles, key=lambda s: id(s.slot.slab) if s.slot else 0):
        group = list(members)
        slots = [s.slot for s in group if s.slot is not None]
        plan.rows.append(plan_rows(slots[0].slab, first, [t.index for t in slots], [s.computed for s in group]))
        first += len(group)
