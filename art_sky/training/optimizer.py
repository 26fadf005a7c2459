"""AdamW on the adapter, and the learning rate of an update."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from art_sky.config import TrainConfig, UpdateConfig
from art_sky.schedules import rate_at
from art_sky.training.objective import not_finite
from art_sky.training.state import TrainerState


def learning_rate(config: TrainConfig, state: TrainerState) -> float:
    """That of the next update, by the number of updates that the model has had; those of fine-tuning do not count."""
    return rate_at(
        state.updates - state.sft_updates,
        config.learning_rate,
        config.lr_schedule,
        config.lr_schedule_updates,
        warmup=config.warmup_updates,
        end_ratio=config.lr_end_ratio or 0.0,
    )


def update(
    parameters: Mapping[str, torch.nn.Parameter], state: TrainerState, config: UpdateConfig, learning_rate: float
) -> float:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on float32 state; returns the gradient's norm before
    clipping, and clears the gradient.

    Raises TrainFailed when the gradient or a weight is not finite.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm).item()
    if not math.isfinite(norm):
        raise not_finite("gradient", norm)
    optimizer = adamw(parameters, state, config, learning_rate)
    try:
        optimizer.step()
    except RuntimeError as e:
        if "without overflow" not in str(e):
            raise
        raise not_finite("update", learning_rate / (1 - config.adam_beta1)) from e  # beyond float32
    optimizer.zero_grad()
    state.updates += 1
    for name, p in parameters.items():
        if not torch.isfinite(p).all():
            raise not_finite(f"weight {name}", math.nan)
    return norm


def adamw(
    parameters: Mapping[str, torch.nn.Parameter], state: TrainerState, config: UpdateConfig, learning_rate: float
) -> torch.optim.AdamW:
    """torch's, going on from `state`, whose moments it changes in place."""
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    for name, p in parameters.items():
        # From files they come into main memory.
        state.exp_avg[name] = state.exp_avg[name].to(p.device)
        state.exp_avg_sq[name] = state.exp_avg_sq[name].to(p.device)
        optimizer.state[p] = {
            "step": torch.tensor(float(state.updates), device="cpu"),
            "exp_avg": state.exp_avg[name],
            "exp_avg_sq": state.exp_avg_sq[name],
        }
    return optimizer
