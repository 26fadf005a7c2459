"""Secrets on their way into the server: as files of mode 0600 that it is pointed to, never as values in its
environment."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from art_sky.node.records import RENTED, Secrets
from art_sky.whole_file import write_whole

# Environment names, as `aws configure export-credentials` prints them, and the fields of a credential process.
_KEYS = {
    "AWS_ACCESS_KEY_ID": "AccessKeyId",
    "AWS_SECRET_ACCESS_KEY": "SecretAccessKey",
    "AWS_SESSION_TOKEN": "SessionToken",
    "AWS_CREDENTIAL_EXPIRATION": "Expiration",
}
_PLAIN = {"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}


def check(secrets: Secrets) -> None:
    """Raises ValueError, which repeats no value."""
    if not isinstance(secrets.token, str) or not secrets.token.strip():
        raise ValueError("the secrets hold no token")
    unknown = sorted(set(secrets.store_env) - set(_KEYS) - _PLAIN)
    if unknown:
        known = ", ".join([*_KEYS, *sorted(_PLAIN)])
        raise ValueError(f"store_env holds {', '.join(unknown)}; known are {known}")
    if ("AWS_ACCESS_KEY_ID" in secrets.store_env) != ("AWS_SECRET_ACCESS_KEY" in secrets.store_env):
        raise ValueError("store_env holds one half of an access key")
    texts = [*secrets.store_env.values(), secrets.hf_token or ""]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise ValueError("a secret is not one line of text")


def values(secrets: Secrets) -> list[bytes]:
    """What must stand in nothing that leaves the machine."""
    texts = [secrets.token, secrets.hf_token, *(v for name, v in secrets.store_env.items() if name not in _PLAIN)]
    return [text.encode() for text in texts if text]


def environment(secrets: Secrets, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Writes the files into `folder` and returns the environment for whoever opens the store.

    boto3 reads the store's credential through a `credential_process`, again before it expires and, as the store's
    client sees to, when a server refuses it as expired: when the controller sends a fresh one, a running server goes on
    with it. Without a credential the machine's role counts.
    """
    dropped = {*_KEYS, "AWS_PROFILE", "HF_TOKEN", "PYTHONPATH", "VIRTUAL_ENV"}
    result = {name: value for name, value in base.items() if name not in dropped}
    result[RENTED] = "1"
    result.update((name, value) for name, value in secrets.store_env.items() if name in _PLAIN)
    if "AWS_ACCESS_KEY_ID" in secrets.store_env:
        keys = {field: secrets.store_env[name] for name, field in _KEYS.items() if name in secrets.store_env}
        _keep(folder / "store-credential.json", json.dumps({"Version": 1, **keys}), 0o600)
        process = f"cat {shlex.quote(str(folder / 'store-credential.json'))}"
        _keep(folder / "aws-config", f"[default]\ncredential_process = {process}\n")
        result["AWS_CONFIG_FILE"] = str(folder / "aws-config")
        result["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
    if secrets.hf_token is not None:
        _keep(folder / "hf-token", secrets.hf_token, 0o600)
        result["HF_TOKEN_PATH"] = str(folder / "hf-token")
    return result


def _keep(file: Path, text: str, mode: int = 0o644) -> None:
    """Writes nothing that is there already: a full disk keeps no program from its next start."""
    try:
        if file.read_text() == text:
            return
    except FileNotFoundError:
        pass
    write_whole(file, text, mode)
