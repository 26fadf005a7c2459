"""Why a node ended, and whether another one is rented after it. The reason's first word is its code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from art_sky.controller.rented import Node, RentedCluster
from art_sky.node.records import REASONS

# `failed`: the end of a first launch, the next offer for a cluster that has served before.
After = Literal["stop", "failed", "next offer", "same offer"]

# code -> (what it means, what follows)
AFTER: dict[str, tuple[str, After]] = {
    **{code: (text, "stop") for code, text in REASONS.items()},
    "setup": (REASONS["setup"], "failed"),
    "secrets": (REASONS["secrets"], "failed"),
    "health": (REASONS["health"], "failed"),
    "server": (REASONS["server"], "failed"),
    "watchdog": (REASONS["watchdog"], "failed"),
    "disk": (REASONS["disk"], "failed"),
    "guard": (REASONS["guard"], "next offer"),
    "autostop": (REASONS["autostop"], "next offer"),
    "preempted": (REASONS["preempted"], "next offer"),
    "launch": ("the launch failed", "failed"),
    "capacity": ("none to be had", "next offer"),
    "vanished": ("the machine vanished", "next offer"),
    "silent": ("the machine runs and does not answer", "next offer"),
    "restarted": ("the controller was restarted during the launch", "same offer"),
    "unknown": ("why it ended is not known", "stop"),
}

# A replacement is looked for this long; between two rounds through the plan there is a wait that doubles.
REPLACE_SECONDS = 2 * 3600.0
FIRST_WAIT, LONGEST_WAIT = 60.0, 600.0
FAILED_IN_A_ROW = 3


@dataclass(frozen=True)
class Decision:
    """The index of the offer to try, after `wait` seconds; or the error that ends the cluster."""

    offer: int = 0
    wait: float = 0.0
    error: str | None = None


def described(reason: str) -> str:
    """The reason as a person reads it."""
    code, _, detail = reason.partition(":")
    text = AFTER[code][0] if code in AFTER else code
    return f"{text}: {detail.strip()}" if detail else text


def told(word: str | None) -> str:
    """The reason that a watchdog gave, itself or in the ledger.

    A word that is not in the table, as from a node of another release, is `unknown`: no money is spent on a guess. An
    end without a word is the watchdog's own failure.
    """
    if word is None:
        return "watchdog: it ended without a reason"
    return word if word in AFTER else f"unknown: the node said {word[:80]!r}"


def offer_text(offer: dict[str, object]) -> str:
    """`H100:1 on aws us-east-1 (p5.4xlarge spot, $2.10/h)`."""
    gpus = ", ".join(f"{k}:{n}" for k, n in dict(offer["accelerators"]).items()) or "no GPU"  # type: ignore[call-overload]
    spot = " spot" if offer["spot"] else ""
    return f"{gpus} on {offer['cloud']} {offer['region']} ({offer['instance_type']}{spot}, ${offer['price']:.2f}/h)"


def next_launch(cluster: RentedCluster, now: float, payable: list[int]) -> Decision:
    """What follows on the newest node, which is gone, in a cluster that is wanted up. A cluster that has served goes
    round and round through the offers `payable` (`money.payable`)."""
    last = cluster.node
    if last is None:
        return Decision(cluster.next_offer)
    reason, after = last.reason or "unknown", AFTER[_code(last)][1]
    since_served = _since_served(cluster)
    served = len(since_served) < len(cluster.nodes)  # some node once became ready
    again = f"`art-sky launch {cluster.name}` goes on from the last step"
    if after == "stop":
        return Decision(error=f"{last.name} ended: {described(reason)}; {again}")
    if after == "same offer":
        return Decision(cluster.next_offer)
    if after == "failed" and (not served or _failed_in_a_row(cluster) >= FAILED_IN_A_ROW):
        return Decision(error=f"{described(reason)}; see `art-sky logs {cluster.name}`, mend it and launch again")
    if not served and cluster.next_offer + 1 >= len(cluster.plan):
        return Decision(error=_nothing_left(cluster, since_served))
    return _replacement(cluster, since_served, now, payable) if served else Decision(cluster.next_offer + 1)


def _replacement(cluster: RentedCluster, since_served: list[Node], now: float, payable: list[int]) -> Decision:
    offer = next((n for n in payable if n > cluster.next_offer), payable[0])
    if not since_served:
        return Decision(offer)
    if now - since_served[0].since > REPLACE_SECONDS:
        return Decision(error=_nothing_left(cluster, since_served[-len(payable) :]))
    rounds, rest = divmod(len(since_served), len(payable))
    if rest:
        return Decision(offer)
    wait = min(FIRST_WAIT * 2.0 ** (rounds - 1), LONGEST_WAIT)
    return Decision(offer, wait=max(since_served[-1].since + wait - now, 0.0))


def _since_served(cluster: RentedCluster) -> list[Node]:
    """The newest nodes that never became ready, oldest first."""
    found: list[Node] = []
    for node in reversed(cluster.nodes):
        if "ready" in node.phases:
            break
        found.insert(0, node)
    return found


def _failed_in_a_row(cluster: RentedCluster) -> int:
    """A server that fails on every machine would go on until the budget is gone."""
    count = 0
    for node in reversed(cluster.nodes):
        if AFTER[_code(node)][1] == "failed":
            count += 1
        elif _code(node) != "capacity":
            break
    return count


def _nothing_left(cluster: RentedCluster, tried: list[Node]) -> str:
    each = "; ".join(
        f"{n.offer['instance_type']} on {n.offer['cloud']} {n.offer['region']}: {described(n.reason or '')}"
        for n in tried
    )
    return (
        f"no candidate could be rented ({each}); try again later, or with other --gpu, --cloud or --region: "
        f"`art-sky launch {cluster.name} ...`"
    )


def _code(node: Node) -> str:
    code = (node.reason or "unknown").partition(":")[0]
    return code if code in AFTER else "unknown"
