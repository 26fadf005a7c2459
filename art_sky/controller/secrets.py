"""The secrets of a cluster on this machine: files of mode 0600 beside its name, never in the registry or an argv.

The token belongs to the stable address: it outlives nodes, controllers and runs of the same name.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from pathlib import Path

from art_sky.config import home
from art_sky.errors import CorruptObject
from art_sky.names import check_name
from art_sky.node.records import Secrets, parse
from art_sky.whole_file import write_whole


def token_file(name: str) -> Path:
    return home() / "clusters" / check_name("cluster", name) / "token"


def write_secrets(name: str, store_env: dict[str, str], hf_token: str | None) -> None:
    """What a node of this cluster is sent; makes the token where there is none yet."""
    file = token_file(name)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        token = file.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        write_whole(file, token, 0o600)
    made = Secrets(token=token, store_env=store_env, hf_token=hf_token)
    write_whole(_secrets_file(name), json.dumps(dataclasses.asdict(made)), 0o600)


def replace_store_env(name: str, store_env: dict[str, str]) -> None:
    """Another credential for the store; all else stays. Raises CorruptObject."""
    made = dataclasses.replace(read_secrets(name), store_env=store_env)
    write_whole(_secrets_file(name), json.dumps(dataclasses.asdict(made)), 0o600)


def read_secrets(name: str) -> Secrets:
    """Raises CorruptObject with the next step."""
    file = _secrets_file(name)
    try:
        return parse(file.read_text(), Secrets, str(file))
    except (OSError, ValueError) as e:
        # The reason may quote the file, so that it is not repeated.
        raise CorruptObject(
            f"the secrets of cluster {name!r} in {file} cannot be read ({type(e).__name__}); end it with "
            f"`art-sky down {name}` and launch it again"
        ) from None


def _secrets_file(name: str) -> Path:
    return token_file(name).with_name("secrets.json")
