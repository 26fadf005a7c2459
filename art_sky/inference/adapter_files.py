"""Checks of an adapter's files that need no torch: vLLM takes matrices of a wrong shape, and ones that hold NaN."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from art_sky.errors import InvalidInput
from art_sky.schemas import AdapterRef

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# By safetensors' name: the type of the same size, and the exponent bits, which NaN and infinity have all set.
_BITS = {"F32": (np.uint32, 0x7F80_0000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors file; `begin` and `end` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Raises OSError, or ValueError for what is no such file.

    Format: 8 bytes of length, little-endian, then JSON, then the data
    (https://huggingface.co/docs/safetensors/index#format).
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        if len(start) < 8:
            raise ValueError("the file is cut off")
        (length,) = struct.unpack("<Q", start)
        if 8 + length > size:
            raise ValueError("the file is cut off, or no safetensors file")
        header = json.loads(f.read(length))
    found = {}
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
                found[name] = Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), begin, end)
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"its header is damaged ({type(e).__name__}: {e})") from e
    if any(t.end > size for t in found.values()):
        raise ValueError("the file is cut off")
    return found


def check_adapter(ref: AdapterRef, base_shapes: dict[str, tuple[int, ...]], max_rank: int) -> str:
    """The adapter's layout: what it is but for the numbers. Adapters of equal layouts are loaded alike.

    Raises InvalidInput for files that are missing or damaged, a rank above `max_rank`, matrices that do not fit the
    base model's layers, and numbers that are none. Blocks.

    `base_shapes`: of the base model's tensors by name, (outputs, inputs) for a linear layer. A layer that is not
    among them is left to the engine: quantized and multimodal models name theirs differently.
    """
    file = Path(ref.path) / "adapter_model.safetensors"
    try:
        config = json.loads((Path(ref.path) / "adapter_config.json").read_text())
        tensors = read_header(file)
    except OSError as e:
        raise _bad(ref, f"{e.filename or ref.path}: {e.strerror or e}; fetch the adapter again") from e
    except ValueError as e:
        raise _bad(ref, f"its files cannot be read: {e}; fetch the adapter again") from e
    if not tensors or not isinstance(config, dict):
        raise _bad(ref, "it is empty; save the adapter again")
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise _bad(ref, f"{name!r} is no LoRA matrix; use an adapter in PEFT's format")
        rank = tensor.shape[0 if match["side"] == "A" else -1] if len(tensor.shape) == 2 else 0
        if rank > max_rank:
            raise _bad(ref, f"its rank is {rank} and the engine was started for {max_rank}; raise max_lora_rank")
        base = base_shapes.get(match["module"] + ".weight")
        if base is not None and tensor.shape != ((rank, base[-1]) if match["side"] == "A" else (base[0], rank)):
            raise _bad(
                ref,
                f"{name} is {tensor.shape} and the base model's layer {base}; use an adapter that was trained on this "
                "model",
            )
    with file.open("rb") as f:
        for name, tensor in tensors.items():
            if tensor.dtype not in _BITS:
                raise _bad(ref, f"{name} has the type {tensor.dtype}; save the adapter as one of {', '.join(_BITS)}")
            kind, exponent = _BITS[tensor.dtype]
            f.seek(tensor.begin)
            bits = np.frombuffer(f.read(tensor.end - tensor.begin), kind)
            if ((bits & kind(exponent)) == exponent).any():
                raise _bad(ref, f"{name} holds NaN or infinity; use an earlier step")
    return json.dumps([config, {name: (t.dtype, t.shape) for name, t in tensors.items()}], sort_keys=True)


def _bad(ref: AdapterRef, why: str) -> InvalidInput:
    return InvalidInput(f"adapter {ref.name} cannot be used: {why}")
