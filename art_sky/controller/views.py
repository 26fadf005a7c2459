"""What `art-sky status` shows of a rented cluster: its record, what it cost and can cost, how long it may go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_sky.controller import money
from art_sky.controller.outcomes import described
from art_sky.controller.plan import GUARD_MINUTES
from art_sky.controller.rented import RentedCluster
from art_sky.controller.secrets import token_file
from art_sky.node.records import WatchdogState
from art_sky.schemas import LeaseStatus


def cluster_view(
    cluster: RentedCluster,
    watchdog: WatchdogState | None,
    problem: str | None,
    now: float,
    leases: Mapping[str, LeaseStatus] | None = None,
) -> dict[str, Any]:
    """JSON. Times are Unix seconds, money is dollars; `worst_case` bounds the whole run, disks and egress apart.
    `leases` are those of the cluster's server, by project/name, as it told them last."""
    node, limits = cluster.node, cluster.request.limits
    running = node is not None and node.state != "gone"
    price = money.price(node) if node is not None and running else None
    left: float | None = None
    if node is not None and running:
        left = max(money.ends_by_itself(cluster, node, now)[0] - now, 0.0)
    return {
        "name": cluster.name,
        "id": cluster.id,
        "cloud": node.offer["cloud"] if node is not None else None,
        "state": state_of(cluster),
        "wanted": cluster.wanted,
        "base_url": f"http://127.0.0.1:{cluster.port}",
        "token_file": str(token_file(cluster.name)),
        "store": cluster.request.store,
        "store_here": cluster.request.store_here,
        "created": cluster.created,
        "node": node.model_dump() if node is not None else None,
        "nodes": len(cluster.nodes),
        "price_per_hour": price,
        "spent": round(money.spent(cluster, now), 4),
        "hours": round(money.hours(cluster, now), 4),
        "seconds_left": left,
        "worst_case": round(_worst(cluster, now), 4),
        "idle_seconds": watchdog.idle_seconds if watchdog is not None else None,
        "idle_limit_seconds": limits.idle_minutes * 60,
        "limits": limits.model_dump(),
        "extended_hours": cluster.extended_hours,
        "watchdog": watchdog.phase if watchdog is not None else None,
        "preempted": watchdog is not None and watchdog.preemption_unix is not None,
        "models": cluster.models,
        "leases": {name: lease.model_dump() for name, lease in sorted((leases or {}).items())},
        "problem": problem,
        "error": cluster.error,
        "ended": described(node.reason) if node is not None and node.reason and not running else None,
    }


def state_of(cluster: RentedCluster) -> str:
    """One word: a node's state, `waiting` for the next node, `down`."""
    node = cluster.node
    if node is None or node.state == "gone":
        return "down" if cluster.wanted == "down" else "waiting"
    return node.phase if node.phase in ("kept", "flushing") else node.state


def is_over(cluster: RentedCluster) -> bool:
    """Nothing is wanted and no machine is left."""
    return state_of(cluster) == "down"


def _worst(cluster: RentedCluster, now: float) -> float:
    """What is spent, when nothing can be added any more; else the limits, and the last machine's way out."""
    spent, limits = money.spent(cluster, now), cluster.request.limits
    if is_over(cluster):
        return spent
    price = max([float(o["price"]) for o in cluster.plan], default=0.0)
    bound = spent + price * max(money.max_hours(cluster) - money.hours(cluster, now), 0.0)
    if limits.budget is not None:
        bound = min(bound, max(limits.budget, spent))
    return bound + price * (limits.flush_minutes + GUARD_MINUTES) / 60
