"""Every loss and its gradient against TRL's own `_compute_loss` on the same batch.

The mapping of names is the table in `art_sky.training.losses`: ours `ppo` is TRL's `grpo`, `gspo` is its `grpo` with
sequence-level ratios, cispo's upper bound 1 + 4 is its `epsilon_high=5.0`, and `normalize_tokens` its
`max_completion_length`. What TRL lacks is checked against float64 in test_training_losses.py.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from art_sky.config import TrainConfig
from art_sky.training.advantages import advantages
from art_sky.training.objective import Part, PolicyObjective, make_parts, prepare
from art_sky.training.sequences import TokenSequence

warnings.filterwarnings("ignore", module="trl")

COMPLETION = 40
NAMES = {  # ours -> TRL's options
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "ppo": {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.2, "max_completion_length": 29},
    "gspo": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4,
    },
}  # fmt: skip
OURS = {"dr_grpo": {"normalize_tokens": 29}}
PENALTIES = {
    "no KL": ({}, {}),
    "KL": ({"kl_penalty_coef": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False}),
    "KL by ratio": (
        {"kl_penalty_coef": 0.1, "kl_bias_correction": True},
        {"beta": 0.1, "use_bias_correction_kl": True},
    ),
}


class Batch:
    """Groups of 5 and 7 trajectories with one history each, in which the environment speaks between two turns."""

    def __init__(self) -> None:
        draw = np.random.default_rng(4)
        self.sequences: list[TokenSequence] = []
        self.mask = torch.zeros(12, COMPLETION, dtype=torch.bool)
        self.sampler, self.start, self.reference = (
            torch.from_numpy(draw.normal(-2, 1, (12, COMPLETION))).float() for _ in range(3)
        )
        # Near the sampler, so that some sequence ratios are inside the narrow bounds and some outside.
        self.logp = self.sampler + 0.3 * torch.from_numpy(draw.normal(0, 1, (12, COMPLETION))).float()
        self.logp[::3] = self.sampler[::3] + 1e-4
        self.start = self.sampler + 0.1 * self.start
        rewards = draw.random(12)
        self.advantage = [*advantages(list(rewards[:5])), *advantages(list(rewards[5:]))]
        for i in range(12):
            n = int(draw.integers(6, COMPLETION))
            places = np.arange(n)
            sampled = (places < n // 2) | (places >= n // 2 + 2)
            self.mask[i, :n] = torch.from_numpy(sampled)
            ids = draw.integers(0, 50, 3 + n).astype(np.int32)
            logprobs = np.concatenate([np.full(3, np.nan), self.sampler[i, :n]]).astype(np.float32)
            yes, one = np.ones(3 + n, np.bool_), np.ones(3 + n, np.float32)
            where = np.concatenate([np.zeros(3, np.bool_), sampled])
            group = int(i >= 5)
            self.sequences.append(
                TokenSequence(ids, logprobs, where, one, yes, ~yes, group, i - 5 * group, self.advantage[i])
            )


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


@pytest.fixture(scope="module")
def make_trainer(tiny_model, tmp_path_factory):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    folder = str(tmp_path_factory.mktemp("trl"))

    class Trainer(GRPOTrainer):
        """TRL's, but that the logprobs are given. (1.15 makes them with a kernel that needs a GPU.)"""

        logprobs: torch.Tensor

        def _get_per_token_logps_and_entropies(self, *_, **__):
            return self.logprobs, torch.zeros_like(self.logprobs), None

    def make(**options) -> Trainer:
        args = GRPOConfig(
            folder, report_to=[], use_cpu=True, per_device_train_batch_size=12, num_generations=2,
            steps_per_generation=1, scale_rewards=True, **{"max_completion_length": COMPLETION, **options},
        )  # fmt: skip
        trainer = Trainer(
            model, lambda completions, **_: [0.0] * len(completions), args, Dataset.from_list([{"prompt": "a"}] * 12),
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return make


def theirs(trainer, batch: Batch, **inputs) -> tuple[float, torch.Tensor]:
    trainer.logprobs = batch.logp.clone().requires_grad_()
    ids = torch.ones(12, COMPLETION, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :3], "prompt_mask": ids[:, :3], "completion_ids": ids, "completion_mask": ids,
            "tool_mask": batch.mask.long(), "advantages": torch.tensor(batch.advantage),
            "num_items_in_batch": batch.mask.sum(), "old_per_token_logps": batch.sampler,
            "ref_per_token_logps": batch.reference, **inputs,
        },
    )  # fmt: skip
    loss.backward()
    return loss.item(), trainer.logprobs.grad[batch.mask]


def ours(batch: Batch, pieces: int = 1, **options) -> tuple[float, torch.Tensor, Part]:
    config = TrainConfig(**options)
    (part,) = make_parts(batch.sequences, config, share=False)
    if config.kl_penalty_coef:
        part.reference = batch.reference[batch.mask]
    prepare([part], config, lambda *_: batch.start[batch.mask])
    logp = batch.logp[batch.mask].requires_grad_()
    if pieces > 1:  # as if each segment had every n-th token, and no trajectory as a whole
        part.segments = [part.segments[0], part.segments[0]]
    objective = PolicyObjective(part, config, lambda *_: logp.detach())
    for i in range(pieces):
        tokens = torch.arange(i, len(logp), pieces)
        objective(tokens, logp[tokens], torch.zeros(len(tokens))).backward()
    return objective.loss, logp.grad, part


def assert_same(found, expected) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert ((found[1] - expected[1]).norm() / expected[1].norm()).item() < 1e-5
    assert expected[1].norm() > 0


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_equal_trls(name, penalty, batch, make_trainer):
    own, other = PENALTIES[penalty]
    expected = theirs(make_trainer(**NAMES[name], **other), batch)
    for pieces in (1, 3):
        assert_same(ours(batch, pieces, loss_fn=name, **OURS.get(name, {}), **own), expected)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("name", ["cispo", "ppo"])
def test_importance_correction_equals_trls(name, mode, batch, make_trainer):
    trainer = make_trainer(**NAMES[name], beta=0.1, use_bias_correction_kl=False)
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    difference = (batch.start - batch.sampler) * batch.mask
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    ratio = ratio.clamp(max=1.05) if mode.endswith("truncate") else ratio.masked_fill(ratio > 1.05, 0.0)
    assert (ratio < 1.05).float().mean() > 0
    expected = theirs(trainer, batch, importance_sampling_ratio=ratio, old_per_token_logps=batch.start)
    correction = {"importance_correction": mode, "importance_correction_bound": 1.05}
    assert_same(ours(batch, loss_fn=name, kl_penalty_coef=0.1, **correction), expected)


def test_kl_as_advantage_penalty(batch):
    """Which TRL lacks: the advantage of each token, less the centred difference to the reference."""
    *_, part = ours(batch, kl_penalty_coef=0.3, kl_penalty_in="advantage")
    kl = (batch.start - batch.reference)[batch.mask].double()
    expected = part.table.advantage.double() + 0.3 * (kl.mean() - kl)
    torch.testing.assert_close(part.advantage.double(), expected, rtol=1e-5, atol=1e-6)
    assert_same(
        ours(batch, kl_penalty_coef=0.3, kl_penalty_in="advantage"),
        cispo_reference(batch, part.advantage.double()),
    )


def cispo_reference(batch: Batch, advantage: torch.Tensor) -> tuple[float, torch.Tensor]:
    logp = batch.logp[batch.mask].double().requires_grad_()
    ratio = (logp - batch.sampler[batch.mask].double()).exp().clamp(0, 5).detach()
    loss = -(ratio * advantage * logp).mean()
    loss.backward()
    return loss.item(), logp.grad.float()
