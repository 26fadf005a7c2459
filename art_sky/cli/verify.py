"""`art-sky verify`."""

from __future__ import annotations

import dataclasses

import click

from art_sky.cli.output import json_option, print_json, size, stdout, transfer_bar
from art_sky.cli.stores import chosen_store, find_model, store_options, whole_model
from art_sky.store.model_store import ModelStore
from art_sky.store.verify import Damage, Verification, verify_model

DAMAGED = 1


@click.command()
@click.argument("model", metavar="MODEL")
@store_options
@json_option
def command(model: str, url: str | None, cluster: str | None, as_json: bool) -> int:
    """Read again and hash everything a model needs.

    Says what is damaged or missing, which steps that touches and how it can be mended, which is what `art-sky repair`
    does. Exit code 1 when something is damaged.
    """
    found = find_model(chosen_store(url, cluster), whole_model(model))
    report = verify_and_show(found)
    if as_json:
        print_json(
            {
                "store": found.store.url,
                "model": found.prefix,
                "objects": report.objects,
                "bytes": report.bytes,
                "damages": [damage_row(damage) for damage in report.damages],
            }
        )
        return DAMAGED if report.damages else 0
    print_damages(report.damages)
    result = f"{len(report.damages)} damaged" if report.damages else "all whole"
    stdout().print(
        f"{found.prefix} in {found.store.url}: {report.objects} objects, {size(report.bytes)} of blobs: {result}",
        markup=False,
        soft_wrap=True,
    )
    return DAMAGED if report.damages else 0


def verify_and_show(model: ModelStore) -> Verification:
    """With a bar; nothing that was read before is relied on."""
    with transfer_bar(f"verify {model.prefix}") as progress:
        return verify_model(ModelStore(model.store, model.project, model.name), progress=progress)


def print_damages(damages: list[Damage]) -> None:
    for damage in damages:
        steps = f"steps {', '.join(map(str, damage.steps))}" if damage.steps else "no step's files"
        text = f"{damage.problem}: {damage.key} ({steps}; {'; '.join(damage.needed_by)})\n  {damage.detail}"
        stdout().print(f"{text}\n  to mend it: {damage.mend}", markup=False, soft_wrap=True)


def damage_row(damage: Damage) -> dict[str, object]:
    """For JSON."""
    row = dataclasses.asdict(damage)
    del row["ref"]
    return row
