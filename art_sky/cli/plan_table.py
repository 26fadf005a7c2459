"""A plan for people: what would be rented, what it costs at most, what ends it."""

from __future__ import annotations

from rich.console import Console

from art_sky.cli.output import table
from art_sky.controller.plan import GUARD_MINUTES, Candidate, Plan


def show_plan(out: Console, name: str, plan: Plan) -> None:
    out.print(
        table(
            f"Plan for cluster {name}: tried in this order",
            ["", "cloud", "region", "machine", "GPU", "spot", "#$/hour", "#worst case $", "ends by itself through"],
            [_row(number, c) for number, c in _numbered(plan.candidates)],
        )
    )
    limits = plan.limits
    bounds = [f"{limits.max_hours:g} hours in all"]
    if limits.budget is not None:
        bounds.insert(0, f"${limits.budget:g}")
    out.print(
        f"Ends after {limits.idle_minutes:g} minutes without work, {limits.orphan_minutes:g} when this computer is "
        f"gone too, or at {' or '.join(bounds)}, replacements included.",
        soft_wrap=True,
    )
    out.print(
        f"At most ${plan.worst:.2f}, with the last flush ({limits.flush_minutes:g} min) and the guard "
        f"({GUARD_MINUTES:g} min); disks ({_disks(plan)}) and egress come on top.",
        soft_wrap=True,
    )
    for note in dict.fromkeys(
        f"{c.offer.cloud}: {c.refused or c.note}" for c in plan.candidates if c.refused or c.note
    ):
        out.print(note, soft_wrap=True, markup=False)


def _numbered(candidates: list[Candidate]) -> list[tuple[str, Candidate]]:
    """A refused candidate has no number: it is not tried."""
    rows, number = [], 0
    for candidate in candidates:
        number += candidate.refused is None
        rows.append((str(number) if candidate.refused is None else "-", candidate))
    return rows


def _row(number: str, candidate: Candidate) -> tuple[object, ...]:
    offer = candidate.offer
    gpus = ", ".join(f"{name}:{count}" for name, count in offer.accelerators.items()) or None
    spot = "spot" if offer.spot else ""
    ends = "refused, see below" if candidate.refused else ", ".join(candidate.guarantees) or "nothing"
    price, worst = f"{offer.price:.3f}", f"{candidate.worst:.2f}"
    return (number, offer.cloud, offer.region, offer.instance_type, gpus, spot, price, worst, ends)


def _disks(plan: Plan) -> str:
    dearest = max(c.disk_per_hour for c in plan.usable)
    return f"up to ${dearest:.3f} an hour" if dearest else "part of the price here"
