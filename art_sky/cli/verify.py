"""`art-sky verify`."""

from __future__ import annotations

import dataclasses

import click

from art_sky.cli.output import json_option, print_json, size, stdout, transfer_bar
from art_sky.cli.stores import chosen_store, find_model, lease_owner, store_options, whole_model
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore
from art_sky.store.verify import Damage, Verification, mend, verify_model

DAMAGED = 1


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--mend-from", "origin", metavar="URL", help="Bring what is damaged from this store.")
@store_options
@json_option
def command(model: str, origin: str | None, url: str | None, cluster: str | None, as_json: bool) -> int:
    """Read again and hash everything a model needs.

    Says what is damaged or missing, which steps that touches and how it can be mended. Exit code 1 when something
    is damaged and was not mended.
    """
    found = find_model(chosen_store(url, cluster), whole_model(model))
    report = _verify(found)
    mended: list[str] = []
    if origin is not None and report.damages:
        other = ModelStore(open_store(origin), found.project, found.name)
        mended = mend(found, report.damages, other, lease_owner("verify"), found.store.lease_wait_seconds)
        report = _verify(found)
    if as_json:
        print_json(
            {
                "store": found.store.url,
                "model": found.prefix,
                "objects": report.objects,
                "bytes": report.bytes,
                "mended": mended,
                "damages": [_row(damage) for damage in report.damages],
            }
        )
        return DAMAGED if report.damages else 0
    for key in mended:
        stdout().print(f"mended {key}", markup=False, soft_wrap=True)
    for damage in report.damages:
        steps = f"steps {', '.join(map(str, damage.steps))}" if damage.steps else "no step's files"
        text = f"{damage.problem}: {damage.key} ({steps}; {'; '.join(damage.needed_by)})\n  {damage.detail}"
        stdout().print(f"{text}\n  to mend it: {damage.mend}", markup=False, soft_wrap=True)
    result = f"{len(report.damages)} damaged" if report.damages else "all whole"
    stdout().print(
        f"{found.prefix} in {found.store.url}: {report.objects} objects, {size(report.bytes)} of blobs: {result}",
        markup=False,
        soft_wrap=True,
    )
    return DAMAGED if report.damages else 0


def _verify(model: ModelStore) -> Verification:
    with transfer_bar(f"verify {model.prefix}") as progress:
        return verify_model(ModelStore(model.store, model.project, model.name), progress=progress)


def _row(damage: Damage) -> dict[str, object]:
    row = dataclasses.asdict(damage)
    del row["ref"]
    return row
