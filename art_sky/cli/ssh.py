"""`art-sky ssh`."""

from __future__ import annotations

import os
import shlex

import click

from art_sky.cli.rented import rented
from art_sky.controller.control import ControlClient
from art_sky.controller.provider import Machine
from art_sky.controller.ssh import known_hosts, ssh_command


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[COMMAND]...")
def command(name: str, words: tuple[str, ...]) -> None:
    """Open a shell on a rented machine.

    With COMMAND that is run instead. A shell is no work: the machine still ends by its limits.
    """
    rented(name)
    machine = Machine(**ControlClient().machine(name))
    argv = ssh_command(machine, known_hosts(), *([] if words else ["-t"]))
    os.execvp(argv[0], [*argv, *([shlex.join(words)] if words else [])])
