"""A whole train call: updates, references, corrections, failures."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from training.make_batch import make_groups

from art_sky.config import LoRAConfig, TrainConfig
from art_sky.errors import TrainFailed
from art_sky.training import passes
from art_sky.training.model import Policy
from art_sky.training.rows import plan
from art_sky.training.sequences import build_batch
from art_sky.training.state import TrainerState
from art_sky.training.tokens import TokenTable
from art_sky.training.trainer import train

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy(tiny_model) -> Policy:
    return Policy(tiny_model, "float32")


@pytest.fixture(scope="module")
def groups(tiny_model) -> list:
    return make_groups(tiny_model, groups=4, size=4, turns=2, seed=9)


@pytest.fixture
def state(policy) -> TrainerState:
    config = policy.new_adapter(LoRAConfig(rank=4, seed=1), "tiny")
    generator = torch.Generator().manual_seed(3)
    weights = {k: p.detach() + torch.randn(p.shape, generator=generator) * 0.05 for k, p in policy.adapter().items()}
    return TrainerState.fresh(config, weights)


def run(policy, state, groups, reference=None, **options):
    """(metrics, state after the call); the given state is left alone."""
    config = TrainConfig(**{"learning_rate": 1e-3, **options})
    batch = build_batch(groups, config, vocab_size=policy.vocab_size, context_length=policy.context_length)
    after = copy.deepcopy(state)
    metrics = train(policy, after, batch, config, lambda *_: None, reference)
    return metrics, copy.deepcopy(after)  # its tensors are the model's own, which the next call changes


def distance(a: TrainerState, b: TrainerState) -> float:
    return max((a.adapter[k] - b.adapter[k]).abs().max().item() for k in a.adapter)


def test_epochs_and_minibatches_are_updates_of_their_own(policy, state, groups):
    metrics, after = run(policy, state, groups, epochs=2, minibatches=3, loss_fn="ppo")
    assert (metrics["updates"], after.updates) == (6.0, 6)
    _, one = run(policy, state, groups, loss_fn="ppo")
    _, two = run(policy, one, groups, loss_fn="ppo")
    _, epochs = run(policy, state, groups, epochs=2, loss_fn="ppo")
    assert distance(two, epochs) == 0  # the ratios refer to the sampler: a second epoch is a second call
    assert distance(two, after) > 0
    halves, _ = run(policy, state, groups, minibatches=99)
    assert halves["updates"] == 4  # one a group


def test_the_learning_rate_goes_on_where_the_model_stands(policy, state, groups):
    options = {"lr_schedule": "linear", "lr_schedule_updates": 4}
    first, after = run(policy, state, groups, minibatches=2, **options)
    second, _ = run(policy, after, groups, minibatches=2, **options)
    assert (first["learning_rate"], second["learning_rate"]) == (7.5e-4, 2.5e-4)


@pytest.mark.parametrize("loss_fn", ["cispo", "ppo", "dapo", "bnpo", "dr_grpo", "gspo"])
def test_the_budget_changes_no_gradient(loss_fn, policy, state, groups):
    """AdamW's first moment after one update is 0.1 of the gradient, without clipping."""
    options = {"loss_fn": loss_fn, "kl_penalty_coef": 0.1, "kl_bias_correction": True, "max_grad_norm": 1e9}
    options |= {"adam_beta1": 0.9}
    found = [run(policy, state, groups, micro_batch_tokens=budget, **options) for budget in (4096, 40, 16)]
    gradients = [torch.cat([m.flatten() for m in after.exp_avg.values()]) for _, after in found]
    assert gradients[0].norm() > 0
    for (metrics, _), gradient in zip(found[1:], gradients[1:], strict=True):
        assert ((gradient - gradients[0]).norm() / gradients[0].norm()).item() < 1e-5
        assert metrics["loss"] == pytest.approx(found[0][0]["loss"], abs=1e-6)
        assert metrics["data/micro_batches"] > found[0][0]["data/micro_batches"]
        assert metrics["data/tokens_computed"] == found[0][0]["data/tokens_computed"]


def test_the_reference_of_the_kl_can_be_a_step(policy, state, groups):
    own, _ = run(policy, state, groups, reference=state, kl_penalty_coef=0.1, kl_penalty_reference_step=0)
    assert own["policy/kl"] == pytest.approx(0, abs=1e-6)
    base, pulled = run(policy, state, groups, kl_penalty_coef=0.1)
    assert base["policy/kl"] > 1e-4
    config = TrainConfig()
    batch = build_batch(groups, config, vocab_size=policy.vocab_size, context_length=policy.context_length)
    table, segments = TokenTable.of(batch.sequences), plan(batch.sequences, 4096, True)
    policy.load_adapter(state.adapter_config, state.adapter)
    logp = passes.score(policy, segments, table, lambda: None)
    with policy.base_only():
        d = (passes.score(policy, segments, table, lambda: None) - logp).double()
    assert base["policy/kl"] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-3)
    _, free = run(policy, state, groups)
    assert distance(pulled, free) > 0


def test_a_kl_penalty_moves_the_policy_towards_the_reference(policy, state, groups):
    strong = {"kl_penalty_coef": 50.0, "learning_rate": 3e-3}
    for where in ("loss", "advantage"):
        before, after = run(policy, state, groups, kl_penalty_in=where, **strong)
        for _ in range(3):
            _, after = run(policy, after, groups, kl_penalty_in=where, **strong)
        now, _ = run(policy, after, groups, kl_penalty_in=where, **strong)
        assert now["policy/kl"] < 0.7 * before["policy/kl"], where


def test_the_importance_correction_is_seen_in_the_metrics(policy, state, groups):
    # The samples are the base model's, and the adapter is another policy.
    metrics, _ = run(policy, state, groups, importance_correction="token_truncate", importance_correction_bound=1.1)
    assert 0.5 < metrics["policy/correction_mean"] < 1.1
    assert metrics["policy/clip_fraction"] == 0  # ratios refer to the trainer itself: all are 1
    assert all(v is None or math.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("where", ["weights", "half-way"])
def test_after_a_failed_call_the_next_one_is_as_if_nothing_had_been(where, policy, state, groups):
    expected, after = run(policy, state, groups)
    broken = copy.deepcopy(state)
    if where == "weights":
        name = next(iter(broken.adapter))
        broken.adapter[name] = torch.full_like(broken.adapter[name], math.nan)
        with pytest.raises(TrainFailed, match="nothing was committed"):
            run(policy, broken, groups)
    else:

        def stop(done: int, of: int) -> None:
            if done:
                raise InterruptedError

        config = TrainConfig(micro_batch_tokens=40)
        batch = build_batch(groups, config, vocab_size=policy.vocab_size, context_length=policy.context_length)
        with pytest.raises(InterruptedError):
            train(policy, broken, batch, config, stop)
    metrics, again = run(policy, state, groups)
    assert distance(after, again) == 0
    assert metrics["loss"] == expected["loss"]
