"""A plan for people: what would be rented, what it costs at most, what ends it."""

from __future__ import annotations

from itertools import count

from rich.console import Console

from art_sky.cli.output import table
from art_sky.controller.plan import GUARD_MINUTES, Candidate, Plan

# Of the words of `CloudFacts.guarantees`, for a column that fits beside long names of machines.
LETTERS = {"watchdog": "W", "node agent": "A", "guard": "G", "gc by label": "L"}
LEGEND = {
    "watchdog": "the watchdog there ends the job",
    "node agent": "SkyPilot's node agent then ends the machine",
    "guard": "the guard powers it off when they fail",
    "gc by label": "`art-sky gc --clouds` finds it by its label",
}


def show_plan(out: Console, name: str, plan: Plan) -> None:
    columns = ["", "machine", "GPU", "spot", "#$/hour", "#at most $", "ends"]
    made = table(f"Plan for cluster {name}: tried in this order", columns, map(_row, *_numbered(plan.candidates)))
    for column in made.columns:
        column.no_wrap = column.header != "machine"  # which has spaces to go on in the next line at
    out.print(made)
    there = {word for c in plan.candidates for word in c.guarantees if c.refused is None}
    for word, letter in LETTERS.items():
        if word in there:
            out.print(f"  {letter}  {LEGEND[word]}", markup=False)
    limits = plan.limits
    bounds = [f"{limits.max_hours:g} hours in all"]
    if limits.budget is not None:
        bounds.insert(0, f"${limits.budget:g}")
    out.print(
        f"Ends after {limits.idle_minutes:g} minutes without work, {limits.orphan_minutes:g} when this computer is "
        f"gone too, or at {' or '.join(bounds)}, replacements included.",
        markup=False,
    )
    out.print(
        f"At most ${plan.worst:.2f}, with the last flush ({limits.flush_minutes:g} min) and the guard "
        f"({GUARD_MINUTES:g} min); disks ({_disks(plan)}) and egress come on top.",
        markup=False,
    )
    for note in dict.fromkeys(
        f"{c.offer.cloud}: {c.refused or c.note}" for c in plan.candidates if c.refused or c.note
    ):
        out.print(note, markup=False)


def _numbered(candidates: list[Candidate]) -> tuple[list[str], list[Candidate]]:
    """A refused candidate has no number: it is not tried."""
    numbers = count(1)
    return ["-" if c.refused else str(next(numbers)) for c in candidates], candidates


def _row(number: str, candidate: Candidate) -> tuple[object, ...]:
    offer = candidate.offer
    gpus = ", ".join(f"{name}:{count}" for name, count in offer.accelerators.items()) or None
    spot = "spot" if offer.spot else ""
    ends = "".join(letter if word in candidate.guarantees else "-" for word, letter in LETTERS.items())
    price, worst = f"{offer.price:.3f}", f"{candidate.worst:.2f}"
    machine = f"{offer.instance_type}, {offer.cloud} {offer.region}"
    return (number, machine, gpus, spot, price, worst, "refused" if candidate.refused else ends)


def _disks(plan: Plan) -> str:
    dearest = max(c.disk_per_hour for c in plan.usable)
    return f"up to ${dearest:.3f} an hour" if dearest else "part of the price here"
