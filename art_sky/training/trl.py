"""TRL's GRPOTrainer as what computes losses, gradients and updates, fed with our sequences.

TRL gets one row for each sequence, with the sampler's logprobs as the old ones, and never samples. Its model is the
`Policy` that everything else here uses, in plain padded rows; logprobs come from `Policy.predict`, since TRL knows one
temperature for all tokens, and computes logits in the base's dtype. What the files of a step hold is the same, so that
a model may be trained by either trainer in turn. What TRL has no counterpart for is refused (`check`).

Its loss is a mean over sequences where ours is one over trajectories, so these losses want one sequence in each.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOConfig, GRPOTrainer

from art_sky.config import TrainConfig
from art_sky.errors import InvalidConfig
from art_sky.training.losses import LOSSES
from art_sky.training.model import Policy
from art_sky.training.objective import not_finite
from art_sky.training.optimizer import keep_moments, learning_rate, make_optimizer
from art_sky.training.sequences import Batch, TokenSequence
from art_sky.training.state import TrainerState
from art_sky.training.trainer import Metrics, PassCount, Progress, describe

# Ours -> GRPOConfig's; the bounds come on top.
_LOSSES: dict[str, dict[str, Any]] = {
    "cispo": {"loss_type": "cispo"},
    "ppo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
_UNKNOWN = (
    "normalize", "kl_penalty_in", "kl_penalty_reference_step", "importance_correction", "minibatches",
)  # fmt: skip


def check(config: TrainConfig, batch: Batch) -> None:
    """Raises InvalidConfig naming an option that TRL would ignore."""
    for name in _UNKNOWN:
        if getattr(config, name) != TrainConfig.model_fields[name].default:
            raise InvalidConfig(f"the trainer trl has no {name}; leave it out, or use the trainer native")
    if config.loss_fn == "cispo" and config.epsilon not in (None, 1.0):
        raise InvalidConfig("TRL's cispo has no lower bound; leave out epsilon, or use the trainer native")
    if config.loss_fn in ("ppo", "gspo", "dr_grpo"):
        keys = [(s.group, s.trajectory) for s in batch.sequences]
        for key in keys:
            if keys.count(key) > 1:
                raise InvalidConfig(
                    f"group {key[0]}, trajectory {key[1]} has {keys.count(key)} sequences, each of which would count "
                    f"as a trajectory in TRL's {config.loss_fn}; use cispo, dapo or bnpo, or the trainer native"
                )


def train(policy: Policy, state: TrainerState, batch: Batch, config: TrainConfig, progress: Progress) -> Metrics:
    """As `art_sky.training.trainer.train`, with TRL's part of its metrics under `trl/`."""
    check(config, batch)
    began = time.monotonic()
    policy.load_adapter(state.adapter_config, state.adapter)
    parameters = policy.adapter()
    state.adapter = {k: p.detach() for k, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    # TRL wants two rows at least; the same row twice has the same mean.
    rows = batch.sequences if len(batch.sequences) > 1 else batch.sequences * 2
    size = _rows_at_a_time(rows, config.micro_batch_tokens)
    before = state.updates
    optimizer = make_optimizer(parameters, state, config, 1.0)
    rates = [learning_rate(config, replace(state, updates=before + n)) for n in range(config.epochs + 1)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rates[n])
    count = PassCount(progress, config.epochs * len(rows) // size)
    with tempfile.TemporaryDirectory() as scratch, policy.lent() as model, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="trl")
        arguments = _arguments(scratch, rows, size, config, policy.device)
        trainer = _Trainer(policy, model, rows, config, count, (optimizer, schedule), arguments)
        trainer.train()
    logs = trainer.state.log_history
    norms = [row["grad_norm"] for row in logs if "grad_norm" in row]
    for norm in norms:
        if not math.isfinite(norm):
            raise not_finite("gradient", norm)
    for name, p in parameters.items():
        p.grad = None
        if not torch.isfinite(p).all():
            raise not_finite(f"weight {name}", math.nan)
    keep_moments(optimizer, parameters, state)
    state.updates = before + config.epochs
    seconds = time.monotonic() - began
    own = [row for row in logs if "loss" in row]
    return {
        **describe(batch),
        **{f"trl/{k}": math.fsum(row[k] for row in own) / len(own) for k in own[0] if k in _LOGGED},
        "policy/entropy": math.fsum(row["entropy"] for row in own) / len(own),
        "loss": math.fsum(row["loss"] for row in own) / len(own),
        "grad_norm": max(norms),
        "learning_rate": rates[config.epochs - 1],
        "updates": float(config.epochs),
        "data/tokens_computed": float(sum(map(len, rows))),
        "data/micro_batches": float(len(rows) // size),
        "data/prefix_tree": 0.0,
        "time/train_seconds": seconds,
        "time/tokens_per_second": config.epochs * sum(map(len, rows)) / max(seconds, 1e-9),
    }


_LOGGED = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def _rows_at_a_time(rows: list[TokenSequence], budget: int) -> int:
    """The most that fit in the budget and go evenly into all rows, as TRL wants them."""
    most = max(budget // max(map(len, rows)), 1)
    return max(n for n in range(1, len(rows) + 1) if len(rows) % n == 0 and n <= most)


def _arguments(
    scratch: str, rows: list[TokenSequence], size: int, config: TrainConfig, device: torch.device
) -> GRPOConfig:
    loss = LOSSES[config.loss_fn]
    low = loss.epsilon if config.epsilon is None else config.epsilon
    high = loss.epsilon_high if config.epsilon_high is None else config.epsilon_high
    return GRPOConfig(
        output_dir=scratch,
        **_LOSSES[config.loss_fn],
        epsilon=low,
        epsilon_high=1 + high if config.loss_fn == "cispo" else high,
        max_completion_length=config.normalize_tokens or 1024,
        use_bias_correction_kl=config.kl_bias_correction,
        beta=0.0,  # else TRL adds a reference adapter; the coefficient is set behind its back
        num_iterations=config.epochs,
        max_steps=config.epochs,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=len(rows) // size,
        steps_per_generation=len(rows) // size,
        num_generations=len(rows),
        max_grad_norm=config.max_grad_norm,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=device.type == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


class _Trainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """Given rows instead of prompts, and the logprobs of `Policy`."""

    def __init__(
        self,
        policy: Policy,
        model: Any,
        rows: list[TokenSequence],
        config: TrainConfig,
        count: PassCount,
        optimizers: tuple[Any, Any],
        arguments: GRPOConfig,
    ) -> None:
        self._policy, self._rows, self._count = policy, rows, count
        super().__init__(
            model=model,
            reward_funcs=_no_reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"row": list(range(len(rows)))}),
            processing_class=transformers.AutoTokenizer.from_pretrained(policy.folder, local_files_only=True),
            optimizers=optimizers,
        )
        self.remove_callback(transformers.PrinterCallback)
        self.beta = config.kl_penalty_coef

    def _get_train_sampler(self, dataset: Any = None) -> list[int]:
        """All rows for every pass: TRL takes what it needs of them from where it keeps them."""
        passes: int = self.args.steps_per_generation * self.num_iterations
        return list(range(len(self._rows))) * passes

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["row"]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise not_finite("loss", loss.item())
        self._count()
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, int]]) -> dict[str, Tensor]:
        rows = [self._rows[x["row"]] for x in inputs]
        first = [int(s.sampled.argmax()) for s in rows]
        last = [len(s) - int(s.sampled[::-1].argmax()) for s in rows]

        def completions(values: list[Any], kind: torch.dtype, fill: float = 0) -> Tensor:
            cut = [torch.from_numpy(v[a:b].copy()).to(kind) for v, a, b in zip(values, first, last, strict=True)]
            return pad_sequence(cut, batch_first=True, padding_value=fill)

        def prompts(values: list[Tensor]) -> Tensor:
            return pad_sequence(values, batch_first=True, padding_side="left")

        before = [torch.from_numpy(s.ids[:a]).long() for s, a in zip(rows, first, strict=True)]
        mask = completions([s.sampled for s in rows], torch.long)
        made = {
            "prompt_ids": prompts(before),
            "prompt_mask": prompts([torch.ones_like(p) for p in before]),
            "completion_ids": completions([s.ids for s in rows], torch.long),
            "completion_mask": completions([s.sampled | ~s.sampled for s in rows], torch.long),
            "tool_mask": mask,
            "sampler": completions([s.logprobs for s in rows], torch.float32),
            "comparable": completions([s.comparable & s.sampled for s in rows], torch.bool),
            "temperature": completions([s.temperature for s in rows], torch.float32, 1.0),
            "advantages": torch.tensor([s.advantage for s in rows], dtype=torch.float32),
            "num_items_in_batch": mask.sum(),
        }
        if self.beta:
            with self._policy.base_only():
                made["ref_per_token_logps"] = self._score(made)
        return made

    @torch.no_grad()
    def _score(self, batch: dict[str, Tensor]) -> Tensor:
        size = self.args.per_device_train_batch_size
        parts = [{k: v[i : i + size] for k, v in batch.items() if v.dim()} for i in range(0, len(self._rows), size)]
        return torch.cat([self._logps(part)[0] for part in parts])

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        self._inputs = inputs
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        logp, entropy = self._logps(self._inputs)
        # Without a comparable logprob, and where not sampled, the token is taken to be the policy's own: ratio 1.
        old = torch.where(self._inputs["comparable"], self._inputs["sampler"], logp.detach())
        self._inputs["old_per_token_logps"] = old  # TRL reads it behind this call
        return logp, entropy, None

    def _logps(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, C] logprobs and entropies of the trained tokens; 0 elsewhere."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        start, (size, length) = batch["prompt_ids"].shape[1], batch["completion_ids"].shape
        hidden = self._policy.hidden(ids, mask, positions)[:, start - 1 : -1]
        trained = batch["tool_mask"].bool()
        at = torch.arange(int(trained.sum()))
        logp, entropy = self._policy.predict(
            hidden[trained], batch["completion_ids"][trained], at, batch["temperature"][trained]
        )
        empty = torch.zeros(size, length)
        return empty.masked_scatter(trained, logp), empty.masked_scatter(trained, entropy)


def _no_reward(completions: list[Any], **_: Any) -> Iterator[float]:
    raise AssertionError("rewards come with the rows")
