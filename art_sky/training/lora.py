"""PEFT's lora.Linear as one autograd step: the same numbers, less memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoRAForward:
    """What PEFT's lora.Linear computes, but as one autograd step that keeps the input in the base's dtype."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._base: nn.Linear = layer.get_base_layer()
        self._a: nn.Parameter = layer.lora_A["default"].weight
        self._b: nn.Parameter = layer.lora_B["default"].weight
        self._scale: float = layer.scaling["default"]

    def __call__(self, x: Tensor) -> Tensor:
        if self._layer.disable_adapters:
            return F.linear(x, self._base.weight, self._base.bias)
        arguments = (x, self._base.weight, self._base.bias, self._a, self._b, self._scale)
        out: Tensor = LoRALinear.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out


class LoRALinear(torch.autograd.Function):
    """cast(base(x) + scale * B A float(x)); the base weight is frozen.

    PEFT's own autograd graph keeps a float32 copy of the input for every layer: three quarters of the memory of a
    step on a small bfloat16 model.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = F.linear(x.float(), a)
        out = F.linear(x, weight, bias)
        if out.dtype == torch.float32:
            out += F.linear(low, b) * scale
        else:
            out = out.float().add_(F.linear(low, b), alpha=scale).to(x.dtype)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, a, b, low = ctx.saved_tensors
        g = grad.float().flatten(0, -2) * ctx.scale
        g_low = g @ b
        grad_b = g.t() @ low.flatten(0, -2)
        grad_a = g_low.t() @ x.float().flatten(0, -2)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ((grad.flatten(0, -2) @ weight).float() + g_low @ a).to(x.dtype).view_as(x)
        return grad_x, None, None, grad_a, grad_b, None
