"""Linear layers that add several LoRA adapters in one batch, unmerged (Hu et al. 2021, arXiv:2106.09685).

Linear layers that read the same input (query, key and value; gate and up) run as one. Beside the base product
stands x A^T B^T in float32, with the A and B matrices of all adapters in the batch put together: a mask zeroes
the part of x A^T that belongs to other sequences' adapters. As in the trainer, base and delta are added in
float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LoRAWeights:
    """What one adapter adds to one group: y += (x A^T) B, the scaling folded into B."""

    a: torch.Tensor  # [rank, in], float32; the rank is summed over the group's members
    b: torch.Tensor  # [rank, out], in the base model's dtype


@dataclass
class ActiveLoRA:
    """The adapters of the current forward, set before it: one entry of `weights` and `masks` a group."""

    weights: Sequence[LoRAWeights | None] = ()
    masks: Sequence[torch.Tensor | None] = ()  # [T, rank]; None: every token uses every row


@dataclass
class LinearGroup:
    """The linear layers with one common input, in call order; together they are one product.

    The first member computes for all of them; the others take their part.
    """

    index: int
    names: list[str]
    sizes: list[int]
    in_features: int
    weight: torch.Tensor  # [sum(sizes), in_features]
    bias: torch.Tensor | None
    active: ActiveLoRA
    _input: torch.Tensor | None = field(default=None, repr=False)
    _outputs: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    def output(self, member: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input:
            self._input, self._outputs = x, torch.split(self._compute(x), self.sizes, -1)
        result = self._outputs[member]
        if member == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return result

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        lora = self.active.weights[self.index] if self.active.weights else None
        if lora is not None:
            low = x[0].float() @ lora.a.T
            mask = self.active.masks[self.index]
            if mask is not None:
                low *= mask
            y[0].addmm_(low.to(y.dtype), lora.b)
        return y


class GroupMember(nn.Module):
    """Stands where a linear layer was."""

    def __init__(self, group: LinearGroup, member: int) -> None:
        super().__init__()
        self._output = group.output
        self._member = member

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._output(self._member, x)


def group_linears(decoder: nn.Module, probe: Callable[[], object]) -> tuple[list[LinearGroup], ActiveLoRA]:
    """Replaces the decoder's linear layers by groups. `probe` runs one forward with a single row of tokens, which
    shows who reads what; layers that see anything else than that row (experts) are left alone.
    """
    calls: list[tuple[str, nn.Linear, torch.Tensor]] = []

    def record(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            assert isinstance(module, nn.Linear)
            calls.append((name, module, inputs[0]))  # keeps the input alive, so that identities stay unique

        return hook

    linears = [(name, m) for name, m in decoder.named_modules() if isinstance(m, nn.Linear)]
    hooks = [module.register_forward_pre_hook(record(name)) for name, module in linears]
    try:
        probe()
    finally:
        for hook in hooks:
            hook.remove()
    tokens = max(x.shape[1] for _, _, x in calls if x.ndim == 3)
    times = {name: sum(1 for other, _, _ in calls if other == name) for name, _, _ in calls}
    inputs: dict[int, list[tuple[str, nn.Linear]]] = {}
    for name, module, x in calls:
        if times[name] == 1 and tuple(x.shape[:2]) == (1, tokens):
            inputs.setdefault(id(x), []).append((name, module))
    active = ActiveLoRA()
    groups = [_make_group(decoder, i, members, active) for i, members in enumerate(inputs.values())]
    return groups, active


def _make_group(
    decoder: nn.Module, index: int, members: list[tuple[str, nn.Linear]], active: ActiveLoRA
) -> LinearGroup:
    modules = [m for _, m in members]
    bias = None
    if any(m.bias is not None for m in modules):
        bias = torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in modules])
    group = LinearGroup(
        index,
        names=[name for name, _ in members],
        sizes=[m.out_features for m in modules],
        in_features=modules[0].in_features,
        weight=torch.cat([m.weight.detach() for m in modules]),
        bias=bias,
        active=active,
    )
    for member, (name, _) in enumerate(members):
        decoder.set_submodule(name, GroupMember(group, member))
    return group
