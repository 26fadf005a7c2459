"""`art-sky steps`."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from art_sky.cli.output import duration, json_option, print_json, stdout, table
from art_sky.cli.stores import chosen_store, find_model, store_options
from art_sky.errors import NotFound
from art_sky.schemas import HistoryRow
from art_sky.store.model_store import ModelStore


@click.command()
@click.argument("model", metavar="MODEL")
@store_options
@json_option
def command(model: str, url: str | None, cluster: str | None, as_json: bool) -> None:
    """Show the steps of a model: reward, loss, tokens, seconds.

    MODEL is PROJECT/NAME, or NAME alone where it is clear.
    """
    found = find_model(chosen_store(url, cluster), model)
    rows = describe_steps(found)
    if as_json:
        head: dict[str, Any] | None = None
        with contextlib.suppress(NotFound):  # registered, its first step is being made
            head = found.head().model_dump()
        return print_json({"store": found.store.url, "model": found.prefix, "head": head, "steps": rows})
    columns = ["#step", "#reward", "#val", "#loss", "updates", "#tokens", "trained in", "tags"]
    cells = [
        (
            row["step"],
            row["reward"],
            row["val_reward"],
            row["loss"],
            _updates(row),
            row["tokens"],
            duration(row["seconds"]),
            ", ".join(row["tags"]) or None,
        )
        for row in rows
    ]
    stdout().print(table(f"Steps of {found.prefix}", columns, cells))


def describe_steps(model: ModelStore) -> list[dict[str, Any]]:
    """One row a step that is reachable from HEAD, with its metrics from the manifest and the history."""
    steps = model.steps()
    if not steps:
        return []
    history = model.history()
    attempt = model.head().attempt
    refs = model.refs()
    rows = []
    for step in steps:
        number = step.manifest.step
        train = step.manifest.metrics | _logged(history, attempt, number, "train")
        tokens, seconds = train.get("data/tokens_trained"), train.get("time/train_seconds")
        rows.append(
            {
                "step": number,
                "manifest": step.key,
                "created": step.manifest.created,
                "updates": step.manifest.updates,
                "reason": step.manifest.reason,
                "reward": train.get("reward"),
                "val_reward": _logged(history, attempt, number, "val").get("reward"),
                "loss": train.get("loss"),
                "tokens": None if tokens is None else int(tokens),
                "seconds": seconds,
                "deleted": step.deleted,
                "tags": sorted(name for name, key in refs.items() if key == step.key),
                "metrics": train,
            }
        )
    return rows


def _updates(row: dict[str, Any]) -> object:
    if row["step"] == 0:
        return row["reason"]  # of a fork: where it comes from
    return row["updates"] or f"skipped: {row['reason']}"


def _logged(history: list[HistoryRow], attempt: int, step: int, split: str) -> dict[str, float | None]:
    """The row of the newest attempt that may have made this step: a rewind leaves the rows of the older one."""
    rows = [r for r in history if r.step == step and r.split == split and r.attempt <= attempt]
    return max(rows, key=lambda r: r.attempt).metrics if rows else {}
