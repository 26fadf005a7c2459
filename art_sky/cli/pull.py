"""`art-sky pull`."""

from __future__ import annotations

import click

from art_sky.cli.copying import copy_and_report
from art_sky.cli.output import json_option
from art_sky.cli.stores import chosen_store, find_model, store_options, whole_model
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--from", "origin", metavar="URL", required=True, help="The store to copy from.")
@store_options
@json_option
def command(model: str, origin: str, url: str | None, cluster: str | None, as_json: bool) -> None:
    """Copy a model from another store.

    All its steps, history and trajectories come, and what is here already does not come again. This store must be
    behind: where both went on, fork one of them. A server may go on training the model there meanwhile.
    """
    source = find_model(open_store(origin), whole_model(model))
    copy_and_report("pull", source, ModelStore(chosen_store(url, cluster), source.project, source.name), as_json)
