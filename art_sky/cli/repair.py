"""`art-sky repair`."""

from __future__ import annotations

import click

from art_sky.cli.output import json_option, print_json, stdout
from art_sky.cli.stores import chosen_store, find_model, lease_owner, store_options, whole_model
from art_sky.cli.verify import DAMAGED, damage_row, print_damages, verify_and_show
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore
from art_sky.store.repair import Repair, make_repairs, plan_repairs

ROUNDS = 3  # with HEAD comes into sight what its steps lack


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--from", "origin", metavar="URL", help="A store that has the same model, to copy from.")
@click.option("--apply", is_flag=True, help="Write it; without this nothing is changed.")
@store_options
@json_option
def command(model: str, origin: str | None, apply: bool, url: str | None, cluster: str | None, as_json: bool) -> int:
    """Mend what `art-sky verify` finds; with --apply, write it.

    Steps' files, manifests, requests and trajectories that are missing or damaged are copied from the store --from,
    files of a fork also from the model it was forked from, once their bytes are known to be right. A HEAD that is lost
    or was edited is written again for the newest step that is whole. What is whole is never overwritten. To write,
    no server may have the model meanwhile. Exit code 1 when something is damaged still.
    """
    found = find_model(chosen_store(url, cluster), whole_model(model))
    other = None if origin is None else ModelStore(open_store(origin), found.project, found.name)
    made: list[Repair] = []
    damages = verify_and_show(found).damages
    planned = plan_repairs(found, damages, other)
    for _ in range(ROUNDS):
        if not apply or not planned:
            break
        make_repairs(found, planned, lease_owner("repair"), found.store.lease_wait_seconds)
        made += planned
        damages = verify_and_show(found).damages
        planned = plan_repairs(found, damages, other)
    repairs = made if apply else planned
    mended = {repair.key for repair in planned}
    left = [damage for damage in damages if damage.key not in mended]
    if as_json:
        print_json(
            {
                "store": found.store.url,
                "model": found.prefix,
                "applied": apply,
                "repairs": [{"key": repair.key, "how": repair.how} for repair in repairs],
                "damages": [damage_row(damage) for damage in left],
            }
        )
        return DAMAGED if damages else 0
    for repair in repairs:
        stdout().print(f"{'mended' if apply else 'to mend'} {repair.key}: {repair.how}", markup=False, soft_wrap=True)
    print_damages(left)
    if not damages:
        text = f"{found.prefix} in {found.store.url} is whole"
    elif repairs and not apply:
        text = "Nothing was changed. Mend it with --apply."
    else:
        text = f"{len(left)} damaged still"
    stdout().print(text, markup=False, soft_wrap=True)
    return DAMAGED if damages else 0
