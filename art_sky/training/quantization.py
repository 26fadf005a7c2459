"""What bitsandbytes computes: frozen base weights in 4-bit NormalFloat (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

Only the linear layers inside the model are quantised, with double quantisation: 4.127 bits a parameter. Embedding,
output layer and norms stay bfloat16. A matrix is dequantised to bfloat16 whenever it multiplies, and not kept for the
backward pass. bitsandbytes' own forward is not used: on some CPUs it repacks the weights, or looks for kernels on the
hub.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_sky.errors import InvalidConfig

if TYPE_CHECKING:
    import torch

    from art_sky.config import TrainerConfig


def check_bitsandbytes(settings: TrainerConfig, dtype: str, gpu: bool) -> None:
    """Raises InvalidConfig for what cannot be computed here. Imports nothing heavy: it comes before the model."""
    if settings.quantization == "none" and settings.optimizer == "adamw":
        return
    option = "quantization nf4" if settings.quantization != "none" else "optimizer adamw_8bit"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InvalidConfig(
            f"the trainer's {option} needs bitsandbytes; `pip install 'art-sky[bnb]'`, or use quantization none and "
            "optimizer adamw"
        )
    if settings.quantization == "none":
        return
    if dtype != "bfloat16":
        raise InvalidConfig(
            f"quantization nf4 computes in bfloat16, not {dtype}; use dtype bfloat16, or no quantization"
        )
    if settings.kind == "unsloth" and not gpu:
        raise InvalidConfig(
            "on a CPU Unsloth may leave the model unquantised and go on; use the trainer native, or quantization none"
        )


def config() -> Any:
    """transformers' BitsAndBytesConfig, with the settings of the paper."""
    import torch
    import transformers

    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in `folder`, its linear layers quantised as they are read."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        device_map={"": device},
        quantization_config=config(),
    )
