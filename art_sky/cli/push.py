"""`art-sky push`."""

from __future__ import annotations

import click

from art_sky.cli.copying import copy_and_report
from art_sky.cli.output import json_option
from art_sky.cli.stores import chosen_store, find_model, store_options, whole_model
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--to", "to", metavar="URL", required=True, help="The store to copy to.")
@store_options
@json_option
def command(model: str, to: str, url: str | None, cluster: str | None, as_json: bool) -> None:
    """Copy a model to another store.

    All its steps, history and trajectories go there, and what is there already is not sent again. The other store
    must be behind: where both went on, fork one of them. No server may have the model there meanwhile.
    """
    source = find_model(chosen_store(url, cluster), whole_model(model))
    copy_and_report("push", source, ModelStore(open_store(to), source.project, source.name), as_json)
