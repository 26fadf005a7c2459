"""`art-sky models`."""

from __future__ import annotations

import time
from typing import Any

import click

from art_sky.cli.output import duration, json_option, print_json, stdout, table
from art_sky.cli.stores import chosen_store, store_options
from art_sky.errors import NotFound
from art_sky.store.model_store import ModelStore, list_models
from art_sky.store.read_ahead import read_ahead


@click.command()
@store_options
@json_option
def command(url: str | None, cluster: str | None, as_json: bool) -> None:
    """List the models of a store."""
    store = chosen_store(url, cluster)
    rows = list(read_ahead(lambda names: _describe(ModelStore(store, *names)), list_models(store), worth_it=2))
    if as_json:
        return print_json({"store": store.url, "models": rows})
    if not rows:
        stdout().print(f"No model is in {store.url}", markup=False, soft_wrap=True)
        return
    now = time.time()
    columns = ["model", "base model", "#step", "#reward", "last step"]
    cells = [
        (
            f"{row['project']}/{row['name']}",
            row["base_model"],
            row["step"],
            row["reward"],
            f"{duration(now - row['updated'])} ago" if row["updated"] else None,
        )
        for row in rows
    ]
    stdout().print(table(f"Models in {store.url}", columns, cells))


def _describe(model: ModelStore) -> dict[str, Any]:
    record = model.record()
    row: dict[str, Any] = {
        "project": model.project,
        "name": model.name,
        "base_model": record.base_model,
        "created": record.created,
        "step": None,
        "manifest": None,
        "updated": None,
        "reward": None,
    }
    try:
        head = model.head()
    except NotFound:
        return row  # registered, its first step is being made
    newest = model.manifest(head.manifest)
    return row | {
        "step": head.step,
        "manifest": head.manifest,
        "updated": newest.created,
        "reward": newest.metrics.get("reward"),
    }
