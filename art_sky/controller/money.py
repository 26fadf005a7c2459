"""What a cluster has spent and what is left, over all its machines.

The registry's own times are used: a machine is billed from before the first cloud call until its provider said that
it is gone, so that these sums are never below the bill (disks and egress apart).
"""

from __future__ import annotations

import contextlib

from art_sky.controller.plan import USEFUL_MINUTES
from art_sky.controller.rented import Node, RentedCluster
from art_sky.errors import BudgetTooSmall
from art_sky.node.records import NodeLimits

# How long after a limit the controller itself acts, where the machine's own watchdog should have.
GRACE_SECONDS = 120.0


def price(node: Node) -> float:
    """Dollars per hour."""
    return float(node.offer["price"])


def billed_hours(node: Node, now: float) -> float:
    end = now if node.closed is None else node.closed
    return max(end - node.billed_from, 0.0) / 3600


def spent(cluster: RentedCluster, now: float) -> float:
    """Dollars, over all nodes until now."""
    return sum(billed_hours(node, now) * price(node) for node in cluster.nodes)


def hours(cluster: RentedCluster, now: float) -> float:
    """Hours in which a machine was billed, over all nodes until now."""
    return sum(billed_hours(node, now) for node in cluster.nodes)


def max_hours(cluster: RentedCluster) -> float:
    return cluster.request.limits.max_hours + cluster.extended_hours


def node_limits(cluster: RentedCluster, node: str, now: float) -> NodeLimits:
    """What one node may use: the cluster's limits less what the other nodes took."""
    others = cluster.model_copy(update={"nodes": [n for n in cluster.nodes if n.name != node]})
    limits = cluster.request.limits
    return NodeLimits(
        idle_minutes=limits.idle_minutes,
        max_hours=max_hours(cluster) - hours(others, now),
        orphan_minutes=limits.orphan_minutes,
        flush_minutes=limits.flush_minutes,
        setup_minutes=limits.setup_minutes,
        budget=None if limits.budget is None else limits.budget - spent(others, now),
    )


def check_useful(cluster: RentedCluster, limits: NodeLimits, dollars_per_hour: float) -> None:
    """Raises BudgetTooSmall when a node with these limits would end before it had made a step."""
    left, enough = limits.budget, USEFUL_MINUTES / 60
    if left is not None and left < enough * dollars_per_hour:
        raise BudgetTooSmall(
            f"${max(left, 0):.2f} of the budget of ${cluster.request.limits.budget:.2f} are left, less than "
            f"{USEFUL_MINUTES:.0f} minutes at ${dollars_per_hour:.2f} an hour; launch again with a larger --budget"
        )
    if limits.max_hours < min(enough, max_hours(cluster)) - 1e-9:
        raise BudgetTooSmall(
            f"{max(limits.max_hours, 0) * 60:.0f} minutes of max_hours are left, less than {USEFUL_MINUTES:.0f}; "
            "launch again with a larger --max-hours"
        )


def payable(cluster: RentedCluster, limits: NodeLimits) -> list[int]:
    """Which offers of the plan a node with these limits can make a step on; the cheapest alone where there is none."""
    prices = [float(offer["price"]) for offer in cluster.plan]
    found = []
    for n, dollars_per_hour in enumerate(prices):
        with contextlib.suppress(BudgetTooSmall):
            check_useful(cluster, limits, dollars_per_hour)
            found.append(n)
    return found or [prices.index(min(prices))]


def ends_by_itself(cluster: RentedCluster, node: Node, now: float) -> tuple[float, str]:
    """(Unix seconds at which the node's limits are used up, `budget` or `max_hours`)."""
    others = cluster.model_copy(update={"nodes": [n for n in cluster.nodes if n.name != node.name]})
    by_hours = node.billed_from + (max_hours(cluster) - hours(others, now)) * 3600
    budget = cluster.request.limits.budget
    if budget is None or price(node) <= 0:
        return by_hours, "max_hours"
    by_budget = node.billed_from + (budget - spent(others, now)) / price(node) * 3600
    return min((by_budget, "budget"), (by_hours, "max_hours"))


def controller_deadline(cluster: RentedCluster, node: Node, now: float) -> tuple[float, str]:
    """When the controller ends a node that has not ended by itself: limit, flush, grace."""
    at, why = ends_by_itself(cluster, node, now)
    return at + cluster.request.limits.flush_minutes * 60 + GRACE_SECONDS, why
