"""`art-sky tag`."""

from __future__ import annotations

import click

from art_sky.cli.output import json_option, print_json, stdout
from art_sky.cli.stores import chosen_store, find_model_at, store_options
from art_sky.store.refs import FORK, add_ref, delete_ref, find_step


@click.command()
@click.argument("model", metavar="MODEL[@STEP]")
@click.argument("name")
@click.option("--delete", is_flag=True, help="Take the name away; the step stays.")
@store_options
@json_option
def command(model: str, name: str, delete: bool, url: str | None, cluster: str | None, as_json: bool) -> None:
    """Give a step a name; its files are then kept.

    Whatever delete_checkpoints and gc clean up, a step with a name keeps its files. `art-sky steps` shows the names.
    """
    found, number = find_model_at(chosen_store(url, cluster), model)
    if delete:
        if number is not None:
            raise click.UsageError("with --delete, give the MODEL without a step")
        delete_ref(found, name)
        text, step = f"{found.prefix} has no tag {name} any more", None
    else:
        if name.startswith(FORK):
            raise click.UsageError(f"names that begin with {FORK!r} are kept for forks; choose another")
        tagged = find_step(found, number)
        add_ref(found, name, tagged)
        step = tagged.manifest.step
        text = f"{name} is {found.prefix}@{step}"
    if as_json:
        return print_json({"model": found.prefix, "tag": name, "step": step})
    stdout().print(text, markup=False, soft_wrap=True)
