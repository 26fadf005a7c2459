"""The output layer, only where a token is trained, in float32, a chunk of places at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Places whose logits exist at a time: 256 x 49,152 tokens x 4 bytes are 48 MiB.
_CHUNK = 256


def predict(hidden: Tensor, head: Tensor, targets: Tensor, at: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """([N] logprobs of `targets` [N], in nats; [R] entropies) from the hidden states [R, H] of R places.

    `at` [N], ascending, says at which of the places each target is predicted; `temperature` [R] divides the logits
    hidden @ head.T, with `head` [V, H] in float32. Entropies carry no gradient.
    """
    arguments = (hidden, head, targets, at, temperature)
    result: tuple[Tensor, Tensor] = _Predict.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it so
    return result


class _Predict(torch.autograd.Function):
    """A logprob depends on one hidden vector, with the derivative (head[target] - p head) / temperature. So p head,
    one vector a place, is made while the probabilities are there, and logits are never kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, at: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        places = len(hidden)
        logprobs = head.new_empty(len(targets))
        entropies = head.new_empty(places)
        mean = head.new_empty(places, head.shape[1]) if ctx.needs_input_grad[0] else None
        bounds = torch.searchsorted(at, torch.arange(0, places + _CHUNK, _CHUNK, device=at.device)).tolist()
        for i, start in enumerate(range(0, places, _CHUNK)):
            here, those = slice(start, start + _CHUNK), slice(bounds[i], bounds[i + 1])
            logits = (hidden[here].float() @ head.t()).div_(temperature[here, None])
            normaliser = logits.logsumexp(-1)
            local = at[those] - start
            logprobs[those] = logits[local, targets[those]] - normaliser[local]
            probabilities = torch.sub(logits, normaliser[:, None]).exp_()
            entropies[here] = normaliser - torch.linalg.vecdot(probabilities, logits)
            if mean is not None:
                torch.matmul(probabilities, head, out=mean[here])
        if mean is not None:
            ctx.save_for_backward(mean, head, targets, at, temperature)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        mean, head, targets, at, temperature = ctx.saved_tensors
        total = torch.zeros_like(temperature).index_add_(0, at, grads[0])
        found = (mean * -total[:, None]).index_add_(0, at, head[targets] * grads[0][:, None])
        return found.div_(temperature[:, None]).to(ctx.dtype), None, None, None, None
