"""The files of a step: the adapter in PEFT's format, and what the optimizer needs to go on from it.

`adapter/adapter_model.safetensors` and `adapter/adapter_config.json` are what PEFT's `save_pretrained` writes;
`trainer/optimizer.safetensors` holds the AdamW moments under `exp_avg.<name>` and `exp_avg_sq.<name>`, in float32 or,
by the optimizer `adamw_8bit`, in uint8 with `absmax.exp_avg.<name>` (float32, of each 256 values) and
`code.exp_avg` ([256] what the bytes mean, times absmax), likewise of `exp_avg_sq`;
`trainer/state.json` the number of updates, and how many of them were supervised. Training draws no random numbers
(dropout is 0, order is fixed), so that is the whole state: going on from files equals going on in memory, bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from art_sky.errors import CorruptObject

FORMAT = 1
ADAPTER, ADAPTER_CONFIG = "adapter/adapter_model.safetensors", "adapter/adapter_config.json"
OPTIMIZER, STATE = "trainer/optimizer.safetensors", "trainer/state.json"


@dataclass
class TrainerState:
    """Tensors are float32, moments float32 or uint8, and named as PEFT names the adapter's; `updates` counts all
    optimizer updates so far, `sft_updates` those of supervised fine-tuning, which RL's learning-rate schedules do not
    count. `scales` are `absmax.*` and `code.*` of the file; `optimizer` is what makes the next update."""

    adapter_config: dict[str, Any]
    adapter: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    updates: int
    sft_updates: int = 0
    scales: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"

    @classmethod
    def fresh(cls, adapter_config: dict[str, Any], adapter: Mapping[str, Tensor]) -> TrainerState:
        return cls(
            adapter_config,
            dict(adapter),
            {k: torch.zeros_like(v) for k, v in adapter.items()},
            {k: torch.zeros_like(v) for k, v in adapter.items()},
            0,
        )


def load(folder: Path) -> TrainerState:
    """Raises CorruptObject when a file is missing or is not what `save` writes."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        state = json.loads((folder / STATE).read_bytes())
        adapter = safetensors.torch.load_file(folder / ADAPTER)
        moments = safetensors.torch.load_file(folder / OPTIMIZER)
        if state["format"] != FORMAT:
            raise CorruptObject(f"{folder / STATE} has format {state['format']}; install the art-sky that wrote it")
        exp_avg, exp_avg_sq = ({k: moments[f"{m}.{k}"] for k in adapter} for m in ("exp_avg", "exp_avg_sq"))
        updates, supervised = int(state["updates"]), int(state.get("sft_updates", 0))
        scales = {k: v for k, v in moments.items() if k.startswith(("absmax.", "code."))}
        for m, found in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            for k in (k for k, v in found.items() if v.dtype == torch.uint8):
                if (
                    scales[f"absmax.{m}.{k}"].numel() != -(-found[k].numel() // 256)
                    or scales[f"code.{m}"].numel() != 256
                ):
                    raise ValueError(f"{m}.{k} has scales of another size")
        return TrainerState(config, adapter, exp_avg, exp_avg_sq, updates, supervised, scales)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as e:
        raise CorruptObject(
            f"the step in {folder} cannot be read: {type(e).__name__}: {e}; unpack it from the store again"
        ) from e


def save(state: TrainerState, folder: Path) -> None:
    """Writes all four files, each whole or not at all, and flushes them to disk. `trainer/state.json` is the last."""
    moments = {f"exp_avg.{k}": v for k, v in state.exp_avg.items()}
    moments |= {f"exp_avg_sq.{k}": v for k, v in state.exp_avg_sq.items()}
    moments |= state.scales
    _write(folder / ADAPTER, safetensors.torch.save(_plain(state.adapter), {"format": "pt"}))
    _write(folder / ADAPTER_CONFIG, _json(state.adapter_config))
    _write(folder / OPTIMIZER, safetensors.torch.save(_plain(moments)))
    counts = {"format": FORMAT, "updates": state.updates, "sft_updates": state.sft_updates}
    _write(folder / STATE, _json(counts))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in sorted(tensors.items())}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
