"""AdamW on the adapter, and the learning rate of an update."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from art_sky.config import TrainConfig
from art_sky.training.objective import not_finite
from art_sky.training.state import TrainerState


def learning_rate(config: TrainConfig, updates: int) -> float:
    """That of the next update, when the model has had `updates` of them: a rise from 0, then the schedule.

    `cosine`: half a wave down to `lr_end_ratio` (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, one cycle).
    """
    if updates < config.warmup_updates:
        return config.learning_rate * (updates + 1) / config.warmup_updates
    if config.lr_schedule == "constant" or config.lr_schedule_updates is None:
        return config.learning_rate
    done = (updates - config.warmup_updates) / (config.lr_schedule_updates - config.warmup_updates)
    left = 1 - min(done, 1.0)
    if config.lr_schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    end = config.lr_end_ratio or 0.0
    return config.learning_rate * (end + (1 - end) * left)


def update(parameters: Mapping[str, torch.nn.Parameter], state: TrainerState, config: TrainConfig) -> float:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on float32 state; returns the gradient's norm before
    clipping, and clears the gradient.

    Raises TrainFailed when the gradient or a weight is not finite.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm).item()
    if not math.isfinite(norm):
        raise not_finite("gradient", norm)
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=learning_rate(config, state.updates),
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    for name, p in parameters.items():
        optimizer.state[p] = {
            "step": torch.tensor(float(state.updates)),
            "exp_avg": state.exp_avg[name],
            "exp_avg_sq": state.exp_avg_sq[name],
        }
    optimizer.step()
    optimizer.zero_grad()
    state.updates += 1
    for name, p in parameters.items():
        if not torch.isfinite(p).all():
            raise not_finite(f"weight {name}", math.nan)
    return norm
