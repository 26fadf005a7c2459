"""`art-sky logs`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from art_sky.cli.rented import find_rented
from art_sky.controller.clouds.local import LocalCloud
from art_sky.controller.logs import LogTail
from art_sky.controller.registry import Registry, registry_file
from art_sky.controller.stored_logs import last_lines, pull_logs
from art_sky.errors import NotFound

_POLL_SECONDS = 0.2


@click.command()
@click.argument("name", default="local")
@click.option("-f", "--follow", is_flag=True, help="Go on until the cluster is down, or Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0), default=100, show_default=True, help="Lines to begin with.")
@click.option("--node", "number", type=click.IntRange(1), help="What the N-th machine of a rented cluster left.")
def command(name: str, follow: bool, lines: int, number: int | None) -> None:
    """Show the log of a cluster's server.

    With -f it goes on through rotation and truncation of the file, and ends when the cluster is down. A rented machine
    that is gone, or is named with --node, is shown as it last pushed its logs to the store: every ten minutes, and
    once more at its end.
    """
    view = find_rented(name, over=True)
    if view is not None and (view["state"] != "down" or not LocalCloud().has(name)):
        return _rented_logs(view, follow, lines, number)
    if number is not None:
        raise NotFound(f"there is no rented cluster {name!r}; leave --node out, or see `art-sky status --all`")
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


def _rented_logs(view: dict[str, Any], follow: bool, lines: int, number: int | None) -> None:
    """What the controller did, then what setup and server wrote on the machine."""
    from art_sky.controller.__main__ import make_provider

    registry = Registry(registry_file())
    try:
        for _, at, text in registry.events(view["id"]):
            click.echo(f"{time.strftime('%H:%M:%S', time.localtime(at))} controller: {text}")
    finally:
        registry.close()
    if number is not None and number > view["nodes"]:
        raise NotFound(f"cluster {view['name']!r} has had {view['nodes']} machines; give --node 1 to {view['nodes']}")
    if number is not None or (view["node"] is not None and view["node"]["state"] == "gone"):
        return _stored_logs(view, lines, number or view["nodes"])
    if view["node"] is not None:
        make_provider().logs(view["node"]["name"], follow, lambda text: click.echo(text, nl=False))


def _stored_logs(view: dict[str, Any], lines: int, number: int) -> None:
    node = f"{view['id']}-{number}"
    folder, pushed = pull_logs(view["store_here"], view["id"], node)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(pushed))
    click.echo(f"The logs of {node} as of {at}, whole in {folder}", err=True)
    for name, text in last_lines(folder, lines):
        click.echo(f"==> {name} <==\n{text}", nl=not text.endswith("\n"))
