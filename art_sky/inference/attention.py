"""Attention of a ragged batch: tokens of many sequences side by side in one row of shape (1, T).

A forward carries one token of each decoding sequence, then chunks of prompts. transformers hands every layer's
queries, keys and values to the function registered here; it writes the new keys and values into the cache and
lets each sequence attend to its own. Sequences that add one token are read slab by slab, with the query heads
that share a key-value head folded into the query length, so that nothing is repeated in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from art_sky.errors import Unsupported
from art_sky.inference.kv_cache import Slab, Slot

NAME = "art_sky_ragged"


@dataclass
class Rows:
    """Sequences of one slab that add one token each: tokens `first : first + len(slots)` of the batch.

    `target` [n * kv heads] says where each token's keys go, in rows of head_dim. The first `occupied` slots of the
    slab are read up to `length` under `mask` [occupied, 1, 1, length] (True: attend). `dense`: every occupied slot
    takes part.
    """

    slab: Slab
    first: int
    slots: torch.Tensor
    target: torch.Tensor
    occupied: int
    length: int
    mask: torch.Tensor
    dense: bool


@dataclass
class Chunk:
    """`count` tokens of one sequence from batch row `first`, at positions `start : start + count`."""

    slot: Slot
    first: int
    start: int
    count: int
    mask: torch.Tensor  # [group * count, start + count]


@dataclass
class Plan:
    """What the attention layers need to know about one forward."""

    context_length: int
    rows: list[Rows] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


def plan_rows(slab: Slab, first: int, slots: list[int], positions: list[int]) -> Rows:
    """`slots` ascending; `positions` are where the new tokens go."""
    occupied, length = slots[-1] + 1, max(positions) + 1
    at = torch.tensor(slots)
    position = torch.tensor(positions)
    ends = torch.zeros(occupied, dtype=torch.long)  # a slot that sits out attends to position 0 and is ignored
    ends[at] = position
    mask = (torch.arange(length) <= ends[:, None])[:, None, None]
    heads = slab.data.shape[3]
    target = ((at[:, None] * heads + torch.arange(heads)) * slab.length + position[:, None]).flatten()
    return Rows(slab, first, at, target, occupied, length, mask, dense=len(slots) == occupied)


def plan_chunk(slot: Slot, first: int, start: int, count: int, group: int) -> Chunk:
    """`group`: query heads a key-value head."""
    mask = torch.arange(start + count) <= torch.arange(start, start + count)[:, None]
    return Chunk(slot, first, start, count, mask.repeat(group, 1))


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, head_dim]
    key: torch.Tensor,  # [1, kv heads, T, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    plan: Plan,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, head_dim]. Raises Unsupported for attention that is more than causal."""
    _refuse_what_is_not_done(plan, options)
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, heads, head_dim]
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty(tokens, heads, head_dim, dtype=q.dtype)
    for rows in plan.rows:
        keys, values = rows.slab.data[layer, 0], rows.slab.data[layer, 1]  # [slots, kv heads, length, head_dim]
        own = slice(rows.first, rows.first + len(rows.slots))
        keys.view(-1, head_dim).index_copy_(0, rows.target, k[own].reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, rows.target, v[own].reshape(-1, head_dim))
        asks = q[own]
        if not rows.dense:
            asks = asks.new_zeros(rows.occupied, heads, head_dim).index_copy_(0, rows.slots, asks)
        read = (slice(rows.occupied), slice(None), slice(rows.length))
        answer = F.scaled_dot_product_attention(
            asks.reshape(rows.occupied, kv_heads, group, head_dim),
            keys[read],
            values[read],
            attn_mask=rows.mask,
            scale=scaling,
        ).reshape(rows.occupied, heads, head_dim)
        out[own] = answer if rows.dense else answer[rows.slots]
    for chunk in plan.chunks:
        end = chunk.start + chunk.count
        own = slice(chunk.first, chunk.first + chunk.count)
        keys, values = chunk.slot.slab.data[layer, :, chunk.slot.index]  # [kv heads, length, head_dim]
        keys[:, chunk.start : end] = k[own].transpose(0, 1)
        values[:, chunk.start : end] = v[own].transpose(0, 1)
        asks = q[own].transpose(0, 1).reshape(1, kv_heads, group * chunk.count, head_dim)
        answer = F.scaled_dot_product_attention(
            asks, keys[None, :, :end], values[None, :, :end], attn_mask=chunk.mask, scale=scaling
        )
        out[own] = answer.reshape(heads, chunk.count, head_dim).transpose(0, 1)
    return out[None], None


def _refuse_what_is_not_done(plan: Plan, options: dict[str, Any]) -> None:
    window = options.get("sliding_window")
    if window is not None and window < plan.context_length:
        raise Unsupported(
            f"this model attends to a sliding window of {window} tokens, which the CPU engine does not do; "
            f"set context_length to at most {window}, or use another engine"
        )
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise Unsupported(
                f"this model's attention uses {name}, which the CPU engine does not do; use another engine"
            )


AttentionInterface.register(NAME, ragged_attention)
