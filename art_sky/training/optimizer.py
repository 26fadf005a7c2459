"""AdamW on the adapter, with moments in float32 or in 8 bits, and the learning rate of an update.

8 bits: Dettmers et al. 2022, arXiv:2110.02861, as bitsandbytes' AdamW8bit computes it. Each 256 values share a scale;
moments of fewer than 4096 values stay float32. A model may change its optimizer between train calls: moments are then
dequantised, which is exact, or quantised, as that optimizer does after each of its updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) by `state.optimizer`; returns the gradient's norm before
    clipping, and clears the gradient.

    Raises TrainFailed when the gradient or a weight is not finite.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm).item()
    if not math.isfinite(norm):
        raise not_finite("gradient", norm)
    optimizer = make_optimizer(parameters, state, config, learning_rate)
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


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter], state: TrainerState, config: UpdateConfig, learning_rate: float
) -> torch.optim.Optimizer:
    """torch's AdamW or bitsandbytes' AdamW8bit, going on from `state`, whose moments it changes in place."""
    options: dict[str, Any] = {
        "lr": learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "weight_decay": config.weight_decay,
    }
    if state.optimizer == "adamw_8bit":
        return _adamw_8bit(parameters, state, options)
    optimizer = torch.optim.AdamW(parameters.values(), **options)
    for name, p in parameters.items():
        # From files they come into main memory.
        state.exp_avg[name] = _float(state, "exp_avg", name).to(p.device)
        state.exp_avg_sq[name] = _float(state, "exp_avg_sq", name).to(p.device)
        optimizer.state[p] = {
            "step": torch.tensor(float(state.updates), device="cpu"),
            "exp_avg": state.exp_avg[name],
            "exp_avg_sq": state.exp_avg_sq[name],
        }
    state.scales = {}
    return optimizer


def keep_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], state: TrainerState
) -> None:
    """Takes over into `state` what `optimizer` has, where others have put copies of the moments into it."""
    for name, p in parameters.items():
        found = optimizer.state[p]
        for i, (moment, own) in enumerate((("exp_avg", state.exp_avg), ("exp_avg_sq", state.exp_avg_sq)), start=1):
            own[name] = found[moment] if moment in found else found[f"state{i}"]
            if own[name].dtype == torch.uint8:
                state.scales[f"absmax.{moment}.{name}"] = found[f"absmax{i}"]
                state.scales[f"code.{moment}"] = found[f"qmap{i}"]


def _adamw_8bit(
    parameters: Mapping[str, torch.nn.Parameter], state: TrainerState, options: dict[str, Any]
) -> torch.optim.Optimizer:
    import bitsandbytes

    optimizer: Any = bitsandbytes.optim.AdamW8bit(parameters.values(), **options)
    scales = dict[str, Tensor]()
    for name, p in parameters.items():
        found: dict[str, Any] = {"step": state.updates}
        optimizer.state[p] = found
        for i, (moment, own, kind) in enumerate(
            (("exp_avg", state.exp_avg, "dynamic"), ("exp_avg_sq", state.exp_avg_sq, "udynamic")), start=1
        ):
            value, absmax, code = own[name], f"absmax.{moment}.{name}", f"code.{moment}"
            if value.dtype == torch.uint8:
                scales[absmax] = state.scales[absmax].to(p.device)
                scales.setdefault(code, state.scales[code].to(p.device))
            elif value.numel() >= optimizer.args.min_8bit_size:
                scales.setdefault(code, optimizer.name2qmap[kind].to(p.device))
                value, scale = bitsandbytes.functional.quantize_blockwise(
                    value.to(p.device), code=scales[code], blocksize=256
                )
                scales[absmax] = scale.absmax
            found[f"state{i}"] = own[name] = value.to(p.device)
            if own[name].dtype == torch.uint8:
                found |= {f"absmax{i}": scales[absmax], f"qmap{i}": scales[code]}
    state.scales = scales
    made: torch.optim.Optimizer = optimizer
    return made


def _float(state: TrainerState, moment: str, name: str) -> Tensor:
    value = (state.exp_avg if moment == "exp_avg" else state.exp_avg_sq)[name]
    if value.dtype != torch.uint8:
        return value
    scale = state.scales[f"absmax.{moment}.{name}"].repeat_interleave(256)[: value.numel()]
    return (state.scales[f"code.{moment}"][value.flatten().long()] * scale).view_as(value)
