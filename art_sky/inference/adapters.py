"""LoRA adapters in PEFT's format: read, checked against the base model, and kept while they are used."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from art_sky.errors import Busy, InvalidInput
from art_sky.inference.lora import ActiveLoRA, LinearGroup, LoRAWeights
from art_sky.schemas import AdapterRef

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# Settings under which the adapter is not "base + scaling * B A x" alone.
_MUST_BE_OFF = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "modules_to_save",
    "lora_bias",
)

_MOST_AHEAD = 2  # each takes as much memory as a resident adapter


@dataclass(frozen=True)
class Adapter:
    """`weights` has one entry a group; all None when every B is zero: the adapter then is the base model."""

    name: str
    weights: list[LoRAWeights | None]

    @property
    def is_base(self) -> bool:
        return all(w is None for w in self.weights)


# The adapters' names, their weights below each other group by group, and how many rows each has in each group.
Stack = tuple[tuple[str, ...], list[LoRAWeights | None], list[tuple[int, ...]]]


class Adapters:
    """The resident adapters, least recently used out first; those of running requests stay."""

    def __init__(self, groups: list[LinearGroup], active: ActiveLoRA, decoder_prefix: str, limit: int) -> None:
        """`decoder_prefix`: where the groups' names hang in the full model, e.g. "model."."""
        self._groups = groups
        self._active = active
        self._limit = limit
        self._members = {
            decoder_prefix + name: (group, member) for group in groups for member, name in enumerate(group.names)
        }
        self._resident: OrderedDict[str, Adapter] = OrderedDict()
        self._stacked: Stack = ((), [], [])
        self._ahead: OrderedDict[str, Adapter] = OrderedDict()  # read by another thread, not resident yet
        self._ahead_lock = threading.Lock()

    def names(self) -> list[str]:
        """Of the adapters that a request can have without reading files."""
        with self._ahead_lock:
            return list(dict.fromkeys([*self._resident, *self._ahead]))

    def read_ahead(self, ref: AdapterRef) -> None:
        """Reads and checks an adapter for `load`, on any thread. Raises InvalidInput as `load` does."""
        with self._ahead_lock:
            if ref.name in self._resident or ref.name in self._ahead:
                return
        adapter = Adapter(ref.name, self._read(ref))
        with self._ahead_lock:
            self._ahead[ref.name] = adapter
            while len(self._ahead) > _MOST_AHEAD:
                self._ahead.popitem(last=False)

    def load(self, ref: AdapterRef, in_use: set[str]) -> tuple[Adapter, list[str]]:
        """Makes an adapter resident; also returns the names that had to go.

        Raises InvalidInput for files that are missing, damaged or made for another model, and Busy when every
        place is taken by an adapter in `in_use`.
        """
        if (adapter := self._resident.get(ref.name)) is not None:
            self._resident.move_to_end(ref.name)
            return adapter, []
        idle = [name for name in self._resident if name not in in_use]
        surplus = len(self._resident) + 1 - self._limit
        if surplus > len(idle):
            raise Busy(
                f"all {self._limit} places for adapters are taken by running requests, so {ref.name} has to wait; "
                "call again, or raise max_adapters"
            )
        with self._ahead_lock:
            ahead = self._ahead.pop(ref.name, None)
        adapter = ahead or Adapter(ref.name, self._read(ref))
        gone = idle[: max(0, surplus)]
        for name in gone:
            del self._resident[name]
        self._resident[ref.name] = adapter
        return adapter, gone

    def activate(self, tokens: Sequence[tuple[Adapter, int]]) -> None:
        """Sets what the next forward adds: `tokens` says for runs of the batch's rows which adapter they use."""
        wanted = {a.name: a for a, _ in tokens if not a.is_base}
        if not wanted:
            self._active.weights = self._active.masks = ()
            return
        names, weights, ranks = self._stack(wanted)
        masks: dict[tuple[int, ...], torch.Tensor | None] = {}
        if len(names) > 1 or any(a.is_base for a, _ in tokens):
            owners = torch.cat([torch.full((n,), names.index(a.name) if a.name in wanted else -1) for a, n in tokens])
            for r in set(ranks):
                columns = torch.arange(len(names)).repeat_interleave(torch.tensor(r))
                masks[r] = (owners[:, None] == columns).float()
        self._active.weights = weights
        self._active.masks = [masks.get(r) for r in ranks]

    def _stack(self, wanted: dict[str, Adapter]) -> Stack:
        """The matrices of all wanted adapters, made anew only where the last stack lacks one of them.

        A stack that holds more than is wanted is still right; making one costs as much as a few steps.
        """
        if len(wanted) == 1:
            return _stack(list(wanted.values()))  # copies nothing
        names = self._stacked[0]
        if not wanted.keys() <= set(names) or not self._resident.keys() >= set(names):
            self._stacked = _stack([wanted[name] for name in sorted(wanted)])
        return self._stacked

    def _read(self, ref: AdapterRef) -> list[LoRAWeights | None]:
        config, tensors = _read_files(ref)
        for option in _MUST_BE_OFF:
            if config.get(option):
                raise _bad(ref, f"it uses {option}, which the CPU engine does not do; train it without")
        sides: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key)
            module = match["module"] if match else key
            if match is None or module not in self._members:
                raise _bad(ref, f"{module!r} is no linear layer of this base model; use the adapter of this model")
            if not tensor.isfinite().all():
                raise _bad(ref, f"{key} holds NaN or infinity; use an earlier step")
            sides.setdefault(module, {})[match["side"]] = tensor.float()
        if not sides:
            raise _bad(ref, "no layer of the model matches its target_modules; check target_modules")
        parts: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for module, ab in sides.items():
            group, member = self._members[module]
            a, b = ab.get("A"), ab.get("B")
            if a is None or b is None:
                raise _bad(ref, f"{module} has lora_{'B' if a is None else 'A'} only; save the adapter again")
            want = (group.sizes[member], group.in_features)
            if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != want or a.shape[0] != b.shape[1]:
                raise _bad(
                    ref,
                    f"{module} is {want[0]} x {want[1]} in this base model, but A is {tuple(a.shape)} and B is "
                    f"{tuple(b.shape)}; use an adapter that was trained on this model",
                )
            if b.any():
                parts.setdefault(group.index, {})[member] = (a, b * (float(config["lora_alpha"]) / a.shape[0]))
        return [_merge(group, parts.get(group.index, {})) for group in self._groups]


def _read_files(ref: AdapterRef) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder = Path(ref.path)
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        alpha = float(config["lora_alpha"])
        tensors = load_file(folder / "adapter_model.safetensors")
    except OSError as e:
        raise _bad(ref, f"{e.filename or folder}: {e.strerror or e}; fetch the adapter again") from e
    except (ValueError, TypeError, KeyError, SafetensorError) as e:
        raise _bad(ref, f"its files cannot be read ({type(e).__name__}: {e}); fetch the adapter again") from e
    if not alpha > 0:
        raise _bad(ref, f"lora_alpha is {alpha}; save the adapter again with a positive one")
    return config, tensors


def _merge(group: LinearGroup, members: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> LoRAWeights | None:
    """The members' matrices as one: A below A, and B on the diagonal, at the columns of its member."""
    if not members:
        return None
    rank = sum(len(a) for a, _ in members.values())
    b = torch.zeros(rank, sum(group.sizes))
    row = 0
    for member, (a, own) in sorted(members.items()):
        column = sum(group.sizes[:member])
        b[row : row + len(a), column : column + group.sizes[member]] = own.T
        row += len(a)
    return LoRAWeights(torch.cat([members[m][0] for m in sorted(members)]), b.to(group.weight.dtype))


def _stack(adapters: list[Adapter]) -> Stack:
    weights: list[LoRAWeights | None] = []
    ranks: list[tuple[int, ...]] = []
    for own in zip(*(a.weights for a in adapters), strict=True):
        there = [w for w in own if w is not None]
        ranks.append(tuple(0 if w is None else len(w.a) for w in own))
        if len(there) > 1:
            weights.append(LoRAWeights(torch.cat([w.a for w in there]), torch.cat([w.b for w in there])))
        else:
            weights.append(there[0] if there else None)
    return tuple(a.name for a in adapters), weights, ranks


def _bad(ref: AdapterRef, why: str) -> InvalidInput:
    return InvalidInput(f"adapter {ref.name} cannot be used: {why}")
