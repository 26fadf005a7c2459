"""Why a node ended, and whether another one is rented after it. The reason's first word is its code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from art_sky.controller.rented import Node, RentedCluster
from art_sky.errors import ArtSkyError, CloudError, NoCapacity, NoCredentials, NoQuota
from art_sky.node.records import REASONS

# `failed`: the end of a first launch, the next offer for a cluster that has served before.
# `next cloud`: at first an offer of another cloud; a cluster that has served goes round all, as the cause may pass.
After = Literal["stop", "failed", "next offer", "next cloud", "same offer"]

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
    "quota": ("not allowed", "next offer"),
    "credentials": ("not asked", "next cloud"),
    "vanished": ("the machine vanished", "next offer"),
    "silent": ("the machine runs and does not answer", "next offer"),
    "restarted": ("the controller was restarted during the launch", "same offer"),
    "unknown": ("why it ended is not known", "stop"),
}

# Nothing was rented: where no machine was seen either, nothing is billed.
REFUSALS: tuple[tuple[type[CloudError], str], ...] = (
    (NoCapacity, "capacity"),
    (NoQuota, "quota"),
    (NoCredentials, "credentials"),
)

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


def refused(error: ArtSkyError) -> str | None:
    """The reason of a launch that rented nothing; None when it may have."""
    code = next((code for kind, code in REFUSALS if isinstance(error, kind)), None)
    if code is None and error.details.get("untouched"):
        code = "launch"
    return None if code is None else f"{code}: {error.message}"


def is_refused(reason: str) -> bool:
    return reason.partition(":")[0] in [code for _, code in REFUSALS]


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
    if served:
        return _replacement(cluster, since_served, now, payable)
    closed = {n.offer["cloud"] for n in since_served if AFTER[_code(n)][1] == "next cloud"}
    later = range(cluster.next_offer + 1, len(cluster.plan))
    left = next((offer for offer in later if cluster.plan[offer]["cloud"] not in closed), None)
    return Decision(left) if left is not None else Decision(error=_nothing_left(cluster, since_served))


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
        elif not is_refused(_code(node)):
            break
    return count


def _nothing_left(cluster: RentedCluster, tried: list[Node]) -> str:
    if all(_code(n) == "credentials" for n in tried):
        why = {str(n.offer["cloud"]): (n.reason or "").partition(":")[2].strip() for n in tried}
        return "; ".join(f"{cloud}: {text}" for cloud, text in why.items())
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
