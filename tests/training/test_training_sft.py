"""Supervised fine-tuning on tiny models: its gradient against plain autograd, its schedule, and resuming."""

from __future__ import annotations

import copy
import json

import peft
import pytest
import torch
from training.make_batch import make_group, make_groups, make_trajectory, sample
from transformers import AutoModelForCausalLM

from art_sky.config import LoRAConfig, SFTConfig, TrainConfig
from art_sky.errors import InvalidConfig, SequenceTooLong, TrainFailed
from art_sky.schedules import create_lr_schedule
from art_sky.training import sft
from art_sky.training import state as files
from art_sky.training.model import Policy
from art_sky.training.optimizer import learning_rate
from art_sky.training.sequences import Batch, build_examples
from art_sky.training.state import TrainerState


@pytest.fixture
def policy(tiny_model) -> Policy:
    torch.set_num_threads(1)
    return Policy(tiny_model, "float32")


def fresh(policy: Policy) -> TrainerState:
    return TrainerState.fresh(
        policy.new_adapter(LoRAConfig(rank=4), "tiny"),
        {k: p.detach().clone() for k, p in policy.adapter().items()},
    )


def examples(policy: Policy, groups: list, config: SFTConfig) -> Batch:
    return build_examples(groups, config, vocab_size=policy.vocab_size, context_length=policy.context_length)


def some_groups(model, seed: int = 0) -> list:
    groups = make_groups(model, groups=2, size=3, turns=2, seed=seed)
    alone = sample(model, [5, 6, 7], 4, 0.0, 1)
    alone["sampling"] = {"temperature": 1.0, "comparable": False}
    return [*groups, make_group([make_trajectory([alone], 0.0)])]


def test_the_update_is_adams_on_the_mean_cross_entropy(tiny_model, policy, tmp_path):
    config = SFTConfig(learning_rate=1e-2, batch_size=100, micro_batch_tokens=16, max_grad_norm=1e9)
    state = fresh(policy)
    for i, name in enumerate(state.adapter):  # B is 0 at the start, which would leave A without a gradient
        state.adapter[name] = state.adapter[name] + 0.02 * torch.randn(
            state.adapter[name].shape, generator=torch.Generator().manual_seed(i)
        )
    files.save(state, tmp_path)
    batch = examples(policy, some_groups(tiny_model), config)
    lm = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), tmp_path / "adapter", is_trainable=True
    ).eval()
    total = torch.zeros(())
    for s in batch.sequences:
        labels = torch.where(torch.tensor(s.sampled), torch.tensor(s.ids, dtype=torch.long), -100)
        logits = lm(input_ids=torch.tensor(s.ids, dtype=torch.long)[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
    mean = total / sum(s.trained for s in batch.sequences)
    mean.backward()
    expected = {n.replace(".default.", "."): p for n, p in lm.named_parameters() if p.requires_grad}
    torch.optim.AdamW(expected.values(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0).step()

    metrics = sft.train(policy, state, batch, config, lambda *_: None)
    assert metrics["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert metrics["data/tokens_computed"] < metrics["data/tokens_total"]  # shared beginnings
    assert metrics["data/trajectories"] == 7
    norm = torch.cat([p.grad.flatten() for p in expected.values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    # Adam's first step is about the gradient's sign, so only first moments tell the gradients themselves.
    for name, parameter in expected.items():
        torch.testing.assert_close(state.exp_avg[name], 0.1 * parameter.grad, rtol=1e-3, atol=1e-6)


def test_loss_falls_over_epochs_and_batches_are_updates(tiny_model, policy):
    config = SFTConfig(learning_rate=3e-3, batch_size=3, epochs=8)
    state = fresh(policy)
    seen = []
    metrics = sft.train(
        policy, state, examples(policy, some_groups(tiny_model), config), config, lambda *p: seen.append(p)
    )
    assert (metrics["updates"], state.updates, state.sft_updates) == (24, 24, 24)
    assert metrics["loss_last"] < metrics["loss"] < metrics["loss_first"] - 0.5
    assert seen[-1][0] == seen[-1][1] == 8 * metrics["data/micro_batches"]


def test_a_call_in_two_equals_one_bit_for_bit(tiny_model, policy, tmp_path):
    groups = some_groups(tiny_model)
    rates = create_lr_schedule(6, 1e-2, "cosine", warmup_steps=2)
    whole = SFTConfig(learning_rate=rates, batch_size=3, epochs=2)
    state = fresh(policy)
    start = copy.deepcopy(state)
    sft.train(policy, state, examples(policy, groups, whole), whole, lambda *_: None)
    parts = start
    for i in (0, 1):
        files.save(parts, tmp_path / str(i))
        parts = files.load(tmp_path / str(i))
        half = SFTConfig(learning_rate=rates[3 * i : 3 * i + 3], batch_size=3)
        sft.train(policy, parts, examples(policy, groups, half), half, lambda *_: None)
    files.save(state, tmp_path / "a")
    files.save(parts, tmp_path / "b")
    for name in (files.ADAPTER, files.OPTIMIZER, files.STATE):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert json.loads((tmp_path / "a" / files.STATE).read_text())["sft_updates"] == 6


def test_schedules(tiny_model, policy):
    assert create_lr_schedule(4, 1.0) == [1.0, 0.75, 0.5, 0.25]
    assert create_lr_schedule(4, 1.0, "linear", 2, 0.5) == [0.5, 1.0, 1.0, 0.75]
    config = SFTConfig(
        learning_rate=1.0, batch_size=2, epochs=2, lr_schedule="linear", warmup_updates=2, lr_end_ratio=0.5
    )
    assert sft.learning_rates(config, 2) == [0.5, 1.0, 1.0, 0.75]
    with pytest.raises(InvalidConfig, match="3 learning rates for 4 updates"):
        sft.learning_rates(SFTConfig(learning_rate=[1.0] * 3, epochs=2), 2)
    # RL's schedule begins where RL begins.
    state = fresh(policy)
    rl = TrainConfig(learning_rate=1.0, lr_schedule="linear", lr_schedule_updates=10)
    state.updates = state.sft_updates = 40
    assert learning_rate(rl, state) == 1.0
    state.updates += 5
    assert learning_rate(rl, state) == 0.5


def test_bad_input(tiny_model, policy):
    groups = some_groups(tiny_model)
    with pytest.raises(SequenceTooLong, match="group 0, trajectory 0"):
        examples(policy, groups, SFTConfig(max_sequence_tokens=4, too_long="refuse"))
    none_left = examples(policy, groups, SFTConfig(max_sequence_tokens=4))
    assert none_left.reason() == "nothing to train on: 7 x sequence too long"
    for values, message in (
        ({"learning_rate": 0.0}, "above 0"),
        ({"learning_rate": [1e-3], "warmup_updates": 1}, "is a schedule"),
        ({"lr_end_ratio": 0.1}, "does nothing"),
        ({"loss_fn": "ppo"}, "unknown option 'loss_fn'"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            SFTConfig.parse(values)
    state = fresh(policy)
    state.adapter = {k: v * float("nan") for k, v in state.adapter.items()}
    with pytest.raises(TrainFailed, match="loss is nan"):
        sft.train(policy, state, examples(policy, groups, SFTConfig()), SFTConfig(), lambda *_: None)
