"""Attention over the packed rows of `rows.Segment`, in which a token sees its ancestors in the prefix tree.

The keys of a span serve all tokens below it, which are its neighbours in the row, as one dense rectangle without a
mask; what each rectangle yields is merged by its logsumexp (Juravsky et al. 2024, "Hydragen", arXiv:2402.05099).
So attention costs what its visible pairs cost, no key is copied, and no mask as large as the row exists. Small
subtrees, where calls cost more than pairs, are one square with a mask. Backward, each rectangle is given the merged
output and logsumexp, with which the derivative of FlashAttention is that of its share (Dao et al. 2022,
arXiv:2205.14135, appendix B): exact gradients.

On GPUs one FlexAttention call with a block mask takes the place of the rectangles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from art_sky.training.rows import Segment

NAME = "art_sky_tree"  # of this attention among those of transformers

# What one more rectangle costs, in pairs of a query and a key: on CPUs about 0.1 ms, forward and backward.
_CALL_PAIRS = 2048
# Queries whose mask exists at a time where a sliding window cuts a rectangle.
_MASKED_QUERIES = 256


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Queries [q0, q1) of a packed row see keys [k0, k1) of its `level`-th trunk, or of the row itself (None)."""

    q0: int
    q1: int
    k0: int
    k1: int
    level: int | None = None
    diagonal: bool = False  # holds each query's own key; every query is in exactly one such rectangle
    square: bool = False  # of whole subtrees: not plainly causal
    visible: Tensor | None = None  # [q, k], made where a mask is needed

    @property
    def causal(self) -> bool:
        return self.diagonal and self.visible is None


class PackedRow:
    """A segment on its way through the layers: where its tokens' keys are found, and its own for those below it.

    Call `backward` after the children's passes when gradients are wanted.
    """

    def __init__(self, segment: Segment, above: Sequence[PackedRow], device: torch.device) -> None:
        self.segment, self.above = segment, list(above)
        self.windows: dict[int, int | None] = {}  # by layer, as the model gave them
        self.ids, self.positions = (torch.from_numpy(x).to(device) for x in (segment.ids, segment.positions.copy()))
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys and values in this row's graph
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}  # the same as leaves, for the children's graphs
        self._rectangles: dict[int | None, list[Rectangle]] = {}
        self._block_masks: dict[int | None, Any] = {}

    def share(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keeps a layer's keys and values [1, H, T, D] for the child segments."""
        needed = torch.is_grad_enabled() and key.requires_grad
        self._given[layer] = key, value
        self._shared[layer] = key.detach().requires_grad_(needed), value.detach().requires_grad_(needed)

    def trunk(self, layer: int) -> list[Tensor]:
        """Keys and values of the segments above, topmost first: k, v, k, v ... of [1, H, T, D]."""
        return [tensor for row in self.above for tensor in row._shared[layer]]

    def rectangles(self, window: int | None) -> list[Rectangle]:
        if window not in self._rectangles:
            self._rectangles[window] = list(_windowed(self, window))
        return self._rectangles[window]

    def block_mask(self, window: int | None) -> Any:
        if window not in self._block_masks:
            self._block_masks[window] = _block_mask(self, window)
        return self._block_masks[window]

    def backward(self, loss: Tensor | None) -> None:
        """Adds this row's share of the gradient: that of its own loss, and what the children found for its keys."""
        outputs: list[Tensor] = [] if loss is None else [loss]
        gradients: list[Tensor | None] = [None] * len(outputs)
        for layer, given in self._given.items():
            for output, leaf in zip(given, self._shared[layer], strict=True):
                if leaf.grad is not None:
                    outputs.append(output)
                    gradients.append(leaf.grad)
        torch.autograd.backward(outputs, gradients)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_row: PackedRow | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """For transformers: query [1, H, T, D], key and value [1, H' <= H, T, D] -> [1, T, H, D]. Plain without a row."""
    if packed_row is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options
        )
        return out
    row, layer = packed_row, module.layer_idx
    row.windows[layer] = sliding_window
    trunk = row.trunk(layer)
    if row.segment.children:
        row.share(layer, key, value)
    if query.device.type != "cpu":
        return _flex(query, key, value, trunk, row.block_mask(sliding_window), scaling), None
    arguments = (query, key, value, row.rectangles(sliding_window), scaling, *trunk)
    merged: Tensor = _Rectangles.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return merged, None


ALL_ATTENTION_FUNCTIONS.register(NAME, tree_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)  # for padded rows


class _Rectangles(torch.autograd.Function):
    """The merged rectangles of one layer, on a CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rectangles: list[Rectangle],
        scale: float | None,
        *trunk: Tensor,
    ) -> Tensor:
        _, heads, length, width = query.shape
        out = query.new_empty(1, length, heads, width, dtype=torch.float32).transpose(1, 2)
        # In the memory order of the kernel's own logsumexp.
        norm = query.new_empty(1, length, heads, dtype=torch.float32).transpose(1, 2)
        for r in rectangles:
            at = slice(r.q0, r.q1)
            k, v = _keys(r, key, value, trunk)
            mask = None if r.visible is None else _additive(r.visible, query.dtype)
            o, n = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, at], k, v, 0.0, r.causal, attn_mask=mask, scale=scale
            )
            if r.diagonal:  # these come first
                out[:, :, at], norm[:, :, at] = o, n
            else:
                if r.visible is not None:
                    n = n.masked_fill(~r.visible.any(-1), -torch.inf)  # the kernel says 0 where nothing is seen
                total = torch.logaddexp(norm[:, :, at], n)
                out[:, :, at] *= (norm[:, :, at] - total).exp_()[..., None]
                out[:, :, at] += o * (n - total).exp_()[..., None]
                norm[:, :, at] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, norm, *trunk)
        ctx.rectangles, ctx.scale = rectangles, scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norm, *trunk = ctx.saved_tensors
        grad_out = grads[0].transpose(1, 2)
        found = [torch.zeros_like(t, dtype=torch.float32) for t in (query, key, value, *trunk)]
        for r in ctx.rectangles:
            q, k = slice(r.q0, r.q1), slice(r.k0, r.k1)
            mask = None if r.visible is None else _additive(r.visible, query.dtype)
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, q], query[:, :, q], *_keys(r, key, value, trunk), out[:, :, q], norm[:, :, q],
                0.0, r.causal, attn_mask=mask, scale=ctx.scale,
            )  # fmt: skip
            first = 1 if r.level is None else 3 + 2 * r.level
            found[0][:, :, q] += dq
            found[first][:, :, k] += dk
            found[first + 1][:, :, k] += dv
        dq, dk, dv, *rest = (g.to(query.dtype) for g in found)
        return dq, dk, dv, None, None, *rest


def _keys(r: Rectangle, key: Tensor, value: Tensor, trunk: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if r.level is not None:
        key, value = trunk[2 * r.level : 2 * r.level + 2]
    return key[:, :, r.k0 : r.k1], value[:, :, r.k0 : r.k1]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as the kernel wants it."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)


def _windowed(row: PackedRow, window: int | None) -> Iterator[Rectangle]:
    """The rectangles of a row, diagonals first, in layers whose tokens see the last `window` positions (None: all)."""
    end = torch.empty(row.segment.unpadded, dtype=torch.long)
    for span in row.segment.spans:
        end[span.start : span.stop] = span.end
    for r in sorted(_cover(row.segment), key=lambda r: not r.diagonal):
        q_at, k_at = row.positions[0], (row if r.level is None else row.above[r.level]).positions[0]
        cut = window is not None and int(q_at[r.q0 : r.q1].max() - k_at[r.k0 : r.k1].min()) >= window
        if not cut and not r.square:
            yield r
            continue
        for q0 in range(r.q0, r.q1, _MASKED_QUERIES):
            q1 = min(q0 + _MASKED_QUERIES, r.q1)
            queries, keys = torch.arange(q0, q1)[:, None], torch.arange(r.k0, min(q1, r.k1) if r.diagonal else r.k1)
            visible = torch.ones(q1 - q0, len(keys), dtype=torch.bool)
            if r.diagonal:
                visible &= (keys <= queries) & (queries < end[keys])
            if window is not None:
                visible &= q_at[queries] - k_at[keys] < window
            seen = visible.any(0).nonzero()
            if len(seen):
                k0, k1 = int(seen[0]), int(seen[-1]) + 1
                visible = visible[:, k0:k1].contiguous()
                yield Rectangle(q0, q1, r.k0 + k0, r.k0 + k1, r.level, r.diagonal, visible=visible)


@dataclass(frozen=True)
class _Cover:
    """Rectangles for what the tokens [start, end) see of themselves, and what they cost."""

    start: int
    end: int
    cost: float
    rectangles: list[Rectangle]

    @classmethod
    def square(cls, start: int, end: int) -> _Cover:
        cost = (end - start) ** 2 + _CALL_PAIRS
        return cls(start, end, cost, [Rectangle(start, end, start, end, diagonal=True, square=True)])


def _cover(segment: Segment) -> Iterator[Rectangle]:
    """Rectangles that hold every pair of a token and one of its ancestors exactly once, at little cost.

    Found from the leaves up: a subtree is either its span's triangle, the rectangle of the tokens below with the
    span's keys, and what covers the children; or, as a run of neighbouring subtrees may be, one masked square.
    """
    for tree in segment.trees:
        yield from (Rectangle(tree.start, tree.end, 0, n, level) for level, n in enumerate(tree.trunk))
    found: list[_Cover] = []  # of whole subtrees, the leftmost last
    for span in reversed(segment.spans):
        children: list[_Cover] = []
        while found and found[-1].end <= span.end:
            children.append(found.pop())
        n, below = span.stop - span.start, span.end - span.stop
        cost = n * n / 2 + _CALL_PAIRS
        rectangles = [Rectangle(span.start, span.stop, span.start, span.stop, diagonal=True)]
        if below:
            cost += n * below + _CALL_PAIRS
            rectangles.append(Rectangle(span.stop, span.end, span.start, span.stop))
        for child in _runs(children):
            cost += child.cost
            rectangles += child.rectangles
        found.append(_Cover(span.start, span.end, cost, rectangles))
    for cover in _runs(found[::-1]):
        yield from cover.rectangles


def _runs(neighbours: list[_Cover]) -> list[_Cover]:
    """Joins neighbouring subtrees into squares where that is cheaper."""
    runs: list[_Cover] = []
    for cover in neighbours:
        runs.append(min(cover, _Cover.square(cover.start, cover.end), key=lambda c: c.cost))
        if len(runs) > 1:
            joined = _Cover.square(runs[-2].start, runs[-1].end)
            if joined.cost < runs[-2].cost + runs[-1].cost:
                runs[-2:] = [joined]
    return runs


def _block_mask(row: PackedRow, window: int | None) -> Any:
    """FlexAttention's mask over the keys of all trunks, topmost first, and the row's own behind them."""
    device, length = row.ids.device, row.segment.unpadded
    sizes = [*(above.segment.unpadded for above in row.above), length]
    before = sum(sizes) - length  # keys of all trunks
    end = torch.zeros(before + length, dtype=torch.long)
    trunk = torch.zeros(len(sizes), length, dtype=torch.long)  # how many keys of each level a query sees
    for span in row.segment.spans:
        end[before + span.start : before + span.stop] = span.end
    for tree in row.segment.trees:
        trunk[:-1, tree.start : tree.end] = torch.tensor(tree.trunk, dtype=torch.long)[:, None]
    level = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    index = torch.cat([torch.arange(n) for n in sizes])
    own = level == len(sizes) - 1
    end, trunk, level, index, own = (x.to(device) for x in (end, trunk, level, index, own))
    q_at = row.positions[0]
    k_at = torch.cat([above.positions[0] for above in [*row.above, row]])

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (own[k] & (index[k] <= q) & (q < end[k])) | (index[k] < trunk[level[k], q])
        return seen if window is None else seen & (q_at[q] - k_at[k] < window)

    return _flex_functions(device.type).create_block_mask(visible, None, None, length, len(level), device=device)


def _flex(query: Tensor, key: Tensor, value: Tensor, trunk: list[Tensor], mask: Any, scale: float | None) -> Tensor:
    """Untested on a GPU."""
    keys, values = torch.cat([*trunk[::2], key], dim=2), torch.cat([*trunk[1::2], value], dim=2)
    out: Tensor = _flex_functions(query.device.type).flex_attention(
        query, keys, values, block_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


@dataclass(frozen=True)
class _Flex:
    create_block_mask: Any
    flex_attention: Any


@functools.cache
def _flex_functions(device: str) -> _Flex:
    """Compiled on GPUs: uncompiled, the mask and the scores of all pairs would exist, with 8 bytes and more each."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device != "cuda":
        return _Flex(create_block_mask, flex_attention)
    return _Flex(torch.compile(create_block_mask, dynamic=True), torch.compile(flex_attention, dynamic=True))
