"""Whether a model computes in packed rows what it computes in plain ones: tried once, when it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from art_sky.training.rows import Segment, plan
from art_sky.training.sequences import TokenSequence
from art_sky.training.tokens import TokenTable

if TYPE_CHECKING:
    from art_sky.training.model import Policy

# Of the difference that reading a sibling's tokens makes: rounding in bfloat16 is far below, a wrong mask far above.
_TOLERANCE = 0.2


@torch.no_grad()
def why_not_packed(policy: Policy, config: Any) -> str | None:
    """None when packed rows are exact for this model, else the reason in words."""
    from art_sky.training import passes

    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        return f"its layers of {', '.join(sorted(kinds))} cannot be packed"
    sequences = _sequences(policy.vocab_size)
    table = TokenTable.of(sequences)
    plain, *packed = (plan(sequences, budget, share) for budget, share in ((1024, False), (1024, True), (24, True)))
    try:
        expected = passes.score(policy, plain, table, _nothing)
        found = [passes.score(policy, segments, table, _nothing) for segments in packed]
        windows = policy.forward(packed[0][0])[0].windows
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as e:  # of code that is not ours
        return f"its layers refuse packed rows ({type(e).__name__}: {e})"
    if windows != _windows(config):
        return "its layers do not say what they attend to"
    wrong = passes.score(policy, [_causal(packed[0][0])], table, _nothing)
    difference = max((f - expected).abs().max().item() for f in found)
    if not difference <= max(_TOLERANCE * (wrong - expected).abs().max().item(), 1e-4):
        return f"packed rows differ from plain ones by {difference:.2g}"
    return None


def _sequences(vocabulary: int) -> list[TokenSequence]:
    """A trunk with a fork and three branches, in which nearly all tokens are predicted."""
    draw = np.random.default_rng(0)
    trunk, branch, *tails = (draw.integers(0, vocabulary, n) for n in (20, 6, 9, 8, 7))
    made: list[TokenSequence] = []
    for prefix, tail in zip(([trunk, branch], [trunk, branch], [trunk]), tails, strict=True):
        ids = np.concatenate([*prefix, tail]).astype(np.int32)
        n = len(ids)
        yes, one = np.ones(n, np.bool_), np.ones(n, np.float32)
        made.append(TokenSequence(ids, -one, np.arange(n) > 0, one, yes, ~yes, 0, len(made), 1.0))
    return made


def _causal(segment: Segment) -> Segment:
    """The same row, wrongly: each token sees all before it."""
    return Segment(segment.ids, segment.positions, tokens=segment.tokens, sources=segment.sources)


def _windows(config: Any) -> dict[int, int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return {
        i: window if kinds is None or kinds[i] == "sliding_attention" else None for i in range(config.num_hidden_layers)
    }


def _nothing() -> None: ...
