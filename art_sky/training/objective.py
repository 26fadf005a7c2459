"""What a policy update minimises: a loss of `losses.py` with its options, for a part of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from art_sky.config import TrainConfig
from art_sky.errors import TrainFailed
from art_sky.training.losses import (
    LOSSES,
    Bounds,
    Loss,
    Mean,
    bounded,
    importance_weights,
    k3,
    sum_by,
    token_weights,
)
from art_sky.training.ranks import ALONE, Ranks
from art_sky.training.rows import Segment, plan
from art_sky.training.sequences import TokenSequence
from art_sky.training.tokens import TokenTable

Score = Callable[[Sequence[Segment], TokenTable], Tensor]  # [N] logprobs of all trained tokens, without gradient


@dataclass(frozen=True)
class Totals:
    """Denominators, of all sequences, also of those whose advantage is 0."""

    tokens: float
    trajectories: float

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> Totals:
        return cls(sum(s.trained for s in sequences), len({(s.group, s.trajectory) for s in sequences}))


@dataclass(eq=False)
class Part:
    """What one update learns from: the sequences that have a gradient, their plan, and [N] of each trained token."""

    sequences: list[TokenSequence]
    table: TokenTable
    segments: list[Segment]
    weight: Tensor
    advantage: Tensor
    old: Tensor | None = None  # the trainer's logprobs before the call, where ratios refer to them
    correction: Tensor | None = None  # importance weights
    reference: Tensor | None = None  # logprobs under the KL penalty's reference
    ranks: int = 1  # processes that have a share of the segments each


@dataclass(frozen=True, eq=False)
class Observed:
    """What one segment showed, [n] each. `tokens` are numbers in the part's table."""

    part: Part
    tokens: Tensor
    logp: Tensor
    entropy: Tensor
    cut: Tensor
    kl: Tensor | None


def make_parts(
    sequences: Sequence[TokenSequence], config: TrainConfig, share: bool, ranks: Ranks = ALONE
) -> list[Part]:
    """The batch's groups in `minibatches` parts, or as many as there are groups; empty ones are left out."""
    groups = list(dict.fromkeys(s.group for s in sequences))
    count = min(config.minibatches, len(groups))
    whole = Totals.of(sequences)
    per = config.normalize or LOSSES[config.loss_fn].per
    parts = []
    for i in range(count):
        chosen = set(groups[len(groups) * i // count : len(groups) * (i + 1) // count])
        members = [s for s in sequences if s.group in chosen]
        # Where the advantage is 0 only the KL has a gradient.
        computed = [s for s in members if s.advantage != 0 or config.kl_penalty_coef > 0]
        if not computed:
            continue
        own = Totals.of(members)
        tokens = own.tokens if per == "part_token" else whole.tokens / count
        table = TokenTable.of(computed)
        weight = token_weights(per, table.trajectory, tokens, own.trajectories, config.normalize_tokens or 1024)
        segments = plan(computed, config.micro_batch_tokens, share, ranks.rank, ranks.count)
        parts.append(Part(computed, table, segments, weight.float(), table.advantage, ranks=ranks.count))
    return parts


def needs_own_logprobs(config: TrainConfig) -> bool:
    return config.importance_correction is not None or config.kl_penalty_in == "advantage"


def prepare(parts: Sequence[Part], config: TrainConfig, score: Score) -> None:
    """Fills in what refers to the trainer's own logprobs before the call; the references must be there."""
    if not needs_own_logprobs(config):
        return
    found = [score(part.segments, part.table) for part in parts]
    if config.kl_penalty_in == "advantage":
        # Centred over the batch, so that it moves no more than the differences between tokens; as ART does it.
        kl = [logp - part.reference for logp, part in zip(found, parts, strict=True) if part.reference is not None]
        center = torch.cat(kl).mean()
        for part, own in zip(parts, kl, strict=True):
            part.advantage = part.advantage + config.kl_penalty_coef * (center - own)
    if config.importance_correction is not None:
        for part, logp in zip(parts, found, strict=True):
            ratio = torch.where(part.table.comparable, logp - part.table.sampler, 0.0)
            part.old = logp
            part.correction = importance_weights(
                config.importance_correction, config.importance_correction_bound or 3.0, ratio, part.table.trajectory
            )


class PolicyObjective:
    """The objective of `passes.backward` for one part. `loss` and `seen` grow with each segment.

    Raises TrainFailed on a loss that is not finite.
    """

    def __init__(self, part: Part, config: TrainConfig, score: Score) -> None:
        self.loss, self.seen = 0.0, list[Observed]()
        self._part, self._config = part, config
        self._loss: Loss = LOSSES[config.loss_fn]
        epsilon = self._loss.epsilon if config.epsilon is None else config.epsilon
        epsilon_high = self._loss.epsilon_high if config.epsilon_high is None else config.epsilon_high
        self._bounds = Bounds(1 - epsilon, 1 + epsilon_high)
        self._slopes: Tensor | None = None
        if self._loss.by_sequence and (part.ranks > 1 or _spread(part)):
            # The ratio of a trajectory takes all its tokens, and no segment has them: its derivative by each logprob
            # is found first, and the segments then need only multiply.
            logp = score(part.segments, part.table).requires_grad_()
            total, self._cut, self._kl = self._evaluate(torch.arange(len(logp)), logp)
            (self._slopes,) = torch.autograd.grad(total, logp)
            self._add(total / part.ranks)  # each has the whole

    def __call__(self, tokens: Tensor, logp: Tensor, entropy: Tensor) -> Tensor:
        if self._slopes is None:
            total, cut, kl = self._evaluate(tokens, logp)
            self._add(total)
        else:
            total = (self._slopes[tokens] * logp).sum()
            cut, kl = self._cut[tokens], None if self._kl is None else self._kl[tokens]
        self.seen.append(Observed(self._part, tokens, logp.detach(), entropy, cut, kl))
        return total

    def gather(self, ranks: Ranks) -> tuple[float, list[Observed]]:
        """The loss, and what was seen, of all processes."""
        if ranks.count == 1:
            return self.loss, self.seen
        found = torch.zeros(4, len(self._part.table))
        for o in self.seen:
            found[:3, o.tokens] = torch.stack([o.logp, o.entropy, o.cut.float()])
            if o.kl is not None:
                found[3, o.tokens] = o.kl
        logp, entropy, cut, kl = ranks.sum(found)
        tokens, with_kl = torch.arange(len(self._part.table)), self._part.reference is not None
        everything = Observed(self._part, tokens, logp, entropy, cut > 0.5, kl if with_kl else None)
        return ranks.sum(torch.tensor([self.loss], dtype=torch.float64)).item(), [everything]

    def _evaluate(self, tokens: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The share of the loss, [n] whether a bound cut, [n] KL."""
        part, config, table = self._part, self._config, self._part.table
        old = (table.sampler if part.old is None else part.old)[tokens]
        # Without a comparable logprob the token is taken to be sampled from the policy itself: ratio 1.
        old = torch.where(table.comparable[tokens], old, logp.detach())
        mean = _mean_by(table.trajectory[tokens])
        loss, cut = self._loss.token_loss(logp, old, part.advantage[tokens], self._bounds, mean)
        if part.correction is not None:
            loss = loss * part.correction[tokens]
        kl = None
        if part.reference is not None:
            kl = k3(logp, part.reference[tokens])
            if config.kl_penalty_in != "advantage":
                # The ratio corrects for samples that an older policy drew: DeepSeek-V3.2 (2025), arXiv:2512.02556.
                log_ratio = mean(logp - old) if self._loss.by_sequence else logp - old
                ratio = bounded(log_ratio).exp() if config.kl_bias_correction else 1.0
                loss = loss + config.kl_penalty_coef * kl * ratio
            kl = kl.detach()
        return (loss * part.weight[tokens]).sum(), cut, kl

    def _add(self, total: Tensor) -> None:
        value = total.item()
        if not math.isfinite(value):
            raise not_finite("loss", value)
        self.loss += value


def _mean_by(trajectory: Tensor) -> Mean:
    count = sum_by(torch.ones(len(trajectory)), trajectory)
    return lambda values: (sum_by(values, trajectory) / count)[trajectory]


def _spread(part: Part) -> bool:
    """Whether some trajectory has trained tokens in more than one segment."""
    seen: set[int] = set()
    for top in part.segments:
        for segment in top.walk():
            here = set(part.table.trajectory[torch.from_numpy(segment.tokens)].tolist())
            if seen & here:
                return True
            seen |= here
    return False


def not_finite(what: str, value: float) -> TrainFailed:
    return TrainFailed(
        f"the {what} is {value}; nothing was committed. Lower learning_rate or kl_penalty_coef, or go back to an "
        f"earlier step"
    )
