"""The metrics of one history row, from the trajectories that are logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from art_sky.errors import InvalidInput
from art_sky.trajectories import TrajectoryGroup

RESERVED = (
    "reward",
    "reward_std_dev",
    "reward_std_dev_overall",
    "exception_rate",
    "trajectories",
    "groups",
)


def summarize(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Means over all trajectories; nothing where there is nothing to take a mean of.

    reward, and each metric under its own name; reward_std_dev: the mean over groups of the standard deviation within
    the group (population, groups of two or more); reward_std_dev_overall; exception_rate: failed / all rollouts;
    trajectories and groups: counts; group/<name>: means of the groups' own metrics.

    Raises InvalidInput, naming group and trajectory, for a metric that is not finite or has one of these names.
    """
    check_metrics(groups)
    trajectories = [t for g in groups for t in g.trajectories]
    failed = sum(len(g.exceptions) for g in groups)
    row: dict[str, float] = {}
    columns: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            columns.setdefault(name, []).append(float(value))
    for group in groups:
        for name, value in group.metrics.items():
            columns.setdefault(f"group/{name}", []).append(float(value))
    row |= {name: fmean(values) for name, values in columns.items()}
    if trajectories:
        rewards = [t.reward for t in trajectories]
        row |= {"reward": fmean(rewards), "reward_std_dev_overall": pstdev(rewards)}
        spreads = [pstdev([t.reward for t in g.trajectories]) for g in groups if len(g.trajectories) > 1]
        if spreads:
            row["reward_std_dev"] = fmean(spreads)
    if trajectories or failed:
        row["exception_rate"] = failed / (failed + len(trajectories))
    return row | {"trajectories": float(len(trajectories)), "groups": float(len(groups))}


def check_metrics(groups: Sequence[TrajectoryGroup]) -> None:
    """Raises InvalidInput for a metric that cannot be stored or would hide one of ours."""
    for g, group in enumerate(groups):
        places = [(f"trajectory {t} of group {g}", t_.metrics) for t, t_ in enumerate(group.trajectories)]
        for where, metrics in [(f"group {g}", group.metrics), *places]:
            for name, value in metrics.items():
                if not math.isfinite(value):
                    raise InvalidInput(f"the metric {name!r} of {where} is {value}; leave it out where it has no value")
        for where, metrics in places:
            if taken := sorted(set(metrics).intersection(RESERVED)):
                raise InvalidInput(f"the metric name {taken[0]!r} of {where} is taken; choose another name")


def storable(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Metrics that a caller computed, for a row: a value that is not finite is stored as null, a gap in the curve."""
    row: dict[str, float | None] = {}
    for name, value in metrics.items():
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
            raise InvalidInput(f"the metric {name!r} is {value!r}, not a number; leave it out or convert it") from None
        row[name] = number if number is not None and math.isfinite(number) else None
    return row
