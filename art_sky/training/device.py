"""Where the trainer computes, and what of its memory that takes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def choose_device() -> torch.device:
    """The first NVIDIA GPU that `CUDA_VISIBLE_DEVICES` leaves to this process, where torch can use it; else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def begin_peak(device: torch.device) -> None:
    """`peak_mib` counts from here on a GPU. What a process has had at most on a CPU cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> float:
    """The most MiB of tensors on the GPU since `begin_peak`, or of main memory since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@contextmanager
def memory_given_back() -> Iterator[None]:
    """After the block torch keeps no memory of the GPU for its next tensors: an engine there is about to want it."""
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
