"""Logged trajectories as a polars DataFrame, for notebooks and plots; read from the store, without a server."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_sky.errors import InvalidConfig, NotFound
from art_sky.store import open_store
from art_sky.store.batches import is_choice
from art_sky.store.os_errors import reported
from art_sky.suggest import did_you_mean

if TYPE_CHECKING:
    import polars

    from art_sky.store.protocol import Store
    from art_sky.store.trajectory_files import LoggedGroups

_TEXT = ("project", "model", "split")
_NUMBERS = ("step", "attempt", "group_index", "trajectory_index")
_COUNTS = ("prompt_tokens", "sampled_tokens", "group_exceptions")
_JSON = ("messages", "tools", "additional_histories", "metadata", "logs", "group_metadata", "group_metrics")


def load_trajectories(
    store: str | os.PathLike[str],
    project: str | None = None,
    models: str | Iterable[str] | None = None,
    split: str | None = None,
    steps: Container[int] | None = None,
) -> polars.DataFrame:
    """A row for each trajectory that was logged into the store (a folder or URL); everything by default. `steps` may
    be a range.

    Columns: project, model, split, step, attempt, group_index and trajectory_index (within one call of `log`), reward,
    `metric_<name>` for every metric that any trajectory has (null where it has none), prompt_tokens and sampled_tokens
    (over all choices), group_exceptions (failed rollouts of the group), and as JSON text messages (each with
    `trainable`), tools, additional_histories, metadata, logs, group_metadata and group_metrics. Rows are in the order
    of the first seven columns.

    Raises NotFound naming what there is for an unknown project or model, CorruptObject naming a damaged object.
    """
    _need_polars()
    import polars as pl

    from art_sky.store.trajectory_files import iter_trajectories

    opened = open_store(os.fspath(store))
    wanted = [models] if isinstance(models, str) else models
    rows: list[dict[str, Any]] = []
    for of, name in _chosen(opened, project, None if wanted is None else list(wanted)):
        for logged in iter_trajectories(opened, of, name, split, steps):
            rows += _rows(logged)
    metrics = sorted({name for row in rows for name in row if name.startswith("metric_")})  # some come up late
    schema = {
        **dict.fromkeys(_TEXT, pl.String),
        **dict.fromkeys(_NUMBERS, pl.Int64),
        **dict.fromkeys(("reward", *metrics), pl.Float64),
        **dict.fromkeys(_COUNTS, pl.Int64),
        **dict.fromkeys(_JSON, pl.String),
    }
    return pl.DataFrame({name: [row.get(name) for row in rows] for name in schema}, schema=schema)


def write_parquet(frame: polars.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Writes the frame whole or not at all, replacing what was there; returns the path."""
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    with reported("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            frame.write_parquet(scratch)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
    return target


@dataclass(frozen=True)
class Table:
    """A file that `write_split_tables` wrote."""

    path: Path
    split: str
    rows: int
    steps: list[int]  # ascending


def write_split_tables(
    store: str,
    project: str,
    model: str,
    folder: Path,
    *,
    split: str | None = None,
    steps: Container[int] | None = None,
) -> list[Table]:
    """Writes what `load_trajectories` gives into `folder/<split>.parquet`, one split at a time.

    Raises NotFound, writing nothing, when no trajectory was logged there, and what `load_trajectories` raises.
    """
    _need_polars()  # before anything is read
    from art_sky.store.trajectory_files import list_logged

    logged: dict[str, list[int]] = {}
    for name, step in sorted(list_logged(open_store(store), project, model)):
        logged.setdefault(name, []).append(step)
    chosen = [s for s, of in logged.items() if split in (None, s) and (steps is None or any(n in steps for n in of))]
    if not chosen:
        there = ", ".join(f"{name} of steps {of[0]} to {of[-1]}" for name, of in logged.items())
        raise NotFound(f"{project}/{model} in {store} has no such trajectories; it has: {there or 'none at all'}")
    tables = []
    for name in chosen:
        frame = load_trajectories(store, project, model, name, steps)
        path = write_parquet(frame, folder / f"{name}.parquet")
        tables.append(Table(path, name, frame.height, sorted(frame["step"].unique().to_list())))
    return tables


def _need_polars() -> None:
    try:
        import polars  # noqa: F401
    except ModuleNotFoundError as e:
        raise InvalidConfig("tables of trajectories need polars: pip install 'art-sky[data]'") from e


def _chosen(store: Store, project: str | None, models: list[str] | None) -> list[tuple[str, str]]:
    from art_sky.store.model_store import list_models

    known = list_models(store)
    in_project = [(p, n) for p, n in known if project in (None, p)]
    if not in_project:
        near = did_you_mean(project or "", {p for p, _ in known})
        raise NotFound(f"there is no model in {store.url} under project {project!r}; projects: {near}")
    if models is None:
        return in_project
    names = {n for _, n in in_project}
    for model in models:
        if model not in names:
            raise NotFound(f"there is no model {model!r} in {store.url}; {did_you_mean(model, names)}")
    return [(p, n) for p, n in in_project if n in models]


def _rows(logged: LoggedGroups) -> Iterator[dict[str, Any]]:
    where = {n: getattr(logged, n) for n in ("project", "model", "split", "step", "attempt")}
    for g, group in enumerate(logged.groups):
        of_group = {
            "group_index": g,
            "group_exceptions": len(group.get("exceptions") or []),
            "group_metadata": json.dumps(group.get("metadata") or {}),
            "group_metrics": json.dumps(group.get("metrics") or {}),
        }
        for t, trajectory in enumerate(group["trajectories"]):
            others = trajectory.get("additional_histories") or []
            choices = [item for history in (trajectory, *others) for item in _items(history) if is_choice(item)]
            yield {
                **where,
                **of_group,
                "trajectory_index": t,
                "reward": _number(trajectory.get("reward")),
                **{_column(name): _number(v) for name, v in (trajectory.get("metrics") or {}).items()},
                "prompt_tokens": sum(len(c.get("prompt_token_ids") or ()) for c in choices),
                "sampled_tokens": sum(len(c.get("token_ids") or ()) for c in choices),
                "messages": json.dumps(_messages(trajectory)),
                "tools": _json_or_none(trajectory.get("tools")),
                "additional_histories": json.dumps(
                    [{"messages": _messages(h), "tools": h.get("tools")} for h in others]
                ),
                "metadata": json.dumps(trajectory.get("metadata") or {}),
                "logs": json.dumps(trajectory.get("logs") or []),
            }


def _items(history: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(history.get("messages_and_choices") or [])


def _messages(history: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {**item["message"], "trainable": True} if is_choice(item) else {**item, "trainable": False}
        for item in _items(history)
    ]


def _column(metric: str) -> str:
    return "metric_" + metric.encode("utf-8", "backslashreplace").decode()  # polars refuses lone surrogates


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _json_or_none(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
