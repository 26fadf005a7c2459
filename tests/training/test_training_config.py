"""Options of a train call: what contradicts, or would do nothing, is refused by name."""

from __future__ import annotations

import math

import pytest

from art_sky.config import TrainConfig
from art_sky.errors import InvalidConfig
from art_sky.training.optimizer import learning_rate
from art_sky.training.state import TrainerState


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalize_tokens": 5}, "normalize_tokens does nothing without loss_fn='dr_grpo'"),
        ({"loss_fn": "dr_grpo", "normalize": "token", "normalize_tokens": 5}, "normalize_tokens does nothing"),
        ({"kl_penalty_in": "loss"}, "kl_penalty_in does nothing without kl_penalty_coef"),
        ({"kl_penalty_reference_step": 0}, "kl_penalty_reference_step does nothing without kl_penalty_coef"),
        ({"kl_bias_correction": True}, "kl_bias_correction does nothing"),
        ({"kl_penalty_coef": 0.1, "kl_penalty_in": "advantage", "kl_bias_correction": True}, "penalty in the loss"),
        ({"importance_correction_bound": 2.0}, "importance_correction_bound does nothing"),
        ({"lr_schedule_updates": 5}, "lr_schedule_updates does nothing without lr_schedule"),
        ({"lr_end_ratio": 0.1}, "lr_end_ratio does nothing"),
        ({"lr_schedule": "cosine"}, "needs lr_schedule_updates"),
        ({"lr_schedule": "linear", "lr_schedule_updates": 5, "warmup_updates": 5}, "less than lr_schedule_updates"),
        ({"loss_fn": "grpo"}, "loss_fn: .*'cispo'"),
        ({"epochs": 0}, "epochs"),
        ({"minibatches": 0}, "minibatches"),
        ({"importance_correction": "truncate"}, "importance_correction"),
        ({"scale_rewards": "std"}, "scale_rewards"),
        ({"micro_batch": 1}, "unknown option 'micro_batch'"),
        ({"beta": 0.1, "kl_penalty_coef": 0.1}, "beta and kl_penalty_coef are the same option"),
    ],
)
def test_what_would_be_ignored_or_contradicts_is_refused(options, words):
    with pytest.raises(InvalidConfig, match=words):
        TrainConfig.parse(options)


def test_other_spellings():
    assert TrainConfig(beta=0.1).kl_penalty_coef == 0.1
    assert [TrainConfig(scale_rewards=v).scale_rewards for v in (True, False)] == ["group", "none"]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_config_that_was_written_down_is_read_again(schedule):
    end = {} if schedule == "constant" else {"lr_schedule_updates": 9, "lr_end_ratio": 0.0}
    config = TrainConfig(lr_schedule=schedule, loss_fn="dr_grpo", kl_penalty_coef=0.1, **end)
    assert TrainConfig(**config.model_dump()) == config


def test_learning_rates():
    def rate(config: TrainConfig, updates: int, sft_updates: int = 0) -> float:
        return learning_rate(config, TrainerState({}, {}, {}, {}, updates, sft_updates))

    constant = TrainConfig(learning_rate=2.0, warmup_updates=4)
    assert [rate(constant, u) for u in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    options = {"learning_rate": 2.0, "warmup_updates": 2, "lr_schedule_updates": 10, "lr_end_ratio": 0.25}
    linear = TrainConfig(lr_schedule="linear", **options)
    cosine = TrainConfig(lr_schedule="cosine", **options)
    assert [rate(linear, u) for u in (0, 2, 6, 10, 50)] == [1.0, 2.0, 1.25, 0.5, 0.5]
    assert [rate(cosine, u) for u in (2, 6, 10, 50)] == pytest.approx([2.0, 1.25, 0.5, 0.5])
    assert rate(cosine, 4) == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(constant, 8, sft_updates=7) == 1.0  # fine-tuning does not count
