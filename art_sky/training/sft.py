"""Supervised fine-tuning: cross-entropy on the tokens of the batch, -logp, a mean over the tokens of an update.

Metrics: `loss` over the whole call, `loss_first` and `loss_last` of its first and last update, in nats a trained
token; `grad_norm` before clipping, the largest; `learning_rate` of the last update; `data/*` and `time/*` as in
`art_sky.training.trainer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from art_sky.config import SFTConfig
from art_sky.errors import InvalidConfig
from art_sky.schedules import create_lr_schedule
from art_sky.training import passes, trainer
from art_sky.training.model import Policy
from art_sky.training.objective import not_finite
from art_sky.training.optimizer import update
from art_sky.training.ranks import ALONE, Ranks
from art_sky.training.rows import Segment, plan
from art_sky.training.sequences import Batch, TokenSequence
from art_sky.training.state import TrainerState
from art_sky.training.tokens import TokenTable
from art_sky.training.trainer import Metrics, PassCount, Progress


def train(
    policy: Policy,
    state: TrainerState,
    batch: Batch,
    config: SFTConfig,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Metrics:
    """Makes the updates of one call in `state`, in place, and returns the metrics; `batch.reason()` must be None.

    Raises InvalidConfig for a list of learning rates that is not one for each update, TrainFailed on a loss, gradient
    or weight that is not finite; `state` is then unusable.
    """
    began = time.monotonic()
    parts = make_parts(batch, config, policy.not_packed is None, ranks)
    rates = learning_rates(config, len(parts))
    segments = [s for part in parts for top in part.segments for s in top.walk()]
    count = PassCount(progress, config.epochs * len(segments))
    policy.load_adapter(state.adapter_config, state.adapter)
    parameters = policy.adapter()
    state.adapter = {k: p.detach() for k, p in parameters.items()}
    for p in parameters.values():
        p.grad = None  # that of a call which failed half-way
    losses, norms = [], []
    for rate, part in zip(rates, [*parts] * config.epochs, strict=True):
        loss = CrossEntropy(len(part.table))
        passes.backward(policy, part.segments, part.table, loss, count)
        ranks.sum_gradients(parameters.values())
        norms.append(update(parameters, state, config, rate))
        state.sft_updates += 1
        losses.append(ranks.sum(torch.tensor([loss.loss], dtype=torch.float64)).item())
    ranks.check_equal(state.adapter)
    computed = ranks.sum(torch.tensor([sum(s.unpadded for s in segments), len(segments)], dtype=torch.float64)).tolist()
    seconds = time.monotonic() - began
    tokens = [len(p.table) for p in parts] * config.epochs
    return {
        **describe(batch),
        "loss": math.fsum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "grad_norm": max(norms),
        "learning_rate": rates[-1],
        "updates": float(len(losses)),
        "data/tokens_computed": computed[0],
        "data/micro_batches": computed[1],
        "data/prefix_tree": float(policy.not_packed is None),
        "time/train_seconds": seconds,
        "time/tokens_per_second": config.epochs * sum(map(len, batch.sequences)) / max(seconds, 1e-9),
    }


def describe(batch: Batch) -> Metrics:
    """The metrics that need no model, also of a batch that teaches nothing."""
    return {k: v for k, v in trainer.describe(batch).items() if k in _COUNTS}


_COUNTS = (
    "data/trajectories",
    "data/sequences",
    "data/splits",
    "data/too_long_dropped",
    "data/tokens_total",
    "data/tokens_trained",
)


class Part:
    """The trajectories of one update."""

    def __init__(self, sequences: Sequence[TokenSequence], config: SFTConfig, share: bool, ranks: Ranks) -> None:
        self.table = TokenTable.of(sequences)
        self.segments: list[Segment] = plan(sequences, config.micro_batch_tokens, share, ranks.rank, ranks.count)


def make_parts(batch: Batch, config: SFTConfig, share: bool, ranks: Ranks = ALONE) -> list[Part]:
    """`batch_size` trajectories each, in their order; one whose sequences were all dropped leaves its part smaller."""
    by_part: dict[int, list[TokenSequence]] = {}
    for s in batch.sequences:
        by_part.setdefault(s.trajectory // config.batch_size, []).append(s)
    return [Part(sequences, config, share, ranks) for sequences in by_part.values()]


def learning_rates(config: SFTConfig, parts: int) -> list[float]:
    """One for each update of the call."""
    updates = config.epochs * parts
    if isinstance(config.learning_rate, list):
        if len(config.learning_rate) != updates:
            raise InvalidConfig(
                f"{len(config.learning_rate)} learning rates for {updates} updates ({parts} batches of at most "
                f"{config.batch_size} trajectories in {config.epochs} epochs); give one for each, or a single number"
            )
        return config.learning_rate
    peak, end = config.learning_rate, config.lr_end_ratio or 0.0
    return create_lr_schedule(updates, peak, config.lr_schedule, min(config.warmup_updates, updates), end * peak)


class CrossEntropy:
    """The objective of `passes.backward` for `tokens` trained tokens; `loss` grows with each segment."""

    def __init__(self, tokens: int) -> None:
        self.loss, self._tokens = 0.0, tokens

    def __call__(self, tokens: Tensor, logp: Tensor, entropy: Tensor) -> Tensor:
        total = -logp.sum() / self._tokens
        value = total.item()
        if not torch.isfinite(total):
            raise not_finite("loss", value)
        self.loss += value
        return total
