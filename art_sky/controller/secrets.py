"""The secrets of a cluster on this machine: files of mode 0600 beside its name, never in the registry or an argv.

The token belongs to the stable address: it outlives nodes, controllers and runs of the same name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from pathlib import Path
from typing import Any

from art_sky.config import home
from art_sky.errors import CorruptObject
from art_sky.names import check_name
from art_sky.node.records import Secrets, parse


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
        _write(file, token)
    made = Secrets(token=token, store_env=store_env, hf_token=hf_token)
    _write(_secrets_file(name), json.dumps(dataclasses.asdict(made)))


def replace_store_env(name: str, store_env: dict[str, str]) -> None:
    """Another credential for the store; all else stays. Raises CorruptObject."""
    made = dataclasses.replace(read_secrets(name), store_env=store_env)
    _write(_secrets_file(name), json.dumps(dataclasses.asdict(made)))


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


def _write(file: Path, text: str) -> None:
    scratch: Any = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    scratch.replace(file)
