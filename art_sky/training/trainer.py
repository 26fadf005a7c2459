"""One train call: a batch of groups, its optimizer updates, the metrics of both.

docs/metrics.md says what the metrics are and what a bad value means.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from art_sky.config import TrainConfig
from art_sky.training import passes
from art_sky.training.losses import bounded
from art_sky.training.model import Policy
from art_sky.training.objective import Observed, PolicyObjective, make_parts, needs_own_logprobs, prepare
from art_sky.training.optimizer import learning_rate, update
from art_sky.training.ranks import ALONE, Ranks
from art_sky.training.rows import Segment
from art_sky.training.sequences import Batch
from art_sky.training.state import TrainerState
from art_sky.training.tokens import TokenTable

Metrics = dict[str, float | None]
Progress = Callable[[int, int], None]  # passes done, of about how many; may raise to stop


def train(
    policy: Policy,
    state: TrainerState,
    batch: Batch,
    config: TrainConfig,
    progress: Progress,
    reference: TrainerState | None = None,
    ranks: Ranks = ALONE,
) -> Metrics:
    """Makes the updates of one call in `state`, in place, and returns the metrics; `batch.reason()` must be None.

    `reference` is the step of `kl_penalty_reference_step`. Raises TrainFailed on a loss, gradient or weight that is
    not finite; `state` is then unusable. Of several `ranks`, all are called alike and come to the same state.
    """
    began = time.monotonic()
    parts = make_parts(batch.sequences, config, share=policy.not_packed is None, ranks=ranks)
    segments = [s for part in parts for top in part.segments for s in top.walk()]
    scorings = (config.kl_penalty_coef > 0) + needs_own_logprobs(config)
    count = PassCount(progress, (config.epochs + scorings) * len(segments))

    def score(segments: Sequence[Segment], table: TokenTable) -> Tensor:
        found = passes.score(policy, segments, table, count)
        return found if ranks.count == 1 else ranks.sum(found.nan_to_num(0.0))

    if reference is not None:
        policy.load_adapter(reference.adapter_config, reference.adapter)
        for part in parts:
            part.reference = score(part.segments, part.table)
    policy.load_adapter(state.adapter_config, state.adapter)
    if reference is None and config.kl_penalty_coef > 0:
        with policy.base_only():
            for part in parts:
                part.reference = score(part.segments, part.table)
    prepare(parts, config, score)
    parameters = policy.adapter()
    state.adapter = {k: p.detach() for k, p in parameters.items()}
    for p in parameters.values():
        p.grad = None  # that of a call which failed half-way
    losses, norms, rates = [], [], []
    seen: list[list[Observed]] = []
    for _ in range(config.epochs):
        seen.append([])
        for part in parts:
            objective = PolicyObjective(part, config, score)
            passes.backward(policy, part.segments, part.table, objective, count)
            ranks.sum_gradients(parameters.values())
            rates.append(learning_rate(config, state))
            norms.append(update(parameters, state, config, rates[-1]))
            loss, observed = objective.gather(ranks)
            losses.append(loss)
            seen[-1] += observed
    ranks.check_equal(state.adapter)
    computed = ranks.sum(torch.tensor([sum(s.unpadded for s in segments), len(segments)], dtype=torch.float64)).tolist()
    seconds = time.monotonic() - began
    return {
        **describe(batch),
        **_observed(seen),
        "loss": math.fsum(losses) / len(losses),
        "grad_norm": max(norms),
        "learning_rate": rates[-1],
        "updates": float(len(losses)),
        "data/sequences_without_advantage": float(sum(s.advantage == 0 for s in batch.sequences)),
        "data/tokens_computed": computed[0],
        "data/micro_batches": computed[1],
        "data/prefix_tree": float(policy.not_packed is None),
        "time/train_seconds": seconds,
        "time/tokens_per_second": config.epochs * sum(len(s) for p in parts for s in p.sequences) / max(seconds, 1e-9),
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
        "data/cut_off_masked": float(batch.cut_off),
        "data/tokens_total": float(sum(map(len, s))),
        "data/tokens_trained": float(sum(q.trained for q in s)),
        "data/tokens_non_comparable": float(sum(int((q.sampled & ~q.comparable).sum()) for q in s)),
        "data/tokens_greedy": float(sum(int(q.greedy.sum()) for q in s)),
    }


class PassCount:
    """Counts passes for the progress of a call."""

    def __init__(self, progress: Progress, of: int) -> None:
        self._progress, self._done, self._of = progress, 0, of
        progress(0, of)

    def __call__(self) -> None:
        self._done += 1
        self._of = max(self._of, self._done)
        self._progress(self._done, self._of)


def _observed(epochs: list[list[Observed]]) -> Metrics:
    every = [o for epoch in epochs for o in epoch]
    metrics: Metrics = {
        "policy/entropy": _all(every, lambda o: o.entropy).mean().item(),
        "policy/clip_fraction": _all(every, lambda o: o.cut).float().mean().item(),
    }
    if every[0].kl is not None:
        metrics["policy/kl"] = torch.cat([o.kl for o in every if o.kl is not None]).mean().item()
    corrections = [o.part.correction[o.tokens] for o in epochs[0] if o.part.correction is not None]
    if corrections:
        metrics["policy/correction_mean"] = torch.cat(corrections).mean().item()
    ratio = bounded(_differences(every)).exp()
    first = _differences(epochs[0])
    if len(ratio):
        p50, p95, p99 = (float(v) for v in np.percentile(ratio.numpy(), (50, 95, 99)))
        metrics |= {
            "policy/ratio_mean": ratio.mean().item(),
            "policy/ratio_p50": p50,
            "policy/ratio_p95": p95,
            "policy/ratio_p99": p99,
            "policy/ratio_max": ratio.max().item(),
            "policy/sampler_mismatch_abs": first.abs().mean().item(),
            "policy/sampler_mismatch_mean": first.mean().item(),
            "policy/sampler_mismatch_k3": (bounded(first).exp() - 1 - first).mean().item(),
        }
    return metrics


def _all(seen: list[Observed], get: Callable[[Observed], Tensor]) -> Tensor:
    return torch.cat([get(o) for o in seen])


def _differences(seen: list[Observed]) -> Tensor:
    """The trainer's logprobs less the sampler's, of comparable tokens, in float64."""
    return _all(seen, lambda o: (o.logp - o.part.table.sampler[o.tokens])[o.part.table.comparable[o.tokens]]).double()
