"""What a launch would rent, what it can cost at most, and what ends it: made and shown before any cloud is asked.

The bound of the bill holds over all machines of a cluster, replacements included, because they run one after the
other and each gets what is left of budget and hours:

    worst = min(budget, price x max_hours) + price x (flush_minutes + GUARD_MINUTES) / 60

The second part is the last machine's way out: its final flush, then the guard where the node agent fails. `price` is
that of the dearest machine of the plan. Disks and egress are not in it; each candidate lists its disk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from art_sky.config import Limits
from art_sky.controller.cloud_table import cloud_facts
from art_sky.controller.provider import Offer
from art_sky.controller.rented import LaunchRequest
from art_sky.errors import BudgetTooSmall, InvalidConfig, NoCapacity
from art_sky.store.s3_location import parse_location

# From the watchdog's word, or its last sign of life, to the machine's end where only the guard is left.
GUARD_MINUTES = 15.0
# Setup and one step: what a launch must be able to pay for to be of any use.
USEFUL_MINUTES = 15.0
# Dollars per GiB and month of the disks that SkyPilot asks for by default (gp3, pd-balanced), list prices of
# us-east-1 and us-central1; elsewhere the disk is part of the price.
DISK_PRICES = {"aws": 0.08, "gcp": 0.10}
HOURS_A_MONTH = 730.0
MAX_CANDIDATES = 12


@dataclass(frozen=True)
class Candidate:
    """One offer with its consequences. `refused` is why it cannot be taken, with the option that allows it."""

    offer: Offer
    worst: float  # dollars
    disk_per_hour: float  # dollars, on top
    guarantees: tuple[str, ...]
    note: str = ""
    refused: str | None = None


@dataclass(frozen=True)
class Plan:
    """Candidates in the order in which they are tried; `worst` bounds the bill of the whole cluster in dollars."""

    candidates: list[Candidate]
    limits: Limits
    worst: float

    @property
    def usable(self) -> list[Candidate]:
        return [c for c in self.candidates if c.refused is None]

    def to_json(self) -> dict[str, Any]:
        return {
            "candidates": [{**asdict(c), "guarantees": list(c.guarantees)} for c in self.candidates],
            "limits": self.limits.model_dump(),
            "worst_case_dollars": round(self.worst, 4),
        }


def make_plan(request: LaunchRequest, offers: list[Offer]) -> Plan:
    """From what the clouds offer, cheapest first.

    Raises NoCapacity when nothing fits, BudgetTooSmall when no candidate's shortest useful run fits into the budget,
    InvalidConfig when all that fits is refused, naming the option that allows it.
    """
    fitting = [o for o in offers if request.max_price is None or o.price <= request.max_price]
    if not fitting:
        raise NoCapacity(_nothing_fits(request, offers))
    candidates = [_candidate(request, offer) for offer in sorted(fitting, key=lambda o: o.price)]
    affordable = [c for c in candidates if _affordable(request.limits, c.offer.price)]
    if not affordable:
        raise BudgetTooSmall(_too_small(request.limits, candidates[0].offer))
    usable = [c for c in affordable if c.refused is None]
    if not usable:
        raise InvalidConfig(f"no candidate may be taken: {affordable[0].refused}")
    # Refused ones are shown where they are cheaper than what is taken: the user sees what an option would bring.
    shown = usable[:MAX_CANDIDATES]
    refused = [c for c in affordable if c.refused is not None and c.offer.price <= shown[-1].offer.price]
    worst = max(c.worst for c in shown)
    return Plan(sorted([*shown, *refused[:MAX_CANDIDATES]], key=lambda c: c.offer.price), request.limits, worst)


def check_store(url: str | None, shares_files: bool) -> None:
    """Raises InvalidConfig for a store that the machines could not reach; `shares_files` as of the provider."""
    if shares_files and url is not None:
        return
    if url is None or not url.startswith("s3://"):
        raise InvalidConfig(
            "a rented machine needs a store that outlives it: --store s3://BUCKET/PREFIX; infra/aws makes a bucket "
            "and a role for it, `art-sky check URL` tries one out"
        )
    profile = parse_location(url).profile
    if profile is not None:
        raise InvalidConfig(
            f"the store's URL names the profile {profile!r} of this computer, which no machine has: leave it out, and "
            f"give --store-profile {profile} to send its credential there"
        )


def worst_case(limits: Limits, price: float) -> float:
    """Dollars at most, at `price` dollars per hour; the formula of this module's docstring."""
    limit = price * limits.max_hours
    if limits.budget is not None:
        limit = min(limit, limits.budget)
    return limit + price * (limits.flush_minutes + GUARD_MINUTES) / 60


def disk_per_hour(cloud: str, gib: int) -> float:
    """Dollars per hour, 0 where the disk is part of the price."""
    return DISK_PRICES.get(cloud, 0.0) * gib / HOURS_A_MONTH


def _candidate(request: LaunchRequest, offer: Offer) -> Candidate:
    facts = cloud_facts(offer.cloud)
    key_on_node = request.allow_cloud_key_on_node and facts.node_agent == "account key"
    return Candidate(
        offer=offer,
        worst=worst_case(request.limits, offer.price),
        disk_per_hour=disk_per_hour(offer.cloud, request.disk_gib),
        guarantees=facts.guarantees(key_on_node),
        note=facts.note,
        refused=_refusal(request, offer, key_on_node),
    )


def _refusal(request: LaunchRequest, offer: Offer, key_on_node: bool) -> str | None:
    facts = cloud_facts(offer.cloud)
    if request.image_id is not None:
        if not facts.image_id:
            return f"{offer.cloud} takes no --image-id; leave it out, or leave {offer.cloud} out with --cloud"
        image = request.image_in(offer.region)
        if image is None:
            return f"there is no --image-id for {offer.region}; give --image-id {offer.region}=ID, or leave it out"
        if offer.cloud == "aws" and not isinstance(request.image_id, dict) and len(request.regions) != 1:
            return f"{image} is an image of one region alone; give it as --image-id REGION={image}"
    if facts.is_safe(key_on_node) or request.allow_unsafe:
        return None
    if facts.node_agent == "account key":
        return (
            f"on {offer.cloud} nothing but a process with your account's key can end the machine when this computer "
            "is off; allow the key there with --allow-cloud-key-on-node, or take the risk with --allow-unsafe"
        )
    return f"nothing on a {offer.cloud} machine ends its bill when this computer is off; --allow-unsafe takes the risk"


def _affordable(limits: Limits, price: float) -> bool:
    return limits.budget is None or limits.budget >= _shortest(price)


def _shortest(price: float) -> float:
    return price * USEFUL_MINUTES / 60


def _too_small(limits: Limits, offer: Offer) -> str:
    return (
        f"a budget of ${limits.budget:.2f} does not pay for {USEFUL_MINUTES:.0f} minutes (setup and one step) of the "
        f"cheapest candidate, {offer.instance_type} on {offer.cloud} at ${offer.price:.2f} an hour: that is "
        f"${_shortest(offer.price):.2f}, and ${worst_case(limits, offer.price):.2f} in the worst case; give --budget "
        f"{_shortest(offer.price):.2f} or more, or a smaller GPU"
    )


def _nothing_fits(request: LaunchRequest, offers: list[Offer]) -> str:
    what = " or ".join(request.gpus) or "a machine without a GPU"
    if offers:
        cheapest = min(offers, key=lambda o: o.price)
        return (
            f"no offer of {what} costs at most ${request.max_price:.2f} an hour; the cheapest is "
            f"{cheapest.instance_type} on {cheapest.cloud} at ${cheapest.price:.2f}; raise --max-price"
        )
    where = ", ".join(request.clouds) or "the enabled clouds"
    return f"{where} offer no {what}; give another --gpu, --cloud or --region, or leave --spot out"
