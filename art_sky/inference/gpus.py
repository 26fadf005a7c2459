"""Which GPUs this machine has, and who of engine and trainer gets which.

The server has no torch, so `nvidia-smi` is asked. Indices are those of `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from art_sky.errors import InvalidConfig

_SECONDS = 30.0
_QUERY = ("--query-gpu=index,uuid,memory.total,memory.used", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    """`index` as a word for `CUDA_VISIBLE_DEVICES`; memory in MiB."""

    index: str
    total_mib: int
    used_mib: int

    @property
    def free_mib(self) -> int:
        return self.total_mib - self.used_mib


@dataclass(frozen=True)
class Placement:
    """The GPUs of each side; both empty on a machine without."""

    engine: tuple[Gpu, ...] = ()
    trainer: tuple[Gpu, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether engine and trainer have to take turns on one GPU."""
        return bool(self.engine) and self.engine == self.trainer


def place(gpus: tuple[Gpu, ...]) -> Placement:
    """One GPU is shared; of more, the engine gets the first half and the trainer the rest."""
    if len(gpus) < 2:
        return Placement(gpus, gpus)
    half = len(gpus) // 2
    return Placement(gpus[:half], gpus[half:])


def visible(gpus: tuple[Gpu, ...]) -> dict[str, str]:
    """The environment in which a process sees these GPUs and no other, by the numbers that `nvidia-smi` gives them."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(g.index for g in gpus)}


def find_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order; blocks. Raises InvalidConfig when
    `nvidia-smi` fails, or for a device that does not exist.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        asked = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise InvalidConfig(f"nvidia-smi gave no answer in {_SECONDS:.0f} s; mend the driver") from None
    if asked.returncode:
        said = (asked.stderr or asked.stdout).strip().splitlines()[-1:]
        raise InvalidConfig(f"nvidia-smi fails ({' '.join(said)}); mend the driver, or hide nvidia-smi from the PATH")
    return parse_gpus(asked.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(table: str, wanted: str | None) -> tuple[Gpu, ...]:
    """From what `nvidia-smi` printed and the value of `CUDA_VISIBLE_DEVICES`."""
    found: list[tuple[str, Gpu]] = []
    for line in filter(None, map(str.strip, table.splitlines())):
        try:
            index, uuid, total, used = (word.strip() for word in line.split(","))
            found.append((uuid, Gpu(index, int(total), int(used))))
        except ValueError:
            raise InvalidConfig(f"nvidia-smi said {line!r}, which is no GPU; mend the driver") from None
    if wanted is None:
        return tuple(gpu for _, gpu in found)
    chosen = []
    for word in filter(None, map(str.strip, wanted.split(","))):
        if word == "-1":  # CUDA's word for "no more"
            break
        match = [gpu for uuid, gpu in found if word == gpu.index or uuid.startswith(word)]
        if len(match) != 1:
            known = ", ".join(gpu.index for _, gpu in found) or "none"
            raise InvalidConfig(f"CUDA_VISIBLE_DEVICES names {word!r}; the GPUs here are {known}; mend the variable")
        chosen.append(match[0])
    return tuple(chosen)
