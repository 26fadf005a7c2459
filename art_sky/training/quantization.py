"""What bitsandbytes computes: frozen base weights in 4-bit NormalFloat (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

Only the linear layers inside the model are quantised, with double quantisation: 4.127 bits a parameter. Embedding,
output layer and norms stay bfloat16. A matrix is dequantised to bfloat16 whenever it multiplies, and not kept for the
backward pass. bitsandbytes' own forward is not used: on some CPUs it repacks the weights, or looks for kernels on the
hub.

Engines sample from the same numbers: from a copy of the base model whose linear layers hold, in bfloat16, what the
quantised ones multiply by. `python -m art_sky.training.quantization BASE OUT` writes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_sky.errors import ArtSkyError, Busy, InvalidConfig, NoDiskSpace

if TYPE_CHECKING:
    import torch

    from art_sky.config import TrainerConfig

_COPY_SECONDS = 1800.0
# PEFT imports bitsandbytes, which then warns that it lacks a kernel from the hub for the forward that is not used.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


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


def write_dense(base: Path, out: Path) -> None:
    """Writes the folder of the base model as it computes in 4 bits, in bfloat16, with all its other files."""
    import torch

    from art_sky.training.device import choose_device

    model = load(base, torch.bfloat16, choose_device())
    model.dequantize().save_pretrained(out)
    for file in base.iterdir():
        if file.is_file() and not (out / file.name).exists() and ".safetensors" not in file.name:
            shutil.copyfile(file, out / file.name)


async def dense_copy(base: Path, folder: Path, environment: Mapping[str, str]) -> Path:
    """A folder within `folder` that `write_dense` made of the base model, in a process of its own with the variables of
    `environment`; one that is there already is used again. Older ones are deleted.

    Raises NoDiskSpace, Busy when it takes too long, and ArtSkyError for whatever else ends that process.
    """
    done = folder / await asyncio.to_thread(_made_of, base)
    if done.is_dir():
        return done
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "art_sky.training.quantization", str(base), str(scratch)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )
    try:
        async with asyncio.timeout(_COPY_SECONDS):
            _, said = await process.communicate()
    except TimeoutError:
        raise Busy(f"{base} was not quantised within {_COPY_SECONDS:.0f} s; try again on a less busy machine") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    last = (said.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    if "No space left" in last:
        raise NoDiskSpace(f"no disk space for the quantised copy of {base} in {folder}; free some, then register again")
    if process.returncode:
        raise ArtSkyError(f"{base} could not be quantised for the engine: {last}; mend that, or use quantization none")
    scratch.rename(done)
    return done


def _made_of(base: Path) -> str:
    files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in base.iterdir())
    made_of = [str(base), files, importlib.metadata.version("bitsandbytes")]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]


if __name__ == "__main__":
    write_dense(Path(sys.argv[1]), Path(sys.argv[2]))
