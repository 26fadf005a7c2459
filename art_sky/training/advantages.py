"""How much better a trajectory was than its siblings: the group-relative advantage of GRPO
(Shao et al. 2024, arXiv:2402.03300), without the division for Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Scale = Literal["group", "batch", "none"]

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


def advantages(rewards: Sequence[float], scale: Scale = "group", batch: Sequence[float] = ()) -> list[float]:
    """(reward - mean) / (population standard deviation + 1e-6), the deviation that of the group, or of all rewards of
    the `batch` (Hu et al. 2025, REINFORCE++, arXiv:2501.03262), or without the division.

    All 0 where `skip_reason` says that the group teaches nothing.
    """
    if skip_reason(rewards) is not None:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    divisor = 1.0 if scale == "none" else _deviation(rewards if scale == "group" else batch) + EPSILON
    return [(r - mean) / divisor for r in rewards]


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
