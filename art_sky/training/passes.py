"""Forward and backward passes over the segments of a plan, each below the segments it hangs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from art_sky.training.attention import PackedRow
from art_sky.training.model import Policy
from art_sky.training.rows import Segment
from art_sky.training.tokens import TokenTable

# Takes the numbers [n] of trained tokens, their logprobs and entropies [n]; returns their share of the loss.
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
Done = Callable[[], None]  # called after each segment; may raise to stop


def backward(policy: Policy, segments: Sequence[Segment], table: TokenTable, objective: Objective, done: Done) -> None:
    """Adds the gradient of the sum of all segments' objectives to the adapter's `.grad`.

    Since a segment's objective may use only its own tokens' logprobs, the sum does not depend on the plan.
    """
    for segment in segments:
        _Pass(policy, table, objective, done).run(segment, [])


@torch.no_grad()
def score(policy: Policy, segments: Sequence[Segment], table: TokenTable, done: Done) -> Tensor:
    """[N] the logprobs of all trained tokens under the policy as it is."""
    logprobs = torch.full((len(table),), torch.nan)

    def keep(tokens: Tensor, logp: Tensor, entropy: Tensor) -> Tensor:
        logprobs[tokens] = logp
        return logp

    for segment in segments:
        _Pass(policy, table, keep, done).run(segment, [])
    return logprobs


@dataclass(frozen=True)
class _Pass:
    policy: Policy
    table: TokenTable
    objective: Objective
    done: Done

    def run(self, segment: Segment, above: list[PackedRow]) -> None:
        row, hidden = self.policy.forward(segment, above)
        loss = self._loss(segment, hidden) if len(segment.tokens) else None
        del hidden
        for child in segment.children:
            self.run(child, [*above, row])
        if torch.is_grad_enabled():
            row.backward(loss)
        self.done()

    def _loss(self, segment: Segment, hidden: Tensor) -> Tensor:
        tokens, sources = torch.from_numpy(segment.tokens), torch.from_numpy(segment.sources)
        # Logits are made once for all tokens predicted at one place with one temperature: forks and duplicates.
        temperature = self.table.temperature[tokens]
        places, at = torch.unique(torch.stack([sources.double(), temperature.double()]), dim=1, return_inverse=True)
        order = at.argsort(stable=True)
        tokens, at = tokens[order], at[order]
        device = hidden.device
        logp, entropy = self.policy.predict(
            hidden[places[0].long().to(device)],
            self.table.ids[tokens].to(device),
            at.to(device),
            places[1].float().to(device),
        )
        return self.objective(tokens, logp.cpu(), entropy[at.to(device)].cpu())
