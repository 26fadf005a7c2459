"""Engines in process on the tiny models, adapters made by PEFT, and what PEFT computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from art_sky.inference.protocol import GenerateRequest
from art_sky.inference.scheduler import Ended, Sampled, Scheduler, Sequence


def make_adapter(model: Path, folder: Path, seed: int, *, rank: int = 4, b_std: float = 0.5, **options: object) -> Path:
    """A PEFT adapter whose B is not zero (b_std=0: as untrained)."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, **{"target_modules": "all-linear", **options})
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name and b_std:
            torch.nn.init.normal_(parameter, std=b_std)
    peft.save_pretrained(folder)
    return folder


@dataclass
class Reference:
    """Plain transformers and PEFT, in float32."""

    model: Path
    adapter: Path | None = None

    def __post_init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        if self.adapter is not None:
            self._model = PeftModel.from_pretrained(self._model, self.adapter).eval()

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(tokens), vocabulary]: row i is the distribution of token i + 1."""
        return (self._model(torch.tensor([tokens])).logits[0].float() / temperature).log_softmax(-1)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        out = self._model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return out[0, len(prompt) :].tolist()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    end: object = None
    cached: int = 0


def collect(scheduler: Scheduler, answers: dict[Sequence, Answer], limit: int = 10_000) -> None:
    """Steps until nothing is left."""
    while not scheduler.idle:
        step(scheduler, answers)
        limit -= 1
        assert limit, "the scheduler does not come to an end"


def step(scheduler: Scheduler, answers: dict[Sequence, Answer]) -> list[Sequence]:
    """One step; the sequences that got a token."""
    got = []
    for event in scheduler.step():
        answer = answers.setdefault(event.sequence, Answer())
        if isinstance(event, Sampled):
            answer.tokens.append(event.drawn.token)
            answer.logprobs.append(event.drawn.logprob)
            answer.tops.append(event.drawn.top)
            got.append(event.sequence)
        elif isinstance(event, Ended):
            answer.end = event.reason
            answer.cached = event.sequence.cached_tokens or 0
    return got


def run(scheduler: Scheduler, requests: list[GenerateRequest]) -> list[Answer]:
    """All requests at once, to the end."""
    sequences = [scheduler.add(r) for r in requests]
    answers: dict[Sequence, Answer] = {}
    collect(scheduler, answers)
    return [answers[s] for s in sequences]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(3, 100, (length,), generator=generator).tolist()


MakeScheduler = Callable[..., Scheduler]
