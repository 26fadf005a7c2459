"""Connects to a server that was launched before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from art_sky.client.http_backend import ServerBackend
from art_sky.config import home
from art_sky.errors import CorruptObject, InvalidInput, NotFound, ServerUnreachable
from art_sky.names import check_name
from art_sky.suggest import did_you_mean


def connect(url_or_cluster_name: str, token: str | None = None, **options: Any) -> ServerBackend:
    """A backend for a launched cluster, by its name, or for any server, by its address and token.

    `options` are those of ServerBackend. Raises NotFound for an unknown cluster, ServerUnreachable for one that is
    not up.
    """
    if "://" in url_or_cluster_name:
        if token is None:
            raise InvalidInput(
                f"connect({url_or_cluster_name!r}) needs a token; give token=, the content of the server's token file, "
                "or the cluster's name instead of its address"
            )
        return ServerBackend(url_or_cluster_name, token, **options)

    from pydantic import ValidationError

    from art_sky.controller.cloud import Cluster

    name = check_name("cluster", url_or_cluster_name)
    rented = _rented(name, token, options)
    if rented is not None:
        return rented
    clusters = home() / "clusters"
    record = clusters / name / "cluster.json"
    try:
        cluster = Cluster.model_validate_json(record.read_bytes())
    except FileNotFoundError:
        near = did_you_mean(name, [f.parent.name for f in clusters.glob("*/cluster.json")])
        raise NotFound(f"there is no cluster {name!r} ({near}); start it with `art-sky launch`") from None
    except (ValidationError, OSError) as e:
        raise CorruptObject(f"{record} cannot be read: {e}; launch the cluster again") from e
    if cluster.base_url is None or cluster.state != "up":
        raise ServerUnreachable(f"cluster {name!r} is {cluster.state}; see `art-sky status`, or launch it again")
    try:
        token = token or Path(cluster.token_file).read_text().strip()
    except OSError as e:
        raise ServerUnreachable(f"the token of cluster {name!r} cannot be read: {e}; launch it again") from e
    return ServerBackend(cluster.base_url, token, **options)


def _rented(name: str, token: str | None, options: dict[str, Any]) -> ServerBackend | None:
    """A rented cluster of this name that is wanted up: its address is there also while a machine is replaced."""
    from art_sky.controller.control import rented_views

    view = next((v for v in rented_views() if v["name"] == name and v["wanted"] == "up"), None)
    if view is None:
        return None
    from art_sky.client.skypilot_backend import SkyPilotBackend

    return SkyPilotBackend._of(view, token, **options)
