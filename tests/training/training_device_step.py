"""Two train calls on the CPU and on another device: `python training_device_step.py MODEL BATCH.json OUT`.

Writes the files of a step below OUT/cpu and OUT/elsewhere, and the metrics beside them. Attention on the device is
one call with a mask, as on a GPU; the mask is the one that FlexAttention would be given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training_other_device import device, register

from art_sky.config import LoRAConfig, TrainConfig
from art_sky.training import attention, state
from art_sky.training.model import Policy
from art_sky.training.sequences import build_batch
from art_sky.training.trainer import train

CONFIG = TrainConfig(
    learning_rate=1e-2,
    micro_batch_tokens=24,  # so small that branches hang on trunks
    kl_penalty_coef=0.1,
    importance_correction="token_truncate",
    loss_fn="gspo",
)


def main() -> None:
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the device is known in this thread
    model, batch, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    torch.set_num_threads(1)
    attention._flex_functions = lambda device: attention._Flex(dense_mask, dense_attention)
    register()
    run(Policy(model, "float32", device=torch.device("cpu")), batch, out / "cpu")
    with device() as elsewhere:
        run(Policy(model, "float32", device=elsewhere), batch, out / "elsewhere")


def run(policy: Policy, groups: list[Any], out: Path) -> None:
    config = policy.new_adapter(LoRAConfig(rank=4, seed=3), "tiny")
    state.save(state.TrainerState.fresh(config, policy.adapter()), out)
    batch = build_batch(groups, CONFIG, vocab_size=policy.vocab_size, context_length=policy.context_length)
    metrics = []
    for _ in range(2):
        step = state.load(out)
        metrics.append(train(policy, step, batch, CONFIG, lambda *_: None))
        state.save(step, out)
    assert policy.not_packed is None, policy.not_packed
    assert {p.device for p in policy.adapter().values()} == {policy.device}
    assert {t.device for t in (*step.exp_avg.values(), *step.exp_avg_sq.values())} == {policy.device}
    (out / "metrics.json").write_text(json.dumps(metrics))


def dense_mask(
    visible: Any, batch: None, heads: None, queries: int, keys: int, device: torch.device, **_: Any
) -> Tensor:
    q, k = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)[None]
    return visible(q, q, q, k)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: Tensor, scale: float, enable_gqa: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=block_mask, scale=scale, enable_gqa=enable_gqa
    )


if __name__ == "__main__":
    main()
