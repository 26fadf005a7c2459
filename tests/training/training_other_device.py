"""A device that is not the CPU, for machines without one: its tensors lie in main memory, but torch takes them for
tensors of `elsewhere:0`, and mixing them with the CPU's is the error that it is on a GPU.

    register(), before the first backward pass: torch counts the devices then
    with device() as elsewhere: ...

torch keeps a registered device until the process ends, so tests that use it run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
# What copies between devices, and reads a number, may take tensors of both.
_ACROSS = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten._local_scalar_dense.default}


class Elsewhere(torch.Tensor):
    """A tensor of the device; `inner` is where its numbers really are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Elsewhere({self.inner!r})"

    def tolist(self) -> list[Any]:  # torch has none for subclasses
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Makes what is created on the device, or copied to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def register() -> None:
    _setup_privateuseone_for_python_backend(NAME)


@contextmanager
def device() -> Iterator[torch.device]:
    """Within the block, and in this thread, tensors can be made on it."""
    with _Factories():
        yield torch.device(NAME, 0)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    known: dict[int, Elsewhere] = {}
    here: list[torch.Tensor] = []

    def unwrap(x: Any) -> Any:
        if isinstance(x, Elsewhere):
            known[id(x.inner)] = x
            return x.inner
        if isinstance(x, torch.Tensor) and x.dim():
            here.append(x)
        return x

    wanted = kwargs.get("device")
    args, kwargs = tree_map(unwrap, (args, kwargs))
    if known and here and func not in _ACROSS:
        raise RuntimeError(f"{func}: tensors of two devices, {NAME}:0 and cpu")
    if wanted is not None:
        kwargs["device"] = torch.device("cpu")
    found = func(*args, **kwargs)
    if func is torch.ops.aten.copy_.default:
        theirs = bool(known) and id(found) in known
    else:
        theirs = bool(known) if wanted is None else torch.device(wanted).type == NAME
    if not theirs:
        return found
    return tree_map(
        lambda x: known[id(x)] if id(x) in known else Elsewhere(x) if isinstance(x, torch.Tensor) else x, found
    )
