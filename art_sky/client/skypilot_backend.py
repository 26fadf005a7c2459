"""A backend on a rented machine, for code that launches by itself."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from art_sky.client.http_backend import ServerBackend
from art_sky.client.refused import refuse_unknown
from art_sky.config import Limits
from art_sky.errors import InvalidConfig

if TYPE_CHECKING:
    from art_sky.controller.plan import Plan
    from art_sky.controller.rented import LaunchRequest

log = logging.getLogger("art_sky")

# A call may outlast the replacement of a machine.
RENTED_PATIENCE_SECONDS = 900.0
# Parameters of ART's that mean something else here, and what to write instead.
_INSTEAD = {
    "resources": "give gpu=, clouds=, regions=, spot=, cpus=, memory=, disk_gib= and image_id=",
    "art_version": "the machine always gets the art-sky that runs here; leave art_version out",
    "env_path": "no environment is copied; give store_env={'AWS_ACCESS_KEY_ID': ...} for the store, and HF_TOKEN is "
    "taken from this process's environment",
    "tail_logs": "see `art-sky logs -f NAME`; the launch's own progress is always told",
}


class SkyPilotBackend(ServerBackend):
    """Made by `initialize_cluster`, and then `async with` ends the cluster; or with a cluster's name by
    `art_sky.connect`, which leaves its end to who launched it."""

    def __init__(
        self, cluster_name: str, base_url: str, token: str, *, ends_cluster: bool = False, **options: Any
    ) -> None:
        super().__init__(base_url, token, **{"patience": RENTED_PATIENCE_SECONDS, **options})
        self.cluster_name = cluster_name
        self._ends_cluster = ends_cluster

    @classmethod
    async def initialize_cluster(
        cls,
        *,
        cluster_name: str = "art",
        store: str,
        gpu: str | list[str] | None = None,
        clouds: list[str] | None = None,
        regions: list[str] | None = None,
        spot: str = "no",
        force_restart: bool = False,
        store_env: dict[str, str] | None = None,
        server: dict[str, Any] | None = None,
        **options: Any,
    ) -> SkyPilotBackend:
        """Rents the cheapest machine that fits and waits until its server answers; a cluster of this name that is up
        and was launched alike is taken as it is.

        `options` are the limits (budget, max_hours, idle_minutes, orphan_minutes, flush_minutes, setup_minutes) and
        the other fields of a launch (cpus, memory, max_price, disk_gib, image_id, node_role, allow_unsafe,
        allow_cloud_key_on_node, keep). `force_restart` ends a cluster of this name first. When the
        call is interrupted or cancelled, the machine is ended. Raises InvalidConfig, NoCapacity, BudgetTooSmall,
        Conflict (a cluster of this name differs), LaunchFailed.
        """
        request = _request(cluster_name, store, gpu, clouds, regions, spot, server, options)
        plan = await asyncio.to_thread(_plan, request)
        log.info("renting for %s: at most $%.2f", cluster_name, plan.worst)
        if force_restart:
            await asyncio.to_thread(_end, cluster_name)
        beginning = asyncio.create_task(asyncio.to_thread(_begin, request, plan, store_env))
        try:
            view = await asyncio.to_thread(_wait, await asyncio.shield(beginning))
        except asyncio.CancelledError:
            # Threads know nothing of it: one of them may just have put the launch on record.
            await asyncio.gather(beginning, return_exceptions=True)
            await asyncio.to_thread(_end, cluster_name)
            raise
        return await asyncio.to_thread(cls._of, view, None, ends_cluster=True)

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        if self._ends_cluster:
            await self.down()

    async def down(self) -> None:
        """Flushes, ends the cluster and waits until nothing is billed any more."""
        await asyncio.to_thread(_end, self.cluster_name)

    @classmethod
    def _of(cls, view: dict[str, Any], token: str | None = None, **options: Any) -> SkyPilotBackend:
        from art_sky.controller.secrets import read_secrets

        return cls(view["name"], view["base_url"], token or read_secrets(view["name"]).token, **options)


def _request(
    name: str,
    store: str,
    gpu: str | list[str] | None,
    clouds: list[str] | None,
    regions: list[str] | None,
    spot: str,
    server: dict[str, Any] | None,
    options: dict[str, Any],
) -> LaunchRequest:
    from art_sky.controller.rented import LaunchRequest

    for key, instead in _INSTEAD.items():
        if key in options:
            raise InvalidConfig(f"SkyPilotBackend takes no {key}: {instead}")
    fixed = {"name", "store", "gpus", "clouds", "regions", "spot", "server", "limits"}
    known = sorted({*Limits.model_fields, *LaunchRequest.model_fields} - fixed)
    refuse_unknown("initialize_cluster", {k: v for k, v in options.items() if k not in known}, known)
    limits = Limits.parse({k: options.pop(k) for k in list(options) if k in Limits.model_fields})
    made: LaunchRequest = LaunchRequest.parse(
        {
            "name": name,
            "store": store,
            "gpus": [gpu] if isinstance(gpu, str) else gpu or [],
            "clouds": clouds or [],
            "regions": regions or [],
            "spot": spot,
            "server": server or {},
            "limits": limits,
            **options,
        }
    )
    return made


def _plan(request: LaunchRequest) -> Plan:
    from art_sky.controller.__main__ import make_provider
    from art_sky.controller.plan import check_store, make_plan

    provider = make_provider()
    check_store(request.store, provider.shares_files)
    return make_plan(request, provider.offers(request.wanted()))


def _begin(request: LaunchRequest, plan: Plan, store_env: dict[str, str] | None) -> str:
    from art_sky.controller.launching import begin_launch

    return begin_launch(request, plan, store_env=store_env)


def _wait(id: str) -> dict[str, Any]:
    from art_sky.controller.launching import wait_until_up

    return wait_until_up(id, _tell)


def _end(name: str) -> None:
    from art_sky.controller.launching import end_rented
    from art_sky.errors import NotFound

    try:
        end_rented(name, _tell)
    except NotFound:
        log.info("there is no cluster %s to end", name)


def _tell(event: dict[str, Any]) -> None:
    log.info("%s", event["text"])
