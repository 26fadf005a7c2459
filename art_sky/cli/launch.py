"""`art-sky launch`."""

from __future__ import annotations

from typing import Any

import click

from art_sky.cli.output import json_option, print_json, stderr, stdout
from art_sky.cli.server_options import server_config, server_options
from art_sky.controller.cloud import LaunchConfig
from art_sky.controller.clouds.local import LocalCloud


@click.command()
@click.argument("name", default="local")
@click.option("--cloud", type=click.Choice(["local"]), default="local", show_default=True, help="Where it runs.")
@click.option(
    "--idle-minutes", type=float, default=60.0, show_default=True, help="The server ends after this time without work."
)
@server_options
@json_option
def command(name: str, cloud: str, as_json: bool, **given: Any) -> None:
    """Start a server that outlives this command.

    The cluster NAME (default: local) serves and trains in the background until it has had no work for
    --idle-minutes, or until `art-sky down NAME`. Agent code reaches it with `art_sky.connect("NAME")`.
    """
    local = LocalCloud()
    server = server_config(given, state_dir=str(local.folder(name) / "state"))
    with stderr().status(f"launching {name!r}") as line:
        cluster = local.launch(LaunchConfig(name=name, server=server), lambda text: line.update(text))
    if as_json:
        return print_json(cluster.model_dump())
    out = stdout()
    out.print(f"Cluster [bold]{name}[/] is up at [bold]{cluster.base_url}[/]", soft_wrap=True)
    out.print(f"  token in     {cluster.token_file}", soft_wrap=True, markup=False)
    out.print(f"  store        {cluster.store}", soft_wrap=True, markup=False)
    out.print(f"  ends after   {server.idle_minutes:g} minutes without work", soft_wrap=True)
    out.print(f'Use it from agent code:  backend = art_sky.connect("{name}")', markup=False)
    out.print(f"Next:  art-sky status   |   art-sky logs -f {name}   |   art-sky down {name}", markup=False)
