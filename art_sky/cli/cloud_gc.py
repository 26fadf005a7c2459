"""`art-sky gc --clouds`."""

from __future__ import annotations

import time
from typing import Any

import click

from art_sky.cli.output import print_json, stderr, stdout, table
from art_sky.controller.__main__ import make_provider
from art_sky.controller.orphans import Verdict, judge
from art_sky.controller.provider import Machine
from art_sky.controller.registry import Registry, registry_file
from art_sky.controller.rented import RentedCluster
from art_sky.errors import CorruptObject, NotFound, ObjectNotFound, StoreError
from art_sky.node.records import LedgerEntry, ledger_key, parse


def collect_machines(url: str | None, delete: bool, picked: tuple[str, ...], as_json: bool) -> None:
    """Lists what exists at the clouds; ends orphans with `delete`, and what the user `picked` by name.

    Raises NotFound for a picked name that is no machine of ours, CloudError when the clouds cannot be asked.
    """
    provider = make_provider()
    with stderr().status("asking the clouds"):
        machines = [m for m in provider.list() if m.seen != "absent"]
    unknown = set(picked) - {m.node for m in machines}
    if unknown:
        raise NotFound(f"there is no machine {', '.join(sorted(unknown))}; `art-sky gc --clouds` lists what there is")
    clusters, now = _clusters(), time.time()
    found = [(m, judge(m, clusters, _entry(url, m), url is not None, now)) for m in machines]
    ending = [m for m, v in found if (delete and v.orphan) or m.node in picked]
    for machine in ending:
        with stderr().status(f"ending {machine.node}"):
            provider.end(machine.node)
    if as_json:
        return print_json({"machines": [_record(m, v, m in ending) for m, v in found]})
    rows = [
        (m.node, m.cloud, m.region, m.instance_type, m.seen, "ended" if m in ending else _word(v), v.why)
        for m, v in found
    ]
    columns = ["name", "cloud", "region", "machine", "state", "verdict", "why"]
    stdout().print(table("Machines at the clouds", columns, rows))
    if any(v.orphan and m not in ending for m, v in found):
        stdout().print("Nothing was ended. End the orphans with --delete, or any one with --end NAME.", markup=False)


def _clusters() -> list[RentedCluster]:
    """A registry that cannot be read confirms nothing, and must not keep machines from being listed."""
    if not registry_file().exists():
        return []
    try:
        registry = Registry(registry_file())
        try:
            return registry.all()
        finally:
            registry.close()
    except CorruptObject as e:
        click.echo(f"warning: {e.message}", err=True)
        return []


def _entry(url: str | None, machine: Machine) -> LedgerEntry | None:
    """Raises StoreError for one that cannot be read: that is not "no entry"."""
    if url is None:
        return None
    from art_sky.store import open_store

    key = ledger_key(machine.labels.get("art-sky-id") or machine.node.rpartition("-")[0], machine.node)
    try:
        return parse(open_store(url).get(key).data.decode(), LedgerEntry, key)
    except ObjectNotFound:
        return None
    except ValueError as e:
        raise StoreError(f"{e}; look at {key} in {url}") from e


def _word(verdict: Verdict) -> str:
    return "orphan" if verdict.orphan else "stays"


def _record(machine: Machine, verdict: Verdict, ended: bool) -> dict[str, Any]:
    return {
        "name": machine.node,
        "cloud": machine.cloud,
        "region": machine.region,
        "instance": machine.instance,
        "state": machine.seen,
        "orphan": verdict.orphan,
        "why": verdict.why,
        "ended": ended,
    }
