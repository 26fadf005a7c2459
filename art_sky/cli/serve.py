"""`art-sky serve`."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from art_sky.cli.server_options import server_config, server_options
from art_sky.config import ServerConfig, home
from art_sky.errors import InvalidInput
from art_sky.store import open_store


@click.command()
@click.option("--idle-minutes", type=float, help="End after this time without work. Default: never.")
@click.option("--state-dir", metavar="FOLDER", help="Logs, token, scratch. Default: one per store, below ~/.art-sky.")
@click.option("--fsync-each-reply", is_flag=True, default=None, help="Force each reply's record to disk before it.")
@server_options
def command(state_dir: str | None, **given: Any) -> None:
    """Run a server in the foreground.

    It prints its address; Ctrl-C ends it. `art-sky launch` is the same in the background.
    """
    store = open_store(given["store"] or str(ServerConfig.model_fields["store"].default)).url
    folder = Path(state_dir).expanduser().absolute() if state_dir else _state_of(store)
    config = server_config(given, state_dir=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "config.json"
        file.write_text(config.model_dump_json(indent=2))
    except PermissionError as e:
        raise InvalidInput(f"cannot write {folder} ({e.strerror}); give another folder with --state-dir") from e
    # The server takes this process's place: signals, output and exit code are its own.
    os.execv(sys.executable, [sys.executable, "-m", "art_sky.server", "--config", str(file)])


def _state_of(store: str) -> Path:
    return home() / "servers" / hashlib.sha256(store.encode()).hexdigest()[:16]
