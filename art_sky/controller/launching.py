"""Launching and ending a rented cluster through the controller, as the command line and the backend do it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from art_sky.controller.control import ControlClient
from art_sky.controller.plan import Plan
from art_sky.controller.rented import LaunchRequest
from art_sky.controller.store_credential import from_source
from art_sky.errors import NotFound

Told = Callable[[dict[str, Any]], None]


def launch_rented(
    request: LaunchRequest, plan: Plan, told: Told, *, store_env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Brings the cluster up and returns its view (`views.cluster_view`). `told` gets events `{n, time, text}`.

    `store_env` is a credential for the store, sent to the node over SSH; by default what the request's store_profile or
    store_credential gives now, nothing where it names neither and the node's own role does.
    Whatever interrupts it, the cluster is ended, and waited for until its provider says that it is gone; an
    interruption of that wait leaves the rest to the controller. Raises LaunchFailed, Conflict.
    """
    try:
        return wait_until_up(begin_launch(request, plan, store_env=store_env), told)
    except BaseException as e:
        if not isinstance(e, Exception):
            with contextlib.suppress(NotFound):  # interrupted before anything was on record
                end_rented(request.name, told)
        raise


def begin_launch(request: LaunchRequest, plan: Plan, *, store_env: dict[str, str] | None = None) -> str:
    """Puts the launch on record and returns the cluster's id; from then on it goes on by itself."""
    offers = [dataclasses.asdict(c.offer) for c in plan.usable]
    store_env = from_source(request) if store_env is None else store_env
    begun = ControlClient().launch(request, offers, store_env=store_env, hf_token=os.environ.get("HF_TOKEN"))
    return str(begun["id"])


def wait_until_up(id: str, told: Told) -> dict[str, Any]:
    """When this process goes away meanwhile, the cluster is ended. Raises LaunchFailed."""
    return ControlClient().watch(id, "up", told, owner=True)


def end_rented(name: str, told: Told) -> dict[str, Any]:
    """Flushes, ends and waits until nothing is billed any more; returns the last view. Interrupting it stops the
    waiting alone: the controller goes on. Raises NotFound."""
    control = ControlClient()
    return control.watch(control.down(name)["id"], "gone", told)
