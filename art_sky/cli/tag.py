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
@click.option("--force", is_flag=True, help="With --delete: also a fork's name, whatever the fork needs.")
@store_options
@json_option
def command(
    model: str, name: str, delete: bool, force: bool, url: str | None, cluster: str | None, as_json: bool
) -> None:
    """Give a step a name; its files are then kept.

    Whatever delete_checkpoints and gc clean up, a step with a name keeps its files. `art-sky steps` shows the names.

    Names that begin with fork- were given by `art-sky fork` and keep the files that the fork reads from here. They are
    deleted like others once the fork was deleted or has copies of its own; before, it is an error that says which
    model would lose its files.
    """
    if force and not delete:
        raise click.UsageError("--force is for --delete")
    found, number = find_model_at(chosen_store(url, cluster), model)
    if delete:
        if number is not None:
            raise click.UsageError("with --delete, give the MODEL without a step")
        delete_ref(found, name, force)
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
