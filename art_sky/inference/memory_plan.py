"""What vLLM and the trainer will take, reckoned before either is started, so that what cannot fit is refused then.

Weights, KV cache and adapters are counted from the model's files. The rest is estimates, named so in the plan: what a
process takes that computes nothing, and the activations of one micro-batch (Korthikanti et al. 2022,
arXiv:2205.05198, eq. 1 without the attention scores, which are never stored whole).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from art_sky.config import DEFAULT_KV_CACHE_MIB, EngineConfig, TrainConfig, TrainerConfig
from art_sky.errors import InvalidConfig
from art_sky.inference.adapter_files import read_header
from art_sky.inference.gpus import Placement

_MIB = 2**20
BYTES = {"bfloat16": 2, "float32": 4}
# A parameter in 4 bits with double quantisation (arXiv:2305.14314, section 3), and a moment in 8 bits: their values,
# and their share of the scales of a block.
NF4_BYTES = 0.5 + 0.127 / 8
MOMENT_BYTES = {"adamw": 4.0, "adamw_8bit": 1 + 4 / 256}
# MiB. On a CPU: resident memory of vLLM 0.32's three processes and of the trainer with a model of 1 MB (measured).
# On a GPU: CUDA context, captured graphs and the activations of vLLM's longest batch.
ENGINE_BASE = {"cpu": 2300, "gpu": 3072}
TRAINER_BASE = {"cpu": 600, "gpu": 1024}
ASLEEP = 1536  # what vLLM keeps on a GPU at sleep level 1: the context and the graphs


@dataclass(frozen=True)
class ModelSize:
    """Of a folder in Hugging Face format. Counts are numbers, not bytes."""

    parameters: int
    linear_sides: int  # sum of (inputs + outputs) over the layers that LoRA adapts
    kv_per_token: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    linear_parameters: int = 0  # of the layers that LoRA adapts and the trainer may quantise
    largest_linear: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)  # of all tensors, by name

    def shards(self, gpus: int) -> int:
        """Over how many of so many GPUs tensor parallelism can spread the model: whole heads each; at least 1."""
        return max((n for n in range(1, gpus + 1) if self.heads % n == 0 and self.kv_heads % n == 0), default=1)

    @classmethod
    def of(cls, folder: Path) -> ModelSize:
        """Raises InvalidConfig when config.json or the headers of the safetensors cannot be read."""
        try:
            config = json.loads((folder / "config.json").read_text())
            config = config.get("text_config") or config
            shapes = {n: t.shape for file in folder.glob("*.safetensors") for n, t in read_header(file).items()}
            heads = int(config["num_attention_heads"])
            hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
            head_dim = int(config.get("head_dim") or hidden // heads)
            kv_heads = int(config.get("num_key_value_heads") or heads)
            vocabulary = int(config["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InvalidConfig(
                f"{folder} has no readable config.json and *.safetensors ({type(e).__name__}: {e}); save the model "
                "again"
            ) from e
        linear = [s for s in shapes.values() if len(s) == 2 and vocabulary not in s]
        return cls(
            parameters=sum(map(math.prod, shapes.values())),
            linear_sides=sum(map(sum, linear)),
            kv_per_token=2 * layers * kv_heads * head_dim,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            vocabulary=vocabulary,
            linear_parameters=sum(map(math.prod, linear)),
            largest_linear=max(map(math.prod, linear), default=0),
            shapes=shapes,
        )


@dataclass(frozen=True)
class Share:
    what: str
    mib: int


@dataclass(frozen=True)
class Moment:
    """What is in one memory at one time."""

    where: str
    there_mib: int
    shares: tuple[Share, ...]

    @property
    def needed_mib(self) -> int:
        return sum(s.mib for s in self.shares)

    def __str__(self) -> str:
        parts = ", ".join(f"{s.what} {s.mib}" for s in self.shares)
        return f"{self.where}: {self.needed_mib} of {self.there_mib} MiB ({parts})"


@dataclass(frozen=True)
class MemoryPlan:
    """`kv_cache_mib` is what the engine is to be started with."""

    kv_cache_mib: int
    moments: tuple[Moment, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.moments))

    def check(self) -> None:
        """Raises InvalidConfig naming what does not fit where."""
        for moment in self.moments:
            if moment.needed_mib > moment.there_mib:
                raise InvalidConfig(
                    f"the model does not fit. {moment}; lower kv_cache_mib, max_adapters or context_length, take a "
                    "smaller base model, or a larger machine"
                )


def make_plan(
    size: ModelSize,
    config: EngineConfig,
    context_length: int,
    rank: int,
    placement: Placement,
    free_mib: int,
    trained_by: TrainerConfig | None = None,
) -> MemoryPlan:
    """`free_mib`: of main memory, as `free_memory` finds it. Raises InvalidConfig when the KV cache cannot hold one
    sequence of `context_length` tokens.
    """
    item = BYTES[config.dtype]
    kind = "gpu" if placement.engine else "cpu"
    tensor_parallel = len(placement.engine) or 1
    weights = Share("weights", _mib(size.parameters * item) // tensor_parallel)
    adapters = Share("adapters", _mib(config.max_adapters * size.linear_sides * rank * item))
    base = Share("vLLM itself (estimate)", ENGINE_BASE[kind])
    trainer = _trainer(size, config, rank, kind, trained_by or TrainerConfig())
    resident = [s for s in trainer if "activations" not in s.what]

    least = _mib(size.kv_per_token * item * context_length) // tensor_parallel
    kv = config.kv_cache_mib
    if kv is None:
        kv = DEFAULT_KV_CACHE_MIB
        if placement.engine:
            others = [weights, adapters, base, *(resident if placement.shared else [])]
            smallest = min(g.free_mib for g in placement.engine)
            kv = max(int(0.95 * smallest) - sum(s.mib for s in others), least)
    if kv < least:
        raise InvalidConfig(
            f"kv_cache_mib {kv} is less than the {least} MiB of one sequence of {context_length} tokens; raise it, or "
            "lower context_length"
        )
    engine = (weights, adapters, Share("KV cache", kv), base)
    if not placement.engine:
        return MemoryPlan(kv, (Moment("main memory", free_mib, (*engine, *trainer)),))
    if placement.shared:
        gpu = placement.engine[0]
        asleep = Share("vLLM asleep (estimate)", ASLEEP)
        offloaded = Share("vLLM's weights while it sleeps", weights.mib)
        return MemoryPlan(
            kv,
            (
                Moment(f"GPU {gpu.index} while sampling", gpu.free_mib, (*engine, *resident)),
                Moment(f"GPU {gpu.index} while training", gpu.free_mib, (asleep, *trainer)),
                Moment("main memory while training", free_mib, (offloaded,)),
            ),
        )
    engines = [Moment(f"GPU {g.index}", g.free_mib, engine) for g in placement.engine]
    trainers = [Moment(f"GPU {g.index}", g.free_mib, trainer) for g in placement.trainer]
    return MemoryPlan(kv, (*engines, *trainers))


def free_memory() -> int:
    """MiB of main memory that this process's children may take: the machine's, or less in a limited container."""
    free = int(psutil.virtual_memory().available)
    try:  # cgroup v2, as in containers; "max" is no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        return free // _MIB
    return free // _MIB


def _trainer(size: ModelSize, config: EngineConfig, rank: int, kind: str, settings: TrainerConfig) -> tuple[Share, ...]:
    item = BYTES[config.dtype]
    tokens = int(TrainConfig.model_fields["micro_batch_tokens"].default)
    # The output layer is held a second time in float32 where the base is bfloat16.
    head = size.vocabulary * size.hidden * 4
    # Weights and gradients of the adapter in float32, and Adam's two moments.
    adapter = size.linear_sides * rank * (4 + 4 + 2 * MOMENT_BYTES[settings.optimizer])
    weights = size.parameters * item
    if settings.quantization == "nf4":
        # The largest matrix is there in bfloat16 while it multiplies.
        weights += math.ceil(size.linear_parameters * (NF4_BYTES - item)) + size.largest_linear * item
    activations = size.layers * tokens * size.hidden * 17 * item
    return (
        Share("trainer's weights", _mib(weights + head)),
        Share("its adapter and optimizer", _mib(math.ceil(adapter))),
        Share(f"its activations for {tokens} tokens (estimate)", _mib(activations)),
        Share("trainer itself (estimate)", TRAINER_BASE[kind]),
    )


def _mib(size: int) -> int:
    return -(-size // _MIB)
