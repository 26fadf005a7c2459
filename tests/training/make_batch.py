"""Batches as a client would send them, with tokens really sampled from a model: importable as `training.make_batch`."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

Group = dict[str, Any]


def make_groups(
    model: Path,
    *,
    adapter: Path | None = None,
    groups: int = 2,
    size: int = 4,
    turns: int = 1,
    prompt_tokens: int = 12,
    tokens: int = 6,
    temperature: float = 1.0,
    reward: Callable[[list[int]], float] | None = None,
    seed: int = 0,
) -> list[Group]:
    """Groups in their JSON form. Each trajectory has `turns` choices of 1 to `tokens` tokens, each turn extending the
    one before; `reward` maps all sampled ids of a trajectory to a number (default: drawn from `seed`)."""
    draw = random.Random(seed)
    vocabulary = _load(model, adapter).config.vocab_size
    made = []
    for g in range(groups):
        prompt = [draw.randrange(4, vocabulary) for _ in range(prompt_tokens + g)]
        trajectories = []
        for _ in range(size):
            ids, items, sampled = list(prompt), [], []
            for _ in range(turns):
                items.append({"role": "user", "content": "?"})
                choice = sample(model, ids, draw.randint(1, tokens), temperature, draw.randrange(2**31), adapter)
                items.append(choice)
                sampled += choice["token_ids"]
                ids = [
                    *choice["prompt_token_ids"],
                    *choice["token_ids"],
                    *(draw.randrange(4, vocabulary) for _ in "ab"),
                ]
            value = reward(sampled) if reward else draw.choice((0.0, 0.25, 1.0))
            trajectories.append(make_trajectory(items, value))
        made.append(make_group(trajectories))
    return made


def sample(
    model: Path, prompt: list[int], tokens: int, temperature: float, seed: int, adapter: Path | None = None
) -> dict[str, Any]:
    """One Choice of exactly `tokens` tokens; temperature 0 is greedy."""
    import torch

    lm = _load(model, adapter)
    generator = torch.Generator().manual_seed(seed)
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(tokens):
            logits = lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            logp = (logits / (temperature or 1.0)).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=generator)) if temperature else int(logp.argmax())
            ids.append(token)
            logprobs.append(float(logp[token]))
    return make_choice(prompt, ids[len(prompt) :], logprobs, temperature)


def make_choice(
    prompt: list[int], ids: list[int], logprobs: list[float], temperature: float = 1.0, comparable: bool = True
) -> dict[str, Any]:
    return {
        "finish_reason": "stop",
        "index": 0,
        "message": {"role": "assistant", "content": "..."},
        "logprobs": None,
        "prompt_token_ids": prompt,
        "token_ids": ids,
        "token_logprobs": logprobs,
        "sampling": {
            "completion_id": "chatcmpl-1",
            "model": "agent@0",
            "temperature": temperature,
            "comparable": comparable,
        },
    }


def make_trajectory(items: list[dict[str, Any]], reward: Any, more: list[list[dict[str, Any]]] | None = None) -> Group:
    return {
        "messages_and_choices": items,
        "tools": None,
        "additional_histories": [{"messages_and_choices": m, "tools": None} for m in more or []],
        "reward": reward,
        "metrics": {},
        "metadata": {},
        "logs": [],
    }


def make_group(trajectories: list[dict[str, Any]], exceptions: int = 0) -> Group:
    failed = [{"type": "ValueError", "message": "x", "traceback": ""}] * exceptions
    return {"trajectories": trajectories, "exceptions": failed, "metadata": {}, "metrics": {}, "logs": []}


@lru_cache(maxsize=4)
def _load(model: Path, adapter: Path | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        from peft import PeftModel

        lm = PeftModel.from_pretrained(lm, adapter).eval()
    return lm
