"""Unsloth as what loads the base model: on GPUs with its own kernels, on CPUs plain transformers.

It changes transformers, PEFT and TRL when it is imported, and so has to be imported before them: `prepare` is the first
thing that a trainer of this kind does. The adapter is PEFT's, and losses and updates are ours.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_sky.errors import InvalidConfig

if TYPE_CHECKING:
    import torch


def prepare() -> None:
    """Imports Unsloth. Raises InvalidConfig where it is not installed."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # it would ask the hub
    try:
        import unsloth  # noqa: F401
    except ImportError as e:
        raise InvalidConfig(
            f"the trainer unsloth needs Unsloth ({e}); `pip install 'art-sky[unsloth]'`, or use the trainer native"
        ) from e


def load(folder: Path, dtype: torch.dtype, nf4: bool) -> Any:
    """The model of `FastLanguageModel.from_pretrained`, with its own context length; `nf4`: in Unsloth's 4 bits."""
    import json

    from unsloth import FastLanguageModel

    length = json.loads((folder / "config.json").read_bytes()).get("max_position_embeddings", 2048)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=length,
        dtype=dtype,
        load_in_4bit=nf4,
        use_gradient_checkpointing=False,
        local_files_only=True,
    )
    return model
