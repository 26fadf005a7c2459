"""What a user may set. Unknown keys are refused everywhere, by name (rule R6)."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from art_sky.errors import InvalidConfig

DEFAULT_KV_CACHE_MIB = 1024  # on a CPU


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Any:
        """Like the constructor, but raises InvalidConfig with one line that names the keys."""
        try:
            return cls(**values)
        except ValidationError as e:
            raise InvalidConfig(explain(e, cls.__name__, sorted(cls.model_fields))) from e


def explain(error: ValidationError, what: str, known: list[str]) -> str:
    """One line for a pydantic error: which field, what is wrong, and the known names where one is unknown."""
    lines = []
    for e in error.errors(include_url=False):
        where = ".".join(str(p) for p in e["loc"]) or "value"
        if e["type"] == "extra_forbidden":
            lines.append(f"unknown option {where!r} (known: {', '.join(known)})")
        else:
            lines.append(f"{where}: {e['msg']}")
    return f"{what}: " + "; ".join(lines)


class LoRAConfig(Settings):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685). Dropout is 0: sampler and trainer must agree."""

    rank: int = Field(8, ge=1, le=512)
    alpha: float = Field(16.0, gt=0)
    target_modules: str | list[str] = "all-linear"
    seed: int = Field(0, ge=0, description="of the initial A matrices")


class ModelOptions(Settings):
    """How text becomes tokens and back, where the base model's own files do not say."""

    chat_template: str | None = Field(None, description="Jinja text that replaces the tokenizer's template")
    tool_parser: Literal["hermes"] | None = None
    reasoning_parser: Literal["think"] | None = None


class UpdateConfig(Settings):
    """What every kind of training takes: the optimizer, and how much is computed at a time."""

    too_long: Literal["drop", "refuse"] = Field(
        "drop", description="sequences beyond the context or max_sequence_tokens: dropped and counted, or an error"
    )
    max_sequence_tokens: int | None = Field(None, ge=2, description="default: the model's context length")
    epochs: int = Field(1, ge=1, le=100, description="how often the batch is gone through")
    lr_end_ratio: float | None = Field(None, ge=0, le=1, description="of the learning rate, at the end (0)")
    warmup_updates: int = Field(0, ge=0, description="over which the learning rate rises from 0")
    max_grad_norm: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    micro_batch_tokens: int = Field(
        1024, ge=16, description="tokens whose activations are in memory at a time; changes no gradient"
    )


class TrainConfig(UpdateConfig):
    """One train call. Defaults follow ART 0.5.23 where it has the option. None: the default, or not used.

    An option that the others leave without effect is refused, since it would do nothing in silence.
    """

    learning_rate: float = Field(5e-6, gt=0)
    loss_fn: Literal["cispo", "ppo", "dapo", "bnpo", "dr_grpo", "gspo"] = Field(
        "cispo", description="formulas, papers and default bounds: art_sky/training/losses.py"
    )
    epsilon: float | None = Field(None, ge=0, description="lower ratio bound is 1 - epsilon")
    epsilon_high: float | None = Field(None, ge=0, description="upper ratio bound is 1 + epsilon_high")
    normalize: Literal["token", "trajectory", "constant"] | None = Field(
        None, description="what the loss is a mean over, where it shall not be the loss's own"
    )
    normalize_tokens: int | None = Field(
        None, ge=1, description="the constant, in tokens a trajectory, of dr_grpo and normalize='constant' (1024)"
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="divide advantages by the rewards' standard deviation; True is group, False none"
    )
    kl_penalty_coef: float = Field(0.0, ge=0, description="weight of the KL divergence from the reference")
    kl_penalty_in: Literal["loss", "advantage"] | None = Field(
        None, description="where it counts: k3 in the loss (default), or taken off the advantage of each token"
    )
    kl_penalty_reference_step: int | None = Field(
        None, ge=0, description="the reference is this step of the model, not the base model"
    )
    kl_bias_correction: bool = Field(False, description="weigh the loss's k3 by the ratio (DeepSeek-V3.2)")
    importance_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = Field(
        None,
        description="ratios refer to the trainer's own logprobs before the call, and the ratio of these to the "
        "sampler's becomes a weight, truncated at a bound or 0 beyond it; default: ratios refer to the sampler's",
    )
    importance_correction_bound: float | None = Field(None, gt=0, description="default 3")
    cut_off: Literal["train", "mask"] = Field(
        "train", description="choices that ended at their token limit (DAPO's overlong filtering masks them)"
    )
    minibatches: int = Field(1, ge=1, description="updates an epoch, each from a part of the groups")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="by the number of updates the model has had"
    )
    lr_schedule_updates: int | None = Field(None, ge=1, description="when linear or cosine reach their end")

    @model_validator(mode="before")
    @classmethod
    def _other_spellings(cls, values: Any) -> Any:
        """ART 2025 called the KL weight `beta`; ART and TRL take a flag for `scale_rewards`."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if "beta" in values:
            if "kl_penalty_coef" in values:
                raise ValueError("beta and kl_penalty_coef are the same option; give one")
            values["kl_penalty_coef"] = values.pop("beta")
        if isinstance(values.get("scale_rewards"), bool):
            values["scale_rewards"] = "group" if values["scale_rewards"] else "none"
        return values

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> TrainConfig:
        constant = self.normalize == "constant" or (self.normalize is None and self.loss_fn == "dr_grpo")
        needs = {
            "normalize_tokens": (constant, "loss_fn='dr_grpo' or normalize='constant'"),
            "kl_penalty_in": (self.kl_penalty_coef > 0, "kl_penalty_coef"),
            "kl_penalty_reference_step": (self.kl_penalty_coef > 0, "kl_penalty_coef"),
            "kl_bias_correction": (
                self.kl_penalty_coef > 0 and self.kl_penalty_in != "advantage",
                "kl_penalty_coef, and the penalty in the loss",
            ),
            "importance_correction_bound": (self.importance_correction is not None, "importance_correction"),
            "lr_schedule_updates": (self.lr_schedule != "constant", "lr_schedule='linear' or 'cosine'"),
            "lr_end_ratio": (self.lr_schedule != "constant", "lr_schedule='linear' or 'cosine'"),
        }
        for name, (met, condition) in needs.items():
            value = getattr(self, name)
            if value is not None and value is not False and not met:
                raise ValueError(f"{name} does nothing without {condition}; give that too, or leave it out")
        if self.lr_schedule != "constant" and self.lr_schedule_updates is None:
            raise ValueError(f"lr_schedule={self.lr_schedule!r} needs lr_schedule_updates, the update at which it ends")
        if (self.lr_schedule_updates or math.inf) <= self.warmup_updates:
            raise ValueError("warmup_updates must be less than lr_schedule_updates")
        return self


class SFTConfig(UpdateConfig):
    """Supervised fine-tuning: cross-entropy on what assistants said, in the order in which it is given."""

    method: Literal["sft"] = "sft"
    learning_rate: float | list[float] = Field(
        5e-5, description="a list has one for each batch of each epoch (art_sky.create_lr_schedule)"
    )
    batch_size: int = Field(8, ge=1, description="trajectories an update; the loss is a mean over their trained tokens")
    assistant_turns: Literal["all", "last"] = Field("all", description="of each history, which are trained")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="over the updates of the call")

    @model_validator(mode="after")
    def _rates(self) -> SFTConfig:
        rates = self.learning_rate if isinstance(self.learning_rate, list) else [self.learning_rate]
        if not all(rate >= 0 for rate in rates) or not any(rates):
            raise ValueError("learning_rate must be above 0, in a list 0 or above")
        shaped = self.lr_schedule != "constant" or self.warmup_updates or self.lr_end_ratio is not None
        if isinstance(self.learning_rate, list) and shaped:
            raise ValueError("a list of learning rates is a schedule; leave out lr_schedule, lr_end_ratio and warm-up")
        if self.lr_end_ratio is not None and self.lr_schedule == "constant":
            raise ValueError("lr_end_ratio does nothing without lr_schedule='linear' or 'cosine'; give that too")
        return self


def _kind_of_training(values: Any) -> str:
    method = values.get("method") if isinstance(values, dict) else getattr(values, "method", None)
    return "rl" if method is None else "sft"


# What a train request carries; SFTConfig is told by its `method`.
AnyTrainConfig = Annotated[
    Annotated[TrainConfig, Tag("rl")] | Annotated[SFTConfig, Tag("sft")], Discriminator(_kind_of_training)
]


class EngineConfig(Settings):
    """What samples: the small engine for CPUs, or vLLM in an environment of its own."""

    kind: Literal["cpu", "vllm"] = "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int | None = Field(None, ge=1, description="default: the machine's cores")
    max_batch: int = Field(64, ge=1, description="sequences decoded together; more requests wait")
    kv_cache_mib: int | None = Field(
        None,
        ge=16,
        description="bound of the KV cache, running and reusable together; default 1024, on a GPU what is left",
    )
    max_adapters: int = Field(4, ge=1, description="adapters resident at once; least recently used goes first")
    context_length: int | None = Field(None, ge=16, description="default: the model's, at most 8192")
    max_lora_rank: int | None = Field(
        None, ge=1, le=512, description="vllm only: highest rank of any model; default: the first model's"
    )
    vllm_python: str | None = Field(
        None, description="vllm only: its interpreter; default $ART_SKY_VLLM_PYTHON, else the server's own"
    )

    @model_validator(mode="after")
    def _only_what_it_uses(self) -> EngineConfig:
        for option in ("max_lora_rank", "vllm_python"):
            if self.kind != "vllm" and getattr(self, option) is not None:
                raise ValueError(f"the {self.kind} engine has no {option}; leave it out, or use kind 'vllm'")
        return self


class TrainerConfig(Settings):
    """What trains, and in how many processes. Supervised fine-tuning is always computed by art-sky itself."""

    kind: Literal["native", "trl", "unsloth"] = Field(
        "native",
        description="native: art-sky's losses on packed prefix trees; trl: losses and updates of TRL's GRPOTrainer; "
        "unsloth: native, on a model that Unsloth loads",
    )
    processes: int = Field(
        1, ge=1, le=64, description="that compute a share of each update, on a GPU each or sharing the CPU's cores"
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw", description="adamw_8bit: bitsandbytes' AdamW8bit, moments of large matrices in 8 bits"
    )
    quantization: Literal["none", "nf4"] = Field(
        "none", description="nf4: the trainer's frozen linear layers in 4 bits, by bitsandbytes (QLoRA)"
    )

    @model_validator(mode="after")
    def _only_what_it_uses(self) -> TrainerConfig:
        if self.kind != "native" and self.processes > 1:
            raise ValueError(f"the trainer {self.kind} runs in one process; leave out processes, or use kind 'native'")
        return self


class ServerConfig(Settings):
    """One server process: gateway, jobs, and the engine and trainer it supervises."""

    store: str = "file://.art-sky"
    host: Literal["127.0.0.1"] = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: any free port")
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    allow_untested: bool = Field(False, description="use what docs/capabilities.md lists as untested")
    idle_minutes: float | None = Field(None, gt=0, description="end the server after this time without work")
    state_dir: str = Field(description="logs, exchange log, scratch and unpacked adapters; may be deleted")
    models: list[str] = Field([], description="project/name of models in the store that are served from the start")
    fsync_each_reply: bool = Field(False, description="fsync the exchange log before each reply, not in groups")

    @model_validator(mode="after")
    def _computes_in_bfloat16(self) -> ServerConfig:
        if self.trainer.quantization == "nf4" and self.engine.dtype != "bfloat16":
            raise ValueError("quantization nf4 computes in bfloat16; use dtype bfloat16, or quantization none")
        return self


class Limits(Settings):
    """When a rented machine ends, whoever watches. Budget and hours cover all machines of a cluster together."""

    budget: float | None = Field(None, gt=0, description="dollars; default: only the time limits bound the bill")
    max_hours: float = Field(24.0, gt=0, le=24 * 30, description="of all machines of the cluster together")
    idle_minutes: float = Field(30.0, ge=1, description="time without work")
    orphan_minutes: float = Field(15.0, ge=1, description="time without work while the controller is gone")
    flush_minutes: float = Field(5.0, gt=0, le=60, description="for the last writes to the store")
    setup_minutes: float = Field(20.0, gt=0, le=120, description="for installing and loading, until it serves")


def home() -> Path:
    """Where art-sky keeps what belongs to no project: `$ART_SKY_HOME`, by default `~/.art-sky`."""
    return Path(os.environ.get("ART_SKY_HOME") or Path.home() / ".art-sky")
