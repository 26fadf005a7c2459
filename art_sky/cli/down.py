"""`art-sky down`."""

from __future__ import annotations

import click

from art_sky.cli.output import json_option, print_json, stderr, stdout
from art_sky.cli.rented import EventLines, find_rented, rented_clusters
from art_sky.controller.clouds.local import LocalCloud
from art_sky.controller.launching import end_rented


@click.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="End every cluster.")
@json_option
def command(name: str | None, everything: bool, as_json: bool) -> None:
    """End clusters.

    The server finishes what it is writing; steps that were committed stay in the store, and what was not flushed is
    named. A rented machine is waited for until its cloud says that it is gone; Ctrl-C stops the waiting, not the
    ending. Ending a cluster that is down already is no error.
    """
    if (name is None) != everything:
        raise click.UsageError("give the NAME of a cluster, or --all (see `art-sky status`)")
    cloud = LocalCloud()
    views = [v for v in rented_clusters() if everything or v["name"] == name]
    ended_rented = [end_rented(view["name"], EventLines()) for view in views]
    names = [name] if name is not None and not views else []
    if everything:
        names = [c.name for c in cloud.list() if c.state != "down"]
    elif names and not cloud.has(names[0]) and (over := find_rented(names[0], over=True)) is not None:
        names, ended_rented = [], [over]
    ended = []
    for one in names:
        with stderr().status(f"ending {one!r}"):
            ended.append(cloud.down(one))
    if as_json:
        return print_json({"clusters": [cluster.model_dump() for cluster in ended], "rented": ended_rented})
    for view in ended_rented:
        stdout().print(
            f"Cluster {view['name']} is down ({view['ended']}); it cost ${view['spent']:.2f}, disks and egress apart; "
            f"its steps are in {view['store']}",
            markup=False,
            soft_wrap=True,
        )
    for cluster in ended:
        stdout().print(
            f"Cluster {cluster.name} is down; its steps are in {cluster.store}", markup=False, soft_wrap=True
        )
    if not ended and not ended_rented:
        stdout().print("No cluster is up.")
