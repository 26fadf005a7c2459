"""`art-sky diff`."""

from __future__ import annotations

import dataclasses

import click

from art_sky.cli.output import json_option, print_json, stdout, table
from art_sky.cli.stores import chosen_store, find_model_at, store_options
from art_sky.store.diff import Difference, diff_steps
from art_sky.store.refs import find_step


@click.command()
@click.argument("first", metavar="MODEL[@STEP]")
@click.argument("second", metavar="MODEL[@STEP]")
@store_options
@json_option
def command(first: str, second: str, url: str | None, cluster: str | None, as_json: bool) -> None:
    """Compare the settings and metrics of two steps.

    They may be of one model or of two. Without @STEP it is the newest.
    """
    store = chosen_store(url, cluster)
    sides = []
    for text in (first, second):
        model, number = find_model_at(store, text)
        sides.append((model, find_step(model, number).manifest))
    names = [f"{model.prefix}@{manifest.step}" for model, manifest in sides]
    diff = diff_steps(sides[0], sides[1])
    if as_json:
        return print_json({"store": store.url, "a": names[0], "b": names[1], **dataclasses.asdict(diff)})
    if diff.config:
        rows = [(d.name, _shown(d.a), _shown(d.b)) for d in diff.config]
        stdout().print(table("Settings that differ", ["setting", *names], rows))
    else:
        stdout().print("The settings are the same")
    metrics = [(d.name, d.a, d.b, _change(d)) for d in diff.metrics]
    stdout().print(table("Metrics", ["metric", *(f"#{name}" for name in names), "#change"], metrics))
    stdout().print("Both have the same files" if diff.same_files else "Their files differ")


def _shown(value: object) -> str | None:
    return None if value is None else str(value)


def _change(d: Difference) -> float | None:
    return d.b - d.a if isinstance(d.a, int | float) and isinstance(d.b, int | float) else None
