"""How much better a trajectory was than its siblings: the group-relative advantage of GRPO
(Shao et al. 2024, arXiv:2402.03300), without the division for Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_SPREAD = 1e-6
EPSILON = 1e-6


def skip_reason(rewards: Sequence[float]) -> str | None:
    """Why a group teaches nothing, or None. Failed rollouts have no reward and are not among `rewards`."""
    if not rewards:
        return "no trajectory"
    if len(rewards) == 1:
        return "only one trajectory"
    if max(rewards) - min(rewards) < MIN_SPREAD:
        return "all rewards equal"
    return None


def advantages(rewards: Sequence[float], scale: bool = True) -> list[float]:
    """(reward - mean) / (population standard deviation + 1e-6), or without the division where `scale` is False.

    All 0 where `skip_reason` says that the group teaches nothing.
    """
    if skip_reason(rewards) is not None:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + EPSILON if scale else 1.0) for r in rewards]
