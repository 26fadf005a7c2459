"""Losses and their weights against float64 NumPy, values and derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training.make_batch import make_choice, make_group, make_trajectory

from art_sky.config import TrainConfig
from art_sky.training.losses import LOSSES, Bounds, importance_weights, k3
from art_sky.training.objective import make_parts
from art_sky.training.sequences import build_batch

rng = np.random.default_rng(0)
LOGP, OLD, ADVANTAGE = rng.normal(-2, 1.5, 400), rng.normal(-2, 1.5, 400), rng.normal(0, 1, 400)
TRAJECTORY = np.sort(rng.integers(0, 30, 400))
MEMBERS = [np.flatnonzero(t == TRAJECTORY) for t in range(30)]


def mean_by_trajectory(values):
    count = torch.bincount(torch.from_numpy(TRAJECTORY), minlength=30)
    index = torch.from_numpy(TRAJECTORY)
    return (values.new_zeros(30).index_add_(0, index, values) / count)[index]


def cispo_reference(low, high):
    ratio = np.exp(LOGP - OLD)
    weight = np.clip(ratio, low, high)
    return -weight * ADVANTAGE * LOGP, -weight * ADVANTAGE, (ratio < low) | (ratio > high)


def clipped_reference(low, high):
    ratio, a = np.exp(LOGP - OLD), ADVANTAGE
    cut = ((a > 0) & (ratio > high)) | ((a < 0) & (ratio < low))
    return -np.minimum(ratio * a, np.clip(ratio, low, high) * a), np.where(cut, 0.0, -ratio * a), cut


def gspo_reference(low, high):
    value, slope, cut = np.zeros(400), np.zeros(400), np.zeros(400, bool)
    for at in MEMBERS:
        s, a = np.exp((LOGP - OLD)[at].mean()), ADVANTAGE[at]
        value[at] = -np.minimum(s * a, np.clip(s, low, high) * a)
        cut[at] = ((a > 0) & (s > high)) | ((a < 0) & (s < low))
        slope[at] = np.where(cut[at], 0.0, -s * a).mean()  # of the sum of the trajectory's losses
    return value, slope, cut


@pytest.mark.parametrize("name", LOSSES)
def test_value_gradient_and_clipping(name):
    loss = LOSSES[name]
    bounds = Bounds(1 - loss.epsilon, 1 + loss.epsilon_high)
    logp = torch.tensor(LOGP, dtype=torch.float32, requires_grad=True)
    old, a = (torch.tensor(x, dtype=torch.float32) for x in (OLD, ADVANTAGE))
    value, cut = loss.token_loss(logp, old, a, bounds, mean_by_trajectory)
    value.sum().backward()
    reference = {"cispo": cispo_reference, "gspo": gspo_reference}.get(name, clipped_reference)
    expected, slope, expected_cut = reference(bounds.low, bounds.high)
    np.testing.assert_allclose(value.detach(), expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(logp.grad, slope, rtol=2e-5, atol=2e-6)
    assert cut.tolist() == expected_cut.tolist()
    assert 0 < cut.float().mean() < 1


def test_default_bounds():
    found = {name: (1 - loss.epsilon, 1 + loss.epsilon_high) for name, loss in LOSSES.items()}
    assert found == {
        "cispo": (0.0, 5.0),
        "ppo": (0.8, 1.28),
        "dapo": (0.8, 1.28),
        "bnpo": (0.8, 1.2),
        "dr_grpo": (0.8, 1.2),
        "gspo": (1 - 3e-4, 1 + 4e-4),
    }


def test_a_huge_ratio_stays_finite():
    logp = torch.tensor([0.0, 0.0], requires_grad=True)
    for loss in LOSSES.values():
        old, a = torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0])
        value, _ = loss.token_loss(logp, old, a, Bounds(0.8, 1.28), lambda x: x)
        assert torch.isfinite(value).all()


def test_kl_estimator():
    logp = torch.tensor(LOGP, dtype=torch.float32, requires_grad=True)
    value = k3(logp, torch.tensor(OLD, dtype=torch.float32))
    value.sum().backward()
    d = OLD - LOGP
    np.testing.assert_allclose(value.detach(), np.exp(d) - d - 1, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logp.grad, 1 - np.exp(d), rtol=1e-4, atol=1e-5)
    assert (value >= 0).all()


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights(mode):
    difference = (LOGP + 2) / 10
    ratio = np.exp(difference)
    if mode.startswith("sequence"):
        for at in MEMBERS:
            ratio[at] = np.exp(difference[at].sum())
    expected = np.minimum(ratio, 1.1) if mode.endswith("truncate") else np.where(ratio > 1.1, 0, ratio)
    found = importance_weights(mode, 1.1, torch.from_numpy(difference), torch.from_numpy(TRAJECTORY))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert 0 < (ratio > 1.1).mean() < 1


def test_weights_over_all_histories_and_of_the_whole_batch():
    def trajectory(reward, *histories):
        first, *more = ([make_choice([1], [2] * n, [-1.0] * n)] for n in histories)
        return make_trajectory(first, reward, more)

    # The last trajectory has the advantage 0: it is left out, but it counts.
    one = make_group([trajectory(1.0, 3, 1), trajectory(0.0, 2), trajectory(0.5, 4)])
    two = make_group([trajectory(1.0, 1), trajectory(0.0, 1)])

    def weights(groups, **options):
        config = TrainConfig(**options)
        batch = build_batch(groups, config, vocab_size=9, context_length=9)
        parts = make_parts(batch.sequences, config, True)
        return [[part.weight[part.table.sequence == i].unique().item() for i in range(len(part.sequences))]
                for part in parts]  # fmt: skip

    def close(found, *expected):
        for f, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(f, e, rtol=1e-6)

    close(weights([one], loss_fn="cispo"), [1 / 10] * 3)
    close(weights([one], loss_fn="ppo"), [1 / 12, 1 / 12, 1 / 6])
    close(weights([one], loss_fn="gspo", normalize="token"), [1 / 10] * 3)
    close(weights([one], loss_fn="dr_grpo"), [1 / (3 * 1024)] * 3)
    close(weights([one], loss_fn="dr_grpo", normalize_tokens=50), [1 / 150] * 3)
    close(weights([one], normalize="constant", normalize_tokens=2), [1 / 6] * 3)
    close(weights([one, two], loss_fn="dapo", minibatches=2), [1 / 6] * 3, [1 / 6] * 2)
    close(weights([one, two], loss_fn="bnpo", minibatches=2), [1 / 10] * 3, [1 / 2] * 2)
    close(weights([one, two], loss_fn="ppo", minibatches=9), [1 / 12, 1 / 12, 1 / 6], [1 / 2] * 2)
