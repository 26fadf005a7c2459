"""PEFT's lora.Linear as one autograd step: the same numbers, less memory. The base weight may be quantised."""

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
            return F.linear(x, dense(self._base), self._base.bias)
        arguments = (x, self._base, self._a, self._b, self._scale)
        out: Tensor = LoRALinear.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out


class FrozenForward:
    """base(x) of a quantised layer that has no adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = FrozenLinear.apply(x, self._layer)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out


def is_quantised(layer: nn.Module) -> bool:
    """Whether it is bitsandbytes' Linear4bit with a weight in 4 bits."""
    return getattr(getattr(layer, "weight", None), "quant_state", None) is not None


def dense(layer: nn.Linear) -> Tensor:
    """[out, in] the layer's frozen weight as it multiplies: in the base's dtype, dequantised where it is in 4 bits."""
    if not is_quantised(layer):
        return layer.weight
    from bitsandbytes.functional import dequantize_4bit

    packed: Any = layer.weight
    weight: Tensor = dequantize_4bit(packed, packed.quant_state)
    return weight


class FrozenLinear(torch.autograd.Function):
    """base(x), with a gradient for x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Linear) -> Tensor:
        ctx.base = base
        return F.linear(x, dense(base), base.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ dense(ctx.base), None


class LoRALinear(torch.autograd.Function):
    """cast(base(x) + scale * B A float(x)); the base weight is frozen.

    PEFT's own autograd graph keeps a float32 copy of the input for every layer: three quarters of the memory of a
    step on a small bfloat16 model.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = F.linear(x.float(), a)
        out = F.linear(x, dense(base), base.bias)
        if out.dtype == torch.float32:
            out += F.linear(low, b) * scale
        else:
            out = out.float().add_(F.linear(low, b), alpha=scale).to(x.dtype)
        ctx.save_for_backward(x, a, b, low)
        ctx.base = base  # not its dense weight, which a quantised one has only while it multiplies
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        (grad,) = grads
        x, a, b, low = ctx.saved_tensors
        g = grad.float().flatten(0, -2) * ctx.scale
        g_low = g @ b
        grad_b = g.t() @ low.flatten(0, -2)
        grad_a = g_low.t() @ x.float().flatten(0, -2)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ((grad.flatten(0, -2) @ dense(ctx.base)).float() + g_low @ a).to(x.dtype).view_as(x)
        return grad_x, None, grad_a, grad_b, None
