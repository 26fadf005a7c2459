"""`art-sky pull`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from art_sky.cli.copying import copy_and_report
from art_sky.cli.output import json_option, print_json, stderr, stdout
from art_sky.cli.stores import chosen_store, find_model, store_options, whole_model
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore


def _step_range(ctx: click.Context, param: click.Parameter, value: str | None) -> range | None:
    """`3` or `3-7`."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not one step, as in 3, or a first and a last one, as in 3-7")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--from", "origin", metavar="URL", help="The store to copy from.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["store", "parquet"]),
    default="store",
    show_default=True,
    help="The whole model into another store, or its trajectories as tables.",
)
@click.option("--to", "folder", metavar="FOLDER", type=click.Path(path_type=Path), help="Where parquet files go.")
@click.option("--split", metavar="NAME", help="Only this split, with parquet.")
@click.option("--steps", metavar="FIRST-LAST", callback=_step_range, help="Only these steps, with parquet.")
@store_options
@json_option
def command(
    model: str,
    origin: str | None,
    form: str,
    folder: Path | None,
    split: str | None,
    steps: range | None,
    url: str | None,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Copy a model from another store, or its trajectories into parquet files.

    All its steps, history and trajectories come, and what is here already does not come again. This store must be
    behind: where both went on, fork one of them. A server may go on training the model there meanwhile.

    With --format parquet, FOLDER gets a file SPLIT.parquet for each split, a row for each trajectory: reward, metrics,
    token counts, and its messages as JSON; files of that name are replaced. They come from --from, else from the
    store that the other commands use. It needs polars: pip install 'art-sky[data]'.
    """
    if form == "parquet":
        if folder is None:
            raise click.UsageError("with --format parquet, give the folder for the files: --to FOLDER")
        if origin is not None and (url or cluster):
            raise click.UsageError("with --format parquet, give --from, --store or --cluster, not two of them")
        found = find_model(open_store(origin) if origin else chosen_store(url, cluster), whole_model(model))
        return _write_tables(found, folder, split, steps, as_json)
    for option, value in (("--to", folder), ("--split", split), ("--steps", steps)):
        if value is not None:
            raise click.UsageError(f"{option} is for --format parquet; a model is copied whole into --store")
    if origin is None:
        raise click.UsageError("give the store to copy from: --from URL")
    source = find_model(open_store(origin), whole_model(model))
    copy_and_report("pull", source, ModelStore(chosen_store(url, cluster), source.project, source.name), as_json)


def _write_tables(model: ModelStore, folder: Path, split: str | None, steps: range | None, as_json: bool) -> None:
    from art_sky.client.frames import write_split_tables

    with stderr().status(f"reading the trajectories of {model.prefix}"):
        tables = write_split_tables(model.store.url, model.project, model.name, folder, split=split, steps=steps)
    if as_json:
        files = [{"file": str(t.path), "split": t.split, "rows": t.rows, "steps": t.steps} for t in tables]
        return print_json({"model": model.prefix, "from": model.store.url, "files": files})
    for t in tables:
        stdout().print(
            f"{t.path}: {t.rows} trajectories of {len(t.steps)} steps ({t.steps[0]} to {t.steps[-1]})",
            markup=False,
            soft_wrap=True,
        )
