"""Learning rates that rise from 0 and then fall, by the number of updates."""

from __future__ import annotations

import math
from typing import Literal

from art_sky.errors import InvalidInput

Schedule = Literal["constant", "linear", "cosine"]


def rate_at(
    done: int, peak: float, schedule: Schedule, end: int | None = None, *, warmup: int = 0, end_ratio: float = 0.0
) -> float:
    """The learning rate of the update after `done` others: `warmup` updates up to `peak`, then down until update `end`.

    `cosine`: half a wave down to `end_ratio` x peak (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, one cycle).
    """
    if done < warmup:
        return peak * (done + 1) / warmup
    if schedule == "constant" or end is None:
        return peak
    left = 1 - min((done - warmup) / max(end - warmup, 1), 1.0)
    if schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return peak * (end_ratio + (1 - end_ratio) * left)


def create_lr_schedule(
    total_steps: int, peak_lr: float, method: Schedule = "linear", warmup_steps: int = 0, min_lr: float = 0.0
) -> list[float]:
    """The learning rate of each of `total_steps` updates, for `SFTConfig(learning_rate=...)` or slices of it."""
    if total_steps < 1 or not peak_lr > 0 or not 0 <= min_lr <= peak_lr or not 0 <= warmup_steps <= total_steps:
        raise InvalidInput(
            "create_lr_schedule wants total_steps >= 1, peak_lr > 0, min_lr between 0 and peak_lr, and warmup_steps of "
            f"at most total_steps; got {total_steps}, {peak_lr}, {min_lr} and {warmup_steps}; mend the value"
        )
    if method not in ("constant", "linear", "cosine"):
        raise InvalidInput(f"there is no schedule {method!r}; use 'constant', 'linear' or 'cosine'")
    ratio = min_lr / peak_lr
    return [rate_at(i, peak_lr, method, total_steps, warmup=warmup_steps, end_ratio=ratio) for i in range(total_steps)]
