"""`art-sky fork`."""

from __future__ import annotations

import click

from art_sky import __version__
from art_sky.cli.output import json_option, print_json, stdout, transfer_bar
from art_sky.cli.stores import chosen_store, find_model_at, lease_owner, store_options
from art_sky.store import open_store
from art_sky.store.fork import fork_model
from art_sky.store.model_store import ModelStore


@click.command()
@click.argument("source", metavar="MODEL[@STEP]")
@click.argument("name", metavar="[PROJECT/]NAME")
@click.option("--to", "to", metavar="URL", help="The store of the new model. Default: that of MODEL.")
@click.option("--copy", is_flag=True, help="Copy the files, so that the new model does not need the old one.")
@store_options
@json_option
def command(
    source: str, name: str, to: str | None, copy: bool, url: str | None, cluster: str | None, as_json: bool
) -> None:
    """Begin a new model with a step of another one.

    The new model's step 0 is that step (the newest, unless @STEP is given): its adapter and its optimizer. Nothing is
    copied where the new model can read the old one's files; they are then kept there for it. Register the new model
    with the same base model and LoRA settings, and train on.
    """
    model, step = find_model_at(chosen_store(url, cluster), source)
    project, _, short = name.rpartition("/")
    destination = ModelStore(model.store if to is None else open_store(to), project or model.project, short)
    with transfer_bar(f"fork {model.prefix}") as progress:
        forked = fork_model(
            model,
            step,
            destination,
            lease_owner("fork"),
            created_by=f"art-sky {__version__}",
            copy=copy,
            wait_seconds=destination.store.lease_wait_seconds,
            progress=progress,
        )
    if as_json:
        return print_json(
            {
                "model": destination.prefix,
                "store": destination.store.url,
                "forked_from": forked.origin,
                "copied": forked.copied is not None,
                "copied_because": forked.copied,
            }
        )
    how = "no bytes were copied" if forked.copied is None else f"its files were copied: {forked.copied}"
    stdout().print(
        f"{destination.prefix} in {destination.store.url} begins with {forked.origin}; {how}",
        markup=False,
        soft_wrap=True,
    )
