"""`art-sky status`."""

from __future__ import annotations

import time
from typing import Any

import click

from art_sky.cli.output import duration, json_option, print_json, stdout, table
from art_sky.cli.rented import notes, rented_clusters, rented_table
from art_sky.controller import api
from art_sky.controller.cloud import Cluster
from art_sky.controller.clouds.local import LocalCloud
from art_sky.errors import ArtSkyError
from art_sky.schemas import JOB_TERMINAL, ServerStatus


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Also clusters that are down.")
@json_option
def command(show_all: bool, as_json: bool) -> None:
    """Show clusters, their models and jobs.

    Of rented ones also what they cost, what they can cost at most (disks and egress apart) and how long they may go on.
    """
    found = [(cluster, *_ask(cluster)) for cluster in LocalCloud().list() if show_all or cluster.state != "down"]
    rented = rented_clusters(over=show_all)
    if as_json:
        return print_json(
            {
                "clusters": [
                    {**cluster.model_dump(), "server": status and status.model_dump(), "problem": problem}
                    for cluster, status, problem in found
                ],
                "rented": rented,
            }
        )
    out = stdout()
    if rented:
        out.print(rented_table(rented))
        for view in rented:
            for line in notes(view):
                out.print(f"{view['name']}: {line}", markup=False, soft_wrap=True)
    if not found:
        if not rented:
            out.print("No cluster is up. Start one with `art-sky launch`.")
        return
    out.print(table("Clusters", ["name", "state", "address", "up for", "idle", "engine", "trainer"], _rows(found)))
    models = [
        (cluster.name, f"{m.project}/{m.name}", m.step, m.base_model)
        for cluster, status, _ in found
        if status
        for m in status.models
    ]
    if models:
        out.print(table("\nModels", ["cluster", "model", "#step", "base model"], models))
    jobs = [
        (cluster.name, f"{job.project}/{job.name}", job.state, job.attempts, duration(time.time() - job.created))
        for cluster, status, _ in found
        if status
        for job in status.jobs
        if job.state not in JOB_TERMINAL
    ]
    if jobs:
        out.print(table("\nTrain jobs", ["cluster", "model", "state", "#attempts", "#age"], jobs))
    for cluster, _, problem in found:
        out.print(f"\n{cluster.name}: store {cluster.store}", markup=False, soft_wrap=True)
        if problem:
            out.print(f"{cluster.name}: {problem}", style="red", markup=False, soft_wrap=True)


def _ask(cluster: Cluster) -> tuple[ServerStatus | None, str | None]:
    """One cluster that does not answer must not hide the others."""
    if cluster.state == "failed":
        return None, f"its launch failed; see `art-sky logs {cluster.name}`, then `art-sky down {cluster.name}`"
    if cluster.state != "up":
        return None, None
    try:
        return api.status(cluster), None
    except ArtSkyError as e:
        return None, e.message


def _rows(found: list[tuple[Cluster, ServerStatus | None, str | None]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for cluster, status, _ in found:
        row: list[Any] = [cluster.name, cluster.state, cluster.base_url]
        if status is None:
            rows.append((*row, None, None, None, None))
            continue
        idle = duration(status.idle_seconds)
        if status.idle_limit_seconds is not None:
            idle += f" of {duration(status.idle_limit_seconds)}"
        engine, trainer = status.engine.get("state"), status.trainer.get("state")
        rows.append((*row, duration(time.time() - status.started), idle, engine, trainer))
    return rows
