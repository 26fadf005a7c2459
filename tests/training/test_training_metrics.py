"""docs/metrics.md explains what the trainers emit: all of it, and nothing that they do not."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from training.make_batch import make_groups

from art_sky.config import LoRAConfig, SFTConfig, TrainConfig
from art_sky.training import sft, trainer, trl
from art_sky.training.model import Policy
from art_sky.training.sequences import build_batch, build_examples
from art_sky.training.state import TrainerState

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_metric_is_explained(tiny_model: Path) -> None:
    torch.set_num_threads(1)
    policy = Policy(tiny_model, "float32")
    config = TrainConfig(kl_penalty_coef=0.1, importance_correction="token_truncate")
    limits = {"vocab_size": policy.vocab_size, "context_length": policy.context_length}
    groups = make_groups(tiny_model, groups=1, size=3, seed=5)
    state = TrainerState.fresh(policy.new_adapter(LoRAConfig(rank=2), "tiny"), policy.adapter())
    batch = build_batch(groups, config, **limits)
    emitted = {
        *trainer.train(policy, state, batch, config, lambda *_: None),
        *sft.train(policy, state, build_examples(groups, SFTConfig(), **limits), SFTConfig(), lambda *_: None),
        *(f"trl/{name}" for name in trl._LOGGED),
        "memory/peak_mib",  # by the worker
    }
    explained = re.findall(r"`((?:(?:policy|data|memory|time|trl)/)?[a-z_0-9/]+)`", DOC.read_text())
    options = {*TrainConfig.model_fields, "max_tokens", "gather", "tokens_total", "_abs", "trl", "train/loss"}
    assert set(explained) - options | {"learning_rate"} == emitted
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| `")]
    first_cells = re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in rows))
    assert len(first_cells) == len(set(first_cells))
