"""One train call: a batch of groups, one optimizer update, the metrics of both.

Metrics, and what a bad value means:

- `loss`: of the whole batch, its KL term included. Its size says little; NaN fails the call.
- `grad_norm`: before clipping. Always far above `max_grad_norm`: lower the learning rate.
- `reward`, `reward_std_dev`: over all trajectories, skipped groups included. A spread near 0: nothing to learn.
- `policy/entropy`: nats a trained token. Towards 0: the policy has stopped exploring.
- `policy/ratio_*`: exp(trainer's logprob - sampler's). Far from 1: the samples are old, or the sampler disagrees.
- `policy/clip_fraction`: share of tokens that a ratio bound held back. Above 0.2: steps too large or samples too old.
- `policy/kl`: k3 to the base model, only with `kl_penalty_coef`. Growing without end: the model forgets its language.
- `policy/sampler_mismatch_abs`, `_mean`, `_k3`: trainer against sampler on comparable tokens, before the update. With
  the weights that sampled, the first is about 0.04 in bfloat16, 1e-6 in float32. More: stale samples or a wrong engine.
- `data/*`: counts. Skipped groups need harder or easier tasks; splits cost computation (the chat template rewrites
  history); non-comparable tokens are trained with ratio 1; too-long sequences are dropped.
- `time/*`: seconds of the call in the trainer, and tokens of computed sequences a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from art_sky.config import TrainConfig
from art_sky.errors import TrainFailed
from art_sky.training.losses import LOSSES, MAX_LOG_RATIO, k3, token_weights
from art_sky.training.model import Policy
from art_sky.training.rows import MicroBatch, plan
from art_sky.training.sequences import Batch, TokenSequence
from art_sky.training.state import TrainerState

Metrics = dict[str, float | None]
Progress = Callable[[int, int], None]  # micro-batches done, of how many; may raise to stop


def train(policy: Policy, state: TrainerState, batch: Batch, config: TrainConfig, progress: Progress) -> Metrics:
    """Makes one update of `state` in place and returns the metrics; `batch.reason()` must be None.

    Raises TrainFailed on a loss, gradient or weight that is not finite; `state` is then unusable.
    """
    began = time.monotonic()
    policy.load_adapter(state.adapter_config, state.adapter)
    parameters = policy.adapter()
    state.adapter = {k: p.detach() for k, p in parameters.items()}
    sequences = batch.sequences
    weights = token_weights(sequences, LOSSES[config.loss_fn].per)
    # Where the advantage is 0 only the KL has a gradient. Denominators count these sequences all the same.
    computed = [i for i, s in enumerate(sequences) if s.advantage != 0 or config.kl_penalty_coef > 0]
    chosen, chosen_weights = [sequences[i] for i in computed], weights[computed]
    micro_batches = plan(chosen, config.micro_batch_tokens, policy.can_share)
    seen: list[Observed] = []
    progress(0, len(micro_batches))
    for i, micro_batch in enumerate(micro_batches, start=1):
        seen.append(backward(policy, micro_batch, chosen, chosen_weights, config))
        progress(i, len(micro_batches))
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm).item()
    if not math.isfinite(grad_norm):
        raise _not_finite("gradient", grad_norm)
    _update(parameters, state, config)
    seconds = time.monotonic() - began
    return {
        **describe(batch),
        **_observed(seen, config),
        "loss": math.fsum(o.loss for o in seen),
        "grad_norm": grad_norm,
        "learning_rate": config.learning_rate,
        "data/sequences_without_advantage": float(sum(s.advantage == 0 for s in sequences)),
        "data/tokens_computed": float(sum(len(row) for m in micro_batches for row in m.rows)),
        "data/micro_batches": float(len(micro_batches)),
        "time/train_seconds": seconds,
        "time/tokens_per_second": sum(map(len, chosen)) / max(seconds, 1e-9),
    }


def describe(batch: Batch) -> Metrics:
    """The metrics that need no model, also of a batch that teaches nothing."""
    s = batch.sequences
    return {
        "reward": float(np.mean(batch.rewards)) if batch.rewards else None,
        "reward_std_dev": float(np.std(batch.rewards)) if batch.rewards else None,
        "data/groups": float(batch.groups),
        "data/groups_skipped": float(batch.skipped.total()),
        "data/trajectories": float(len(batch.rewards)),
        "data/trajectories_without_tokens": float(batch.without_tokens),
        "data/exceptions": float(batch.exceptions),
        "data/sequences": float(len(s)),
        "data/splits": float(batch.splits),
        "data/too_long_dropped": float(batch.too_long),
        "data/tokens_total": float(sum(map(len, s))),
        "data/tokens_trained": float(sum(q.trained for q in s)),
        "data/tokens_non_comparable": float(sum(int((q.sampled & ~q.comparable).sum()) for q in s)),
        "data/tokens_greedy": float(sum(int(q.greedy.sum()) for q in s)),
    }


@dataclass(frozen=True, eq=False)
class Observed:
    """What one micro-batch showed, a number a trained token: [N] each."""

    loss: float
    logp: Tensor
    sampler: Tensor
    comparable: Tensor
    entropy: Tensor
    cut: Tensor
    kl: Tensor | None


def backward(
    policy: Policy,
    micro_batch: MicroBatch,
    sequences: Sequence[TokenSequence],
    weights: np.typing.NDArray[np.float64],
    config: TrainConfig,
) -> Observed:
    """Adds the micro-batch's share of the batch's gradient to the adapter's `.grad`."""
    x = _Inputs(micro_batch, sequences, weights)
    loss = LOSSES[config.loss_fn]
    low = 1 - (loss.epsilon if config.epsilon is None else config.epsilon)
    high = 1 + (loss.epsilon_high if config.epsilon_high is None else config.epsilon_high)
    logp, entropy = policy.logprobs(*x.model_inputs())
    # Without a comparable logprob the sampler is taken to be the policy itself: ratio 1.
    old = torch.where(x.comparable, x.sampler, logp.detach())
    token_loss, cut = loss.token_loss(logp, old, x.advantage, low, high)
    kl = None
    if config.kl_penalty_coef > 0:
        with torch.no_grad(), policy.base_only():
            base, _ = policy.logprobs(*x.model_inputs())
        kl = k3(logp, base)
        token_loss = token_loss + config.kl_penalty_coef * kl
    total = (token_loss * x.weight).sum()
    value = total.item()
    if not math.isfinite(value):
        raise _not_finite("loss", value)
    total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return Observed(value, logp.detach(), x.sampler, x.comparable, entropy, cut, None if kl is None else kl.detach())


class _Inputs:
    """A micro-batch as tensors: [B, L] for the model, and [N] for its trained tokens."""

    def __init__(
        self, micro_batch: MicroBatch, sequences: Sequence[TokenSequence], weights: np.typing.NDArray[np.float64]
    ) -> None:
        count, length = len(micro_batch.rows), micro_batch.length
        ids = np.zeros((count, length), np.int64)
        positions = np.zeros((count, length), np.int64)
        # Padding sees itself: a softmax over nothing would be NaN.
        mask = (
            np.broadcast_to(np.eye(length, dtype=np.bool_), (count, length, length)).copy()
            if _masked(micro_batch)
            else None
        )
        where: list[tuple[np.typing.NDArray[np.int64], ...]] = []
        values: list[tuple[np.typing.NDArray[np.generic], ...]] = []
        for r, row in enumerate(micro_batch.rows):
            ids[r, : len(row)], positions[r, : len(row)] = row.ids, row.positions
            if mask is not None:
                mask[r, : len(row), : len(row)] = row.mask
            for member, place in zip(row.members, row.places, strict=True):
                s, at = sequences[member], np.flatnonzero(sequences[member].sampled)
                where.append((np.full(len(at), r), place[at - 1], s.ids[at].astype(np.int64)))
                constant = (np.full(len(at), v, np.float32) for v in (s.advantage, weights[member]))
                values.append((s.temperature[at], s.logprobs[at], s.comparable[at], *constant))
        self._ids, self._positions = torch.from_numpy(ids), torch.from_numpy(positions)
        self._mask = None if mask is None else torch.from_numpy(mask)
        self._rows, self._sources, self._targets = (
            torch.from_numpy(np.concatenate(c)) for c in zip(*where, strict=True)
        )
        self._temperature, self.sampler, self.comparable, self.advantage, self.weight = (
            torch.from_numpy(np.concatenate(c)) for c in zip(*values, strict=True)
        )

    def model_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        positions = None if self._mask is None else self._positions
        return self._ids, self._rows, self._sources, self._targets, self._temperature, positions, self._mask


def _masked(micro_batch: MicroBatch) -> bool:
    return micro_batch.rows[0].mask is not None


def _update(parameters: dict[str, torch.nn.Parameter], state: TrainerState, config: TrainConfig) -> None:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on float32 state."""
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=config.learning_rate,
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
            raise _not_finite(f"weight {name}", math.nan)


def _observed(seen: list[Observed], config: TrainConfig) -> Metrics:
    logp, sampler, comparable, entropy, cut = (
        torch.cat([getattr(o, name) for o in seen]) for name in ("logp", "sampler", "comparable", "entropy", "cut")
    )
    metrics: Metrics = {
        "policy/entropy": entropy.mean().item(),
        "policy/clip_fraction": cut.float().mean().item(),
    }
    if config.kl_penalty_coef > 0:
        metrics["policy/kl"] = torch.cat([o.kl for o in seen if o.kl is not None]).mean().item()
    if comparable.any():
        d = (logp - sampler)[comparable].double()
        ratio = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        p50, p95, p99 = (float(v) for v in np.percentile(ratio.numpy(), (50, 95, 99)))
        metrics |= {
            "policy/ratio_mean": ratio.mean().item(),
            "policy/ratio_p50": p50,
            "policy/ratio_p95": p95,
            "policy/ratio_p99": p99,
            "policy/ratio_max": ratio.max().item(),
            "policy/sampler_mismatch_abs": d.abs().mean().item(),
            "policy/sampler_mismatch_mean": d.mean().item(),
            "policy/sampler_mismatch_k3": (ratio - 1 - d).mean().item(),
        }
    return metrics


def _not_finite(what: str, value: float) -> TrainFailed:
    return TrainFailed(
        f"the {what} is {value}; nothing was committed. Lower learning_rate or kl_penalty_coef, or go back to an "
        f"earlier step"
    )
