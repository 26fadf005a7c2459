"""`art-sky down`."""

from __future__ import annotations

import click

from art_sky.cli.output import json_option, print_json, stderr, stdout
from art_sky.controller.clouds.local import LocalCloud


@click.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="End every cluster.")
@json_option
def command(name: str | None, everything: bool, as_json: bool) -> None:
    """End clusters.

    The server finishes what it is writing; steps that were committed stay in the store. Ending a cluster that
    is down already is no error.
    """
    if (name is None) != everything:
        raise click.UsageError("give the NAME of a cluster, or --all (see `art-sky status`)")
    cloud = LocalCloud()
    names = [name] if name is not None else [c.name for c in cloud.list() if c.state != "down"]
    ended = []
    for one in names:
        with stderr().status(f"ending {one!r}"):
            ended.append(cloud.down(one))
    if as_json:
        return print_json({"clusters": [cluster.model_dump() for cluster in ended]})
    for cluster in ended:
        stdout().print(
            f"Cluster {cluster.name} is down; its steps are in {cluster.store}", markup=False, soft_wrap=True
        )
    if not ended:
        stdout().print("No cluster is up.")
