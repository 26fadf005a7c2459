"""The losses, one small function each. All work on flat tensors [N] of trained tokens in float32:

`logp` is the policy's logprob of the sampled token, `old` the sampler's, `advantage` that of the token's
trajectory. A loss returns ([N] loss of each token, [N] whether the ratio bound cut off its signal). `per` says
what the loss is a mean over; the weights come from the whole batch (`token_weights`), so that the gradient does not
depend on how the batch is split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from art_sky.training.sequences import TokenSequence

# exp of more overflows sums in float32; a ratio of e^20 is meaningless anyway.
MAX_LOG_RATIO = 20.0

TokenLoss = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Loss:
    token_loss: TokenLoss
    per: Literal["token", "trajectory"]
    epsilon: float
    epsilon_high: float


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-stopgrad(clip(ratio, low, high)) * A * logp: CISPO, MiniMax-M1 (2025), arXiv:2506.13585, eq. 4.

    Every token keeps a gradient; the bound only limits its weight.
    """
    ratio = _ratio(logp, old).detach()
    return -ratio.clamp(low, high) * advantage * logp, (ratio < low) | (ratio > high)


def ppo(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, low, high) * A): PPO, Schulman et al. (2017), arXiv:1707.06347, eq. 7, with the
    unequal bounds of DAPO, Yu et al. (2025), arXiv:2503.14476, eq. 10.
    """
    ratio = _ratio(logp, old)
    cut = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage), cut.detach()


LOSSES: dict[str, Loss] = {
    "cispo": Loss(cispo, per="token", epsilon=1.0, epsilon_high=4.0),
    "ppo": Loss(ppo, per="trajectory", epsilon=0.2, epsilon_high=0.28),
}


def k3(logp: Tensor, base: Tensor) -> Tensor:
    """[N] estimates of KL(policy || base) from samples of the policy: exp(d) - d - 1 with d = base - logp.

    Schulman (2020), "Approximating KL divergence", the estimator k3: never negative, little variance.
    """
    d = (base - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d) - d


def token_weights(sequences: Sequence[TokenSequence], per: Literal["token", "trajectory"]) -> npt.NDArray[np.float64]:
    """The weight that each trained token of a sequence has in the batch's mean, one number a sequence.

    `token`: 1 / trained tokens of the batch. `trajectory`: the mean over the trained tokens of all histories of a
    trajectory, then over trajectories. The weights of all trained tokens sum to 1.
    """
    tokens: dict[tuple[int, int], int] = {}
    for s in sequences:
        tokens[s.group, s.trajectory] = tokens.get((s.group, s.trajectory), 0) + s.trained
    if per == "token":
        return np.full(len(sequences), 1.0 / sum(tokens.values()))
    return np.array([1.0 / (len(tokens) * tokens[s.group, s.trajectory]) for s in sequences])


def _ratio(logp: Tensor, old: Tensor) -> Tensor:
    return (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
