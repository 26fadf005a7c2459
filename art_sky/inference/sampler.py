"""From logits to tokens: one uniform number a token, by inversion of the cumulative distribution.

The uniform comes from the request's seed and the token's index alone, so that what else runs never changes a
request's stream. The logprob is that of softmax(logits / temperature) without any filter (temperature 1 where
sampling is greedy), whatever filter chose the token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_BLOCK = 256


@dataclass(frozen=True)
class Draw:
    """How the next token of one sequence is drawn. `uniform` is in [0, 1)."""

    temperature: float
    uniform: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_logprobs: int = 0

    @property
    def filtered(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class Drawn:
    token: int
    logprob: float
    top: list[tuple[int, float]]


def uniform(seed: int, index: int) -> float:
    """The `index`-th number of a seed's stream, uniform in [0, 1) with 53 bits."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn | None]:
    """One token for each row of `logits` [n, vocabulary] (float32; changed in place); None where a row holds NaN
    or infinity, so that nothing can be drawn.
    """
    if any(d.temperature not in (0.0, 1.0) for d in draws):
        logits /= torch.tensor([[d.temperature or 1.0] for d in draws])
    probabilities = torch.softmax(logits, -1)
    broken = probabilities[:, 0].isnan()  # one such logit makes the whole row NaN
    if broken.any():
        probabilities[broken] = 1.0
    tokens = _invert(probabilities, torch.tensor([d.uniform for d in draws], dtype=torch.float64))
    if filtered := [i for i, d in enumerate(draws) if d.filtered]:
        weights = torch.stack([_filter(probabilities[i], draws[i]) for i in filtered])
        tokens[filtered] = _invert(weights, torch.tensor([draws[i].uniform for i in filtered], dtype=torch.float64))
    if greedy := [i for i, d in enumerate(draws) if d.temperature == 0]:
        tokens[greedy] = logits[greedy].argmax(-1)
    chosen = probabilities.gather(1, tokens[:, None])[:, 0]
    logprobs = chosen.log()
    top: dict[int, list[tuple[int, float]]] = {}
    for i, d in enumerate(draws):
        if d.top_logprobs:
            values, ids = logits[i].topk(min(d.top_logprobs, logits.shape[1]))
            values = values + (logprobs[i] - logits[i, tokens[i]])
            top[i] = list(zip(ids.tolist(), values.tolist(), strict=True))
    pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    drawn = [Drawn(token, logprob, top.get(i, [])) for i, (token, logprob) in enumerate(pairs)]
    return [None if bad else d for d, bad in zip(drawn, broken.tolist(), strict=True)]


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws an index from each row of non-negative `weights` [n, v].

    In two levels, so that the vocabulary is read once: sums of blocks choose a block, and a sum within it the
    token. Both are float64, so that no token with weight is out of reach.
    """
    n, v = weights.shape
    whole = v // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(n, -1, _BLOCK).sum(-1)
    if whole < v:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    cumulative = sums.double().cumsum(-1)
    target = _below(uniforms[:, None] * cumulative[:, -1:], cumulative[:, -1:])
    block = torch.searchsorted(cumulative, target, right=True)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_min(0)), 0.0)
    index = block * _BLOCK + torch.arange(_BLOCK)
    inside = weights.gather(1, index.clamp_max(v - 1)).double().masked_fill_(index >= v, 0.0).cumsum(-1)
    within = torch.searchsorted(inside, _below(target - before, inside[:, -1:]), right=True)
    return (block * _BLOCK + within)[:, 0]


def _below(target: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Rounding may push a target onto the end of the distribution, where no token is."""
    return torch.minimum(target, torch.nextafter(limit, torch.zeros_like(limit)))


def _filter(probabilities: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The weights that top_k, then top_p of what is left, and min_p leave over; the likeliest always stays."""
    weights = probabilities.clone()
    if draw.min_p > 0:
        weights[probabilities < draw.min_p * probabilities.max()] = 0.0
    if draw.top_k > 0 or draw.top_p < 1:
        ordered, ids = probabilities.sort(descending=True, stable=True)
        if 0 < draw.top_k < len(ordered):
            ordered[draw.top_k :] = 0.0
        cumulative = ordered.double().cumsum(0)
        ordered[(cumulative - ordered) >= draw.top_p * cumulative[-1]] = 0.0
        weights[ids[ordered == 0]] = 0.0
    return weights
