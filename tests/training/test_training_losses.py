"""Losses against float64 NumPy, values and derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training.make_batch import make_choice, make_group, make_trajectory

from art_sky.training.losses import LOSSES, k3, token_weights
from art_sky.training.sequences import build_batch

rng = np.random.default_rng(0)
LOGP, OLD, ADVANTAGE = rng.normal(-2, 1.5, 400), rng.normal(-2, 1.5, 400), rng.normal(0, 1, 400)


def cispo_reference(logp, old, a, low, high):
    ratio = np.exp(logp - old)
    weight = np.clip(ratio, low, high)
    return -weight * a * logp, -weight * a, (ratio < low) | (ratio > high)


def ppo_reference(logp, old, a, low, high):
    ratio = np.exp(logp - old)
    cut = ((a > 0) & (ratio > high)) | ((a < 0) & (ratio < low))
    return -np.minimum(ratio * a, np.clip(ratio, low, high) * a), np.where(cut, 0.0, -ratio * a), cut


@pytest.mark.parametrize(("name", "reference"), [("cispo", cispo_reference), ("ppo", ppo_reference)])
def test_value_gradient_and_clipping(name, reference):
    loss = LOSSES[name]
    low, high = 1 - loss.epsilon, 1 + loss.epsilon_high
    logp = torch.tensor(LOGP, dtype=torch.float32, requires_grad=True)
    old, a = (torch.tensor(x, dtype=torch.float32) for x in (OLD, ADVANTAGE))
    value, cut = loss.token_loss(logp, old, a, low, high)
    value.sum().backward()
    expected, slope, expected_cut = reference(LOGP, OLD, ADVANTAGE, low, high)
    np.testing.assert_allclose(value.detach(), expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(logp.grad, slope, rtol=2e-5, atol=1e-6)
    assert cut.tolist() == expected_cut.tolist()
    assert 0 < cut.float().mean() < 1


def test_default_bounds():
    assert (1 - LOSSES["cispo"].epsilon, 1 + LOSSES["cispo"].epsilon_high) == (0.0, 5.0)
    assert (LOSSES["ppo"].epsilon, LOSSES["ppo"].epsilon_high) == (0.2, 0.28)


def test_a_huge_ratio_stays_finite():
    logp = torch.tensor([0.0, 0.0], requires_grad=True)
    for loss in LOSSES.values():
        value, _ = loss.token_loss(logp, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]), 0.8, 1.28)
        assert torch.isfinite(value).all()


def test_kl_estimator():
    logp = torch.tensor(LOGP, dtype=torch.float32, requires_grad=True)
    value = k3(logp, torch.tensor(OLD, dtype=torch.float32))
    value.sum().backward()
    d = OLD - LOGP
    np.testing.assert_allclose(value.detach(), np.exp(d) - d - 1, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logp.grad, 1 - np.exp(d), rtol=1e-4, atol=1e-5)
    assert (value >= 0).all()


def test_weights_by_token_and_by_trajectory_over_all_histories():
    def choice(n):
        return make_choice([1], [2] * n, [-1.0] * n)

    groups = [make_group([make_trajectory([choice(3)], 1.0, [[choice(1)]]), make_trajectory([choice(2)], 0.0)])]
    sequences = build_batch(groups, scale_rewards=True, vocab_size=9, context_length=9).sequences
    assert [s.trained for s in sequences] == [3, 1, 2]
    np.testing.assert_allclose(token_weights(sequences, "token"), [1 / 6] * 3)
    np.testing.assert_allclose(token_weights(sequences, "trajectory"), [1 / 8, 1 / 8, 1 / 4])
