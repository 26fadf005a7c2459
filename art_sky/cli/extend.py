"""`art-sky extend`."""

from __future__ import annotations

from typing import TextIO

import click

from art_sky.cli.output import duration, json_option, print_json, stdout
from art_sky.cli.rented import rented
from art_sky.controller.control import ControlClient
from art_sky.controller.store_credential import parse_credential


@click.command()
@click.argument("name")
@click.option("--hours", type=click.FloatRange(0), default=0.0, help="So many more hours, of all machines together.")
@click.option("--budget", type=click.FloatRange(0), default=0.0, help="So many more dollars.")
@click.option("--store-credential", type=click.File(), metavar="FILE", help="A fresh credential for the store in place "
              "of the one that the launch gave, in the same form; - reads stdin.")  # fmt: skip
@json_option
def command(name: str, hours: float, budget: float, store_credential: TextIO | None, as_json: bool) -> None:
    """Let a rented cluster go on for longer.

    The limits of a cluster hold on its machine, whatever happens to this one; the new ones are sent there.
    """
    if hours == 0 and budget == 0 and store_credential is None:
        raise click.UsageError("give what is added: --hours H, --budget DOLLARS, or --store-credential FILE")
    rented(name)
    store_env = None if store_credential is None else parse_credential(store_credential.read())
    view = ControlClient().extend(name, hours, budget, store_env)
    if as_json:
        return print_json(view)
    out = stdout()
    left, most = duration(view["seconds_left"]), view["worst_case"]
    out.print(f"Cluster {name} may go on for {left}; it costs ${most:.2f} at most.", markup=False, soft_wrap=True)
    if not view["told"]:
        out.print(
            "Its machine does not answer now and still has what it had; it is told as soon as it does, see "
            "`art-sky status`.",
            markup=False,
        )
