"""Which rented machines nobody needs any more, for `art-sky gc --clouds`.

A name or label alone says only that a machine may be ours: it is ended when the registry, or the ledger in the store,
confirms it, or when the user names it. Labels: `order.labels`.
"""

from __future__ import annotations

from dataclasses import dataclass

from art_sky.controller.provider import Machine
from art_sky.controller.rented import RentedCluster
from art_sky.node.records import LedgerEntry

# A node writes its entry each minute; one that was silent for so long has neither server nor ledger.
SILENT_SECONDS = 3600.0
# So far apart may be the clocks of those who wrote a time and of this computer.
SKEW_SECONDS = 600.0


@dataclass(frozen=True)
class Verdict:
    orphan: bool
    why: str


def judge(
    machine: Machine, clusters: list[RentedCluster], entry: LedgerEntry | None, store_read: bool, now: float
) -> Verdict:
    """`entry` is the machine's own in the ledger of the store that was given (`store_read`), if it has one."""
    node = next((n for c in clusters for n in c.nodes if n.name == machine.node), None)
    if node is not None and node.state == "gone":
        return Verdict(True, "the registry has it as gone")
    if node is not None:
        return Verdict(False, f"the controller watches it ({node.state})")
    until = _until(machine, entry)
    if entry is not None and entry.closed_unix is not None:
        return Verdict(True, "the ledger has it as closed")
    if entry is not None and until is not None and now > until + SKEW_SECONDS:
        return Verdict(True, "its limits are over, by the ledger")
    if entry is not None and now - entry.seen_unix > SILENT_SECONDS:
        return Verdict(True, f"it has written nothing into the ledger for {(now - entry.seen_unix) / 60:.0f} minutes")
    if entry is not None:
        return Verdict(False, "it is at work, by the ledger; another computer may watch it")
    if until is None:
        return Verdict(False, "only its name says that it may be ours")
    if now <= until + SKEW_SECONDS:
        return Verdict(False, "by its label its time is not over; give its --store to know more")
    if store_read:
        return Verdict(True, "its time is over by its label, and the store shows no extension")
    return Verdict(False, "its time is over by its label; give its --store, which knows whether it was extended")


def _until(machine: Machine, entry: LedgerEntry | None) -> float | None:
    """The later of label and ledger: an extension stands in the ledger alone."""
    found = [entry.until_unix] if entry is not None and entry.until_unix is not None else []
    label = machine.labels.get("art-sky-until", "")
    if label.isdigit():
        found.append(float(label))
    return max(found, default=None)
