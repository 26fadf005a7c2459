"""The losses, one small function each. All work on flat float32 tensors [N] of trained tokens.

`logp` is the policy's logprob of the sampled token, `old` that of the policy the ratio refers to, `advantage` the
token's. A loss returns ([N] loss of each token, [N] whether a ratio bound cut off its signal). `per` says what the
loss is a mean over; the weights come from the whole batch (`token_weights`), so that the gradient does not depend on
how the batch is computed.

| here | in TRL: `loss_type` | its bounds in TRL's words |
|---|---|---|
| cispo | cispo | epsilon_high=5.0 for our upper bound 1 + epsilon_high = 5 |
| ppo | grpo | epsilon=0.2, epsilon_high=0.28 |
| dapo, bnpo, dr_grpo | the same | the same; max_completion_length is our normalize_tokens |
| gspo | grpo with importance_sampling_level="sequence" | the same |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# exp of more overflows sums in float32; a ratio of e^20 is meaningless anyway.
MAX_LOG_RATIO = 20.0

Per = Literal["token", "part_token", "trajectory", "constant"]
Mean = Callable[[Tensor], Tensor]  # [N] -> [N], for each token the mean over all trained tokens of its trajectory


@dataclass(frozen=True)
class Bounds:
    """Of the ratio: 1 - epsilon and 1 + epsilon_high."""

    low: float
    high: float


TokenLoss = Callable[[Tensor, Tensor, Tensor, Bounds, Mean], tuple[Tensor, Tensor]]


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, bounds: Bounds, mean: Mean) -> tuple[Tensor, Tensor]:
    """-stopgrad(clip(r, low, high)) A logp with r = exp(logp - old), a mean over tokens.

    CISPO: MiniMax-M1 (2025), arXiv:2506.13585, eq. 4. Every token keeps a gradient; the bound limits its weight.
    """
    ratio = token_ratio(logp, old).detach()
    return -ratio.clamp(bounds.low, bounds.high) * advantage * logp, (ratio < bounds.low) | (ratio > bounds.high)


def ppo(logp: Tensor, old: Tensor, advantage: Tensor, bounds: Bounds, mean: Mean) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, low, high) A), a mean over each trajectory, then over trajectories.

    PPO: Schulman et al. (2017), arXiv:1707.06347, eq. 7; as GRPO uses it: Shao et al. (2024), arXiv:2402.03300, eq. 3.
    """
    return _clipped(token_ratio(logp, old), advantage, bounds)


def dapo(logp: Tensor, old: Tensor, advantage: Tensor, bounds: Bounds, mean: Mean) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, low, high) A), a mean over the tokens of the batch, with the upper bound further away.

    DAPO: Yu et al. (2025), arXiv:2503.14476, eq. 8 to 12.
    """
    return _clipped(token_ratio(logp, old), advantage, bounds)


def bnpo(logp: Tensor, old: Tensor, advantage: Tensor, bounds: Bounds, mean: Mean) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, low, high) A), a mean over the tokens of the update's own part of the batch.

    TRL's name for the token mean of a local batch; no paper defines it so. It differs from `dapo` in its bounds, and
    where `minibatches` have unlike numbers of tokens.
    """
    return _clipped(token_ratio(logp, old), advantage, bounds)


def dr_grpo(logp: Tensor, old: Tensor, advantage: Tensor, bounds: Bounds, mean: Mean) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, low, high) A), a sum over each trajectory by a constant, and a mean over trajectories.

    Dr. GRPO: Liu et al. (2025), arXiv:2503.20783, section 3.2; scale_rewards="none" is the other half of it.
    """
    return _clipped(token_ratio(logp, old), advantage, bounds)


def gspo(logp: Tensor, old: Tensor, advantage: Tensor, bounds: Bounds, mean: Mean) -> tuple[Tensor, Tensor]:
    """-min(s A, clip(s, low, high) A) with s = exp(mean of logp - old over the trajectory), a mean over trajectories.

    GSPO: Zheng et al. (2025), arXiv:2507.18071, eq. 5 and 7.
    """
    return _clipped(bounded(mean(logp - old)).exp(), advantage, bounds)


@dataclass(frozen=True)
class Loss:
    token_loss: TokenLoss
    per: Per
    epsilon: float
    epsilon_high: float
    by_sequence: bool = False  # its ratio is that of the whole trajectory


LOSSES: dict[str, Loss] = {
    "cispo": Loss(cispo, per="token", epsilon=1.0, epsilon_high=4.0),
    "ppo": Loss(ppo, per="trajectory", epsilon=0.2, epsilon_high=0.28),
    "dapo": Loss(dapo, per="token", epsilon=0.2, epsilon_high=0.28),
    "bnpo": Loss(bnpo, per="part_token", epsilon=0.2, epsilon_high=0.2),
    "dr_grpo": Loss(dr_grpo, per="constant", epsilon=0.2, epsilon_high=0.2),
    "gspo": Loss(gspo, per="trajectory", epsilon=3e-4, epsilon_high=4e-4, by_sequence=True),
}


def token_ratio(logp: Tensor, old: Tensor) -> Tensor:
    return bounded(logp - old).exp()


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """[N] estimates of KL(policy || reference) from samples of the policy: exp(d) - d - 1, d = reference - logp.

    Schulman (2020), "Approximating KL divergence", the estimator k3: never negative, little variance.
    """
    d = bounded(reference - logp)
    return torch.expm1(d) - d


def importance_weights(mode: str, bound: float, log_ratio: Tensor, trajectory: Tensor) -> Tensor:
    """[N] weights for tokens that the sampler drew with other logprobs than the trainer finds: exp(log_ratio).

    `token_*`: each token's; `sequence_*`: the product over its trajectory. `*_truncate`: at most `bound` (Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training", TIS); `*_mask`: 0 beyond it (MIS).
    The same names and formulas as TRL's `vllm_importance_sampling_mode`.
    """
    if mode.startswith("sequence"):
        log_ratio = sum_by(log_ratio, trajectory)[trajectory]
    ratio = bounded(log_ratio).exp()
    return ratio.clamp(max=bound) if mode.endswith("truncate") else ratio.masked_fill(ratio > bound, 0.0)


def token_weights(per: Per, trajectory: Tensor, tokens: float, trajectories: float, constant: int) -> Tensor:
    """[N] the weight of each trained token in the loss: float64, made from the denominators of the whole batch.

    `token`: 1 / tokens. `trajectory`: the mean over the trained tokens of all histories of a trajectory, then over
    trajectories. `constant`: 1 / (trajectories x constant).
    """
    if per == "trajectory":
        count = sum_by(torch.ones(len(trajectory), dtype=torch.float64), trajectory)
        return 1 / (trajectories * count[trajectory])
    denominator = trajectories * constant if per == "constant" else tokens
    return torch.full((len(trajectory),), 1 / denominator, dtype=torch.float64)


def sum_by(values: Tensor, index: Tensor) -> Tensor:
    """[max(index) + 1] sums of the values [N] with the same index [N]."""
    size = int(index.max()) + 1 if len(index) else 0
    return values.new_zeros(size).index_add_(0, index, values)


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(ratio: Tensor, advantage: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    cut = ((advantage > 0) & (ratio > bounds.high)) | ((advantage < 0) & (ratio < bounds.low))
    loss = -torch.minimum(ratio * advantage, ratio.clamp(bounds.low, bounds.high) * advantage)
    return loss, cut.detach()
