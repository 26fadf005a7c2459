"""The few calls that the controller makes to a server, over its loopback address and with its token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from art_sky.controller.cloud import Cluster
from art_sky.errors import ServerUnreachable, from_wire
from art_sky.schemas import ServerStatus


def is_healthy(base_url: str, seconds: float = 2.0) -> bool:
    """Whether a server answers there now; needs no token."""
    try:
        with _client(seconds) as client:
            return client.get(f"{base_url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def status(cluster: Cluster, seconds: float = 5.0) -> ServerStatus:
    """Raises ServerUnreachable, or the server's own typed error."""
    reply = _call("GET", cluster, "/api/v1/status", seconds)
    try:
        return ServerStatus.model_validate(reply)
    except ValidationError as e:
        raise ServerUnreachable(
            f"{cluster.base_url} answers, but not as a server of this release; end it with "
            f"`art-sky down {cluster.name}` and launch it again"
        ) from e


def shutdown(cluster: Cluster, seconds: float = 5.0) -> None:
    """Asks the server to flush and end; returns when it has accepted."""
    _call("POST", cluster, "/api/v1/shutdown", seconds)


def _call(method: str, cluster: Cluster, path: str, seconds: float) -> Any:
    mend = f"see `art-sky logs {cluster.name}`, or end it with `art-sky down {cluster.name}`"
    if cluster.base_url is None:
        raise ServerUnreachable(f"cluster {cluster.name!r} has no address yet; {mend}")
    try:
        token = Path(cluster.token_file).read_text().strip()
        with _client(seconds) as client:
            reply = client.request(method, f"{cluster.base_url}{path}", headers={"Authorization": f"Bearer {token}"})
    except httpx.HTTPError as e:
        raise ServerUnreachable(f"no answer from {cluster.base_url} ({type(e).__name__}); {mend}") from e
    except OSError as e:
        raise ServerUnreachable(f"the token of cluster {cluster.name!r} cannot be read: {e}; {mend}") from e
    if reply.is_error:
        try:
            body = reply.json()
        except ValueError:
            body = reply.text
        raise from_wire(body, reply.status_code)
    return reply.json() if reply.content else None


def _client(seconds: float) -> httpx.Client:
    # A loopback address is never reached through a proxy, whatever the environment says.
    return httpx.Client(timeout=seconds, trust_env=False)
