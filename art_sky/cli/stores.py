"""Which store, model and step a command means. No server is needed for it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import click

from art_sky.config import ServerConfig
from art_sky.controller.clouds.local import LocalCloud
from art_sky.errors import InvalidInput, NotFound
from art_sky.names import split_step
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore, list_models
from art_sky.store.protocol import Store
from art_sky.suggest import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])
DEFAULT_STORE = str(ServerConfig.model_fields["store"].default)


def store_options(function: Function) -> Function:
    """Adds --store and --cluster, for `chosen_store`."""
    cluster = click.option("--cluster", metavar="NAME", help="The store of this cluster.")
    store = click.option(
        "--store", "url", metavar="URL", help=f"Default: of the one cluster that is up, else {DEFAULT_STORE}."
    )
    return store(cluster(function))


def chosen_store(url: str | None, cluster: str | None) -> Store:
    """Raises NotFound for an unknown cluster, and UsageError for both options at once."""
    if url is not None and cluster is not None:
        raise click.UsageError("give --store or --cluster, not both")
    if cluster is not None:
        return open_store(LocalCloud().get(cluster).store)
    if url is None:
        up = [c.store for c in LocalCloud().list() if c.state == "up"]
        url = up[0] if len(up) == 1 else DEFAULT_STORE
    return open_store(url)


def find_model(store: Store, text: str) -> ModelStore:
    """`project/name`, or `name` where only one project has it. Raises NotFound or InvalidInput naming what there is."""
    found = [(p, n) for p, n in list_models(store, text) if text in (n, f"{p}/{n}")]
    if len(found) == 1:
        return ModelStore(store, *found[0])
    if found:
        raise InvalidInput(f"{text!r} is in several projects; give one of {', '.join(f'{p}/{n}' for p, n in found)}")
    models = list_models(store)
    near = did_you_mean(text, {f"{p}/{n}" for p, n in models} if "/" in text else {n for _, n in models})
    raise NotFound(f"there is no model {text!r} in {store.url} ({near}); see `art-sky models`, or give --store")


def find_model_at(store: Store, text: str) -> tuple[ModelStore, int | None]:
    """`MODEL[@STEP]`, the step None for the newest. Raises NotFound or InvalidInput."""
    name, step = split_step(text)
    if "@" in name:
        raise InvalidInput(f"{text!r}: a step is a number, as in {name.partition('@')[0]}@3; see `art-sky steps`")
    return find_model(store, name), step


def whole_model(text: str) -> str:
    """MODEL for a command that takes no step."""
    if "@" in text:
        raise click.UsageError(f"{text!r}: give the MODEL without a step; it is taken whole")
    return text


def lease_owner(command: str) -> str:
    """Under what name a command takes a model's lease, for whoever finds it taken."""
    return f"art-sky {command} on {socket.gethostname()}"
