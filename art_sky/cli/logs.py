"""`art-sky logs`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from art_sky.controller.clouds.local import LocalCloud
from art_sky.controller.logs import LogTail

_POLL_SECONDS = 0.2


@click.command()
@click.argument("name", default="local")
@click.option("-f", "--follow", is_flag=True, help="Go on until the cluster is down, or Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0), default=100, show_default=True, help="Lines to begin with.")
def command(name: str, follow: bool, lines: int) -> None:
    """Show the log of a cluster's server.

    With -f it goes on through rotation and truncation of the file, and ends when the cluster is down.
    """
    cloud = LocalCloud()
    tail = LogTail(Path(cloud.get(name).log_file), lines)
    try:
        while True:
            # Asked before the read: what was written until the end is then still shown.
            ended = not follow or cloud.get(name).state in ("down", "failed")
            click.echo(tail.read(), nl=False)
            if ended:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        tail.close()
    if follow:
        click.echo(f"cluster {name!r} is {cloud.get(name).state}", err=True)
